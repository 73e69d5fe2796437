"""FastV: drops visual tokens that receive little attention from the prompt's last token, inside the language model.

"An Image is Worth 1/2 Tokens After Layer 2" (arXiv 2403.06764). The encoder and the first layers read everything. The
later layers, and their part of the cache, hold the K tokens of each picture that the prompt's last token attends to
most.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from arr_coc.config import Budget
from arr_coc.selectors.contract import LanguageSelector, Selection
from arr_coc.selectors.per_picture import count_kept
from arr_coc.selectors.registry import register_selector


@register_selector("fastv")
class FastVSelector(LanguageSelector):
    """Keeps the tokens that the prompt's last token attends to most.

    Args:
        layer (`int`, *optional*, defaults to 2): number of decoder layers that read every token; the attention is
            taken from the last of them.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import create_selector
    >>> attention = torch.tensor([0.1, 0.3, 0.0, 0.2])
    >>> [selection] = create_selector("fastv").select([attention], budget=2)
    >>> selection.indices.tolist()
    [1, 3]

    ```
    """

    def __init__(self, layer: int = 2) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 1:
            raise ValueError(f"`layer` must be a whole number of at least 1, got {layer!r}")
        self.layer = layer

    def select(self, attention: Sequence[Tensor], budget: Budget | None = None) -> list[Selection]:
        """Keep the most attended tokens; `"auto"` is the default ratio, as for all selectors without relevance."""
        selections = []
        for received in attention:
            count = count_kept(budget, len(received))
            selections.append(Selection(indices=received.topk(count).indices.sort().values))
        return selections
