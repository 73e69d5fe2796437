"""A model's own encoder as a CUDA graph: a few hundred cells are encoded faster than their kernels can be launched."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from arr_coc.families.family import read_levels
from arr_coc.runtime.cuda_graphs import GraphCache, may_replay

# Patches above which encoding takes longer than launching.
MOST_PATCHES = 8192

_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()
_lock = threading.Lock()


def call_encoder(visual: Any, patches: Tensor, told: Mapping[str, Tensor], replay: bool) -> tuple[Tensor, ...]:
    """Features `[n, D]` and further levels of patches.

    Args:
        visual (`nn.Module`): the encoder.
        patches (`Tensor` of shape `[n, F]`): rows of pixel values.
        told (`Mapping[str, Tensor]`): what the encoder is told of them. What is on the host decides shapes.
        replay (`bool`): whether calls like this one come again, so that a recording is worth its price. It is left
            aside where it would hide something: gradients, hooks, compiled modules, attention that reads lengths.
    """
    if not (replay and len(patches) <= MOST_PATCHES and may_replay(patches) and _is_plain(visual)):
        return read_levels(visual(patches, return_dict=True, **told))
    names = [name for name, value in told.items() if value.device == patches.device]
    host = tuple((name, tuple(value.tolist())) for name, value in told.items() if name not in names)

    def encode(*given: Any) -> tuple[Tensor, ...]:
        rows, *others = given[: len(names) + 1]
        lengths = {name: torch.tensor(values, dtype=torch.int32) for name, values in host}
        return read_levels(visual(rows, return_dict=True, **dict(zip(names, others, strict=True)), **lengths))

    with _lock:
        graphs = _caches.setdefault(visual, GraphCache())
    # weights that were put elsewhere are others: a graph reads them by address
    weights = tuple(value.data_ptr() for value in (*visual.parameters(), *visual.buffers()))
    attention = str(visual.config._attn_implementation)
    found: tuple[Tensor, ...] = graphs(
        encode, (patches, *(told[name] for name in names)), (tuple(names), host, attention, weights)
    )
    return found


def _is_plain(visual: Any) -> bool:
    """Whether nothing but the weights decides what the encoder does, and it never waits for the device."""
    if visual.training or "flash" in str(visual.config._attn_implementation):
        return False
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or getattr(module, "_hf_hook", None) is not None
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
        for module in visual.modules()
    )
