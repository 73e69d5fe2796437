"""Covering: the greedy search for tokens that between them resemble everything there is to cover."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cover(likeness: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Candidates `[K]` that cover the targets, greedily, in the order in which they were added.

    A target is covered as far as the best of the chosen resembles it; each step adds the candidate by which coverage
    grows most, times the candidate's weight.

    On the host only targets that became better covered are counted again. On other devices to know their number would
    mean to wait at each step, so that all are: `O(K * T * N)`, as in the papers.

    Args:
        likeness (`Tensor` of shape `[T, N]`): of each target to each candidate; nothing below 0 counts.
        count (`int`): candidates to choose.
        weights (`Tensor` of shape `[N]`, *optional*): of the candidates; 1 by default.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.baselines.covering import cover
    >>> cover(torch.tensor([[0.9, 0.8, 0.0], [0.9, 0.0, 0.0], [0.0, 0.0, 0.5]]), 2).tolist()
    [0, 2]

    ```
    """
    on_host = likeness.device.type == "cpu"
    covered = likeness.new_zeros(len(likeness))  # [T]
    gain = likeness.clamp(min=0).sum(dim=0, dtype=torch.float64 if on_host else None)  # [N]
    barred = torch.zeros_like(gain)  # -inf where chosen: at the end nobody may gain
    room = None if on_host else torch.empty_like(likeness)
    picked = []
    for _ in range(count):
        worth = gain if weights is None else gain * weights
        best = (worth + barred).argmax(dim=0, keepdim=True)  # [1], on the device
        picked.append(best)
        barred.index_fill_(0, best, -math.inf)
        now = likeness.index_select(1, best)[:, 0]  # [T]
        if room is None:
            [better] = (now > covered).nonzero(as_tuple=True)
            part = likeness[better]  # [n, N]
            before, after = covered[better, None], now[better, None]
            # what a candidate no longer adds: its likeness between the old coverage and the new
            gain -= (part.clamp(max=after) - before).clamp_(min=0).sum(dim=0, dtype=gain.dtype)
            covered[better] = now[better]
        else:
            torch.maximum(covered, now, out=covered)
            torch.sub(likeness, covered[:, None], out=room)
            gain = room.clamp_(min=0).sum(dim=0)
    return torch.cat(picked)
