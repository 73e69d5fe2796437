"""Muon as `torch.optim.Muon` computes it, for many small matrices: those of one shape are orthogonalised together.

A model of this size has seventy matrices; one by one, launching their kernels takes longer than a training step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, from Jordan's Muon
STEPS, MOMENTUM, TINY = 5, 0.95, 1e-7


def orthogonalise(updates: Tensor) -> Tensor:
    """The nearest matrices `[n, r, c]` with singular values about 1."""
    a, b, c = COEFFICIENTS
    tall = updates.shape[1] > updates.shape[2]
    found = updates.mT if tall else updates
    found = found.bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=TINY)
    for _ in range(STEPS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


class StackedMuon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonalised, as large as AdamW's would be.

    Args:
        weights (`Iterable[nn.Parameter]`): matrices.
        lr (`float`, *optional*, defaults to 1e-3): the same as for AdamW.
        weight_decay (`float`, *optional*, defaults to 0.05): a share of the rate.
    """

    def __init__(self, weights: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.05) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for weight in weights:
            groups[weight.shape].append(weight)
        super().__init__([{"params": group} for group in groups.values()], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all matrices, each of which must have a gradient."""
        for group in self.param_groups:
            weights = group["params"]
            gradients = torch.stack([weight.grad for weight in weights])  # [n, r, c]
            state = self.state[weights[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradients)
            momentum = state["momentum"].lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonalise(gradients.lerp_(momentum, MOMENTUM)).to(gradients.dtype)
            rate = group["lr"] * 0.2 * max(gradients.shape[1:]) ** 0.5
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, list(updates.unbind()), alpha=-rate)
