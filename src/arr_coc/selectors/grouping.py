"""Batching queries: pictures of one size go through the layer in one call, with their words padded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.runtime.tensors import upload
from arr_coc.selectors.contract import VisualQuery

# Pictures whose mipmaps, some megabytes each, are stacked at most.
MOST_MIPMAPS = 8


def group_queries(queries: Sequence[VisualQuery]) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """For each group of queries of one size, their places in the list and the layer's arguments.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import VisualQuery
    >>> from arr_coc.selectors.grouping import group_queries
    >>> sizes = [(1, 2, 3), (1, 4, 4), (1, 2, 3)]
    >>> queries = [VisualQuery(torch.rand(t * h * w, 8), (t, h, w), torch.rand(2, 8)) for t, h, w in sizes]
    >>> [(places, tuple(inputs["tokens"].shape)) for places, inputs in group_queries(queries)]
    [([0, 2], (2, 6, 8)), ([1], (1, 16, 8))]

    ```
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, query in enumerate(queries):
        picture = query.picture
        form = (tuple(picture.shape), picture.dtype) if isinstance(picture, Tensor) else picture and picture.form
        groups[query.grid, query.cells, form, query.attended is None, query.details, query.leeway].append(place)
    for places in _limit(queries, groups.values()):
        group = [queries[place] for place in places]
        lengths = [query.words.shape[0] for query in group]
        mask = None
        if min(lengths) < max(lengths):
            mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, Q]
            mask = upload(mask, group[0].words.device)
        yield (
            places,
            {
                "tokens": _stack([query.tokens for query in group]),
                "words": pad_sequence([query.words for query in group], batch_first=True),  # [B, Q, D]
                "word_mask": mask,
                "attended": _stack_attended([query.attended for query in group]),
                "picture": _stack_pictures([query.picture for query in group]),
                "grid": group[0].grid,
                "cells": group[0].cells,
                "details": group[0].details,
                "leeway": group[0].leeway,
            },
        )


def _limit(queries: Sequence[VisualQuery], groups: Iterable[list[int]]) -> Iterator[list[int]]:
    """The groups, those of large pictures in parts."""
    for places in groups:
        size = MOST_MIPMAPS if isinstance(queries[places[0]].picture, Mipmaps) else len(places)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def _stack_pictures(pictures: list[Any]) -> Tensor | Mipmaps | None:
    if pictures[0] is None:
        return None
    return Mipmaps.stack(pictures) if isinstance(pictures[0], Mipmaps) else _stack(pictures)


def _stack_attended(attended: list[Tensor | None]) -> Tensor | None:
    known = [paid for paid in attended if paid is not None]
    return _stack(known) if known else None


def _stack(tensors: list[Tensor]) -> Tensor:
    """`torch.stack` that does not copy a single, possibly large, tensor."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def pad_words(words: Tensor, mask: Tensor | None, multiple: int = 16) -> tuple[Tensor, Tensor]:
    """Words `[B, Q, D]` padded to a multiple, and their mask: questions of similar length then share a CUDA graph."""
    if mask is None:
        mask = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device)
    missing = -words.shape[1] % multiple
    return F.pad(words, (0, 0, 0, missing)), F.pad(mask, (0, missing), value=False)
