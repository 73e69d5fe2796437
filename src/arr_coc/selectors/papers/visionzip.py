"""VisionZip: the tokens that receive most attention, and a few means of all others."""

from __future__ import annotations

import torch

from arr_coc.config import EncoderLayer
from arr_coc.runtime.tensors import unit_rows
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.papers.merging import mean_groups, merge
from arr_coc.selectors.per_picture import PerPictureSelector, strongest
from arr_coc.selectors.registry import register_selector


@register_selector("visionzip")
class VisionZipSelector(PerPictureSelector):
    """Keeps dominant tokens as they are and averages the others into contextual tokens.

    The method of "VisionZip: Longer is Better but Not Necessary in Vision Language Models" (Yang et al.,
    arXiv 2412.04467). Dominant tokens are those that receive most attention. Of the M others every (M / C)-th is a
    target; the rest join the target with the most similar key, by cosine. The question is not used.

    Choices the paper leaves open: without a class token, attention is the mean that a token's patches receive;
    attention and keys come from the encoder's last layer (LLaVA takes its features one layer earlier: use `layer=-2`
    there). A contextual token is the plain mean of its target and the tokens that joined it, and takes the target's
    place. One tenth of the budget is contextual, as in the 45 % + 5 % of the authors' port to Qwen; a budget of one
    token has none.

    Args:
        contextual (`float`, *optional*, defaults to 0.1): share of the budget for contextual tokens.
        layer (`int` or `float`, *optional*, defaults to -1): the encoder layer.
    """

    def __init__(self, contextual: float = 0.1, layer: EncoderLayer = -1) -> None:
        if not 0 <= contextual < 1:
            raise ValueError(f"`contextual` must be in [0, 1), got {contextual}")
        self.contextual, self.layer = contextual, layer
        self.encoder_layers = (layer,)

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep the dominant tokens, and the means of the others."""
        groups = min(count - 1, max(1, round(self.contextual * count))) if self.contextual else 0
        order = strongest(query.received_attention(self.layer), len(query.tokens))
        dominant, rest = order[: count - groups], order[count - groups :].sort().values
        if not groups:
            return Selection(indices=dominant.sort().values)
        stride = len(rest) // groups
        targets = rest[::stride][:groups]  # [C]
        keys = unit_rows(query.keys(self.layer).float())
        nearest = (keys[rest] @ keys[targets].mT).argmax(dim=1)  # [M]
        # a target belongs to itself, even if another one has the same key
        nearest[::stride][:groups] = torch.arange(groups, device=rest.device)
        indices, order = torch.cat([dominant, targets]).sort()
        row = order.argsort()  # row of each dominant token and each target among the kept ones
        group = torch.empty(len(query.tokens), dtype=torch.long, device=rest.device)
        group[dominant] = row[: count - groups]
        group[rest] = row[count - groups :][nearest]
        return merge(query, indices, lambda rows: mean_groups(rows, group, count))
