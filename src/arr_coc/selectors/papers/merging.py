"""Merging: rows that stand for several tokens, made alike for the tokens and for every DeepStack level."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arr_coc.selectors.contract import Selection, VisualQuery


def merge(query: VisualQuery, indices: Tensor, mix: Callable[[Tensor], Tensor]) -> Selection:
    """The tokens at `indices` `[K]`, replaced by what `mix` makes of all rows: `[N, D]` -> `[K, D]`, in float32."""
    rows = [mix(level.float()).to(level.dtype) for level in (query.tokens, *query.deepstack)]
    return Selection(indices, rows[0], tuple(rows[1:]))


def sum_groups(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums `[count, D]` of the rows `[N, D]` of each group, the same to the bit at every run.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.papers.merging import sum_groups
    >>> sum_groups(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2).tolist()
    [[2.0], [5.0]]

    ```
    """
    total = rows.new_zeros(count, rows.shape[1])
    if rows.is_cuda:  # this one sorts, where `index_add_` would add in any order
        return total.index_put_((groups,), rows, accumulate=True)
    return total.index_add_(0, groups, rows)


def mean_groups(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Means `[count, D]` of the rows `[N, D]` of each group."""
    sizes = torch.zeros(count, dtype=torch.long, device=groups.device)
    sizes = sizes.index_add_(0, groups, torch.ones_like(groups))
    return sum_groups(rows, groups, count) / sizes[:, None]
