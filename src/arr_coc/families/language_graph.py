"""Running the language model as CUDA graphs: for a short prompt, and for every decoded token, launching its kernels
takes longer than running them.

While a session calls a model, the passes of its language model are replayed where that gives the same result, and
everything around them stays transformers' own: `generate` and all its options hold.

Keys and values live in a [`Room`], memory of a fixed place and length that all recordings share, for as long as the
call lasts. The caller's cache shows the filled part of it, and gets a copy of its own at the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from arr_coc.families.language_passes import Lease
from arr_coc.families.recordable import State, read_state
from arr_coc.families.room import Rooms
from arr_coc.runtime.cuda_graphs import GraphCache
from arr_coc.runtime.tracing import untraced_itself

logger = logging.getLogger(__name__)

PATIENCE = 2  # passes of a length before it is recorded
MOST_STATES = 64  # of weights and adapters; a server that exchanges adapters has ever new ones


class LanguageGraphs:
    """The recordings of one language model, and the rooms that they use.

    Args:
        inner (`nn.Module`): the model without its head.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = ref(inner)  # which is the key of what holds this
        self.lock = threading.Lock()  # held by the call that uses them
        self.lease: Lease | None = None
        self.said: set[str] = set()
        self.replay = GraphCache(limit=32, limit_bytes=2**30, patience=PATIENCE)
        self.rooms = Rooms(self.replay.clear)  # recordings know rooms by their addresses
        self._states: dict[State, int] = {}
        self._done: torch.cuda.Event | None = None

    def wait(self, device: torch.device) -> None:
        """Let the current stream wait until the call before, perhaps on another stream, has left the rooms."""
        if self._done is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(self._done)

    def leave(self, device: torch.device) -> None:
        """Remember when the current stream leaves the rooms."""
        if device.type == "cuda":
            self._done = torch.cuda.current_stream(device).record_event()

    def number(self, state: State) -> int:
        """A number for each state that was seen: its hundreds of addresses would take long to compare in every pass."""
        if state not in self._states and len(self._states) == MOST_STATES:
            self._states.clear()
            self.replay.clear()  # recordings know states by their numbers
        return self._states.setdefault(state, len(self._states))

    @untraced_itself
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own, which runs if this pass cannot be replayed."""
        lease = self.lease  # which may end in its thread while another is here
        output = None if lease is None else lease.replay(args, kwargs)
        inner: Any = self._inner()
        return type(inner).forward(inner, *args, **kwargs) if output is None else output

    def say(self, reason: str) -> None:
        """Log once why there are no recordings."""
        if reason not in self.said:
            self.said.add(reason)
            logger.warning("the language model runs without CUDA graphs: %s", reason)


_graphs: WeakKeyDictionary[nn.Module, LanguageGraphs] = WeakKeyDictionary()
_lock = threading.Lock()


def forget_recordings(inner: nn.Module) -> None:
    """Give back the memory of a model's recordings, unless a call is using them."""
    graphs = _graphs.get(inner)
    if graphs is not None and graphs.lock.acquire(blocking=False):
        with _lock:
            _graphs.pop(inner, None)
        graphs.lock.release()


@contextmanager
def replayed_passes(family: Any, unpadded: bool = False) -> Iterator[None]:
    """Inside, passes of a model's language model are replayed where that gives the same result.

    One call at a time uses the recordings of a model; others, in other threads, run as if there were none.

    Args:
        family (`Family`): the opened model.
        unpadded (`bool`, *optional*, defaults to `False`): whether the prompt is known to have no padding. Otherwise,
            if it has one row, it is looked up, which waits for the device.
    """
    inner = family.inner
    # nobody who trains a model expects recordings, so that there is nothing to say then
    if not family.graphs_language or family.headless or inner.language_model.training or not _is_on_cuda(inner):
        yield
        return
    with _lock:
        graphs = _graphs.setdefault(inner, LanguageGraphs(inner))
    if not graphs.lock.acquire(blocking=False):
        yield
        return
    try:
        state = read_state(inner.language_model)
        reason = _why_not(inner) or state.obstacle
        if reason is not None:
            graphs.say(reason)
            yield
            return
        device = next(inner.parameters()).device
        graphs.wait(device)
        lease = graphs.lease = Lease(graphs, family, unpadded, state)
        inner.__dict__["forward"] = graphs.forward
        try:
            yield
        finally:
            inner.__dict__.pop("forward", None)
            graphs.lease = None  # before its end, which may lack memory for copies: a lease keeps the model alive
            lease.end()
            graphs.leave(device)
    finally:
        graphs.lock.release()


def _is_on_cuda(inner: Any) -> bool:
    return bool(next(inner.parameters()).is_cuda)


def _why_not(inner: Any) -> str | None:
    """Why a recording could not stand in for this model; None if it could."""
    language = inner.language_model
    if language.config._attn_implementation != "sdpa":
        return f"attention is {language.config._attn_implementation!r}, not 'sdpa'"
    if set(getattr(language.config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "its layers are not all of full attention"
    if getattr(language.config, "num_experts", 0):
        return "it chooses experts"
    if "forward" in inner.__dict__:
        return "another tool has replaced `forward`"
    return None
