"""SCOPE: salient tokens that cover the picture."""

from __future__ import annotations

from arr_coc.config import EncoderLayer
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.papers.covering import cover
from arr_coc.selectors.per_picture import PerPictureSelector, unit_tokens
from arr_coc.selectors.registry import register_selector


@register_selector("scope")
class SCOPESelector(PerPictureSelector):
    """Keeps the tokens that add most to the coverage of all tokens, times a power of the attention they receive.

    The method of "SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodel LLMs" (Deng et al.,
    arXiv 2510.24214). A token's coverage is its cosine with the most similar kept token; coverage starts at 0, so
    negative cosines never count. The question is not used.

    Choices the paper leaves open: without a class token, saliency is the mean attention that a token's patches receive;
    the layer is the encoder's last, which attends to the whole picture in every family; similarity is that of the
    tokens the language model reads.

    Args:
        alpha (`float`, *optional*, defaults to 1.0): power of the attention; 0 uses coverage only.
        layer (`int` or `float`, *optional*, defaults to -1): the encoder layer.
    """

    def __init__(self, alpha: float = 1.0, layer: EncoderLayer = -1) -> None:
        self.alpha, self.layer = alpha, layer
        self.encoder_layers = (layer,)

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep the salient tokens that cover all others."""
        unit = unit_tokens(query)
        saliency = query.received_attention(self.layer).float() ** self.alpha
        return Selection(indices=cover(unit @ unit.mT, count, saliency).sort().values)
