"""Losses on the continuous relevance map, each a mean over the examples `[B]`.

Discrete selection has no gradient; these need none. Relevance becomes a probability by a learned sharpness and
threshold that are dropped after training: only the order of the cells decides what is kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS = {"dice": 1.0, "bce": 1.0, "mse": 0.5, "rank": 1.0, "beside": 0.3, "alike": 2.0, "order": 2.0, "explore": 0.1}

# How much a question about something that is not there counts: it says little about where to look for what is.
ABSENT = 0.2


def proxy_losses(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Losses of relevance against targets.

    Args:
        logits (`Tensor` of shape `[B, N]`): relevance, sharpened.
        target (`Tensor` of shape `[B, N]`): in [0, 1]: above 0.5 what had to be looked at, above 0.4 what lies beside
            it, below 0.3 nothing in particular, below 0.15 what is alike, 0 what distracts; a row of zeros is a
            question about something that is not there.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.training.losses import proxy_losses, total
    >>> target = torch.tensor([[1.0, 0.45, 0.2]])
    >>> good, bad = (proxy_losses(torch.tensor([row]), target) for row in ([4.0, 0.0, -4.0], [-4.0, 0.0, 4.0]))
    >>> bool(total(good) < total(bad))
    True

    ```
    """
    probability = torch.sigmoid(logits)
    inside = (target > 0.5).float()
    beside = ((target > 0.4) & (target <= 0.5)).float()
    present = inside.amax(dim=1)  # [B]
    counts = present + ABSENT * (1 - present)
    both = (probability * inside).sum(dim=1)
    dice = 1 - (2 * both + 1) / (probability.sum(dim=1) + inside.sum(dim=1) + 1)
    nothing = ((target > 0.15) & (target < 0.3)).float()
    alike = ((target > 0.05) & (target < 0.15)).float()
    # what is inside, what was not asked for, and the rest count alike, however small they are
    other = ((target == 0) & (present[:, None] > 0)).float()
    groups = torch.stack([inside, other, 1 - inside - other], dim=1)  # [B, 3, N]
    balance = (groups / groups.sum(dim=2, keepdim=True).clamp(min=1)).sum(dim=1)
    bce = (F.binary_cross_entropy_with_logits(logits, target, reduction="none") * balance).sum(dim=1)
    mse = ((probability - target).square() * balance).sum(dim=1)
    return {
        "dice": (dice * present).mean(),
        "bce": (bce * counts).mean(),
        "mse": (mse * counts).mean(),
        "rank": (_ranking(logits, inside) * present).mean(),
        "beside": (_ranking(logits.masked_fill(inside > 0, -1e4), beside) * present).mean(),
        "alike": _contrast(logits, inside, alike).mean(),
        "order": _order(logits, other, nothing).mean(),
    }


def distill_losses(relevance: Tensor, target: Tensor, sharpness: Tensor) -> dict[str, Tensor]:
    """Losses of relevance against where the model looks.

    Args:
        relevance (`Tensor` of shape `[B, N]`): in [0, 1].
        target (`Tensor` of shape `[B, N]`): the root of attention, in [0, 1].
        sharpness (`Tensor`): what makes logits of relevance.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.training.losses import distill_losses, total
    >>> target, sharpness = torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor(5.0)
    >>> good, bad = (distill_losses(map, target, sharpness) for map in (target, target.flip(1)))
    >>> bool(total(good) < total(bad))
    True

    ```
    """
    paid = target.square()
    share = paid / paid.sum(dim=1, keepdim=True).clamp(min=1e-6)  # [B, N]
    missed = torch.special.entr(share) + share * torch.log_softmax(sharpness * relevance, dim=1)
    return {"follow": -missed.sum(dim=1).mean(), "map": (relevance - target).square().mean()}


def _ranking(logits: Tensor, inside: Tensor) -> Tensor:
    """How far `[B]` cells are below the best of the others: cross-entropy of each against all of those."""
    outside = torch.logsumexp(logits.masked_fill(inside > 0, -torch.inf), dim=1, keepdim=True)  # [B, 1]
    missing = F.softplus(outside.clamp(min=-1e4) - logits)  # -log(inside / (inside + all outside))
    return (missing * inside).sum(dim=1) / inside.sum(dim=1).clamp(min=1)


def _contrast(logits: Tensor, inside: Tensor, alike: Tensor) -> Tensor:
    """How far `[B]` the mean of what is alike is above that of what was asked for."""
    asked, meant = ((logits * cells).sum(dim=1) / cells.sum(dim=1).clamp(min=1) for cells in (inside, alike))
    return F.softplus(meant - asked + 1) * alike.amax(dim=1) * inside.amax(dim=1)


def _order(logits: Tensor, other: Tensor, nothing: Tensor) -> Tensor:
    """How far `[B]` other things are above the mean of what is nothing in particular."""
    mean = (logits * nothing).sum(dim=1, keepdim=True) / nothing.sum(dim=1, keepdim=True).clamp(min=1)
    return (F.softplus(logits - mean + 1) * other).sum(dim=1) / other.sum(dim=1).clamp(min=1)


def total(losses: dict[str, Tensor]) -> Tensor:
    """Their weighted sum."""
    return torch.stack([WEIGHTS.get(name, 1.0) * value for name, value in losses.items()]).sum()
