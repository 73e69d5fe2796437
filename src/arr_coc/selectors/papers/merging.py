"""Merging tokens: the same merge is applied to the tokens and to every DeepStack level."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arr_coc.selectors.contract import Selection, VisualQuery


def merge(query: VisualQuery, indices: Tensor, mix: Callable[[Tensor], Tensor]) -> Selection:
    """Replace the tokens at `indices` `[K]` by merged rows: `mix` maps all rows `[N, D]` to `[K, D]`, in float32."""
    rows = [mix(level.float()).to(level.dtype) for level in (query.tokens, *query.deepstack)]
    return Selection(indices, rows[0], tuple(rows[1:]))


def sum_groups(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums `[count, D]` of the rows `[N, D]` of each group; every run gives the same bits.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.papers.merging import sum_groups
    >>> sum_groups(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 2).tolist()
    [[2.0], [5.0]]

    ```
    """
    total = rows.new_zeros(count, rows.shape[1])
    if rows.is_cuda:  # `index_put_` sorts first, while `index_add_` adds in any order
        return total.index_put_((groups,), rows, accumulate=True)
    return total.index_add_(0, groups, rows)


def mean_groups(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Means `[count, D]` of the rows `[N, D]` of each group."""
    sizes = torch.zeros(count, dtype=torch.long, device=groups.device)
    sizes = sizes.index_add_(0, groups, torch.ones_like(groups))
    return sum_groups(rows, groups, count) / sizes[:, None]
