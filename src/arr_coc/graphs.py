"""Replaying a function of tensors as one CUDA graph: the layer is hundreds of tiny kernels, and launching them costs
more than running them.

A signature (shapes, types, settings) runs as written the first time, is recorded the second time and replayed from
then on. Results are the same; they are copied out, so that the next call cannot overwrite them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    outputs: Any


class GraphCache:
    """Recordings of one function for the signatures used last.

    Args:
        limit (`int`, *optional*, defaults to 8): how many signatures are kept; each holds a copy of its inputs.

    The function takes tensors (or `None`) and settings, and returns a `NamedTuple` of tensors (or `None`). It must not
    wait for the device, and its results may depend on nothing else that changes in place but the module's weights.
    """

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self._recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()
        self._lock = threading.Lock()
        self._pools: dict[torch.device, Any] = {}

    def __reduce__(self) -> tuple[type[GraphCache], tuple[int]]:
        return GraphCache, (self.limit,)  # copies and pickles of a layer start with no recordings

    def __call__(
        self, function: Callable[..., Any], tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...]
    ) -> Any:
        """Run, record or replay `function(*tensors, *settings)`."""
        shapes = tuple(None if x is None else (tuple(x.shape), x.dtype, x.device) for x in tensors)
        key = (settings, shapes)
        with self._lock:
            if key not in self._recordings:
                self._keep(key, None)
                return function(*tensors, *settings)
            recording = self._recordings[key]
            if recording is None:
                recording = self._record(function, tensors, settings)
            self._keep(key, recording)
            for static, value in zip(recording.inputs, tensors, strict=True):
                if static is not None and value is not None:
                    static.copy_(value)
            recording.graph.replay()
            copies = (None if value is None else value.clone() for value in recording.outputs)
            return type(recording.outputs)(*copies)

    def _keep(self, key: Hashable, recording: _Recording | None) -> None:
        self._recordings[key] = recording
        self._recordings.move_to_end(key)
        while len(self._recordings) > self.limit:
            self._recordings.popitem(last=False)

    def _record(
        self, function: Callable[..., Any], tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...]
    ) -> _Recording:
        device = next(x.device for x in tensors if x is not None)
        with torch.cuda.device(device):
            with torch.inference_mode(False):  # inference tensors could not be written to outside inference mode
                inputs = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device) for x in tensors]
            for static, value in zip(inputs, tensors, strict=True):
                if static is not None and value is not None:
                    static.copy_(value)
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function(*inputs, *settings)  # allocates workspaces, which a recording may not
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # one pool serves all recordings: every result is copied out before another recording can run
            pool = self._pools.setdefault(device, torch.cuda.graph_pool_handle())
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = function(*inputs, *settings)
        return _Recording(graph, inputs, outputs)
