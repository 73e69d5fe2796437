"""Stage 1: relevance from boxes or maps. No language model runs; the encoder's tokens come from disk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arr_coc.balancing import Judgement
from arr_coc.evaluation.metrics import overlap
from arr_coc.realizing import ARRCOCLayer
from arr_coc.training.feature_cache import Batch
from arr_coc.training.losses import proxy_losses


class ProxyTask(nn.Module):
    """The layer with what only training needs.

    Args:
        layer (`ARRCOCLayer`): learns.
    """

    def __init__(self, layer: ARRCOCLayer) -> None:
        super().__init__()
        self.layer = layer
        self.sharpness = nn.Parameter(torch.tensor(2.5))  # logarithm of
        self.threshold = nn.Parameter(torch.tensor(0.4))

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses of a batch, and measures of how well it looked."""
        judged = judge_batch(self.layer, batch)
        relevance = judged.balance.relevance.flatten(1)  # [B, N]
        losses = proxy_losses(self.sharpness.exp() * (relevance - self.threshold), batch.target)
        inside = batch.target > 0.5
        present = inside.any(dim=1)
        losses["explore"] = _explore(judged.balance.tensions[:, 1], present)
        with torch.no_grad():
            found = overlap(relevance, inside)
            measures = {"overlap": found.sum() / present.sum().clamp(min=1)}
        return losses, measures


def judge_batch(layer: ARRCOCLayer, batch: Batch) -> Judgement:
    """What a layer makes of features that were kept."""
    texture = layer.project_again(batch.texture, batch.tokens, batch.grid)
    return layer.judge(texture, batch.tokens, batch.words, batch.grid, batch.word_mask)


def _explore(tension: Tensor, present: Tensor) -> Tensor:
    """A question about a place need not explore; one about something that is not there has to."""
    wanted = (~present).float()
    return nn.functional.binary_cross_entropy(tension.clamp(1e-4, 1 - 1e-4), wanted)
