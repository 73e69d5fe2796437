"""PixelPrune: cells whose pixels repeat those of a neighbour are dropped before the encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.config import Budget, cell_count
from arr_coc.selectors.contract import PixelQuery, PixelSelector, Selection
from arr_coc.selectors.per_picture import count_kept
from arr_coc.selectors.registry import register_selector

_NEIGHBOURS = ((0, -1), (-1, 0), (-1, -1))  # left, above, upper left: those that were walked before


@register_selector("pixelprune")
class PixelPruneSelector(PixelSelector):
    """Keeps the cells that no earlier neighbour predicts, and encodes only those.

    The method of "PixelPrune: Pixel-Level Adaptive Visual Token Reduction via Predictive Coding" (Wang et al.,
    arXiv 2604.00886). In reading order each cell is compared with what stands for the cells to its left, above and
    upper left: themselves, or the kept cell that predicted them. If no pixel differs from the nearest of these by more
    than a tolerance, the cell is dropped. The question is not used.

    A budget sets the tolerance: the smallest, in steps of 1/255, with which at most K cells stay; then the cells with
    the largest differences fill the budget. If no more than K cells differ at all, only these are kept: fewer tokens,
    and no pixel is lost.
    """

    @torch.no_grad()
    def select(self, queries: Sequence[PixelQuery], budget: Budget | None = None) -> list[Selection]:
        """Keep the cells that are not predicted."""
        return [
            Selection(indices=choose_unpredicted(query, count_kept(budget, cell_count(query.grid))))
            for query in queries
        ]


def choose_unpredicted(query: PixelQuery, most: int) -> Tensor:
    """At most this many cells `[k]`, ascending, of those that their neighbours do not predict.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.contract import PixelQuery
    >>> from arr_coc.selectors.papers.pixelprune import choose_unpredicted
    >>> picture = torch.zeros(1, 3, 32, 64)
    >>> picture[..., 48:] = 1.0
    >>> choose_unpredicted(PixelQuery(picture, (1, 2, 4)), 4).tolist()
    [0, 3]

    ```
    """
    _, rows, columns = query.grid
    pixels = (query.picture[0] * 255).round().to(torch.uint8)  # [3, H, W]
    # [3, H, W] -> [3, rows, y, columns, x] -> [rows, columns, 3 * y * x]
    cells = pixels.view(3, rows, pixels.shape[1] // rows, columns, -1).permute(1, 3, 0, 2, 4).flatten(2)
    low, high = 0, 255
    kept, differences = _walk(cells, low)
    if int(kept.sum()) <= most:
        return kept.nonzero()[:, 0]
    while high - low > 1:  # at `low` too many cells stay, at `high` few enough
        middle = (low + high) // 2
        kept, _ = _walk(cells, middle)
        low, high = (middle, high) if int(kept.sum()) > most else (low, middle)
    kept, differences = _walk(cells, high)
    spare = most - int(kept.sum())
    further = differences.masked_fill(kept, -1).argsort(descending=True, stable=True)[:spare]
    kept[further] = True
    return kept.nonzero()[:, 0]


def _walk(cells: Tensor, tolerance: int) -> tuple[Tensor, Tensor]:
    """Which cells stay `[N]`, and how much each differs from its nearest neighbour `[N]`, of cells `[h, w, P]`.

    The cells of one diagonal depend only on earlier diagonals, so they are walked together.
    """
    rows, columns, _ = cells.shape
    flat = cells.flatten(0, 1)  # [N, P]
    stands_for = torch.arange(rows * columns, device=cells.device)  # the kept cell that stands for each
    differences = torch.full((rows * columns,), 256, device=cells.device)  # the first cell has no neighbour
    offsets = torch.tensor(_NEIGHBOURS, device=cells.device)
    for diagonal in range(1, rows + columns - 1):
        row = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=cells.device)
        own = torch.stack([row, diagonal - row], dim=1)  # [n, 2]
        before = own[:, None] + offsets  # [n, 3, 2]
        outside = (before < 0).any(dim=2)
        predictors = stands_for[(before[..., 0] * columns + before[..., 1]).masked_fill(outside, 0)]  # [n, 3]
        index = own[:, 0] * columns + own[:, 1]
        mine, theirs = flat[index][:, None], flat[predictors]  # [n, 1, P], [n, 3, P]
        apart = (torch.maximum(mine, theirs) - torch.minimum(mine, theirs)).amax(dim=2).long()
        least, nearest = apart.masked_fill(outside, 256).min(dim=1)
        differences[index] = least
        stands_for[index] = torch.where(least <= tolerance, predictors.gather(1, nearest[:, None])[:, 0], index)
    return stands_for == torch.arange(rows * columns, device=cells.device), differences
