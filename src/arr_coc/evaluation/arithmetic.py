"""Count arithmetic: the multiply-adds of matrix products, convolutions and attention that a call really makes.

They are the same on every machine and at every moment, where milliseconds are not. Attention counts every pair of a
query and a key, also those that a mask hides; it is PyTorch's own or written out, as packages of kernels are not seen.
CUDA graphs step aside while operations are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from arr_coc.config import EncoderLayer
from arr_coc.evaluation.answers import tell_boxes
from arr_coc.evaluation.contenders import Contender
from arr_coc.evaluation.run import Opened, Sample, share_encodings
from arr_coc.families.family import Encoded, Family, Inputs, open_family

# Pictures over which the arithmetic of a selector is averaged: it hardly differs between pictures of one size.
COUNTED = 8
Row = dict[str, Any]
PARTS = ("encoder", "language", "choosing")
# All forms that attention takes in PyTorch; its own counter knows none of the CPU, and refuses grouped heads.
_ATTENTION = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}attention{where}")
    for kind, where in (("flash_", ""), ("efficient_", ""), ("cudnn_", ""), ("flash_", "_for_cpu"))
)


def attention_operations(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    """Operations of attention, given the shapes `[B, heads, T, d]`; keys may have fewer heads than queries.

    Example:

    ```python
    >>> from arr_coc.evaluation.arithmetic import attention_operations
    >>> attention_operations((1, 4, 10, 16), (1, 2, 10, 16), (1, 2, 10, 16)) == 2 * 4 * 10 * 10 * (16 + 16)
    True

    ```
    """
    batch, heads, asked, width = query
    return int(2 * batch * heads * asked * key[2] * (width + value[3]))


def _linear_operations(values: Any, weight: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    """Of values `[*, F]`, each multiplied with the matrix `[O, F]`."""
    return int(2 * math.prod(values) * weight[0])


def _grouped_operations(rows: Any, experts: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    """Of rows `[n, D]`, each multiplied with the matrix `[D, F]` of its expert."""
    return int(2 * rows[0] * rows[1] * experts[-1])


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Inside `with`, a counter sees all operations of this thread, two for each multiply-add."""
    known: dict[Any, Callable[..., int]] = dict.fromkeys(_ATTENTION, attention_operations)
    known[torch.ops.mkldnn._linear_pointwise] = _linear_operations  # of the embedded model's encoder on a CPU
    if hasattr(torch.ops.aten, "_grouped_mm"):  # which not every supported version of torch has
        known[torch.ops.aten._grouped_mm] = _grouped_operations
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        yield counter


def count_operations(call: Callable[[], Any]) -> int:
    """Operations of a call, two for each multiply-add.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.evaluation.arithmetic import count_operations
    >>> count_operations(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    60

    ```
    """
    with counting() as counter:
        call()
    return int(counter.get_total_flops())


def count_parts(family: Family, call: Callable[[], Any]) -> dict[str, int]:
    """Operations of a call by part, see `PARTS`: the vision encoder, the language model with its head, all else."""
    inner = family.inner
    part_of: dict[nn.Module, str] = dict.fromkeys(inner.children(), "encoder")
    part_of[inner.language_model] = "language"
    if not family.headless:
        part_of[family.target.lm_head] = "language"
    counts = dict.fromkeys(PARTS, 0)
    begins: list[int] = []
    with counting() as counter:

        def enter(module: nn.Module, args: Any) -> None:
            if module in part_of:
                begins.append(counter.get_total_flops())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module in part_of:
                counts[part_of[module]] += counter.get_total_flops() - begins.pop()

        # not on the modules themselves: what has hooks of its own is run in another way
        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            call()
        finally:
            for handle in handles:
                handle.remove()
    counts["choosing"] = int(counter.get_total_flops()) - sum(counts.values())
    return counts


@torch.no_grad()
def count_work(opened: Opened, samples: Sequence[Sample], calls: Sequence[tuple[Contender, str]]) -> Iterator[Row]:
    """Mean multiply-adds to the first token, in billions (`..._gmacs`), of contenders at budgets.

    What a selector computes inside the language model, as `fastv` does, counts as the language model's.

    Args:
        opened (`Opened`): the model.
        samples (`Sequence[Sample]`): questions about one picture or clip each, over which the mean is taken. Whole
            pictures are encoded once for all contenders, and every one of them is charged for it.
        calls (`Sequence[tuple[Contender, str]]`): contenders and budgets; a row each.
    """
    family = open_family(opened.model)
    with share_encodings(family, [contender for contender, _ in calls]), _charging(family) as charged:
        for contender, budget in calls:
            row: Row = {"selector": contender.name, "budget": budget, "samples": len(samples)}
            totals, known = dict.fromkeys(PARTS, 0), list[Any]()
            for sample in samples:
                tell_boxes(contender.selector, [sample.item], [sample.shown])
                session = opened.session(family, contender, budget)
                call = partial(session.forward, {**sample.inputs, "logits_to_keep": 1})
                grids = [family.grids(sample.inputs, kind) for kind in family.present(sample.inputs)]
                if grids not in known:
                    known.append(grids)
                    call()  # the first call about a size makes constants, which later ones find made
                charged.clear()
                counts = count_parts(family, call)
                counts["encoder"] += sum(charged)
                totals = {part: total + counts[part] for part, total in totals.items()}
            yield row | {f"{part}_gmacs": round(total / 2e9 / len(samples), 6) for part, total in totals.items()}


@contextmanager
def _charging(family: Family) -> Iterator[list[int]]:
    """Inside, a list gets the operations behind every encoding that was made before and is used again."""
    shared, made, charged = family.encode, dict[int, int](), list[int]()

    def encode(inputs: Inputs, kind: str, layers: Sequence[EncoderLayer] = ()) -> Encoded:
        with counting() as counter:
            encoded = shared(inputs, kind, layers)
        operations = int(counter.get_total_flops())
        if operations:
            made[id(encoded)] = operations
        else:
            charged.append(made[id(encoded)])
        # what one selector computes from the encoder's layers, the next computes again
        return encoded if encoded.reader is None else encoded._replace(reader=encoded.reader.renewed())

    family.__dict__["encode"] = encode
    try:
        yield charged
    finally:
        family.__dict__["encode"] = shared
