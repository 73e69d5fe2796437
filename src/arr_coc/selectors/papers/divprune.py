"""DivPrune: the tokens that are farthest apart."""

from __future__ import annotations

import math

import torch

from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.per_picture import PerPictureSelector, unit_tokens
from arr_coc.selectors.registry import register_selector


@register_selector("divprune")
class DivPruneSelector(PerPictureSelector):
    """Keeps tokens whose smallest distance to each other is large, greedily.

    The method of "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models" (Alvar et al.,
    arXiv 2503.02175). It starts with the token whose nearest neighbour is farthest away, then always adds the token
    farthest from those kept; distance is 1 minus the cosine. The question is not used.

    Choices the paper leaves open: the distances of all pairs are stored (`N * N` floats), which the start needs anyway;
    ties go to the first token; the frames of a clip are one set.
    """

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Add the farthest token, K times."""
        unit = unit_tokens(query)
        cosine = unit @ unit.mT  # [N, N]
        nearest = cosine.fill_diagonal_(-math.inf).amax(dim=1)
        cosine.fill_diagonal_(math.inf)  # a kept token is infinitely near, so never chosen again
        best = nearest.argmin(dim=0, keepdim=True)  # [1], on the device
        picked, closest = [best], cosine.index_select(0, best)[0]
        for _ in range(count - 1):
            best = closest.argmin(dim=0, keepdim=True)
            picked.append(best)
            closest = torch.maximum(closest, cosine.index_select(0, best)[0])
        return Selection(indices=torch.cat(picked).sort().values)
