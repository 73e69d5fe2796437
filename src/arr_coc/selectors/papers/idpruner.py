"""IDPruner: important tokens that resemble the kept ones as little as possible."""

from __future__ import annotations

import math

import torch

from arr_coc.config import EncoderLayer
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.per_picture import PerPictureSelector, unit_tokens
from arr_coc.selectors.registry import register_selector


@register_selector("idpruner")
class IDPrunerSelector(PerPictureSelector):
    """Adds the token with the largest difference between its importance and its likeness to a kept token, K times.

    The method of "IDPruner: Harmonizing Importance and Diversity in Visual Token Pruning for MLLMs" (Tan et al.,
    arXiv 2602.13315), which is the maximal marginal relevance of text retrieval: `balance` times importance, scaled to
    [0, 1] in each picture, minus the rest times the largest cosine with a kept token. The question is not used.

    The paper takes importance from a scorer that was trained for the model. Without training, it is here the mean
    attention that a token receives in the encoder's last layer. The frames of a clip are one set.

    Args:
        balance (`float`, *optional*, defaults to 0.5): weight of importance, from 0 to 1.
        layer (`int` or `float`, *optional*, defaults to -1): the encoder layer.
    """

    def __init__(self, balance: float = 0.5, layer: EncoderLayer = -1) -> None:
        if not 0 <= balance <= 1:
            raise ValueError(f"`balance` must be from 0 to 1, got {balance!r}")
        self.balance, self.layer = balance, layer
        self.encoder_layers = (layer,)

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Add the most important token that is least like the kept ones, K times."""
        unit = unit_tokens(query)
        importance = query.received_attention(self.layer).float()
        importance = importance - importance.amin()
        importance = importance / importance.amax().clamp(min=torch.finfo(importance.dtype).tiny)
        likeness = torch.full_like(importance, -1.0)  # to the most similar kept token
        barred = torch.zeros_like(importance)
        picked = []
        for _ in range(count):
            worth = self.balance * importance - (1 - self.balance) * likeness + barred
            best = worth.argmax(dim=0, keepdim=True)  # [1], on the device
            picked.append(best)
            barred.index_fill_(0, best, -math.inf)
            likeness = torch.maximum(likeness, unit @ unit.index_select(0, best)[0])
        return Selection(indices=torch.cat(picked).sort().values)
