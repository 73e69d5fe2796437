"""The `own-attention` selector: the model that will answer says where it looks, and no weights are trained."""

from __future__ import annotations

from arr_coc.selectors.contract import InvalidSelectorError, Selection, VisualQuery
from arr_coc.selectors.per_picture import PerPictureSelector, strongest
from arr_coc.selectors.registry import register_selector


@register_selector("own-attention")
class OwnAttentionSelector(PerPictureSelector):
    """Keeps the cells to which the language model itself pays most attention when it is asked the question.

    Before the prompt is shortened, the language model reads it once with each picture pooled to a sixteenth of its
    tokens (16 to 256), and the attention of the prompt's last token and of the question's words is read in all layers,
    on all cells: each layer makes keys of them, but nothing else. See
    [`~arr_coc.prompting.first_look.introspection.introspect`].

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

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep the cells with most attention."""
        if query.attended is None:
            raise InvalidSelectorError("'own-attention' needs `VisualQuery.attended`; use it with a model, or give it")
        return Selection(indices=strongest(query.attended, count).sort().values)
