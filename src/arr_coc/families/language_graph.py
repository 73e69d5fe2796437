"""Running the language model as CUDA graphs: for a short prompt, and for every decoded token, launching its kernels
takes longer than running them.

While a session calls a model, the passes of its language model are replayed where that gives the same result, and
everything around them stays transformers' own: `generate` and all its options hold. Two kinds of passes are recorded:

- a first pass over a prompt, rounded up to the next of a few lengths. The places that are left over follow the prompt,
  where causal attention cannot see them;
- a pass that appends tokens to a cache: the next one, or some hundred of a further turn.

Keys and values live in a [`Room`], memory of a fixed place and length that all recordings share, for as long as the
call lasts. The caller's cache shows the filled part of it, and gets a copy of its own at the end.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModelOutputWithPast

from arr_coc.families.leaner_layers import GROUPED, lean_layer, with_fused_norms
from arr_coc.families.recordable import State, read_state
from arr_coc.families.room import Room
from arr_coc.runtime.cuda_graphs import GraphCache, may_replay
from arr_coc.runtime.tracing import untraced, untraced_itself

logger = logging.getLogger(__name__)

# Tokens of a first pass are rounded up to a multiple of this; with more than the most, running takes longer than
# launching.
STEP, MOST_FIRST = 32, 2048
# Tokens of a pass that appends, and of the cache that it appends to, are rounded up to one of these.
APPENDED = (1, 32, *range(64, 513, 64))
ROOMS = (512, 768, 1024, 2048, 4096, 8192)
SPARE = 128  # tokens that a first pass leaves room for
PATIENCE = 2  # passes of a length before it is recorded
ROOM_SHARE = 1 / 16  # most of the device's memory that keys and values may take
MOST_STATES = 64  # of weights and adapters; a server that exchanges adapters has ever new ones


class _Pass(NamedTuple):
    """The arguments of a pass that matter, if there are no others."""

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    cache: Any
    features: dict[str, Any]


class _Lease:
    """The use of a model's recordings for one call, by one thread.

    Args:
        graphs (`LanguageGraphs`): the recordings.
        family (`Family`): the opened model.
        unpadded (`bool`): whether the prompt is known to have no padding.
        state (`State`): what recordings depend on besides their inputs.
    """

    def __init__(self, graphs: LanguageGraphs, family: Any, unpadded: bool, state: State) -> None:
        self.graphs, self.family, self.unpadded = graphs, family, unpadded
        self.state = graphs.number(state)
        self.inner: Any = family.inner
        self.thread = threading.get_ident()
        self._room: Room | None = None
        self._cache: Any = None  # a weak reference to the cache whose keys and values are in the room
        self._shown: list[Tensor] = []

    @untraced
    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a pass returns, if it can be replayed; otherwise None."""
        call = None if args or threading.get_ident() != self.thread else self._read(kwargs)
        if call is None:
            return None
        length = 0 if call.cache is None else call.cache.get_seq_length()
        return self._append(call, length) if length else self._first(call)

    def _read(self, kwargs: dict[str, Any]) -> _Pass | None:
        """The arguments of a pass; None if one of them asks for something else."""
        config = self.inner.language_model.config
        given = {name: getattr(config, name) for name in ("use_cache", "output_hidden_states")}
        given |= {name: value for name, value in kwargs.items() if value is not None}
        ids, positions, mask = (given.pop(name, None) for name in ("input_ids", "position_ids", "attention_mask"))
        cache, features = given.pop("past_key_values", None), given.pop("mm_encoder_outputs", {})
        given.pop("mm_token_type_ids", None)  # only for positions
        settings = {"use_cache": True, "return_dict": True, "output_attentions": False, "output_hidden_states": False}
        if any(value is not settings.get(name) for name, value in given.items()):
            return None
        if ids is None or positions is None or positions.ndim != 3 or positions.shape[-1] != ids.shape[1]:
            return None
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):  # a static cache has ready masks
            return None
        if not may_replay(ids) or not _is_plain_cache(cache):
            return None
        return _Pass(ids, positions[-3:], mask, cache, features)

    def _first(self, call: _Pass) -> Any:
        """A first pass; None if it has one row that is too long or padded."""
        rows, count = call.ids.shape
        size = -(-count // STEP) * STEP
        unpadded, self.unpadded = self.unpadded, False  # of another prompt in the same call, nothing is known
        if rows > 1:
            return self._first_of_batch(call, unpadded)
        if size > MOST_FIRST or not (unpadded or call.mask is None or bool(call.mask.all())):
            return None
        self._make_way(call.cache)
        embeds, levels = self._embed(call)
        room = self.graphs.room(self.inner, rows, size + SPARE, embeds)
        if room is None:
            return None
        language = self.inner.language_model

        def read(embeds: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor]:
            return (_run(_reader(language), embeds, positions, None, room.cache(), list(rest[: len(levels)])),)

        tensors = [
            _extend(embeds, size),
            _extend(call.positions[..., None], size)[..., 0],
            *(_extend(x, size) for x in levels),
        ]
        (hidden,) = self.graphs.replay(read, tensors, ("first", id(room), len(levels), self.state))
        return self._finish(call, room, hidden, 0)

    def _first_of_batch(self, call: _Pass, unpadded: bool) -> Any:
        """A first pass over several rows, not replayed: running takes longer than launching."""
        embeds, levels = self._embed(call)
        language, mask = self.inner.language_model, None
        if not unpadded and call.mask is not None:
            valid = call.mask.bool()
            before = torch.ones(valid.shape[1], valid.shape[1], dtype=torch.bool, device=valid.device).tril()  # [n, n]
            # padding looks at itself: with nothing to look at, attention would not be a number
            mask = before & (valid[:, None, None] | ~valid[:, None, :, None])  # [B, 1, n, n]
        cache = DynamicCache(config=language.config) if call.cache is None else call.cache
        hidden = _run(_lean_reader(language), embeds, call.positions, mask, cache, levels)
        return self._output(hidden, cache)

    def _append(self, call: _Pass, length: int) -> Any:
        """A pass that appends to a cache; None if it does not fit."""
        rows, count = call.ids.shape
        size = next((size for size in APPENDED if size >= count), None)
        if size is None:
            return None
        self._make_way(call.cache)
        embeds, levels = self._embed(call)
        room = self.graphs.room(self.inner, rows, length + size, embeds)
        if room is None:
            return None
        if not self._is_shown(call.cache) or room is not self._room:
            room.load(call.cache, length)
        valid = torch.ones(rows, room.size, dtype=torch.bool, device=embeds.device)
        if call.mask is not None:
            if call.mask.shape[1] != length + count:
                return None
            valid[:, : length + count] = call.mask.bool()
        language = self.inner.language_model
        share = language.config.num_attention_heads // language.config.num_key_value_heads  # heads that share keys

        def read(embeds: Tensor, positions: Tensor, valid: Tensor, start: Tensor, *rest: Any) -> tuple[Tensor]:
            places = start + torch.arange(size, device=start.device)  # [n]
            before = torch.arange(room.size, device=start.device) <= places[:, None]  # [n, S]
            mask = (before & valid[:, None, None]).repeat(1, 1, share, 1)  # [B, 1, share * n, S]
            reader, deepstack = _lean_reader(language, GROUPED), list(rest[: len(levels)])
            return (_run(reader, embeds, positions, mask, room.cache(places), deepstack),)

        start = torch.full((1,), length, device=embeds.device)
        tensors = [
            _extend(embeds, size),
            _extend(call.positions[..., None], size)[..., 0],
            valid,
            start,
            *(_extend(x, size) for x in levels),
        ]
        (hidden,) = self.graphs.replay(read, tensors, ("append", id(room), len(levels), self.state))
        return self._finish(call, room, hidden, length)

    def _embed(self, call: _Pass) -> tuple[Tensor, list[Tensor]]:
        """Embeddings `[B, n, D]` of a prompt with its pictures, and DeepStack's levels, zero where there is text."""
        embeds: Tensor = self.inner.get_input_embeddings()(call.ids)
        levels: list[Tensor] = []
        for kind, output in call.features.items():
            visual = call.ids == self.family.token_id(kind)  # [B, n]
            rows = (visual.flatten().cumsum(0) - 1).clamp(min=0).view_as(visual)
            features = torch.cat(list(output.pooler_output)).to(embeds.dtype)
            embeds = torch.where(visual[..., None], features[rows], embeds)
            for number, parts in enumerate(getattr(output, "deepstack_features", None) or ()):
                level = torch.where(visual[..., None], torch.cat(list(parts)).to(embeds.dtype)[rows], 0)
                levels[number : number + 1] = [levels[number] + level] if number < len(levels) else [level]
        return embeds, levels

    def _finish(self, call: _Pass, room: Room, hidden: Tensor, length: int) -> Any:
        """Show the filled places of the room in the cache, and return what the model would."""
        count = call.ids.shape[1]
        cache: Any = DynamicCache(config=self.inner.language_model.config) if call.cache is None else call.cache
        while len(cache.layers) < len(room.keys):
            cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
        self._show(cache, room, room.filled(length + count))
        return self._output(hidden[:, :count], cache)

    def _output(self, hidden: Any, cache: Any) -> Any:
        deltas = self.inner.rope_deltas
        return Qwen2VLModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache, rope_deltas=deltas)

    def _show(self, cache: Any, room: Room | None, shown: list[Tensor]) -> None:
        half = len(shown) // 2
        for layer, keys, values in zip(cache.layers, shown[:half], shown[half:], strict=True):
            layer.keys, layer.values = keys, values
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        self._room, self._cache, self._shown = room, ref(cache), shown

    def _is_shown(self, cache: Any) -> bool:
        """Whether the room holds what a cache shows: nobody has changed it since."""
        if self._cache is None or self._cache() is not cache:
            return False
        half = len(self._shown) // 2
        pairs = zip(cache.layers, self._shown[:half], self._shown[half:], strict=True)
        return all(layer.keys is keys and layer.values is values for layer, keys, values in pairs)

    def _make_way(self, cache: Any) -> None:
        """Before a pass writes to a room: another cache must not show what is written there."""
        if self._cache is not None and self._cache() is not cache:
            self.end()

    def end(self) -> None:
        """Give the cache, if anyone still has it, a copy of its own."""
        cache: Any = None if self._cache is None else self._cache()
        if cache is not None and self._room is not None:
            if self._is_shown(cache):
                self._show(cache, None, self._room.filled(self._shown[0].shape[2], copied=True))
            else:
                self._room.move_out(cache)
        self._room, self._cache, self._shown = None, None, []


class LanguageGraphs:
    """The recordings of one language model, and the rooms that they use.

    Args:
        inner (`nn.Module`): the model without its head.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = ref(inner)  # which is the key of what holds this
        self.lock = threading.Lock()  # held by the call that uses them
        self.lease: _Lease | None = None
        self.said: set[str] = set()
        self.replay = GraphCache(limit=32, limit_bytes=2**30, patience=PATIENCE)
        self._rooms: dict[tuple[Any, ...], Room] = {}
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

    def room(self, inner: Any, rows: int, length: int, like: Tensor) -> Room | None:
        """A room for so many rows and tokens; None if it would be too large."""
        size = next((size for size in ROOMS if size >= length), None)
        if size is None:
            return None
        key = (rows, size, like.dtype, like.device)
        if key not in self._rooms:
            config = inner.language_model.config
            heads = config.num_attention_heads
            width = getattr(config, "head_dim", None) or config.hidden_size // heads
            shape = (2, config.num_hidden_layers, rows, config.num_key_value_heads, size, width)
            limit = ROOM_SHARE * _memory(like.device)
            bytes_needed = torch.Size(shape).numel() * like.element_size()
            if bytes_needed > limit:
                return None
            held = sum(room.memory.nbytes for room in self._rooms.values())
            if held + bytes_needed > limit:
                self._rooms.clear()
                self.replay.clear()  # recordings know rooms by their addresses
            try:
                self._rooms[key] = Room(shape, like)
            except torch.OutOfMemoryError:
                return None
        return self._rooms[key]

    def say(self, reason: str) -> None:
        """Log once why there are no recordings."""
        if reason not in self.said:
            self.said.add(reason)
            logger.warning("the language model runs without CUDA graphs: %s", reason)


_graphs: WeakKeyDictionary[nn.Module, LanguageGraphs] = WeakKeyDictionary()
_lock = threading.Lock()


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
        lease = graphs.lease = _Lease(graphs, family, unpadded, state)
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


def _reader(language: Any) -> Any:
    """The language model with DeepStack's levels added densely: finding their places would wait for the device."""
    reader = copy.copy(language)
    reader.__dict__["_deepstack_process"] = lambda hidden, places, level: hidden + level
    return reader


def _lean_reader(language: Any, attention: str | None = None) -> Any:
    """The same with leaner layers, where the result need not be the same to the last bit."""
    reader = _reader(with_fused_norms(language))
    reader.__dict__["layers"] = [lean_layer(layer, attention) for layer in language.layers]
    return reader


def _run(
    reader: Any, embeds: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, deepstack: list[Tensor]
) -> Tensor:
    levels = {"deepstack_visual_embeds": deepstack, "visual_pos_masks": None} if deepstack else {}
    output = type(reader).forward(
        reader, inputs_embeds=embeds, position_ids=positions, attention_mask=mask, past_key_values=cache,
        use_cache=True, **levels,
    )  # fmt: skip
    hidden: Tensor = output.last_hidden_state
    return hidden


def _extend(values: Tensor, size: int) -> Tensor:
    """Values `[..., n, D]` with zeros after them, up to `size`."""
    return F.pad(values, (0, 0, 0, size - values.shape[-2]))


def _is_plain_cache(cache: Any) -> bool:
    """Whether a cache only holds keys and values, as many in each layer."""
    if cache is None:
        return True
    if not isinstance(cache, DynamicCache) or cache.offloading:
        return False
    replicated = cache.layer_class_to_replicate
    return replicated in (None, DynamicLayer) and all(type(layer) is DynamicLayer for layer in cache.layers)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**34
