"""Running a model's encoder as a CUDA graph: for a few hundred cells, launching kernels takes longer than encoding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from arr_coc.families.recordable import read_state
from arr_coc.runtime.cuda_graphs import GraphCache, may_replay

# With more patches than this, encoding takes longer than launching.
MOST_PATCHES = 8192

_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()
_lock = threading.Lock()


def call_encoder(
    visual: Any,
    tensors: Sequence[Tensor],
    plain: Callable[..., tuple[Tensor, ...]],
    recorded: Callable[..., tuple[Tensor, ...]],
    key: tuple[Hashable, ...],
    replay: bool,
) -> tuple[Tensor, ...]:
    """Features `[n, D]` of patches, then their DeepStack levels.

    Args:
        visual (`nn.Module`): the encoder.
        tensors (`Sequence[Tensor]`): the patches `[n, F]`, and what else the functions take, on the device.
        plain (`Callable`): calls the encoder.
        recorded (`Callable`): does the same without waiting for the device. What it depends on besides the values of
            `tensors` and the weights belongs to `key`.
        key (`tuple`): tells recordings apart.
        replay (`bool`): whether such calls will be repeated, so that recording a graph pays off. No graph is used where
            it would change the result: with gradients, hooks, compiled modules, or attention that reads lengths.
    """
    attention = str(visual.config._attn_implementation)
    may = replay and len(tensors[0]) <= MOST_PATCHES and may_replay(tensors[0]) and "flash" not in attention
    state = read_state(visual) if may else None
    if state is None or state.obstacle is not None:
        return plain(*tensors)
    with _lock:
        graphs = _caches.setdefault(visual, GraphCache())

    def encode(*rest: Any) -> tuple[Tensor, ...]:
        return recorded(*rest[: len(tensors)])

    levels: tuple[Tensor, ...] = graphs(encode, tensors, (*key, attention, state))
    return levels
