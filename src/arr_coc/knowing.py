"""Knowing: three ways to score every cell, each `[B, h, w]` in [0, 1].

| scorer                | way of knowing | question                           | before training               |
|-----------------------|----------------|------------------------------------|-------------------------------|
| `InformationScorer`   | propositional  | how much is here?                  | local diversity               |
| `PerspectivalScorer`  | perspectival   | what stands out?                   | mean of the saliency channels |
| `ParticipatoryScorer` | participatory  | what matters to this question?     | cosine of tokens and words    |

Learned parts start as zero corrections, so an untrained layer is already a sensible, deterministic selector. The
frames of a clip are passed as a batch; only the participatory scorer knows which frames belong together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc.config import ARRCOCConfig, Grid
from arr_coc.pixels.mipmaps import resize
from arr_coc.pixels.saliency import structure_of
from arr_coc.runtime.tensors import constant, unit_rows
from arr_coc.texture import CHANNELS

# Channels whose local diversity counts as information. The others (position, clusters, memory) start near zero weight.
_DIVERSE = {
    "core": ("red", "green", "blue", "sobel_magnitude", "local_variance"),
    "full": ("red", "green", "blue", "edges", "high_pass", "text"),
}
_SALIENT = {
    "core": ("saliency_intensity", "saliency_color", "saliency_orientation"),
    "full": ("saliency",),
}
# The channel that holds the deviation of the pixels inside a cell.
_SPREAD = {"core": "local_variance", "full": "high_pass"}

HISTOGRAM_BINS = 12
# Softness of the softplus on a word's pull, in units of cosine.
PULL_SOFTNESS = 0.02
# A word whose cosine varies less than this over the picture points nowhere: encoders drift that much with position.
FLAT_PULL = 0.04
# The share of the model's own attention that noise hardly ever draws to a sixteenth of the cells: asked open questions,
# the embedded model pays at most 0.15 to it in 192 pictures of noise and splattered paint, and asked for a text on such
# pictures at least 0.32.
FOCUSED = 0.16


@constant
def _near_average(side: int, device: torch.device) -> Tensor:
    """Matrix `[side, side]` whose columns average a cell and its neighbours along one side."""
    return F.avg_pool1d(torch.eye(side), 3, stride=1, padding=1, count_include_pad=False).to(device)


@constant
def _far_average(side: int, device: torch.device) -> Tensor:
    """Matrix `[side, side]` whose columns take each cell from two mip levels further up."""
    coarse = torch.eye(side)
    for _ in range(2):
        coarse = F.avg_pool1d(coarse, 2, ceil_mode=True, count_include_pad=False)  # [side, ceil(side / 2)]
    return resize(coarse, (side, side)).to(device)


class InformationScorer(nn.Module):
    """Propositional knowing: Shannon entropy of the local histogram, over learnable channel weights.

    A cell's histogram combines its own values, its 3x3 neighbourhood and a coarser mip level. Its own values are
    widened by the deviation of its pixels, so a busy cell scores high even among equally busy ones. The entropy of a
    blank cell is subtracted, so blank cells score 0. (Softmax entropy over the channels themselves would have the wrong
    sign: a flat vector has the highest.)

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import ARRCOCConfig
    >>> from arr_coc.knowing import InformationScorer
    >>> InformationScorer(ARRCOCConfig(hidden_size=64))(torch.rand(2, 40, 5, 7)).shape
    torch.Size([2, 5, 7])

    ```
    """

    bins: Tensor

    def __init__(self, config: ARRCOCConfig) -> None:
        super().__init__()
        table = CHANNELS[config.channels]
        logits = torch.full((len(table),), -8.0)
        for name in _DIVERSE[config.channels]:
            logits[table[name]] = 0.0
        for name, index in table.items():
            if name.startswith("semantic_"):
                logits[index] = -2.0
        self.channel_logits = nn.Parameter(logits)
        self.spread = table[_SPREAD[config.channels]]
        # Two bins of margin on both sides, so that black and white are treated like grey.
        self.step = 1.0 / (HISTOGRAM_BINS - 5)
        bins = torch.arange(HISTOGRAM_BINS) * self.step - 2 * self.step
        self.register_buffer("bins", bins.view(1, 1, -1, 1, 1), persistent=False)
        self.blank_entropy = math.log(math.sqrt(2 * math.pi * math.e))
        self.max_entropy = math.log(HISTOGRAM_BINS)

    def forward(self, texture: Tensor) -> Tensor:
        """Score texture `[B, C, h, w]`; returns `[B, h, w]`."""
        batch, channels, rows, columns = texture.shape
        spread = texture[:, self.spread][:, None, None]  # [B, 1, 1, h, w]
        sharpness = -0.5 / (self.step**2 + spread * spread)
        here = torch.softmax((texture[:, :, None] - self.bins).square() * sharpness, dim=2)  # [B, C, bins, h, w]
        here = here.view(batch, channels * HISTOGRAM_BINS, rows, columns)  # [B, C * bins, h, w]
        near, far = (
            average(rows, texture.device).mT @ (here @ average(columns, texture.device))
            for average in (_near_average, _far_average)
        )
        histogram = (0.5 * here).add_(near, alpha=0.25).add_(far, alpha=0.25)
        entropy = torch.special.entr(histogram).view(batch, channels, HISTOGRAM_BINS, rows, columns).sum(dim=2)
        score = torch.einsum("bchw,c->bhw", entropy, torch.softmax(self.channel_logits, dim=0))
        return ((score - self.blank_entropy) / (self.max_entropy - self.blank_entropy)).clamp(0, 1)


class PerspectivalScorer(nn.Module):
    """Perspectival knowing: a small CNN on the texture that starts as the mean of the saliency channels.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import CHANNELS, ARRCOCConfig
    >>> from arr_coc.knowing import PerspectivalScorer
    >>> texture = torch.rand(1, 40, 5, 7)
    >>> score = PerspectivalScorer(ARRCOCConfig(hidden_size=64))(texture)
    >>> torch.allclose(score, texture[:, CHANNELS["full"]["saliency"]], atol=1e-4)
    True

    ```
    """

    def __init__(self, config: ARRCOCConfig, width: int = 32) -> None:
        super().__init__()
        table = CHANNELS[config.channels]
        first = table[_SALIENT[config.channels][0]]
        self.salient = slice(first, first + len(_SALIENT[config.channels]))
        last = nn.Conv2d(width, 1, 1, bias=False)
        nn.init.zeros_(last.weight)
        self.correction = nn.Sequential(
            nn.Conv2d(len(table), width, 1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2),
            nn.GELU(),
            last,
        )

    def forward(self, texture: Tensor) -> Tensor:
        """Score texture `[B, C, h, w]`; returns `[B, h, w]`."""
        saliency = texture[:, self.salient].mean(dim=1)
        # corrected in logits: it stays in [0, 1] and equals the saliency while the correction is zero
        return torch.sigmoid(torch.logit(saliency, eps=1e-5) + self.correction(texture)[:, 0])


def hear(attended: Tensor) -> Tensor:
    """The attention `[B, t, h, w]` that the model itself pays the cells, as a voice in [0, 1].

    The square root, because a few cells get most of the attention; then each picture's range. Even attention, which
    says nothing, is 1 everywhere.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.knowing import hear
    >>> hear(torch.tensor([0.0, 0.04, 0.16]).view(1, 1, 1, 3)).flatten()
    tensor([0.0000, 0.5000, 1.0000])

    ```
    """
    root = attended.float().clamp(min=0).sqrt()
    low, high = root.amin(dim=(1, 2, 3), keepdim=True), root.amax(dim=(1, 2, 3), keepdim=True)
    return 1 - (high - root) / (high - low).clamp(min=1e-9)


def focus_of(attended: Tensor) -> Tensor:
    """How far `[B]` the model's own attention `[B, N]` is drawn to few cells; 1 is more than noise draws it to.

    Attention is never even: the sixteenth of the cells that is paid most gets a tenth of it on noise, and a quarter to
    a half where there is something to look at. What these cells would get of even attention is taken off: 0 is even.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.knowing import focus_of
    >>> focus_of(torch.stack([torch.ones(64), torch.eye(64)[5] + 0.001])).round(decimals=1)
    tensor([0., 9.])

    ```
    """
    count = max(1, round(attended.shape[1] / 16))
    most = attended.topk(count, dim=1).values.sum(dim=1)
    share = most / attended.sum(dim=1).clamp(min=1e-12)
    return (share - count / attended.shape[1]) / (FOCUSED - 1 / 16)


class Participation(NamedTuple):
    """Output of the [`ParticipatoryScorer`].

    Args:
        score (`Tensor` of shape `[B, t, h, w]`): relevance to the question.
        pull (`Tensor` of shape `[B, Q, t, h, w]`): how strongly each word points to each cell; 0 for padding.
        match (`Tensor` of shape `[B]`): how clearly the best word points to a place; 1 and above is better than chance.
        gestalt (`Tensor` of shape `[B, R]`): the mean token, projected.
        question (`Tensor` of shape `[B, R]`): the mean word, projected.
    """

    score: Tensor
    pull: Tensor
    match: Tensor
    gestalt: Tensor
    question: Tensor


class ParticipatoryScorer(nn.Module):
    """Participatory knowing: cross-attention of cells to the words of the query, never to their mean.

    Merged vision tokens live in the language model's embedding space, so the cosine of token and word works without
    training. Each word's mean over the picture is subtracted: a word that is everywhere points nowhere. Then the
    maximum, mean and bounded sum over the words are mixed by learned weights, so a cell that matches two words outranks
    a cell that matches one. A learned low-rank bilinear form of tokens and texture, zero at first, corrects the cosine.
    Two more learned terms, also zero at first, use rows and columns of matched words, and texture.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import ARRCOCConfig
    >>> from arr_coc.knowing import ParticipatoryScorer
    >>> scorer = ParticipatoryScorer(ARRCOCConfig(hidden_size=64))
    >>> tokens = torch.randn(1, 12, 64)
    >>> output = scorer(torch.rand(1, 40, 3, 4), tokens, tokens[:, 5:6], grid=(1, 3, 4))
    >>> output.score.flatten().argmax().item()
    5

    ```
    """

    def __init__(self, config: ARRCOCConfig) -> None:
        super().__init__()
        width, rank = config.hidden_size, config.low_rank
        self.read_tokens = nn.Linear(width, rank, bias=False)
        self.read_words = nn.Linear(width, rank, bias=False)
        # no bias: a constant points nowhere
        self.read_texture = nn.Conv2d(len(CHANNELS[config.channels]), rank, 1, bias=False)
        self.agree = nn.Parameter(torch.zeros(rank, rank))
        # maximum, mean, sum; a token between two words has a cosine of 0.7 with each, so the sum counts most
        self.mix_logits = nn.Parameter(torch.tensor([0.0, 0.0, 1.2]))
        # how all words together favour or disfavour each texture channel
        self.leaning = nn.Parameter(torch.zeros(rank, len(CHANNELS[config.channels])))
        # weights of a matched word's row, of its column, and of where rows and columns cross
        self.aligned = nn.Parameter(torch.zeros(3))

    def forward(
        self, texture: Tensor, tokens: Tensor, words: Tensor, grid: Grid, word_mask: Tensor | None = None
    ) -> Participation:
        """Score cells against words.

        Args:
            texture (`Tensor` of shape `[B * t, C, h, w]`): on the cells to score.
            tokens (`Tensor` of shape `[B, N, D]`): the encoder's tokens on `grid`.
            words (`Tensor` of shape `[B, Q, D]`): the query's word embeddings.
            grid (`tuple[int, int, int]`): `(t, h, w)` of the tokens; the cells may be finer.
            word_mask (`Tensor` of shape `[B, Q]`, *optional*): False for padding.
        """
        batch, length = words.shape[:2]
        frames, rows, columns = texture.shape[0] // batch, texture.shape[2], texture.shape[3]
        cells = (rows, columns)
        if word_mask is None:
            word_mask = torch.ones(batch, length, dtype=torch.bool, device=words.device)
        valid = word_mask[:, :, None]  # [B, Q, 1]
        unit_tokens, unit_words = unit_rows(tokens), unit_rows(words)
        cosine = (unit_words @ unit_tokens.mT).float()  # [B, Q, N]
        token_features = F.linear(unit_tokens, self.read_tokens.weight.to(tokens.dtype)).float()  # [B, N, R]
        word_features = F.linear(unit_words, self.read_words.weight.to(words.dtype)).float()  # [B, Q, R]
        gestalt = token_features.mean(dim=1)
        question = (word_features * valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
        if (grid[1], grid[2]) != cells:
            cosine = self._to_cells(cosine, grid, cells)
            token_features = self._to_cells(token_features.mT, grid, cells).mT
        shown = self.read_texture(texture)  # [B * t, R, h, w]
        shown = shown.view(batch, frames, -1, rows * columns).transpose(1, 2).flatten(2).mT  # [B, N, R]
        learned = (word_features @ self.agree) @ (token_features + shown).mT  # [B, Q, N]
        untrained_pull, pull = (
            (values - values.mean(dim=-1, keepdim=True)).masked_fill(~valid, 0.0)
            for values in (cosine, cosine + learned)
        )
        soft = F.softplus(pull, beta=1 / PULL_SOFTNESS).masked_fill(~valid, 0.0)
        num_words = valid.sum(dim=1)  # [B, 1]
        best, total = soft.amax(dim=1), soft.sum(dim=1)
        pooled = torch.stack([best, total / num_words.clamp(min=1), -torch.expm1(-total)], dim=-1)  # [B, N, 3]
        score = (pooled @ torch.softmax(self.mix_logits, dim=0)).clamp(max=1)
        score = self._align(score.view(batch, frames, rows, columns), best)
        score = self._lean(score, texture, (word_features * valid).sum(dim=1))
        shape = (batch, length, frames, rows, columns)
        return Participation(
            score=score,
            pull=pull.view(shape),
            # from the cosine alone: a learned position bias is there in every picture, and its chance level is unknown
            match=_match(untrained_pull.detach().view(shape), num_words[:, 0]),
            gestalt=gestalt,
            question=question,
        )

    def _align(self, score: Tensor, best: Tensor) -> Tensor:
        """Add the strongest pull `[B, N]` in each cell's row and column to its score, by learned weights.

        A form's value stands in the row of its key, a table's where the row of one word crosses the column of another,
        and the thing to the left of another in the same row.
        """
        best = best.clamp(max=1).view_as(score)  # [B, t, h, w]
        in_row, in_column = best.amax(dim=3, keepdim=True), best.amax(dim=2, keepdim=True)
        row, column, both = self.aligned
        raised: Tensor = score + row * in_row + column * in_column + both * in_row * in_column
        return (raised / (1 + self.aligned.abs().sum())).clamp(0, 1)

    def _lean(self, score: Tensor, texture: Tensor, summed_words: Tensor) -> Tensor:
        """Raise or lower the score by texture `[B * t, C, h, w]`, as learned from the summed word features `[B, R]`.

        A single word's pull can only raise a cell. Here "left" favours the one further left of two things on the right.
        """
        shown = texture.view(score.shape[0], score.shape[1], *texture.shape[1:])  # [B, t, C, h, w]
        shown = shown - shown.mean(dim=(1, 3, 4), keepdim=True)
        change = torch.tanh(torch.einsum("bc,btchw->bthw", summed_words @ self.leaning, shown))
        raw = score + change
        low = raw.amin(dim=(1, 2, 3), keepdim=True).clamp(max=0)
        high = raw.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1)
        return (raw - low) / (high - low)

    @staticmethod
    def _to_cells(values: Tensor, grid: Grid, cells: tuple[int, int]) -> Tensor:
        """Token values `[B, X, t * h * w]`, interpolated to finer cells `[B, X, t * rows * columns]`."""
        batch, count = values.shape[:2]
        fine = resize(values.reshape(batch, count * grid[0], grid[1], grid[2]), cells)  # [B, X * t, rows, columns]
        return fine.view(batch, count, -1)


def _match(pull: Tensor, num_words: Tensor) -> Tensor:
    """How clearly `[B]` the best word of a pull `[B, Q, t, h, w]` points to a place; 1 is better than chance.

    `num_words` `[B]` words were tried, and the more there are, the better the best one is by chance.
    """
    batch, _, frames = pull.shape[:3]
    by_frame = pull.transpose(1, 2).flatten(0, 1)  # [B * t, Q, h, w]
    alike, alone = structure_of(by_frame, FLAT_PULL, num_words.repeat_interleave(frames))
    return torch.maximum(alike, alone).view(batch, -1).amax(dim=1)
