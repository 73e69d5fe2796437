"""The `own-attention` selector: the model that will answer says where it looks, and no weights are trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arr_coc.config import Budget, cell_count
from arr_coc.selectors.contract import InvalidSelectorError, Selection, TokenSelector, VisualQuery
from arr_coc.selectors.per_picture import count_kept, strongest
from arr_coc.selectors.registry import register_selector


@register_selector("own-attention")
class OwnAttentionSelector(TokenSelector):
    """Keeps the cells to which the language model itself pays most attention when it is asked the question.

    Before the prompt is shortened, the language model reads it once, and the attention of the prompt's last token and
    of the question's words is read in all layers. In mode `prune` each picture is pooled to a sixteenth of its tokens
    (16 to 256) for that, and the attention is read on all cells: each layer makes keys of them, but nothing else. In
    mode `saccade` it reads the gestalt. See [`~arr_coc.prompting.first_look.introspection`].

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import VisualQuery, create_selector
    >>> tokens, words = torch.randn(4, 8), torch.randn(2, 8)
    >>> query = VisualQuery(tokens, (1, 2, 2), words, attended=torch.tensor([0.1, 0.4, 0.2, 0.3]))
    >>> create_selector("own-attention").select([query], 2)[0].indices
    tensor([1, 3])

    ```
    """

    reads_question = True
    introspects = True
    needs_picture = False
    ordered = True

    @torch.no_grad()
    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Keep the cells with most attention."""
        selections = []
        for query in queries:
            total = cell_count(query.cells)
            count = count_kept(budget, total)
            if count >= total:  # nothing to choose: the model was not asked
                selections.append(Selection(indices=torch.arange(total, device=query.tokens.device)))
                continue
            if query.attended is None:
                raise InvalidSelectorError(
                    "'own-attention' needs `VisualQuery.attended`; use it with a model, or give it"
                )
            best = strongest(query.attended, count)
            indices, places = best.sort()
            selections.append(Selection(indices=indices, order=places.argsort()))
        return selections
