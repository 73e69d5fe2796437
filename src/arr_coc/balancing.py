"""Balancing: opponent processing. Question and picture together decide how the three scores are weighted.

If the model itself was asked where it looks, its voice is multiplied by what the three scores say. How far it is
followed, and how much the scores may take away, is weighed by question and picture too.

The balancer also sets three tensions in [0, 1] that steer the allocation:

| tension   | 0        | 1             | governs                                                       |
|-----------|----------|---------------|---------------------------------------------------------------|
| `detail`  | compress | particularize | scales the automatic number of tokens                         |
| `explore` | exploit  | explore       | share of tokens spread evenly over regions not yet looked at  |
| `variety` | focus    | diversify     | suppression of near-duplicates                                |

Where a call says exactly how many tokens stay, the tensions are those of [`AdaptiveTensionBalancer`]. Where it leaves
that open, as the first look of mode `auto` does, [`Steering`] adds what was learned from answers and their price.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc.config import ARRCOCConfig
from arr_coc.knowing import Participation

SCORES = ("information", "perspectival", "participatory")
TENSIONS = ("detail", "explore", "variety")

# A map whose best cell exceeds its mean by this much is of ordinary strength.
ORDINARY_STRENGTH = (0.2, 0.2, 0.2)
# A map whose range is smaller counts as flat and is not stretched to the full range.
FLAT = 0.05
_NEUTRAL_TENSIONS = (0.5, 0.2, 0.2)
_STATISTICS = 4  # mean, maximum, deviation, strength
# Where the model itself was asked: the logarithm of the voice's exponent, the logit of the least that the three scores
# leave of it, and what is added to the logit of `explore`.
_FOLLOWING = (0.0, 0.0, -3.0)
# A voice of 0 would have no gradient in a power below 1.
_FAINT = 1e-4
# How far steering may move the logit of a tension either way.
MOST_STEERED = 3.0


class Balance(NamedTuple):
    """Output of the [`AdaptiveTensionBalancer`].

    Args:
        relevance (`Tensor` of shape `[B, t, h, w]`): in [0, 1].
        weights (`Tensor` of shape `[B, 3]`): of information, perspectival, participatory; each in (0, 1).
        tensions (`Tensor` of shape `[B, 3]`): detail, explore, variety; each in (0, 1).
        context (`Tensor` of shape `[B, 2 * R + 12]`): question, gestalt and statistics of the maps.
    """

    relevance: Tensor
    weights: Tensor
    tensions: Tensor
    context: Tensor


class Judgement(NamedTuple):
    """Outputs of the three scorers and the balancer for one texture."""

    information: Tensor  # [B, t, h, w]
    perspectival: Tensor  # [B, t, h, w]
    participation: Participation
    balance: Balance


class AdaptiveTensionBalancer(nn.Module):
    """Weight the three score maps by question, gestalt and the statistics of the maps.

    Weights are sigmoids, not a softmax: relevance is higher where more of everything is needed. They start equal for
    maps of ordinary strength; a weak map counts less, a strong one more. Tensions start neutral at ordinary strength; a
    question that points nowhere raises `explore`, the rest is left to training. The learned correction is zero at
    first, and so is the spread of relevance to neighbouring cells (a model that reads a word needs all of it). Where
    the model itself looks, the scores may halve relevance at first, and little is explored.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import ARRCOCConfig
    >>> from arr_coc.balancing import AdaptiveTensionBalancer
    >>> from arr_coc.knowing import Participation
    >>> config = ARRCOCConfig(hidden_size=64)
    >>> balancer = AdaptiveTensionBalancer(config)
    >>> flat, peaked = torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None]
    >>> participation = Participation(peaked, peaked[:, None], torch.ones(1), *torch.zeros(2, 1, config.low_rank))
    >>> weights = balancer(peaked, flat, participation).weights[0]
    >>> bool(weights[1] < weights[0])
    True

    ```
    """

    ordinary: Tensor

    def __init__(self, config: ARRCOCConfig, width: int = 64) -> None:
        super().__init__()
        context = 2 * config.low_rank + _STATISTICS * len(SCORES)
        self.gain = nn.Parameter(torch.full((len(SCORES),), 1.5))
        self.register_buffer("ordinary", torch.tensor(ORDINARY_STRENGTH), persistent=False)
        neutral = [0.0] * len(SCORES) + [math.log(p / (1 - p)) for p in _NEUTRAL_TENSIONS]
        self.neutral = nn.Parameter(torch.tensor(neutral))
        # how the strengths of the three maps move the three tensions: a question that points nowhere raises `explore`
        lean = torch.zeros(len(SCORES), len(TENSIONS))
        lean[SCORES.index("participatory"), TENSIONS.index("explore")] = -1.0
        self.lean = nn.Parameter(lean)
        self.spread = nn.Parameter(torch.zeros(2))  # sideways, up and down
        last = nn.Linear(width, len(neutral), bias=False)
        nn.init.zeros_(last.weight)
        self.correction = nn.Sequential(nn.LayerNorm(context), nn.Linear(context, width), nn.GELU(), last)
        self.following = nn.Parameter(torch.tensor(_FOLLOWING))
        self.trust = nn.Linear(width, len(_FOLLOWING), bias=False)
        nn.init.zeros_(self.trust.weight)

    def forward(
        self, information: Tensor, perspectival: Tensor, participation: Participation, voice: Tensor | None = None
    ) -> Balance:
        """Combine score maps `[B, t, h, w]`, and the model's own voice if it was asked, into one relevance map."""
        shape = information.shape
        maps = torch.stack([information, perspectival, participation.score], dim=1).flatten(2)  # [B, 3, N]
        low, high = maps.amin(dim=-1), maps.amax(dim=-1)  # [B, 3]
        mean = maps.mean(dim=-1)
        deviation = ((maps - mean[..., None]).square().mean(dim=-1) + 1e-8).sqrt()  # finite gradient on flat maps
        strength = ((high - mean) / self.ordinary).clamp(max=2)
        statistics = torch.stack([mean, high, deviation, strength], dim=-1).flatten(1)  # [B, 12]
        context = torch.cat([participation.question, participation.gestalt, statistics], dim=-1)
        hidden = self.correction[:-1](context)
        logits = self.neutral + self.correction[-1](hidden)  # [B, 6]
        weights = torch.sigmoid(logits[:, :3] + self.gain * (strength - 1))
        tensions = torch.sigmoid(logits[:, 3:] + (strength - 1) @ self.lean)
        stretched = (maps - low[..., None]) / (high - low).clamp(min=FLAT)[..., None]  # [B, 3, N]
        relevance = (weights[..., None] * stretched).mean(dim=1)  # not a weighted mean: strength itself counts
        relevance = self._spread_around(relevance.view(shape))
        if voice is None:
            return Balance(relevance, weights, tensions, context)
        exponent, floor, explore = (self.following + self.trust(hidden)).unbind(dim=-1)  # [B] each
        moved = torch.sigmoid(torch.logit(tensions[:, 1]) + explore)
        tensions = torch.stack([tensions[:, 0], moved, tensions[:, 2]], dim=-1)
        followed = self._follow(relevance, voice, exponent.exp(), torch.sigmoid(floor))
        return Balance(followed, weights, tensions, context)

    @staticmethod
    def _follow(relevance: Tensor, voice: Tensor, exponent: Tensor, floor: Tensor) -> Tensor:
        """The voice `[B, t, h, w]` to a power `[B]`, times what relevance, from `floor` `[B]` to 1, leaves of it."""
        exponent, floor = (part[:, None, None, None] for part in (exponent, floor))
        low, high = relevance.amin(dim=(1, 2, 3), keepdim=True), relevance.amax(dim=(1, 2, 3), keepdim=True)
        # scores that are flat take nothing away
        stretched = 1 - (high - relevance) / (high - low).clamp(min=FLAT)
        return voice.clamp(min=_FAINT) ** exponent * (floor + (1 - floor) * stretched)

    def _spread_around(self, relevance: Tensor) -> Tensor:
        """Spread relevance `[B, t, h, w]` to neighbouring cells by learned weights; it stays in [0, 1]."""
        beside = F.max_pool2d(relevance, (1, 3), stride=1, padding=(0, 1))
        above = F.max_pool2d(relevance, (3, 1), stride=1, padding=(1, 0))
        raised = relevance + self.spread[0] * beside + self.spread[1] * above
        return (raised / (1 + self.spread.abs().sum())).clamp(0, 1)


class Steering(nn.Module):
    """Move the three tensions by question and picture; not at all at first.

    It is learned by trials (`--stage trials`): with which tensions are questions answered from few tokens?

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import ARRCOCConfig
    >>> from arr_coc.balancing import Steering
    >>> config = ARRCOCConfig(hidden_size=64)
    >>> steering, context = Steering(config), torch.randn(2, 2 * config.low_rank + 12)
    >>> steering(steering.describe(context, focus=torch.zeros(2), total=256)).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    ```
    """

    def __init__(self, config: ARRCOCConfig, width: int = 32) -> None:
        super().__init__()
        self.facts = 2 * config.low_rank + _STATISTICS * len(SCORES) + 2
        last = nn.Linear(width, len(TENSIONS))
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.correction = nn.Sequential(nn.LayerNorm(self.facts), nn.Linear(self.facts, width), nn.GELU(), last)

    @staticmethod
    def describe(context: Tensor, focus: Tensor, total: int) -> Tensor:
        """What decides, `[B, F]`.

        Args:
            context (`Tensor` of shape `[B, 2 * R + 12]`): of a [`Balance`].
            focus (`Tensor` of shape `[B]`): from [`~arr_coc.knowing.focus_of`]; 0 if the model was not asked.
            total (`int`): cells there are.
        """
        size = torch.full_like(focus, math.log2(total) / 8)
        return torch.cat([context.detach(), torch.stack([focus.detach(), size], dim=1)], dim=1)

    def forward(self, facts: Tensor) -> Tensor:
        """What is added to the logits of the tensions, `[B, 3]`."""
        moved: Tensor = MOST_STEERED * torch.tanh(self.correction(facts) / MOST_STEERED)
        return moved


def steer(tensions: Tensor, moved: Tensor) -> Tensor:
    """Tensions `[B, 3]` in [0, 1], moved in logits `[B, 3]`.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.balancing import steer
    >>> steer(torch.tensor([0.5, 0.2, 0.2]), torch.tensor([0.0, -50.0, 50.0])).round(decimals=3)
    tensor([0.5000, 0.0000, 1.0000])

    ```
    """
    return torch.sigmoid(torch.logit(tensions, eps=1e-6) + moved)
