"""Sharing the budget of a prompt among its pictures, so that every selector is asked for a budget per picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from arr_coc.config import Budget, PromptBudget

Asked = TypeVar("Asked")
Chosen = TypeVar("Chosen")


def share_total(total: int, counts: Sequence[int]) -> list[int]:
    """Share a number of tokens among pictures in proportion to their tokens `counts`, at least 1 each.

    Example:

    ```python
    >>> from arr_coc.prompting.sharing import share_total
    >>> share_total(20, [24, 96]), share_total(8, [1, 30, 30]), share_total(500, [24, 96])
    ([4, 16], [1, 4, 3], [24, 96])

    ```
    """
    if total < len(counts):
        raise ValueError(f"a total of {total} is too small for {len(counts)} pictures; give at least 1 token to each")
    everything = sum(counts)
    if total >= everything:
        return list(counts)
    shares = [max(1, total * count // everything) for count in counts]
    # what rounding down left over goes to those who lost most by it
    by_loss = sorted(range(len(counts)), key=lambda place: -(total * counts[place] % everything))
    by_loss = [place for place in by_loss if total * counts[place] >= everything]
    for place in by_loss[: max(0, total - sum(shares))]:
        shares[place] += 1
    while sum(shares) > total:  # the smallest pictures were given more than their share
        shares[shares.index(max(shares))] -= 1
    return shares


def share_budget(budget: PromptBudget | None, rows: Sequence[int], counts: Sequence[int]) -> list[Budget | None]:
    """The budget of each picture; a total is shared among the pictures of each row of the batch.

    Args:
        budget (`int`, `float`, `"auto"` or `dict`, *optional*): of the prompt.
        rows (`Sequence[int]`): the row of each picture.
        counts (`Sequence[int]`): the tokens of each picture.

    Example:

    ```python
    >>> from arr_coc.prompting.sharing import share_budget
    >>> share_budget({"total": 10}, [0, 0, 1], [24, 96, 50]), share_budget(0.5, [0, 0], [24, 96])
    ([2, 8, 10], [0.5, 0.5])

    ```
    """
    if not isinstance(budget, Mapping):
        return [budget] * len(counts)
    shares: list[Budget | None] = [None] * len(counts)
    for row in sorted(set(rows)):
        places = [place for place, other in enumerate(rows) if other == row]
        for place, share in zip(places, share_total(budget["total"], [counts[p] for p in places]), strict=True):
            shares[place] = share
    return shares


def select_shared(
    select: Callable[[Sequence[Asked], Budget | None], list[Chosen]],
    asked: Sequence[Asked],
    budgets: Sequence[Budget | None],
) -> list[Chosen]:
    """Call a selector once for each budget, always with all pictures, and take from each call its own pictures."""
    if len(set(budgets)) == 1:
        return select(asked, budgets[0])
    by_budget = {budget: select(asked, budget) for budget in dict.fromkeys(budgets)}
    return [by_budget[budget][place] for place, budget in enumerate(budgets)]
