"""Replay a function of tensors as one CUDA graph, because launching hundreds of tiny kernels costs more than running
them.

The first calls with a signature (shapes, dtypes, settings) run normally, the next is recorded, and later ones replay
the recording. Results are the same; they are copied out, so that the next call cannot overwrite them. What cannot be
recorded, for lack of memory or because it waits for the device, runs normally for good.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arr_coc.runtime.tensors import collect_constants

logger = logging.getLogger(__name__)


def may_replay(tensor: Tensor) -> bool:
    """Whether a graph can replace a plain call: on CUDA, without gradients, and not inside another recording."""
    return (
        tensor.is_cuda
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()  # a counter of operations, for one, must see them
        and not torch.cuda.is_current_stream_capturing()
    )


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    outputs: Any
    constants: list[Tensor]  # the graph reads them by address, so they must live as long as it does

    @property
    def size(self) -> int:
        return sum(0 if value is None else value.nbytes for value in self.inputs)


class GraphCache:
    """Recordings of one function for its most recently used signatures.

    Args:
        limit (`int`, *optional*, defaults to 16): most recordings to keep.
        limit_bytes (`int`, *optional*, defaults to 512 MiB): most memory for their copies of the inputs.
        patience (`int`, *optional*, defaults to 1): calls with a signature before it is recorded.

    The function takes tensors (or `None`) and settings, and returns a tuple, named or not, of tensors, `None` and such
    tuples. It must not wait for the device. Of values that change in place, its results may depend only on its inputs
    and the module's weights.
    """

    def __init__(self, limit: int = 16, limit_bytes: int = 2**29, patience: int = 1) -> None:
        self.limit, self.limit_bytes, self.patience = limit, limit_bytes, patience
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # how often a signature was called, unrecorded
        self._failed: set[Hashable] = set()
        self._lock = threading.Lock()
        self._pools: dict[torch.device, Any] = {}
        self._done: dict[torch.device, torch.cuda.Event] = {}

    def __reduce__(self) -> tuple[type[GraphCache], tuple[int, int, int]]:
        # a copied or unpickled layer starts without recordings
        return GraphCache, (self.limit, self.limit_bytes, self.patience)

    def clear(self) -> None:
        """Forget all recordings, and what could not be recorded: there may be memory now."""
        with self._lock:
            self._recordings.clear()
            self._failed.clear()

    def __call__(
        self, function: Callable[..., Any], tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...]
    ) -> Any:
        """Run, record or replay `function(*tensors, *settings)`."""
        shapes = tuple(None if x is None else (tuple(x.shape), x.dtype, x.device) for x in tensors)
        key = (settings, shapes)
        with self._lock:
            if key not in self._recordings and (self._seen.get(key, 0) < self.patience or key in self._failed):
                result = function(*tensors, *settings)
                self._seen[key] = self._seen.get(key, 0) + 1
                self._seen.move_to_end(key)
                while len(self._seen) > 1024:
                    self._seen.popitem(last=False)
                return result
            device = next(x.device for x in tensors if x is not None)
            with torch.cuda.device(device):
                return self._replay(key, function, tensors, settings, device)

    def _replay(
        self,
        key: Hashable,
        function: Callable[..., Any],
        tensors: Sequence[Tensor | None],
        settings: tuple[Hashable, ...],
        device: torch.device,
    ) -> Any:
        stream = torch.cuda.current_stream()
        if device in self._done:
            # all recordings share one memory pool: results of a replay on another stream must be copied out first
            stream.wait_event(self._done[device])
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(function, tensors, settings, device)
            except RuntimeError as error:  # also torch.OutOfMemoryError
                logger.warning("a CUDA graph could not be recorded, so this runs without one: %s", _first_line(error))
                self._failed.add(key)
                gc.collect()
                torch.cuda.empty_cache()
                return function(*tensors, *settings)
            self._seen.pop(key, None)
            self._forget()
        recording = self._recordings[key]
        self._recordings.move_to_end(key)
        _copy(tensors, recording.inputs)
        recording.graph.replay()
        copies = _copy_out(recording.outputs)
        self._done[device] = stream.record_event()
        return copies

    def _forget(self) -> None:
        """Drop the least recently used recordings until both limits hold; the newest always stays."""
        while len(self._recordings) > 1 and (
            len(self._recordings) > self.limit
            or sum(recording.size for recording in self._recordings.values()) > self.limit_bytes
        ):
            self._recordings.popitem(last=False)

    def _record(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor | None],
        settings: tuple[Hashable, ...],
        device: torch.device,
    ) -> _Recording:
        with torch.inference_mode(False):  # inference tensors could not be written to outside inference mode
            inputs = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device) for x in tensors]
        _copy(tensors, inputs)
        warmup = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            function(*inputs, *settings)  # allocates workspaces, which is not possible while recording
        torch.cuda.current_stream().wait_stream(warmup)
        graph, chance = torch.cuda.CUDAGraph(), torch.cuda.default_generators[device.index].clone_state()
        pool = self._pools.setdefault(device, torch.cuda.graph_pool_handle())
        recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        try:
            with collect_constants() as constants, recording:
                outputs = function(*inputs, *settings)
        except RuntimeError:
            self._give_up(device, chance)
            raise
        return _Recording(graph, inputs, outputs, constants)

    def _give_up(self, device: torch.device, chance: torch.Generator) -> None:
        """After a recording that failed: torch has not ended it in its allocator and its random numbers."""
        torch.cuda.default_generators[device.index].graphsafe_set_state(chance)
        pool = self._pools.pop(device)  # recordings that were made keep it; later ones get another
        with suppress(RuntimeError):  # it was ended after all
            torch._C._cuda_endAllocateToPool(device.index, pool)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _copy(values: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> None:
    for value, target in zip(values, targets, strict=True):
        if value is not None and target is not None:
            target.copy_(value)


def _copy_out(result: Any) -> Any:
    """Copy a graph's results, because the next replay overwrites them."""
    if isinstance(result, tuple):
        return getattr(type(result), "_make", tuple)([_copy_out(part) for part in result])
    return result.clone() if isinstance(result, Tensor) else result
