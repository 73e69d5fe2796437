"""Covering: the greedy search for tokens that between them resemble everything there is to cover."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cover(likeness: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Candidates `[K]` that cover the targets, greedily, in the order in which they were added.

    A target is covered as far as the best of the chosen resembles it; each step adds the candidate by which coverage
    grows most, times the candidate's weight.

    On the host only targets that became better covered are counted again. On other devices, to know which would mean to
    wait at each step, so that all are: `O(K * T * N)`, as in the papers.

    Args:
        likeness (`Tensor` of shape `[T, N]`): of each target to each candidate; nothing below 0 counts.
        count (`int`): candidates to choose.
        weights (`Tensor` of shape `[N]`, *optional*): of the candidates; 1 by default.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.papers.covering import cover
    >>> cover(torch.tensor([[0.9, 0.8, 0.0], [0.9, 0.0, 0.0], [0.0, 0.0, 0.5]]), 2).tolist()
    [0, 2]

    ```
    """
    count_again = _count_changed if likeness.device.type == "cpu" else _count_all
    covered = likeness.new_zeros(len(likeness))  # [T]
    gain = _count_all(likeness, covered, covered)
    barred = torch.zeros_like(gain)  # -inf where chosen: at the end nobody may gain
    picked = []
    for _ in range(count):
        worth = gain if weights is None else gain * weights
        best = (worth + barred).argmax(dim=0, keepdim=True)  # [1], on the device
        picked.append(best)
        barred.index_fill_(0, best, -math.inf)
        now = torch.maximum(covered, likeness.index_select(1, best)[:, 0])  # [T]
        gain, covered = count_again(likeness, now, covered, gain), now
    return torch.cat(picked)


def _count_all(likeness: Tensor, now: Tensor, before: Tensor, gain: Tensor | None = None) -> Tensor:
    """What each candidate `[N]` would add to the coverage `now` `[T]`."""
    return (likeness - now[:, None]).clamp_(min=0).sum(dim=0)


def _count_changed(likeness: Tensor, now: Tensor, before: Tensor, gain: Tensor) -> Tensor:
    """The same, from the gain at the coverage `before`: less by the likeness that lies between the two."""
    [better] = (now > before).nonzero(as_tuple=True)
    between = likeness[better].clamp_(max=now[better, None]).sub_(before[better, None])  # [n, N]
    return gain - between.clamp_(min=0).sum(dim=0, dtype=torch.float64)  # of many small steps
