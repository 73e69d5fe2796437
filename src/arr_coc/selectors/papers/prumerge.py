"""PruMerge: the tokens that receive most attention, each merged with similar ones, and one token for the rest."""

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

# Lower bound of the attention, so that a sum of it can be divided by.
LEAST = 1e-12


@register_selector("prumerge")
class PruMergeSelector(PerPictureSelector):
    """Keeps tokens by attention, adds their nearest neighbours to them, and one residual token for the rest.

    The method of "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models" (Shang et al.,
    arXiv 2403.15388). Each kept token is summed with its nearest neighbours by the cosine of their keys (other kept
    tokens included), weighted by the attention they receive. The question is not used.

    Differences and choices the paper leaves open: the authors keep as many tokens as there are outliers (above the
    third quartile by 1.5 interquartile ranges); here the budget sets the number, and the tokens with most attention are
    kept. Without a class token, attention is the mean that a token's patches receive, scaled to sum to 1 over the
    picture like that of a class token. Attention and keys come from the encoder's last layer (LLaVA takes its features
    one layer earlier: use `layer=-2` there). The residual token is the mean of all others weighted by attention, since
    a weighted sum would be shorter than any token; it counts towards the budget and takes the place of the strongest of
    them. With a budget of one token there is no residual.

    Args:
        neighbours (`int`, *optional*, defaults to 32): number of neighbours added to each kept token.
        layer (`int` or `float`, *optional*, defaults to -1): the encoder layer.
    """

    def __init__(self, neighbours: int = 32, layer: EncoderLayer = -1) -> None:
        if neighbours < 0:
            raise ValueError(f"`neighbours` must be at least 0, got {neighbours}")
        self.neighbours, self.layer = neighbours, layer
        self.encoder_layers = (layer,)

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep the strongest tokens, each with its neighbours, then the rest as one token."""
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
        cosine = (keys[kept] @ keys.mT).scatter_(1, kept[:, None], -math.inf)  # [K', N]
        nearest = cosine.topk(min(self.neighbours, len(keys) - 1), dim=1).indices  # [K', n]
        weights = torch.zeros_like(cosine).scatter_(1, nearest, attention[nearest])
        return weights.scatter_(1, kept[:, None], 1.0)
