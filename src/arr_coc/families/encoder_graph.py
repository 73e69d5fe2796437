"""Running a model's encoder as a CUDA graph: for a few hundred cells, launching kernels takes longer than encoding."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from arr_coc.families.family import read_levels
from arr_coc.families.recordable import read_state
from arr_coc.runtime.cuda_graphs import GraphCache, may_replay

# With more patches than this, encoding takes longer than launching.
MOST_PATCHES = 8192

_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()
_lock = threading.Lock()


def call_encoder(visual: Any, patches: Tensor, arguments: Mapping[str, Tensor], replay: bool) -> tuple[Tensor, ...]:
    """Features `[n, D]` of patches, then their DeepStack levels.

    Args:
        visual (`nn.Module`): the encoder.
        patches (`Tensor` of shape `[n, F]`): rows of pixel values.
        arguments (`Mapping[str, Tensor]`): the encoder's other arguments. Those on the host decide shapes.
        replay (`bool`): whether such calls will be repeated, so that recording a graph pays off. No graph is used where
            it would change the result: with gradients, hooks, compiled modules, or attention that reads lengths.
    """
    attention = str(visual.config._attn_implementation)
    may = replay and len(patches) <= MOST_PATCHES and may_replay(patches) and "flash" not in attention
    state = read_state(visual) if may else None
    if state is None or state.obstacle is not None:
        return read_levels(visual(patches, return_dict=True, **arguments))
    names = [name for name, value in arguments.items() if value.device == patches.device]
    host = tuple((name, tuple(value.tolist())) for name, value in arguments.items() if name not in names)

    def encode(*tensors: Any) -> tuple[Tensor, ...]:
        rows, *others = tensors[: len(names) + 1]
        lengths = {name: torch.tensor(values, dtype=torch.int32) for name, values in host}
        return read_levels(visual(rows, return_dict=True, **dict(zip(names, others, strict=True)), **lengths))

    with _lock:
        graphs = _caches.setdefault(visual, GraphCache())
    settings = (tuple(names), host, attention, state)
    levels: tuple[Tensor, ...] = graphs(encode, (patches, *(arguments[name] for name in names)), settings)
    return levels
