"""The base class of methods that keep exactly K tokens of one picture at a time, such as those of papers.

To add a method, subclass [`PerPictureSelector`] in a new file and implement `pick`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.attending import resolve_budget
from arr_coc.config import Budget
from arr_coc.runtime.tensors import unit_rows
from arr_coc.selectors.contract import DEFAULT_RATIO, InvalidSelectorError, Selection, TokenSelector, VisualQuery


def count_kept(budget: Budget | None, total: int) -> int:
    """Number of tokens to keep, for selectors without relevance: `"auto"` means the default ratio.

    Example:

    ```python
    >>> from arr_coc.selectors.per_picture import count_kept
    >>> count_kept(None, 200), count_kept("auto", 200), count_kept(80, 200), count_kept(0.1, 200)
    (50, 50, 80, 20)

    ```
    """
    wanted = resolve_budget(DEFAULT_RATIO if budget is None else budget, total)
    return wanted or resolve_budget(DEFAULT_RATIO, total) or 1


class PerPictureSelector(TokenSelector):
    """Picks tokens of each picture separately. Subclasses implement `pick`; if the budget covers all, it is not called.

    It needs encoded tokens, so mode `"saccade"`, which chooses before they are encoded, is refused.
    """

    needs_picture = False
    can_saccade = False

    def check(self, queries: Sequence[VisualQuery]) -> None:
        """Raise [`InvalidSelectorError`] unless every cell is an encoded token."""
        if any(query.cells != query.grid for query in queries):
            raise InvalidSelectorError(
                f"{type(self).__name__} chooses among encoded tokens, but mode 'saccade' chooses before encoding; "
                "use mode 'prune'"
            )

    @torch.no_grad()
    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Pick the tokens of each picture."""
        self.check(queries)
        selections = []
        for query in queries:
            total = len(query.tokens)
            count = count_kept(budget, total)
            if count < total:
                selections.append(self.pick(query, count))
            else:
                selections.append(Selection(indices=torch.arange(total, device=query.tokens.device)))
        return selections

    @abstractmethod
    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep `count` tokens; `count` is smaller than the number of tokens."""


def unit_tokens(query: VisualQuery) -> Tensor:
    """The tokens `[N, D]` as rows of length 1, in float32."""
    return unit_rows(query.tokens.float())


def strongest(scores: Tensor, count: int) -> Tensor:
    """Indices `[count]` of the largest scores `[N]`, largest first; on ties the first index."""
    return scores.argsort(descending=True, stable=True)[:count]  # not topk, which breaks ties in no fixed order
