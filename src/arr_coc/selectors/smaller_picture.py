"""Selectors that make the picture smaller; `downsample` is the baseline to beat."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from arr_coc.config import Budget, Grid, cell_count
from arr_coc.selectors.contract import Glance, GlanceSelector, PictureSelector, Reading, TokenSelector
from arr_coc.selectors.per_picture import count_kept
from arr_coc.selectors.registry import create_selector, register_selector


def shrink_grid(grid: Grid, tokens: int) -> Grid:
    """The grid of at most `tokens` cells (at least one per frame) that comes closest in number and aspect ratio.

    Example:

    ```python
    >>> from arr_coc.selectors.smaller_picture import shrink_grid
    >>> shrink_grid((1, 24, 32), 200)
    (1, 12, 16)

    ```
    """
    frames, rows, columns = grid
    per_frame = max(1, tokens // frames)
    if per_frame >= rows * columns:
        return grid

    def difference(size: tuple[int, int]) -> float:
        aspect = abs(math.log(size[0] * columns / (size[1] * rows)))
        return aspect + math.log(per_frame / (size[0] * size[1]))

    heights = range(1, min(rows, per_frame) + 1)
    sizes = [(h, min(columns, per_frame // h)) for h in heights]
    sizes += [(h, w) for h in heights if 1 <= (w := round(h * columns / rows)) <= per_frame // h]
    h, w = min(sizes, key=difference)
    return frames, h, w


def nearest_cells(small: Grid, full: Grid) -> Tensor:
    """For each cell of a smaller grid, the index `[n]` of the full grid's cell nearest to its middle.

    Example:

    ```python
    >>> from arr_coc.selectors.smaller_picture import nearest_cells
    >>> nearest_cells((1, 1, 2), (1, 3, 6)).tolist()
    [7, 10]

    ```
    """
    rows = ((torch.arange(small[1]) + 0.5) * full[1] / small[1] - 0.5).round().long()
    columns = ((torch.arange(small[2]) + 0.5) * full[2] / small[2] - 0.5).round().long()
    frames = torch.arange(small[0])[:, None, None] * full[1] * full[2]
    return (frames + rows[:, None] * full[2] + columns).flatten()


@register_selector("downsample")
class DownsampleSelector(PictureSelector):
    """Resizes the picture to about K tokens, like a processor's `max_pixels`: the baseline to beat."""

    def plan(self, grid: Grid, budget: Budget | None = None) -> tuple[Grid, int]:
        """The smaller grid, without tokens of the full picture."""
        return shrink_grid(grid, count_kept(budget, cell_count(grid))), 0


@register_selector("downsample-auto")
class AutoDownsampleSelector(GlanceSelector):
    """Resizes the picture as far as its question allows: it reads a quarter of the budget, then more if it is unsure.

    The idea of "CARES: Context-Aware Resolution Selector for VLMs" (Kimhi et al., arXiv 2510.19496): each picture and
    question get the smallest size that suffices. There a small model is trained to tell; here the model itself does,
    by the probability of the first token of its answer. If it is unsure, the rest of the budget is one larger picture,
    so that both readings together stay within the budget.

    Args:
        sure (`float`, *optional*, defaults to 0.9): the probability from which on the small picture is enough.
    """

    needs_attention = False

    def __init__(self, sure: float = 0.9) -> None:
        if not 0 <= sure <= 1:
            raise ValueError(f"`sure` must be a probability from 0 to 1, got {sure!r}")
        self.sure = sure

    def small(self, grid: Grid, budget: Budget | None = None) -> Grid:
        """A quarter of the budget."""
        return shrink_grid(grid, count_kept(budget, cell_count(grid)) // 4)

    def plan(self, glance: Glance, budget: Budget | None = None) -> Reading:
        """The small picture again if it was enough, else a larger one."""
        rest = count_kept(budget, cell_count(glance.full)) - cell_count(glance.small)
        larger = shrink_grid(glance.full, rest)
        if glance.confidence >= self.sure or cell_count(larger) <= cell_count(glance.small):
            return Reading(glance.small)
        return Reading(larger)


@register_selector("half-and-half")
class HalfAndHalfSelector(PictureSelector):
    """Spends half of the tokens on the downsampled picture, and half on tokens of the full one.

    Args:
        selector (`str` or `TokenSelector`, *optional*, defaults to `"random"`): picks the second half; an object or a
            registered name.
        kwargs: arguments of the selector, if it is given by name.
    """

    def __init__(self, selector: str | TokenSelector = "random", **kwargs: Any) -> None:
        self.beside = create_selector(selector, **kwargs) if isinstance(selector, str) else selector
        if not isinstance(self.beside, TokenSelector):
            raise ValueError(f"`selector` must pick tokens of an encoded picture, got {selector!r}; use 'grid'")

    def plan(self, grid: Grid, budget: Budget | None = None) -> tuple[Grid, int]:
        """Half of the tokens for a smaller grid, the rest for the full one."""
        wanted = count_kept(budget, cell_count(grid))
        if wanted >= cell_count(grid) or wanted < 2 * grid[0]:
            return shrink_grid(grid, wanted), 0
        small = shrink_grid(grid, wanted // 2)
        return small, wanted - cell_count(small)
