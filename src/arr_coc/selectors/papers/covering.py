"""Greedy coverage: choosing tokens so that every target resembles at least one of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cover(likeness: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Choose candidates `[K]` that cover the targets, greedily, in the order in which they are added.

    A target's coverage is its similarity to the most similar candidate chosen. Each step adds the candidate with the
    largest gain in coverage times its weight.

    On the CPU only targets whose coverage grew are counted again. On other devices finding them would wait for the
    device at each step, so all targets are counted: `O(K * T * N)`, as in the papers.

    Args:
        likeness (`Tensor` of shape `[T, N]`): similarity of each target to each candidate; negative values count as 0.
        count (`int`): number of candidates to choose.
        weights (`Tensor` of shape `[N]`, *optional*): weights of the candidates; 1 by default.

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
    barred = torch.zeros_like(gain)  # -inf where chosen, since in the end all gains may be 0
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
    """Gain of each candidate `[N]` over the coverage `now` `[T]`."""
    return (likeness - now[:, None]).clamp_(min=0).sum(dim=0)


def _count_changed(likeness: Tensor, now: Tensor, before: Tensor, gain: Tensor) -> Tensor:
    """The same, computed from the `gain` at the coverage `before`: it shrinks by the similarity between the two."""
    [grown] = (now > before).nonzero(as_tuple=True)
    between = likeness[grown].clamp_(max=now[grown, None]).sub_(before[grown, None])  # [n, N]
    return gain - between.clamp_(min=0).sum(dim=0, dtype=torch.float64)  # float64: rounding adds up over the steps
