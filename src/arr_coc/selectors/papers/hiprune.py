"""HiPrune: tokens that the middle of the encoder attends to, their neighbours, then those its last layer attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from arr_coc.config import EncoderLayer, Grid
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.per_picture import PerPictureSelector, strongest
from arr_coc.selectors.registry import register_selector


def cross_neighbours(places: Tensor, grid: Grid) -> Tensor:
    """The cells `[4, n]` above, below, left and right of cells `[n]`; at a border, the cell itself.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.papers.hiprune import cross_neighbours
    >>> cross_neighbours(torch.tensor([3, 7]), (1, 3, 4)).tolist()
    [[3, 3], [7, 11], [2, 6], [3, 7]]

    ```
    """
    _, rows, columns = grid
    row, column = places // columns % rows, places % columns
    up, down = places - columns * (row > 0), places + columns * (row < rows - 1)
    left, right = places - 1 * (column > 0), places + 1 * (column < columns - 1)
    return torch.stack([up, down, left, right])


@register_selector("hiprune")
class HiPruneSelector(PerPictureSelector):
    """Keeps anchors by a middle layer's attention, their neighbours, and further tokens by the last layer's attention.

    The method of "HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention in Vision-Language Models"
    (Liu et al., arXiv 2508.00553): a share `alpha` of the budget goes to anchors and the four cells around each, the
    rest to the tokens that receive most attention in the last layer. The question is not used.

    Choices the paper leaves open: a neighbour beyond the border is the anchor itself, in two dimensions and within its
    frame; duplicate cells leave room for more tokens of the last layer; there is at least one anchor, and if it and its
    neighbours do not fit, it comes first. The middle layer is the one nearest to half of the depth that attends to the
    whole picture; on Qwen2.5-VL few do.

    Args:
        alpha (`float`, *optional*, defaults to 0.1): share of the budget for anchors and neighbours.
        middle, last (`int` or `float`, *optional*, defaults to 0.5 and -1): the two encoder layers.
    """

    def __init__(self, alpha: float = 0.1, middle: EncoderLayer = 0.5, last: EncoderLayer = -1) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alpha` must be in [0, 1], got {alpha}")
        self.alpha, self.middle, self.last = alpha, middle, last
        self.encoder_layers = (middle, last)

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep anchors, neighbours, then the strongest tokens of the last layer."""
        anchors = strongest(query.received_attention(self.middle), max(1, round(self.alpha * count / 5)))
        received = query.received_attention(self.last).float()
        score = received / received.amax().clamp(min=torch.finfo(torch.float32).tiny)  # [N], at most 1
        neighbours = cross_neighbours(anchors, query.grid).flatten()
        # anchors first, then neighbours, then the last layer's tokens
        score = score.index_fill(0, neighbours, 2.0).index_fill_(0, anchors, 3.0)
        return Selection(indices=strongest(score, count).sort().values)
