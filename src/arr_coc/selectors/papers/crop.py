"""Crop: the model's own attention on a small picture says which part to read again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from arr_coc.config import Budget, CellBox, Grid, cell_count
from arr_coc.selectors.contract import Glance, GlanceSelector, Reading
from arr_coc.selectors.per_picture import count_kept
from arr_coc.selectors.registry import register_selector
from arr_coc.selectors.smaller_picture import shrink_grid

_SIZES = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)  # sides of the windows, over that of the part that fits at full resolution


@register_selector("crop")
class CropSelector(GlanceSelector):
    """Reads the picture small, then small and one part of it together.

    The training-free method of "MLLMs Know Where to Look" (Zhang et al., arXiv 2502.17422). The map is the attention
    of the prompt's last token at one layer, divided by where the model looks anyway. Windows of several sizes slide
    over it; of each size the one with the largest sum stays, of these the one that stands out most against its
    neighbours.

    Choices here: half of the budget is the small picture, half the part, which is read at full resolution if it fits;
    both keep their places in the picture, as positions matter to these models; "anyway" is the prompt with its
    question hidden, where the paper asks for a description, so that it needs no tokenizer.

    Args:
        layer (`float`, *optional*, defaults to 0.6): the layer, as a share of the depth; None for the mean over all.
        relative (`bool`, *optional*, defaults to `True`): whether to divide by where the model looks anyway.
    """

    def __init__(self, layer: float | None = 0.6, relative: bool = True) -> None:
        if layer is not None and not 0 <= layer <= 1:
            raise ValueError(f"`layer` must be a share of the depth from 0 to 1, or None, got {layer!r}")
        self.layer, self.needs_standing = layer, relative

    def small(self, grid: Grid, budget: Budget | None = None) -> Grid:
        """Half of the budget."""
        count = count_kept(budget, cell_count(grid))
        return shrink_grid(grid, count if count < 2 * grid[0] else count // 2)

    def plan(self, glance: Glance, budget: Budget | None = None) -> Reading:
        """The small picture, and the part that stands out."""
        most = count_kept(budget, cell_count(glance.full)) - cell_count(glance.small)
        if glance.full[0] > 1 or most < 1 or glance.small == glance.full:
            return Reading(glance.small)  # a clip has a part for each frame, which no paper chooses
        attention = glance.attention
        if self.needs_standing:
            attention = attention / glance.standing.clamp(min=torch.finfo(attention.dtype).tiny)
        box = find_box(attention.view(glance.small[1:]), glance.full[1:], shrink_grid(glance.full, most)[1:])
        _, height, width = shrink_grid((1, *box[2:]), most)
        return Reading(glance.small, box, (height, width))


def find_box(attention: Tensor, grid: tuple[int, int], window: tuple[int, int]) -> CellBox:
    """Top, left, height and width, in cells of `grid`, of the window that stands out most in a map `[h, w]`.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.papers.crop import find_box
    >>> attention = torch.zeros(4, 4)
    >>> attention[1, 2] = 1.0
    >>> find_box(attention, (8, 8), (2, 2))
    (2, 4, 2, 2)

    ```
    """
    fine = F.interpolate(attention[None, None].float(), grid, mode="bilinear")[0]  # [1, H, W]
    step = [max(1, round(cells / rough)) for cells, rough in zip(grid, attention.shape, strict=True)]
    best, found = -torch.inf, (0, 0, *window)
    rounding = 1e-4 * float(fine.amax())
    sizes = [(min(grid[0], round(window[0] * size)), min(grid[1], round(window[1] * size))) for size in _SIZES]
    for size in dict.fromkeys(sizes):
        means = F.avg_pool2d(fine, size, stride=1)[0]  # [H - height + 1, W - width + 1]
        largest = means >= means.amax() - rounding  # the first of equal ones: a coarse map has many
        top, left = divmod(int(largest.flatten().int().argmax()), means.shape[1])
        places = [(top - step[0], left), (top + step[0], left), (top, left - step[1]), (top, left + step[1])]
        around = [means[y, x] for y, x in places if 0 <= y < means.shape[0] and 0 <= x < means.shape[1]]
        stands_out = float(means[top, left] - torch.stack(around).mean()) if around else 0.0
        if stands_out > best + rounding:
            best, found = stands_out, (top, left, *size)
    return found
