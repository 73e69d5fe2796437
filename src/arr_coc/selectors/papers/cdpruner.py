"""CDPruner: tokens that are relevant to the question and differ from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arr_coc.runtime.tensors import unit_rows
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.per_picture import PerPictureSelector, unit_tokens
from arr_coc.selectors.registry import register_selector

# A token that adds less volume than this adds only rounding errors.
LEAST = 1e-6


@register_selector("cdpruner")
class CDPrunerSelector(PerPictureSelector):
    """Keeps the tokens, scaled by relevance, of largest volume: greedy MAP of a determinantal point process.

    The method of "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs" (Zhang
    et al., arXiv 2506.10967), with the fast greedy search of Chen et al. (arXiv 1709.05135): the kernel is the cosine
    of two tokens times the relevance of both, and each step adds the token that multiplies its determinant most.

    Choices the paper leaves open: Qwen has no CLIP text tower, so relevance is the mean cosine of a token with the
    question's word embeddings, which share its space. It is scaled to [0, 1] within each picture, never over a batch;
    if all tokens are alike, all are relevant. The sign depends on the space: with CLIP's towers the authors negate it,
    because there patches that match a text are less similar to it.

    Args:
        sign (`int`, *optional*, defaults to 1): 1 if tokens that show a word are more similar to it than others, -1 if
            less. To calibrate it for a model, compare the mean cosine under boxes of the things asked for with that
            elsewhere: for the embedded model it is larger by half a standard deviation.
    """

    reads_question = True

    def __init__(self, sign: int = 1) -> None:
        if sign not in (1, -1):
            raise ValueError(f"`sign` must be 1 or -1, got {sign!r}")
        self.sign = sign

    def relevance(self, unit: Tensor, words: Tensor) -> Tensor:
        """Relevance `[N]` in [0, 1] of unit-length tokens `[N, D]` for words `[Q, D]`."""
        cosine = self.sign * (unit @ unit_rows(words.float()).mean(dim=0))  # [N]: the mean of the cosines
        least, most = cosine.aminmax()
        return (cosine - least + LEAST) / (most - least + LEAST)

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Add the token that increases the volume most, K times."""
        unit = unit_tokens(query)
        scaled = unit * self.relevance(unit, query.words)[:, None]
        kernel = scaled @ scaled.mT  # [N, N]
        gain = kernel.diagonal().clone()  # [N]: squared volume that each token would add
        basis = kernel.new_zeros(count, len(gain))  # [K, N]: rows of the kernel's Cholesky factor
        picked = []
        for place in range(count):
            best = gain.argmax(dim=0, keepdim=True)  # [1], on the device
            picked.append(best)
            known = basis[:place]
            row = kernel.index_select(0, best)[0] - known.index_select(1, best)[:, 0] @ known  # [N]
            added = gain.index_select(0, best)
            # with no volume left, only rounding errors remain, which would grow step by step
            row = torch.where(added > LEAST, row * added.clamp(min=LEAST).rsqrt(), 0.0)
            basis[place] = row
            gain = (gain - row.square()).index_fill_(0, best, -math.inf)
        return Selection(indices=torch.cat(picked).sort().values)
