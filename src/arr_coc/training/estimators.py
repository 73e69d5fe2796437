"""How the loss of an answer reaches the selector, although choosing tokens has no gradient.

| name        | what is read                        | what carries the gradient                                     |
|-------------|-------------------------------------|---------------------------------------------------------------|
| `gate`      | the most relevant tokens            | a factor of 1 on each, straight through to its relevance      |
| `gumbel`    | tokens drawn by Gumbel top-k        | the same factor, to the chance of having been drawn           |
| `reinforce` | tokens drawn by Gumbel top-k        | the chance of the draw, times how much better it went         |
| `soft`      | all tokens, scaled by relevance     | the scale; `prune` when deployed                              |
| `none`      | the most relevant tokens            | nothing: the negative control, which cannot learn             |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.config import Budget
from arr_coc.gaze.compression import ConvCompressor
from arr_coc.realizing import ARRCOCLayer, straight_through
from arr_coc.selectors.contract import Selection, TokenSelector, VisualQuery

ESTIMATORS = ("gate", "gumbel", "reinforce", "soft", "none")

# Relevance lies in [0, 1]; this makes it logits of a draw.
SHARPNESS = 10.0


class EstimatingSelector(TokenSelector):
    """A layer that is being trained, as `prepare` takes it; it keeps what the losses need of its last call.

    It is ordered as the layer itself is, so that what is trained is what is deployed.

    Args:
        layer (`ARRCOCLayer`): learns.
        estimator (`str`): see above.
        temperature (`float`, *optional*, defaults to 1.0): of the draws; lower is nearer to the most relevant.
        generator (`torch.Generator`, *optional*): of the draws.
    """

    ordered = True

    def __init__(
        self,
        layer: ARRCOCLayer,
        estimator: str,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if estimator not in ESTIMATORS:
            raise ValueError(f"`estimator` must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
        self.layer, self.estimator = layer, estimator
        self.temperature, self.generator = temperature, generator
        self.log_chance: list[Tensor] = []  # of each picture's draw
        self.expected: list[Tensor] = []  # tokens that "auto" would give
        self.totals = torch.zeros(0)  # tokens that there were
        self.seen = torch.zeros(0)  # mean token and mean word `[B, 2 * D]`, for a baseline to judge by

    @property
    def compressor(self) -> ConvCompressor | None:
        """Of the layer."""
        return self.layer.compressor

    def check(self, queries: Sequence[VisualQuery]) -> None:
        """Refuse models of another width."""
        self.layer.check(queries)

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Choose tokens so that a gradient can come back."""
        self.totals = torch.tensor([len(query.tokens) for query in queries])
        self.seen = torch.stack([torch.cat([q.tokens.float().mean(0), q.words.float().mean(0)]) for q in queries])
        drawn = self.estimator in ("gumbel", "reinforce")
        selections: dict[int, Selection] = {}
        chances: dict[int, Tensor] = {}
        expected: dict[int, Tensor] = {}
        for place, output in self.layer.outputs(queries, budget):
            expected[place] = output.expected_tokens[0]
            if drawn:
                selections[place], chances[place] = self._draw(output.relevance.flatten(), int(output.num_kept[0]))
                continue
            gate = straight_through(output.budgets[0]) if self.estimator == "gate" else None
            selections[place] = Selection(indices=output.indices[0], gate=gate, output=output)
        self.log_chance = [chances[place] for place in sorted(chances)]
        self.expected = [expected[place] for place in range(len(queries))]
        return [selections[place] for place in range(len(queries))]

    def _draw(self, relevance: Tensor, count: int) -> tuple[Selection, Tensor]:
        """Cells drawn without putting back, and the logarithm of the chance of that draw."""
        logits = SHARPNESS * relevance / self.temperature  # [N]
        chosen, noisy = gumbel_top_k(logits.detach(), count, self.generator)
        indices = chosen.sort().values
        order = chosen.argsort().argsort()  # places in `indices`, in the order of the draw
        log_chance = log_chance_of(logits, chosen)
        if self.estimator == "reinforce":
            return Selection(indices=indices, order=order), log_chance
        # the chance to be above the best cell that was left out, given its noise
        left = noisy.scatter(0, chosen, -torch.inf).max() if count < len(logits) else noisy.min() - 1
        noise = (noisy - logits.detach())[indices]
        inclusion = torch.sigmoid(logits[indices] + noise - left)
        return Selection(indices=indices, gate=straight_through(inclusion), order=order), log_chance


def gumbel_top_k(logits: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Cells `[K]` in the order in which they are drawn, and the noisy logits `[N]`.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.training.estimators import gumbel_top_k
    >>> chosen, _ = gumbel_top_k(torch.tensor([50.0, 0.0, 100.0]), 2)
    >>> chosen.tolist()
    [2, 0]

    ```
    """
    where = logits.device if generator is None else generator.device
    uniform = torch.rand(logits.shape, generator=generator, device=where).to(logits.device)
    noisy = logits - torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))
    return noisy.argsort(descending=True, stable=True)[:count], noisy


def log_chance_of(logits: Tensor, chosen: Tensor) -> Tensor:
    """Logarithm of the chance to draw these cells `[K]` in this order, one after the other, from logits `[N]`."""
    left = torch.ones_like(logits, dtype=torch.bool).scatter(0, chosen, False)
    rest = torch.logsumexp(logits.masked_fill(~left, -torch.inf), dim=0)  # of all that was never drawn
    drawn = logits[chosen]
    # what was still there when each was drawn: itself, all drawn later, and the rest
    later = torch.logcumsumexp(drawn.flip(0), dim=0).flip(0)
    return (drawn - torch.logaddexp(later, rest)).sum()
