"""Stage `distill`: learning to look where the frozen model looks while it reads all tokens. No boxes, no answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from arr_coc.realizing import ARRCOCLayer
from arr_coc.training.config import TrainConfig
from arr_coc.training.feature_cache import Batch
from arr_coc.training.losses import distill_losses
from arr_coc.training.proxy import Progress, judge_batch, open_encoded_stage
from arr_coc.training.stage import Stage

# The share of cells whose choice is compared with the model's.
COMPARED = 1 / 8


class DistillTask(nn.Module):
    """The layer with what only training needs.

    Args:
        layer (`ARRCOCLayer`): learns.
    """

    def __init__(self, layer: ARRCOCLayer) -> None:
        super().__init__()
        self.layer = layer
        self.sharpness = nn.Parameter(torch.tensor(2.0))  # logarithm of

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses of a batch, and the share of its eighth that the layer has in common with the model's."""
        relevance = judge_batch(self.layer, batch).balance.relevance.flatten(1)  # [B, N]
        losses = distill_losses(relevance, batch.target, self.sharpness.exp())
        with torch.no_grad():
            count = max(1, round(COMPARED * relevance.shape[1]))
            wanted = torch.zeros_like(relevance).scatter_(1, batch.target.topk(count, dim=1).indices, 1.0)
            agreement = wanted.gather(1, relevance.topk(count, dim=1).indices).mean()
        return losses, {"agreement": agreement}


def open_distill_stage(config: TrainConfig, accelerator: Any, progress: Progress | None = None) -> Stage:
    """Encode the sources of stage `distill` and ask the model where it looks; arguments as of `open_proxy_stage`."""
    return open_encoded_stage(config, accelerator, progress, DistillTask)
