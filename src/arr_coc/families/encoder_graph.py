"""Running a model's encoder as a CUDA graph: for a few hundred cells, launching kernels takes longer than encoding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from arr_coc.families.family import read_levels
from arr_coc.families.recordable import read_state
from arr_coc.runtime.cuda_graphs import GraphCache, may_replay

# With more patches than this, encoding takes longer than launching.
MOST_PATCHES = 8192

_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()
_lock = threading.Lock()


def call_encoder(
    visual: Any,
    patches: Tensor,
    given: Sequence[Tensor],
    describe: Callable[..., dict[str, Tensor]],
    key: tuple[Hashable, ...],
    replay: bool,
) -> tuple[Tensor, ...]:
    """Features `[n, D]` of patches, then their DeepStack levels.

    Args:
        visual (`nn.Module`): the encoder.
        patches (`Tensor` of shape `[n, F]`): rows of pixel values.
        given (`Sequence[Tensor]`): what `describe` takes, on the device.
        describe (`Callable`): the encoder's other arguments. It must not wait for the device; what it depends on
            besides the values of `given` belongs to `key`.
        key (`tuple`): tells recordings apart.
        replay (`bool`): whether such calls will be repeated, so that recording a graph pays off. No graph is used where
            it would change the result: with gradients, hooks, compiled modules, or attention that reads lengths.
    """
    attention = str(visual.config._attn_implementation)
    may = replay and len(patches) <= MOST_PATCHES and may_replay(patches) and "flash" not in attention
    state = read_state(visual) if may else None

    def encode(rows: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return read_levels(visual(rows, return_dict=True, **describe(*rest[: len(given)])))

    if state is None or state.obstacle is not None:
        return encode(patches, *given)
    with _lock:
        graphs = _caches.setdefault(visual, GraphCache())
    levels: tuple[Tensor, ...] = graphs(encode, (patches, *given), (*key, attention, state))
    return levels
