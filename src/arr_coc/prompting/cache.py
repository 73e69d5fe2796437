"""Caches of shortened prompts: what they hold, how to continue from them, and that nobody else does.

A cache filled from a shortened prompt is shorter than the ids that a caller passes with it in the next turn. It is
marked with a [`Holding`], which says how the two correspond, so that the next turn continues at the true positions. A
marked cache stays marked when it is copied, and refuses to be used by a model that does not know about it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache as remember
from typing import Any

import torch
from torch import Tensor

from arr_coc.families.family import Family

# The models that a session of this thread is calling right now.
_CALLED: ContextVar[tuple[int, ...]] = ContextVar("arr_coc_called_models", default=())


@dataclass(frozen=True, eq=False)
class Holding:
    """The shortened prompt that a cache begins with.

    Args:
        full_ids (`Tensor` of shape `[B, L]`): the prompt as the caller passed it.
        short_ids (`Tensor` of shape `[B, L']`): the prompt as the model read it.
        mask (`Tensor` of shape `[B, L']`): 0 where it is padded.
        positions (`Tensor` of shape `[P, B, L']`): where its tokens stand.
        next_position (`Tensor` of shape `[B]`): where the text after the prompt begins.
    """

    full_ids: Tensor
    short_ids: Tensor
    mask: Tensor
    positions: Tensor
    next_position: Tensor

    @property
    def full_length(self) -> int:
        """Tokens of the prompt as the caller counts them."""
        return self.full_ids.shape[1]

    @property
    def length(self) -> int:
        """Tokens of the prompt in the cache."""
        return self.short_ids.shape[1]

    def extend(self, family: Family, text: Tensor) -> dict[str, Tensor]:
        """Ids, mask and positions of the shortened prompt followed by text `[B, n]`."""
        count = text.shape[1]
        after = self.next_position[:, None] + torch.arange(count, device=text.device)  # [B, n]
        positions = torch.cat([self.positions, after.expand(len(self.positions), -1, -1)], dim=2)
        mask = torch.cat([self.mask, torch.ones_like(text)], dim=1)
        return {
            "input_ids": torch.cat([self.short_ids, text], dim=1),
            "attention_mask": mask,
            **family.place(mask, positions, self.next_position + count),
        }


class _Marked:
    """Added to the class of a cache that holds a shortened prompt."""

    holding: Holding | None = None
    cut: Any = None  # columns in its later layers, if tokens left inside the language model

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Like the cache's own, but only for a session, which knows what the cache holds."""
        if not _CALLED.get():
            raise ValueError(
                "this cache holds a shortened prompt, which the plain model would misread; attach the model to go on "
                "from it, or start without `past_key_values`"
            )
        return super().update(*args, **kwargs)  # type: ignore[misc]

    def crop(self, length: int) -> Any:
        """Like the cache's own: a negative number of tokens to remove, or a length that counts the full prompt."""
        if self.holding is not None:
            if length >= 0:
                length -= self.holding.full_length - self.holding.length
            left = length if length >= 0 else self.get_seq_length() + length  # type: ignore[attr-defined]
            if left < self.holding.length:
                raise ValueError("a cache cannot be cropped into its shortened prompt; start without `past_key_values`")
        return super().crop(length)  # type: ignore[misc]


@remember
def _marked_class(cls: Hashable) -> Any:
    base: Any = cls
    return type(f"Shortened{base.__name__}", (_Marked, base), {})


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
