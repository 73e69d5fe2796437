"""ToMe: tokens that are most alike become one, until few enough are left."""

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
    inside it. In each pass tokens belong to A and B by turns; each of A finds the one of B most like it, the closest
    pairs merge, and means are weighted by how many tokens each stands for. The question has no say.

    Room that was left: likeness is the cosine of the tokens themselves, for there is no attention after them whose
    keys could be compared; a pair stands at the place of its token of B; tokens alternate in reading order, over the
    frames of a clip as well; the language model is not told of sizes (no proportional attention). A pass that merges
    half of the tokens has no choice which, so that passes are many and small, as the authors' layers are.

    Args:
        per_pass (`float`, *optional*, defaults to 0.1): share of the tokens that merge in one pass, at most a half.
    """

    def __init__(self, per_pass: float = 0.1) -> None:
        if not 0 < per_pass <= 0.5:
            raise ValueError(f"`per_pass` must be in (0, 0.5], got {per_pass}")
        self.per_pass = per_pass

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Merge until K are left."""
        device = query.tokens.device
        rows = query.tokens.float()
        sizes = rows.new_ones(len(rows), 1)
        places = joins = torch.arange(len(rows), device=device)  # of each row, and the row of each first token
        while (left := len(places)) > count:
            step, kept = merge_once(rows, min(left - count, max(1, int(self.per_pass * left))))
            places, joins = places[kept], step[joins]
            weighed = sum_groups(torch.cat([rows * sizes, sizes], dim=1), step, len(kept))  # [n', D + 1]
            sizes = weighed[:, -1:]
            rows = weighed[:, :-1] / sizes
        # means of means by size are means of all
        return merge(query, places, lambda level: mean_groups(level, joins, count))


def merge_once(rows: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """One pass over rows `[n, D]`: the new row `[n]` of each, and which rows `[n - pairs]` stay.

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
    alike, partner = (unit[::2] @ unit[1::2].mT).max(dim=1)  # [A]
    closest = alike.argsort(descending=True, stable=True)[:pairs]
    gone = 2 * closest
    goes = torch.arange(len(rows), device=rows.device)
    stays = torch.ones_like(goes).index_fill_(0, gone, 0)
    goes[gone] = 2 * partner[closest] + 1
    kept = stays.argsort(descending=True, stable=True)[: len(rows) - pairs]  # ascending, of a known number
    return (stays.cumsum(dim=0) - 1)[goes], kept
