"""Selectors that have a smaller picture read: `downsample`, the opponent to beat, and `half-and-half`."""

from __future__ import annotations

import math
from typing import Any

from arr_coc.config import Budget, Grid, cell_count
from arr_coc.selectors.contract import PictureSelector, TokenSelector
from arr_coc.selectors.per_picture import count_kept
from arr_coc.selectors.registry import create_selector, register_selector


def shrink_grid(grid: Grid, tokens: int) -> Grid:
    """The grid of at most `tokens` cells (one a frame at least) that is nearest in number and in aspect ratio.

    Example:

    ```python
    >>> from arr_coc.selectors.smaller_picture import shrink_grid
    >>> shrink_grid((1, 24, 32), 200)
    (1, 12, 16)

    ```
    """
    frames, rows, columns = grid
    a_frame = max(1, tokens // frames)
    if a_frame >= rows * columns:
        return grid

    def unlike(size: tuple[int, int]) -> float:
        aspect = abs(math.log(size[0] * columns / (size[1] * rows)))
        return aspect + math.log(a_frame / (size[0] * size[1]))

    heights = range(1, min(rows, a_frame) + 1)
    sizes = [(h, min(columns, a_frame // h)) for h in heights]
    sizes += [(h, w) for h in heights if 1 <= (w := round(h * columns / rows)) <= a_frame // h]
    h, w = min(sizes, key=unlike)
    return frames, h, w


@register_selector("downsample")
class DownsampleSelector(PictureSelector):
    """Has the picture encoded at about K tokens, as a processor's `max_pixels` would. The opponent to beat."""

    def plan(self, grid: Grid, budget: Budget | None = None) -> tuple[Grid, int]:
        """The smaller grid, and nothing beside it."""
        return shrink_grid(grid, count_kept(budget, cell_count(grid))), 0


@register_selector("half-and-half")
class HalfAndHalfSelector(PictureSelector):
    """Spends half of the tokens on the whole picture, downsampled, and half on tokens of the full one.

    Args:
        selector (`str` or `TokenSelector`, *optional*, defaults to `"random"`): of the second half, or its name.
        kwargs: arguments for the name.
    """

    def __init__(self, selector: str | TokenSelector = "random", **kwargs: Any) -> None:
        self.beside = create_selector(selector, **kwargs) if isinstance(selector, str) else selector
        if not isinstance(self.beside, TokenSelector):
            raise ValueError(f"`selector` must pick tokens of an encoded picture, got {selector!r}")

    def plan(self, grid: Grid, budget: Budget | None = None) -> tuple[Grid, int]:
        """Half of the tokens for a smaller grid, what is left for the full one."""
        wanted = count_kept(budget, cell_count(grid))
        if wanted >= cell_count(grid) or wanted < 2 * grid[0]:
            return shrink_grid(grid, wanted), 0
        small = shrink_grid(grid, wanted // 2)
        return small, wanted - cell_count(small)
