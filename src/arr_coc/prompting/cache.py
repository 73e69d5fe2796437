"""Caches that know what they hold: how to go on from them, shorten them and add to them, and that nobody else does.

A cache filled from a shortened prompt is shorter than the ids that a caller passes with it in the next turn. It is
marked with a [`Holding`], which says what each of its tokens is and where it stands, so that everything that follows
has its true position. A marked cache stays marked when it is copied, and refuses to be used by a model that does not
know about it.

[`drop`] takes tokens out of a cache: later tokens are read as if they had been hidden by a mask. [`append`] gives the
arguments of the pass that adds a [`Piece`]: text, or visual tokens with their features and positions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache as remember
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from arr_coc.families.family import Encoded, Family, Inputs, read_levels

# The models that a session of this thread is calling right now.
_CALLED: ContextVar[tuple[int, ...]] = ContextVar("arr_coc_called_models", default=())


class Role(IntEnum):
    """What a token of a prompt is: a token of a small overview is `GESTALT`, any other visual token `CELL`."""

    PADDING = 0
    TEXT = 1
    GESTALT = 2
    CELL = 3


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens to add to a cache; [`text_piece`], [`visual_piece`] and [`piece_of`] make one.

    Args:
        ids (`Tensor` of shape `[B, n]`): the tokens, with placeholders for visual ones.
        mask (`Tensor` of shape `[B, n]`, *optional*): 0 where padded; None if all rows have `n` tokens.
        positions (`Tensor` of shape `[P, B, n]`, *optional*): where they stand; None for text that goes on after what
            the cache holds.
        roles (`Tensor` of shape `[B, n]`): the [`Role`] of each.
        cells (`Tensor` of shape `[B, n]`): for a visual token, the cell of its picture whose place it takes; else -1.
        features (`dict[str, Sequence[Encoded]]`): for each kind of picture, the visual tokens of each row.
        next_position (`Tensor` of shape `[B]`, *optional*): where the text after the piece begins; by default after its
            last text, and where it would have begun before if it has none.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor | None
    roles: Tensor
    cells: Tensor
    features: Mapping[str, Sequence[Encoded]] = field(default_factory=dict)
    next_position: Tensor | None = None


def text_piece(ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Piece:
    """Text `[B, n]` to add to a cache, left-padded where a mask is 0.

    Args:
        ids (`Tensor` of shape `[B, n]`): the words.
        mask (`Tensor` of shape `[B, n]`, *optional*): 0 where padded.
        positions (`Tensor` of shape `[P, B, n]`, *optional*): where they stand, if not after what the cache holds; text
            that comes later goes on after them.
    """
    roles = torch.full_like(ids, Role.TEXT) if mask is None else mask.long() * Role.TEXT
    return Piece(ids, mask, positions, roles, torch.full_like(ids, -1))


def visual_piece(
    family: Family,
    features: Sequence[Encoded],
    positions: Sequence[Tensor],
    cells: Sequence[Tensor],
    role: Role = Role.CELL,
    kind: str = "image",
) -> Piece:
    """Visual tokens to add to a cache; rows may have different numbers of them, also none.

    Args:
        family (`Family`): the opened model.
        features (`Sequence[Encoded]`): the tokens `[k, D]` of each row, on every level.
        positions (`Sequence[Tensor]`): for each row where they stand, `[P, k]`.
        cells (`Sequence[Tensor]`): for each row the cells `[k]` of the picture whose places they take.
        role (`Role`, *optional*, defaults to `Role.CELL`): what they are.
        kind (`str`, *optional*, defaults to `"image"`): the kind of picture.
    """
    counts = [len(row.features) for row in features]
    longest = max(counts)

    def stack(rows: Sequence[Tensor], padding: int) -> Tensor:
        return torch.stack([F.pad(row, (longest - row.shape[-1], 0), value=padding) for row in rows], dim=-2)

    placed = stack(cells, -1)  # [B, n]
    mask = stack([torch.ones_like(row) for row in cells], 0)  # [B, n]
    ids = torch.where(mask.bool(), family.token_id(kind), family.pad_id())
    padded = min(counts) < longest
    return Piece(ids, mask if padded else None, stack(positions, 0), mask * role, placed, {kind: features})


@dataclass(frozen=True, eq=False)
class Beginning:
    """The first tokens of a prompt, if they do not depend on its question: text, then the gestalt of a picture.

    Args:
        text (`tuple[int, ...]`): ids of the text.
        gestalt (`int`): tokens of the gestalt.
        plan (`object`): the gaze that it belongs to.
        features (`Tensor`): what it was made from. Only the same tensor counts as the same, so that nobody must look at
            its values, which would wait for the device.
    """

    text: tuple[int, ...]
    gestalt: int
    plan: object
    features: Tensor

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.text) + self.gestalt

    def same(self, other: Beginning | None) -> bool:
        """Whether keys and values of the other serve this one."""
        if other is None or self.features is not other.features:
            return False
        return (self.text, self.gestalt, self.plan) == (other.text, other.gestalt, other.plan)


@dataclass(frozen=True, eq=False)
class Holding:
    """The shortened prompt that a cache begins with.

    Args:
        full_ids (`Tensor` of shape `[B, L]`): the prompt as the caller passed it.
        short_ids (`Tensor` of shape `[B, L']`): the prompt as the model read it.
        mask (`Tensor` of shape `[B, L']`): 0 where it is padded.
        positions (`Tensor` of shape `[P, B, L']`): where its tokens stand.
        next_position (`Tensor` of shape `[B]`): where the text after the prompt begins.
        roles (`Tensor` of shape `[B, L']`): the [`Role`] of each token.
        cells (`Tensor` of shape `[B, L']`): for a visual token, the cell of its picture whose place it takes; else -1.
        padded (`bool`, *optional*, defaults to `True`): whether the mask may have zeros; False where that is known on
            the host.
        beginning (`Beginning`, *optional*): its first tokens, if they do not depend on the question.
    """

    full_ids: Tensor
    short_ids: Tensor
    mask: Tensor
    positions: Tensor
    next_position: Tensor
    roles: Tensor
    cells: Tensor
    padded: bool = True
    beginning: Beginning | None = None

    @property
    def full_length(self) -> int:
        """Tokens of the prompt as the caller counts them."""
        return self.full_ids.shape[1]

    @property
    def length(self) -> int:
        """Tokens of the prompt in the cache."""
        return self.short_ids.shape[1]

    @property
    def shorter(self) -> bool:
        """Whether the model read fewer tokens than the caller passed."""
        return self.length != self.full_length

    def extend(self, family: Family, text: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Ids, mask and positions of the shortened prompt followed by text `[B, n]`, of which a mask may hide some."""
        return self.followed_by(text_piece(text, mask)).arguments(family)

    def add(self, family: Family, cache: Any, ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        """The arguments of a forward pass that adds tokens `[B, n]` to a cache which begins with this prompt.

        Args:
            family (`Family`): the opened model.
            cache (`Cache`): holds this prompt, and perhaps tokens after it.
            ids (`Tensor` of shape `[B, n]`): the tokens to add.
            mask (`Tensor`, *optional*): of the whole conversation, as its caller or as the cache counts it.
        """
        decoded = int(cache.get_seq_length()) - self.length
        if decoded < 0:
            raise ValueError(
                f"this cache holds {decoded + self.length} tokens, and the prompt has {self.length}; run the prompt "
                "with this cache first"
            )
        before = ids.new_zeros(len(ids), decoded)  # only their number matters
        text = torch.cat([before, ids], dim=1)
        extended: dict[str, Any] = self.extend(family, text, self.mask_after(mask, text.shape[1]))
        positions = extended["position_ids"][..., -ids.shape[1] :]
        return {**extended, "input_ids": ids, "position_ids": positions, "past_key_values": cache}

    def mask_after(self, mask: Any, count: int) -> Tensor | None:
        """The last columns `[B, count]` of a mask, which follow this prompt; None if there is no mask."""
        if mask is None:
            return None
        rows = len(self.full_ids)
        shapes = [(rows, length + count) for length in (self.full_length, self.length)]
        if not isinstance(mask, Tensor) or tuple(mask.shape) not in shapes:
            given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"`attention_mask` must have shape {shapes[0]}, as the whole conversation, got {given}")
        return mask[:, -count:].long()

    def arguments(self, family: Family) -> dict[str, Tensor]:
        """Ids, mask and positions as arguments of the model."""
        placed = family.place(self.mask, self.positions, self.next_position)
        return {"input_ids": self.short_ids, "attention_mask": self.mask, **placed}

    def followed_by(self, piece: Piece) -> Holding:
        """The shortened prompt and a piece after it. The prompt that the caller passed, `full_ids`, stays."""
        if not piece.ids.shape[1]:
            return self
        mask = torch.ones_like(piece.ids) if piece.mask is None else piece.mask.long()
        positions = piece.positions
        if positions is None:
            after = self.next_position[:, None] + mask.cumsum(dim=1) - 1  # [B, n]
            positions = (after * mask).expand(len(self.positions), -1, -1)
        next_position = piece.next_position
        if next_position is None:  # visual tokens take places of their picture, so text alone counts
            ends = torch.where(piece.roles == Role.TEXT, positions.amax(dim=0) + 1, 0).amax(dim=1)  # [B]
            next_position = torch.where(ends > 0, ends, self.next_position)
        return replace(
            self,
            short_ids=torch.cat([self.short_ids, piece.ids], dim=1),
            mask=torch.cat([self.mask, mask], dim=1),
            positions=torch.cat([self.positions, positions], dim=2),
            next_position=next_position,
            roles=torch.cat([self.roles, piece.roles], dim=1),
            cells=torch.cat([self.cells, piece.cells], dim=1),
            padded=self.padded or piece.mask is not None,
        )

    def first(self, count: int) -> Holding:
        """Its first tokens."""
        return replace(
            self,
            short_ids=self.short_ids[:, :count],
            mask=self.mask[:, :count],
            positions=self.positions[:, :, :count],
            roles=self.roles[:, :count],
            cells=self.cells[:, :count],
        )

    def take(self, columns: Tensor, valid: Tensor, pad_id: int) -> Holding:
        """The tokens at columns `[B, m]`, padded where `valid` is False."""
        return replace(
            self,
            short_ids=self.short_ids.gather(1, columns).masked_fill(~valid, pad_id),
            mask=valid.to(self.mask.dtype),
            positions=self.positions.gather(2, columns.expand(len(self.positions), -1, -1)) * valid,
            roles=self.roles.gather(1, columns).masked_fill(~valid, Role.PADDING),
            cells=self.cells.gather(1, columns).masked_fill(~valid, -1),
            padded=True,  # rows may keep different numbers of tokens
            beginning=None,
        )

    def nothing(self) -> Holding:
        """What a cache holds before it reads the first of this prompt."""
        none = self.mask.new_zeros(len(self.mask), 0, dtype=torch.bool)
        return replace(self.take(none.long(), none, 0), next_position=torch.zeros_like(self.next_position))

    def take_rows(self, rows: Tensor) -> Holding:
        """Rows `[b]` of the batch."""
        return Holding(
            self.full_ids[rows], self.short_ids[rows], self.mask[rows], self.positions[:, rows],
            self.next_position[rows], self.roles[rows], self.cells[rows],
        )  # fmt: skip


class _Marked:
    """Added to the class of a cache that holds a shortened prompt, or one of which everything was kept.

    The plain model may use the latter too, at positions that it counts itself.
    """

    holding: Holding | None = None
    cut: Any = None  # columns in its later layers, if tokens left inside the language model

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Like the cache's own, but only for a session, which knows what the cache holds."""
        if not _CALLED.get() and (self.holding is None or self.holding.shorter):
            raise ValueError(
                "this cache holds a shortened prompt, which the plain model would misread; attach the model to go on "
                "from it, or start without `past_key_values`"
            )
        return super().update(*args, **kwargs)  # type: ignore[misc]

    def crop(self, length: int) -> Any:
        """Like the cache's own: a negative number of tokens to remove, or a length that counts the full prompt."""
        whole = True  # the prompt
        if self.holding is not None:
            if length >= 0:
                length -= self.holding.full_length - self.holding.length
            left = length if length >= 0 else self.get_seq_length() + length  # type: ignore[attr-defined]
            whole = left >= self.holding.length
            if self.holding.shorter and not whole:
                raise ValueError("a cache cannot be cropped into its shortened prompt; start without `past_key_values`")
        result = super().crop(length)  # type: ignore[misc]
        if not whole:
            self._forget()
        return result

    def reset(self) -> None:
        """Like the cache's own; afterwards it is an ordinary cache."""
        super().reset()  # type: ignore[misc]
        self._forget()

    def _forget(self) -> None:
        self.__dict__.pop("holding", None)
        self.__dict__.pop("cut", None)
        self.__class__ = type(self).__mro__[2]  # the cache's own

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_marked, (type(self).__mro__[2],), self.__dict__  # pickle would look for the class by its name

    def batch_select_indices(self, indices: Tensor) -> None:
        """Like the cache's own; what it holds follows."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        if self.holding is not None:
            self.holding = self.holding.take_rows(indices)


@remember
def _marked_class(cls: Hashable) -> Any:
    base: Any = cls
    return type(f"Shortened{base.__name__}", (_Marked, base), {})


def _make_marked(cls: Hashable) -> Any:
    """An empty cache, marked; copies and pickles fill it."""
    marked = _marked_class(cls)
    return marked.__new__(marked)


def mark_cache(cache: Any, holding: Holding | None = None, cut: Any = None) -> None:
    """Mark a cache with what it holds; copies of it stay marked."""
    if not isinstance(cache, _Marked):
        cache.__class__ = _marked_class(type(cache))  # type: ignore[arg-type]
    cache.holding, cache.cut = holding or cache.holding, cut or cache.cut


def holding_of(cache: Any) -> Holding | None:
    """The shortened prompt in a cache; None if it holds none."""
    return cache.holding if isinstance(cache, _Marked) else None


def cut_of(cache: Any) -> Any:
    """The columns in a cache's later layers, if tokens left inside the language model; otherwise None."""
    return cache.cut if isinstance(cache, _Marked) else None


def drop(family: Family, cache: Any, keep: Tensor) -> None:
    """Take tokens out of a cache, in every layer. Those that stay keep their positions; rows are left-padded again.

    What is read later does not see the dropped tokens. What was read after them has seen them, and stays as it is.

    Args:
        family (`Family`): the opened model.
        cache (`Cache`): marked with what it holds; changed in place.
        keep (`Tensor` of shape `[B, L']`): True for the tokens that stay; padding never does.
    """
    holding = _open(cache)
    other = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if other:
        raise ValueError(
            f"tokens cannot be dropped from a cache of {', '.join(sorted(other))}: only layers of full attention keep "
            "each token apart; read the shorter prompt from its beginning"
        )
    if keep.shape != holding.mask.shape:
        raise ValueError(
            f"`keep` must have the shape {tuple(holding.mask.shape)} of the cache, got {tuple(keep.shape)}"
        )
    keep = keep.bool() & holding.mask.bool()
    counts = keep.sum(dim=1).tolist()
    if not min(counts):
        raise ValueError(f"`keep` leaves no token in row {counts.index(0)}; keep at least one in each")
    # a stable sort moves what goes to the left, where it becomes padding
    columns = keep.byte().argsort(dim=1, stable=True)[:, -max(counts) :]  # [B, m]
    valid = keep.gather(1, columns)
    for layer in cache.layers:
        index = columns.to(layer.keys.device)[:, None, :, None]  # [B, 1, m, 1]
        layer.keys, layer.values = (
            states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (layer.keys, layer.values)
        )
    cache.holding = holding.take(columns, valid, family.pad_id())


def keep_first(cache: Any, count: int) -> None:
    """Keep the first tokens of a cache, in place; unlike [`drop`], this does not wait for the device."""
    holding = _open(cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :count], layer.values[:, :, :count]
    cache.holding = holding.first(count)


def append(family: Family, cache: Any, *pieces: Piece, decode: bool = False) -> tuple[dict[str, Any], Holding]:
    """The arguments of the pass that adds pieces to a cache, and what it holds afterwards.

    Make the pass inside [`calling`], then mark the cache: `mark_cache(cache, holding)`.

    Args:
        family (`Family`): the opened model.
        cache (`Cache`): marked with what it holds.
        pieces (`Piece`): in the order in which the model reads them.
        decode (`bool`, *optional*, defaults to `False`): whether the arguments are for `generate`, which takes the ids
            of the whole prompt, rather than for `forward`, which takes those of the pieces. Pieces then end in text.
    """
    holding = _open(cache)
    if any(piece.mask is not None for piece in pieces) and any(
        type(layer) is not DynamicLayer for layer in cache.layers
    ):
        raise ValueError(
            "rows of different lengths cannot be added to a cache with linear attention, which would read the padding; "
            "add to one row at a time"
        )
    first = holding.length
    for piece in pieces:
        holding = holding.followed_by(piece)
    arguments: dict[str, Any] = {**holding.arguments(family), "past_key_values": cache}
    if not decode:
        for name in ("input_ids", "position_ids"):
            arguments[name] = arguments[name][..., first:]
    features = _join_features(family, pieces)
    return (arguments | {"mm_encoder_outputs": features} if features else arguments), holding


def _join_features(family: Family, pieces: Sequence[Piece]) -> dict[str, Any]:
    """The features of all pieces, row by row, as the model reads them."""
    outputs = {}
    for kind in family.kinds:
        by_row = zip(*(piece.features[kind] for piece in pieces if kind in piece.features), strict=True)
        rows = [encoded for row in by_row for encoded in row if len(encoded.features)]
        if rows:
            outputs[kind] = family.join(rows)
    return outputs


def piece_of(family: Family, arguments: Inputs, holding: Holding, start: int = 0, stop: int | None = None) -> Piece:
    """The columns of a shortened prompt from `start` to `stop`, to be added to a cache that holds those before.

    A cache that holds none yet is marked with `holding.nothing()`.

    Args:
        family (`Family`): the opened model.
        arguments (`Mapping`): the model's arguments for the whole prompt, with `mm_encoder_outputs`.
        holding (`Holding`): what a cache of the whole prompt holds.
        start (`int`, *optional*, defaults to 0): the first column.
        stop (`int`, *optional*): the first column that is left out; by default none is.
    """
    stop = holding.length if stop is None else stop
    features = {}
    for kind, output in arguments.get("mm_encoder_outputs", {}).items():
        visual = holding.short_ids == family.token_id(kind)  # [B, L']
        firsts, lasts, counts = (
            columns.sum(dim=1).tolist() for columns in (visual[:, :start], visual[:, :stop], visual)
        )
        levels = [
            [rows[first:last] for rows, first, last in zip(torch.split(level, counts), firsts, lasts, strict=True)]
            for level in read_levels(output)
        ]
        features[kind] = [Encoded(row[0], row[1:]) for row in zip(*levels, strict=True)]
    # text goes on where the first text after these columns stands, if there is any
    after = torch.where(holding.roles == Role.TEXT, holding.positions.amax(dim=0), torch.iinfo(torch.long).max)
    first_text = torch.cat([after[:, stop:], holding.next_position[:, None]], dim=1).amin(dim=1)  # [B]
    columns = slice(start, stop)
    return Piece(
        holding.short_ids[:, columns],
        None if len(holding.mask) == 1 else holding.mask[:, columns],  # a single row is not padded
        holding.positions[:, :, columns],
        holding.roles[:, columns],
        holding.cells[:, columns],
        features,
        first_text,
    )


def _open(cache: Any) -> Holding:
    """What a cache holds, if it can be changed; otherwise raise `ValueError`."""
    holding = holding_of(cache)
    if holding is None:
        raise ValueError("this cache does not say what it holds; mark it with `mark_cache` after its first pass")
    if cut_of(cache) is not None:
        raise ValueError(
            "tokens left inside the language model when this cache was filled, so that its layers have different "
            "lengths; start without `past_key_values`"
        )
    generated = cache.get_seq_length() - holding.length
    if generated:
        raise ValueError(
            f"this cache has {generated} generated tokens that its prompt does not describe; remove them with "
            f"`cache.crop({-generated})`, or mark it with a prompt that ends in them"
        )
    return holding


@contextmanager
def calling(model: object) -> Iterator[None]:
    """Inside, a session calls a model: marked caches can be used, and calls of that model are not shortened again."""
    token = _CALLED.set((*_CALLED.get(), id(model)))
    try:
        yield
    finally:
        _CALLED.reset(token)


def is_called(model: object) -> bool:
    """Whether this thread is inside a session's call of a model."""
    return id(model) in _CALLED.get()
