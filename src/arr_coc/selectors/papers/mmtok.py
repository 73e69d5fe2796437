"""MMTok: tokens that cover both the words of the question and the picture."""

from __future__ import annotations

import torch

from arr_coc.runtime.tensors import unit_rows
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.papers.covering import cover
from arr_coc.selectors.per_picture import PerPictureSelector, unit_tokens
from arr_coc.selectors.registry import register_selector


@register_selector("mmtok")
class MMTokSelector(PerPictureSelector):
    """Keeps the tokens that add most to the coverage of the question's words and of all tokens.

    The method of "MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs" (Dong et al.,
    arXiv 2508.18264). A token covers a word or another token by its share in a softmax of their cosines over all
    tokens; all words together weigh 1, all tokens `alpha`.

    Choices the paper leaves open: the words are the embeddings of the question alone, without the rest of the prompt;
    the authors' optional second model, which suggests more words, is left out.

    Args:
        alpha (`float`, *optional*, defaults to 0.5): weight of the picture relative to the words.
        word_temperature, token_temperature (`float`, *optional*, defaults to 0.01 and 0.2): of the two softmaxes.
    """

    reads_question = True

    def __init__(self, alpha: float = 0.5, word_temperature: float = 0.01, token_temperature: float = 0.2) -> None:
        self.alpha = alpha
        self.word_temperature, self.token_temperature = word_temperature, token_temperature

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep the tokens that cover words and tokens."""
        unit, words = unit_tokens(query), unit_rows(query.words.float())
        word_share = (words @ unit.mT / self.word_temperature).softmax(dim=1) / len(words)  # [Q, N]
        token_share = (unit @ unit.mT / self.token_temperature).softmax(dim=1).mul_(self.alpha / len(unit))  # [N, N]
        likeness = torch.cat([word_share, token_share])  # [Q + N, N]
        return Selection(indices=cover(likeness, count).sort().values)
