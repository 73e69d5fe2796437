"""Passes of a language model that a recording can stand in for.

- A first pass over a prompt, rounded up to the next of a few lengths. The places that are left over follow the prompt,
  where causal attention cannot see them.
- A pass that appends tokens to a cache: the next one, or some hundred of a further turn.
- A first pass over several rows is not recorded, but runs in leaner layers and never waits for the device.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModelOutputWithPast

from arr_coc.families.faster.leaner_layers import GROUPED, lean_language_model
from arr_coc.families.recordable import State
from arr_coc.families.room import Room
from arr_coc.runtime.cuda_graphs import may_replay
from arr_coc.runtime.tracing import untraced

# Tokens of a first pass are rounded up to a multiple of this; with more than the most, running takes longer than
# launching.
STEP, MOST_FIRST = 32, 2048
# Tokens of a pass that appends are rounded up to one of these.
APPENDED = (1, 32, *range(64, 513, 64))
SPARE = 128  # tokens that a first pass leaves room for


def is_too_long(ids: Tensor) -> bool:
    """Whether a pass over these tokens `[B, n]` is never replayed, whatever comes before them."""
    rows, count = ids.shape
    return rows == 1 and count > max(MOST_FIRST, APPENDED[-1])


class _Pass(NamedTuple):
    """The arguments of a pass that matter, if there are no others."""

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    cache: Any
    features: dict[str, Any]


class Lease:
    """The use of a model's recordings for one call, by one thread.

    Args:
        graphs (`LanguageGraphs`): the recordings.
        family (`Family`): the opened model.
        unpadded (`bool`): whether the prompt is known to have no padding.
        state (`State`): what recordings depend on besides their inputs.
    """

    def __init__(self, graphs: Any, family: Any, unpadded: bool, state: State) -> None:
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
        room = self.graphs.rooms.find(self.inner.language_model.config, rows, size + SPARE, embeds)
        if room is None:
            return None
        language = self.inner.language_model

        def read(embeds: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor]:
            return (_run(_reader(language), embeds, positions, None, room.cache(), list(rest[: len(levels)])),)

        tensors = _extend_all(size, embeds, call.positions, levels)
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
            mask = _as_bias(before & (valid[:, None, None] | ~valid[:, None, :, None]), embeds.dtype)  # [B, 1, n, n]
        cache = DynamicCache(config=language.config) if call.cache is None else call.cache
        hidden = _run(_lean_reader(language), embeds, call.positions, mask, cache, levels)
        return self._output(hidden, cache)

    def _append(self, call: _Pass, length: int) -> Any:
        """A pass that appends to a cache; None if it does not fit."""
        rows, count = call.ids.shape
        size = next((size for size in APPENDED if size >= count), None)
        if size is None or (call.mask is not None and call.mask.shape[1] != length + count):
            return None
        self._make_way(call.cache)
        embeds, levels = self._embed(call)
        room = self.graphs.rooms.find(self.inner.language_model.config, rows, length + size, embeds)
        if room is None:
            return None
        if not self._is_shown(call.cache) or room is not self._room:
            room.load(call.cache, length)
        valid = torch.ones(rows, room.size, dtype=torch.bool, device=embeds.device)
        if call.mask is not None:
            valid[:, : length + count] = call.mask.bool()
        language = self.inner.language_model
        share = language.config.num_attention_heads // language.config.num_key_value_heads  # heads that share keys

        def read(embeds: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor]:
            deepstack, (valid, start) = list(rest[: len(levels)]), rest[len(levels) : len(levels) + 2]
            places = start + torch.arange(size, device=start.device)  # [n]
            before = torch.arange(room.size, device=start.device) <= places[:, None]  # [n, S]
            bias = _as_bias(before & valid[:, None, None], embeds.dtype)  # [B, 1, n, S]
            mask = bias.repeat(1, 1, share, 1)  # [B, 1, share * n, S]
            return (_run(_lean_reader(language, GROUPED), embeds, positions, mask, room.cache(places), deepstack),)

        start = torch.full((1,), length, device=embeds.device)
        tensors = [*_extend_all(size, embeds, call.positions, levels), valid, start]
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


def _reader(language: Any) -> Any:
    """The language model with DeepStack's levels added densely: finding their places would wait for the device."""
    reader = copy.copy(language)
    reader.__dict__["_deepstack_process"] = lambda hidden, places, level: hidden + level
    return reader


def _lean_reader(language: Any, attention: str | None = None) -> Any:
    """The same with leaner layers, where the result need not be the same to the last bit."""
    return _reader(lean_language_model(language, attention))


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


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Minus infinity where a mask is False: attention would make this of it once more in every layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _extend_all(size: int, embeds: Tensor, positions: Tensor, levels: Sequence[Tensor]) -> list[Tensor]:
    """Embeddings, positions `[3, B, n]` and levels of a pass, with zeros after them, up to `size` tokens."""
    return [
        _extend(embeds, size),
        _extend(positions[..., None], size)[..., 0],
        *(_extend(level, size) for level in levels),
    ]


def _extend(values: Tensor, size: int) -> Tensor:
    """Values `[..., n, D]` with zeros after them, up to `size`."""
    missing = size - values.shape[-2]
    return F.pad(values, (0, 0, 0, missing)) if missing else values


def _is_plain_cache(cache: Any) -> bool:
    """Whether a cache only holds keys and values, as many in each layer."""
    if cache is None:
        return True
    if not isinstance(cache, DynamicCache) or cache.offloading:
        return False
    replicated = cache.layer_class_to_replicate
    return replicated in (None, DynamicLayer) and all(type(layer) is DynamicLayer for layer in cache.layers)
