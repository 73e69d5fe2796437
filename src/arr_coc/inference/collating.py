"""`collate_prepared` joins prepared prompts into one batch, to be run together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arr_coc.families.family import Family, split_pictures
from arr_coc.inference.prepared import Prepared
from arr_coc.inference.run import Run
from arr_coc.inference.session import Session
from arr_coc.prompting.cache import Holding, Role
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.shortening import KeptCells
from arr_coc.selectors.rules import FullSelector

# the arguments that are laid out anew; all others must be the same in every prompt
_JOINED = {"input_ids", "attention_mask", "position_ids", "labels", "mm_encoder_outputs"}


def collate_prepared(items: Sequence[Prepared]) -> Prepared:
    """Join prepared prompts of one model into a batch, padded on the left.

    They may have different pictures, numbers of tokens, selectors and modes. A prompt whose selection failed takes part
    with all its tokens, which are encoded now, and so does one without pictures.

    Args:
        items (`Sequence[Prepared]`): from [`prepare`], with one or more rows each.

    Returns:
        `Prepared`: its rows are those of the prompts, in order, and so are `kept` and `outputs`. The model continues
        from this batch if nothing is prepared in between; [`Prepared.step`] continues it at any time.

    Example:

    ```python
    >>> import torch
    >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    >>> from arr_coc import collate_prepared, create_selector, prepare
    >>> tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> vision, text = CLIPVisionConfig(image_size=56, patch_size=14, **tiny), LlamaConfig(vocab_size=64, **tiny)
    >>> config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    >>> model = LlavaForConditionalGeneration(config).eval()
    >>> inputs = {"input_ids": torch.tensor([[7] + [5] * 16 + [8, 9]]), "pixel_values": torch.rand(1, 3, 56, 56)}
    >>> few, more = (prepare(model, inputs, create_selector("grid"), budget=budget) for budget in (2, 4))
    >>> collate_prepared([few, more])["input_ids"].tolist()
    [[0, 0, 7, 5, 5, 8, 9], [7, 5, 5, 5, 5, 8, 9]]

    ```
    """
    items = list(items)
    wrong = [item for item in items if not isinstance(item, Prepared)]
    if not items or wrong:
        given = f"a {type(wrong[0]).__name__}" if wrong else "none"
        raise ValueError(f"`items` must be prompts from `prepare`, at least one, got {given}")
    family = items[0].family()
    if any(item.family().target is not family.target for item in items):
        raise ValueError("`items` were prepared for different models; collate the prompts of each model by themselves")
    prompts = [_complete(family, item) for item in items]
    extras = _shared_arguments(prompts)
    holding = _join_holdings(family, [prompt.holding for prompt in prompts if prompt.holding is not None])
    arguments = {
        **extras,
        "input_ids": holding.short_ids,
        "attention_mask": holding.mask,
        **family.place(holding.mask, holding.positions, holding.next_position),
        "mm_encoder_outputs": _join_features(family, [prompt["mm_encoder_outputs"] for prompt in prompts]),
    }
    labels = [prompt.labels for prompt in prompts if prompt.labels is not None]
    if labels:
        arguments["labels"] = _pad_left(labels, -100)
    failures = [item.failure for item in items if item.failure is not None]
    run = Run(
        inputs=arguments,
        outputs=[output for item in items for output in item.outputs],
        kept=KeptCells.join(item.kept for item in items),
        full_counts=[item.tokens.full for item in items],
        used_counts=[item.tokens.used for item in items],
        failure="; ".join(failures) if failures else None,
        holding=holding,
    )
    return Prepared(arguments, run, family.target)


def _complete(family: Family, item: Prepared) -> Prepared:
    """A prompt with positions and features; one that `prepare` left as it was has neither yet."""
    if item.holding is not None:
        return item
    if family.present(item):
        run = Session(family, FullSelector(), Settings(on_error="raise")).prepare(item)
        return Prepared(run.inputs, run)
    ids: Tensor = item["input_ids"]
    mask = item.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.long()
    positions = family.positions({**item, "attention_mask": mask}) * mask  # [P, B, L]
    arguments = {name: value for name, value in item.items() if name not in family.consumed}
    next_position = positions.amax(dim=(0, 2)) + 1  # [B]
    run = Run({}, holding=Holding(ids, ids, mask, positions, next_position, mask * Role.TEXT, torch.full_like(ids, -1)))
    return Prepared({**arguments, "attention_mask": mask, "position_ids": None, "mm_encoder_outputs": {}}, run)


def _shared_arguments(prompts: Sequence[Prepared]) -> dict[str, Any]:
    """The arguments that are passed on as they are; `ValueError` if prompts differ in them."""
    names = [set(prompt.keys()) for prompt in prompts]
    differing = sorted(set().union(*names) - names[0].intersection(*names))
    if differing:
        raise ValueError(
            f"only some of these prompts have the argument `{differing[0]}`; prepare all with the same arguments"
        )
    first = prompts[0]
    for name in sorted(names[0] - _JOINED):
        if any(isinstance(prompt[name], Tensor) or prompt[name] != first[name] for prompt in prompts):
            raise ValueError(f"the argument `{name}` cannot be joined; pass it to the model beside the batch")
    return {name: first[name] for name in first if name not in _JOINED}


def _pad_left(rows: Sequence[Tensor], value: int) -> Tensor:
    """Join tensors `[..., B, L]` of different lengths, with a value on their left."""
    longest = max(part.shape[-1] for part in rows)
    return torch.cat([F.pad(part, (longest - part.shape[-1], 0), value=value) for part in rows], dim=-2)


def _join_holdings(family: Family, holdings: Sequence[Holding]) -> Holding:
    """What a cache of the whole batch will hold."""
    pad = family.pad_id()
    return Holding(
        full_ids=_pad_left([holding.full_ids for holding in holdings], pad),
        short_ids=_pad_left([holding.short_ids for holding in holdings], pad),
        mask=_pad_left([holding.mask for holding in holdings], 0),
        positions=_pad_left([holding.positions for holding in holdings], 0),  # [P, B, L']
        next_position=torch.cat([holding.next_position for holding in holdings]),
        roles=_pad_left([holding.roles for holding in holdings], Role.PADDING),
        cells=_pad_left([holding.cells for holding in holdings], -1),
    )


def _join_features(family: Family, encoded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Features of all pictures of each kind, row by row, on every level."""
    joined = {}
    for kind in family.kinds:
        pictures = [picture for output in encoded if kind in output for picture in split_pictures(output[kind])]
        if pictures:
            joined[kind] = family.join(pictures)
    return joined
