"""PruMerge: the tokens that receive most attention, each with something of those like it, and one for the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arr_coc.config import EncoderLayer
from arr_coc.runtime.tensors import unit_rows
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.papers.merging import merge
from arr_coc.selectors.per_picture import PerPictureSelector, strongest
from arr_coc.selectors.registry import register_selector

# Attention that counts as none, so that a sum of it can be divided by.
LEAST = 1e-12


@register_selector("prumerge")
class PruMergeSelector(PerPictureSelector):
    """Keeps tokens by attention, adds their nearest neighbours to them, and one token for all that is left.

    The method of "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models" (Shang et al.,
    arXiv 2403.15388). To each kept token its nearest neighbours by the cosine of their keys, kept ones among them, are
    added, times the attention they receive. The question has no say.

    Room that was left: how many are kept is the authors' count of outliers (above the third quartile by 1.5
    interquartile ranges); here the budget says it, and those with most attention are kept. Without a class token,
    attention is the mean that a token's patches receive, scaled to a sum of 1 over the picture as that of a class token
    has; it and the keys are of the encoder's last layer (LLaVA reads its features one layer earlier: `layer=-2`
    there). The residual token is the mean of all others weighted by attention, as a sum would be shorter than any
    token; it takes one place of the budget, that of the strongest of them. Of a single token nothing is residual.

    Args:
        neighbours (`int`, *optional*, defaults to 32): that are added to each kept token.
        layer (`int` or `float`, *optional*, defaults to -1): of the encoder.
    """

    def __init__(self, neighbours: int = 32, layer: EncoderLayer = -1) -> None:
        if neighbours < 0:
            raise ValueError(f"`neighbours` must not be negative, got {neighbours}")
        self.neighbours, self.layer = neighbours, layer
        self.encoder_layers = (layer,)

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """The strongest, each with its neighbours, then the rest as one."""
        attention = query.received_attention(self.layer).float().clamp(min=LEAST)
        attention = attention / attention.sum()  # [N]
        indices = strongest(attention, count)
        kept = indices if count == 1 else indices[:-1]
        weights = self.blend(query, kept, attention)  # [K', N]
        if count > 1:
            rest = attention.index_fill(0, kept, 0)
            weights = torch.cat([weights, (rest / rest.sum())[None]])  # [K, N]
        indices, order = indices.sort()
        weights = weights[order]
        return merge(query, indices, lambda rows: weights @ rows)

    def blend(self, query: VisualQuery, kept: Tensor, attention: Tensor) -> Tensor:
        """Weights `[K', N]` of all tokens in each kept one: 1 for itself, attention for its neighbours."""
        keys = unit_rows(query.keys(self.layer).float())
        alike = (keys[kept] @ keys.mT).scatter_(1, kept[:, None], -math.inf)  # [K', N]
        near = alike.topk(min(self.neighbours, len(keys) - 1), dim=1).indices  # [K', n]
        weights = torch.zeros_like(alike).scatter_(1, near, attention[near])
        return weights.scatter_(1, kept[:, None], 1.0)
