"""Memory for keys and values at a fixed place, because CUDA graphs read and write by address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Places of a cache are rounded up to one of these.
ROOMS = (512, 768, 1024, 2048, 4096, 8192)
ROOM_SHARE = 1 / 16  # most of the device's memory that keys and values may take


class Room:
    """Keys and values of a fixed number of places `[2, layers, B, heads, S, d]`, which recordings read and write."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        with torch.inference_mode(False):  # inference tensors could not be written to outside inference mode
            # zeros: what is masked out must at least be a number
            self.memory = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.keys, self.values = (list(part.unbind(0)) for part in self.memory)  # each [B, heads, S, d]
        self.size = shape[4]

    def cache(self, places: Tensor | None = None) -> Cache:
        """What a pass takes as its cache: see [`RoomLayer`]."""
        pairs = zip(self.keys, self.values, strict=True)
        return Cache(layers=[RoomLayer(keys, values, places) for keys, values in pairs])

    def load(self, cache: Any, length: int) -> None:
        """Copy the keys and values of a cache to the first places."""
        parts = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
        together = _join(parts)
        if together is None:
            torch._foreach_copy_(self.filled(length), parts)
        else:  # a cache that was given a copy of a room: one kernel instead of dozens
            self.memory.flatten(0, 1)[:, :, :, :length].copy_(together)

    def move_out(self, cache: Any) -> None:
        """Give a cache copies of what it shows of the room, if anything: a cropped one shows a part."""
        here = self.memory.untyped_storage().data_ptr()
        for layer in cache.layers:
            if layer.keys.untyped_storage().data_ptr() == here:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def filled(self, length: int, copied: bool = False) -> list[Tensor]:
        """The first places of all keys, then of all values, or copies of them."""
        part = self.memory[:, :, :, :, :length]
        return list((part.clone() if copied else part).flatten(0, 1).unbind(0))  # each [B, heads, length, d]


class RoomLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a room during a pass that writes to it.

    Args:
        keys, values (`Tensor` of shape `[B, heads, S, d]`): its memory.
        places (`Tensor` of shape `[n]`, *optional*): where the pass writes; it then attends to all places under a mask.
            By default it is the first pass, which writes to the first places and attends to its own tokens.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.places = keys, values, places
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, n, d]` to their places; returns what to attend to."""
        if self.places is None:
            count = key_states.shape[2]
            self.keys[:, :, :count].copy_(key_states)
            self.values[:, :, :count].copy_(value_states)
            return key_states, value_states
        self.keys.index_copy_(2, self.places, key_states)
        self.values.index_copy_(2, self.places, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys to attend to, and the first of them."""
        return query_length if self.places is None else self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Tokens before this pass: unless it is the first, all places, and the mask tells which are filled."""
        return 0 if self.places is None else self.get_max_length()

    def get_max_length(self) -> int:
        """All places."""
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in earlier versions."""
        return self.get_max_length()


class Rooms:
    """The rooms of one language model, together at most a share of the device's memory.

    Args:
        forget (`Callable`): called when rooms are given back.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._rooms: dict[tuple[Any, ...], Room] = {}

    def find(self, config: Any, rows: int, length: int, like: Tensor) -> Room | None:
        """A room for so many rows and tokens; None if it would be too large.

        Args:
            config (`PreTrainedConfig`): of the language model.
            rows, length (`int`): what it must hold.
            like (`Tensor`): has its dtype and device.
        """
        size = next((size for size in ROOMS if size >= length), None)
        if size is None:
            return None
        key = (rows, size, like.dtype, like.device)
        if key not in self._rooms:
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            shape = (2, config.num_hidden_layers, rows, config.num_key_value_heads, size, width)
            needed, limit = torch.Size(shape).numel() * like.element_size(), ROOM_SHARE * _memory(like.device)
            if needed > limit:
                return None
            if needed + sum(room.memory.nbytes for room in self._rooms.values()) > limit:
                self._rooms.clear()
                self._forget()
            try:
                self._rooms[key] = Room(shape, like)
            except torch.OutOfMemoryError:
                return None
        return self._rooms[key]


def _join(parts: Sequence[Tensor]) -> Tensor | None:
    """One view `[n, ...]` of tensors `[...]` that lie in one memory at equal distances; None if they do not."""
    first, last = parts[0], parts[-1]
    shape, strides = first.shape, first.stride()
    places = [part.data_ptr() for part in parts]
    step = places[1] - places[0]
    if step <= 0 or step % first.element_size() or places != list(range(places[0], places[-1] + 1, step)):
        return None
    # between the ends of one memory there is no other
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    if any(part.shape != shape or part.stride() != strides or part.dtype != first.dtype for part in parts):
        return None
    return first.as_strided((len(parts), *shape), (step // first.element_size(), *strides))


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**34
