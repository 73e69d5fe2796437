"""The record of one call of a session: what was shortened, what was read, what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from arr_coc.config import PromptBudget
from arr_coc.gaze.loop import Look
from arr_coc.prompting.cache import Holding
from arr_coc.prompting.layout import Prompt
from arr_coc.prompting.prefix import Prefix
from arr_coc.prompting.shortening import Kept
from arr_coc.selectors.output import ARRCOCOutput


@dataclass(frozen=True)
class TokenCount:
    """Number of visual tokens in the full prompt, and of those the language model read."""

    full: int
    used: int


@dataclass(eq=False)
class Run:
    """The record of one call.

    Args:
        inputs (`dict`): arguments of the shorter prompt, for `model(**inputs)` or `model.generate(**inputs)`.
        mode (`str`): how the prompt was shortened.
        selector (`str`): the selector's name.
        budget (`int`, `float`, `"auto"` or `dict`, *optional*): the caller's budget, or the selector's default; None
            if all tokens stay.
        outputs (`list[ARRCOCOutput | None]`): the layer's output for each picture; None from other selectors.
        kept (`Sequence[tuple[Grid, ndarray]]`): for each picture, its grid and the cells whose tokens were read.
        full_counts, used_counts (`list[int]`): for each picture, its number of visual tokens in the full prompt, and of
            those read. If tokens are dropped inside the language model, the latter reach its later layers.
        encoded_counts (`list[int]`): for each picture, the tokens that the encoder made of it, whether they were read
            or not; those that were known from an earlier call count too.
        glanced_counts (`list[int]`): for each picture, the tokens that the language model read to choose what to read.
        glanced_layers (`int`, *optional*): in how many of its layers; None for all.
        question (`list[Tensor]`): token ids `[Q]` of each row's question.
        failure (`str`, *optional*): the error, if the selection failed and all tokens were kept.
        inside_layer (`int`, *optional*): the decoder layer after which tokens were dropped, if they were dropped inside
            the language model.
        milliseconds (`dict[str, float]`): time of each stage, if a stopwatch was given.
        result (`Any`): the model's output, if it was called.
        generated (`Tensor` of shape `[B, n]`, *optional*): the new tokens.
        prompt (`Prompt`, *optional*): the full prompt, if it has pictures.
        holding (`Holding`, *optional*): what a cache that this call fills holds; None if the prompt is as the caller
            passed it.
        begun (`Prefix`, *optional*): what the language model has read of the prompt to choose the rest of it, from
            where `generate` reads on.
        reused (`int`): first tokens of the shorter prompt that the language model had read before, in a row.
        rows (`list[int]`, *optional*): the rows of the batch that were generated; None for all.
        looks (`list[list[Look]]`): for each row the looks at its pictures, if there could be more than one.
    """

    inputs: dict[str, Any]
    mode: str = "prune"
    selector: str = ""
    budget: PromptBudget | None = None
    outputs: list[ARRCOCOutput | None] = field(default_factory=list)
    kept: Kept = field(default_factory=list)
    full_counts: list[int] = field(default_factory=list)
    used_counts: list[int] = field(default_factory=list)
    encoded_counts: list[int] = field(default_factory=list)
    glanced_counts: list[int] = field(default_factory=list)
    glanced_layers: int | None = None
    question: list[Tensor] = field(default_factory=list)
    failure: str | None = None
    inside_layer: int | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)
    result: Any = None
    generated: Tensor | None = None
    prompt: Prompt | None = field(default=None, repr=False)
    holding: Holding | None = field(default=None, repr=False)
    begun: Prefix | None = field(default=None, repr=False)
    reused: int = 0
    rows: list[int] | None = None
    looks: list[list[Look]] = field(default_factory=list)

    @property
    def full(self) -> int:
        """Number of visual tokens in the full prompt."""
        return sum(self.full_counts)

    @property
    def used(self) -> int:
        """Number of visual tokens that were read."""
        return sum(self.used_counts)

    @property
    def encoded(self) -> int:
        """Number of visual tokens that the encoder made, whether they were read or not."""
        return sum(self.encoded_counts)

    def processed(self, layers: int) -> list[int]:
        """Number of visual tokens that each of the language model's layers processed, to choose and to answer.

        Of several looks those of all; then the record must be that of one row.
        """
        everything, deep = self.inside_layer or 0, layers if self.glanced_layers is None else self.glanced_layers
        if len(self.looks) == 1 and self.looks[0]:  # of one row
            total = sum(look.tokens for look in self.looks[0])
            return [total - sum(self.glanced_counts) * (layer >= deep) for layer in range(layers)]
        read = [self.full if layer < everything else self.used for layer in range(layers)]
        return [count + sum(self.glanced_counts) * (layer < deep) for layer, count in enumerate(read)]

    def split(self, rows: int) -> list[Run]:
        """The record of each row of a batch, as if it had been asked alone; only the times are those of the batch."""
        places: list[list[int]] = [[] for _ in range(rows)]  # of the pictures of each row
        for place, span in enumerate([] if self.prompt is None else self.prompt.spans):
            places[span.row].append(place)
        return [
            Run(
                inputs={},
                mode=self.mode,
                selector=self.selector,
                budget=self.budget if own else None,
                outputs=[self.outputs[place] for place in own],
                kept=[self.kept[place] for place in own],
                full_counts=[self.full_counts[place] for place in own],
                used_counts=[self.used_counts[place] for place in own],
                encoded_counts=[self.encoded_counts[place] for place in own],
                glanced_counts=[self.glanced_counts[place] for place in own],
                glanced_layers=self.glanced_layers,
                question=self.question[row : row + 1] if own else [],
                failure=self.failure,
                inside_layer=self.inside_layer,
                milliseconds=self.milliseconds,
                generated=None if self.generated is None else self.generated[row : row + 1],
                looks=self.looks[row : row + 1],
            )
            for row, own in enumerate(places)
        ]
