"""ToMe: merges the most similar tokens until K are left."""

from __future__ import annotations

import torch
from torch import Tensor

from arr_coc.runtime.tensors import unit_rows
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.papers.merging import mean_groups, merge, sum_groups
from arr_coc.selectors.per_picture import PerPictureSelector
from arr_coc.selectors.registry import register_selector


@register_selector("tome")
class ToMeSelector(PerPictureSelector):
    """Merges the most similar pairs of alternate tokens, pass by pass.

    The method of "Token Merging: Your ViT But Faster" (Bolya et al., arXiv 2210.09461), after the encoder instead of
    inside it. In each pass the tokens alternate between the sets A and B; each token of A finds the most similar one of
    B, and the closest pairs merge into a mean weighted by the number of tokens each stands for. The question is not
    used.

    Choices the paper leaves open: similarity is the cosine of the tokens themselves, because after the encoder there is
    no attention whose keys could be compared; a pair takes the place of its token of B; tokens alternate in reading
    order, across the frames of a clip too; the language model does not know the sizes (no proportional attention). A
    pass that merges half of the tokens has no choice which, so passes are many and small, like the authors' layers.

    Args:
        per_pass (`float`, *optional*, defaults to 0.1): share of the tokens that merge in one pass, at most 0.5.
    """

    def __init__(self, per_pass: float = 0.1) -> None:
        if not 0 < per_pass <= 0.5:
            raise ValueError(f"`per_pass` must be in (0, 0.5], got {per_pass}")
        self.per_pass = per_pass

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Merge until K tokens are left."""
        device = query.tokens.device
        rows = query.tokens.float()
        sizes = rows.new_ones(len(rows), 1)
        places = groups = torch.arange(len(rows), device=device)  # place of each row; row of each original token
        while (left := len(places)) > count:
            step, kept = merge_once(rows, min(left - count, max(1, int(self.per_pass * left))))
            places, groups = places[kept], step[groups]
            sums = sum_groups(torch.cat([rows * sizes, sizes], dim=1), step, len(kept))  # [n', D + 1]
            sizes = sums[:, -1:]
            rows = sums[:, :-1] / sizes
        # means weighted by size equal the mean of all tokens in a group
        return merge(query, places, lambda level: mean_groups(level, groups, count))


def merge_once(rows: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """One pass over rows `[n, D]`: the new row number `[n]` of each, and the rows `[n - pairs]` that stay.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.papers.tome import merge_once
    >>> step, kept = merge_once(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.0]]), 1)
    >>> step.tolist(), kept.tolist()
    ([0, 0, 1, 2], [1, 2, 3])

    ```
    """
    unit = unit_rows(rows)
    cosine, partner = (unit[::2] @ unit[1::2].mT).max(dim=1)  # [A]
    closest = cosine.argsort(descending=True, stable=True)[:pairs]
    merged = 2 * closest
    target = torch.arange(len(rows), device=rows.device)  # the row that each row merges into
    stays = torch.ones_like(target).index_fill_(0, merged, 0)
    target[merged] = 2 * partner[closest] + 1
    kept = stays.argsort(descending=True, stable=True)[: len(rows) - pairs]  # ascending; its length needs no transfer
    return (stays.cumsum(dim=0) - 1)[target], kept
