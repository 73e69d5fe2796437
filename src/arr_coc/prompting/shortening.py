"""The steps from a full prompt to a shorter one, which every mode takes in the same order.

`read` -> `encode` -> `choose` -> `encode_chosen` -> `build`. Only `choose` asks the selector; whoever calls the steps
decides what happens if it fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Family, Inputs
from arr_coc.prompting.layout import Prompt
from arr_coc.prompting.question import Ints, embed_question, find_query
from arr_coc.prompting.settings import Settings
from arr_coc.selectors.output import ARRCOCOutput

Kept = list[tuple[Grid, Ints]]


class Shortened(NamedTuple):
    """A shorter prompt.

    Args:
        inputs (`dict`): ordinary arguments for `model(**inputs)` or `model.generate(**inputs)`.
        outputs (`list[ARRCOCOutput | None]`): what a layer saw, one per picture, in the order of the prompt's kinds.
        kept (`list[tuple[Grid, ndarray]]`): for each picture its grid and the cells whose tokens stayed.
        full, used (`int`): visual tokens of the full prompt, and of this one.
    """

    inputs: dict[str, Any]
    outputs: list[ARRCOCOutput | None]
    kept: Kept
    full: int
    used: int


class Shortening(ABC):
    """One prompt on its way to a shorter one; a subclass for each way.

    Args:
        family (`Family`): the opened model.
        inputs (`Mapping`): what its processor delivered, with pictures.
        settings (`Settings`): how.
    """

    # what is read if the selection fails
    fallback: str = "all visual tokens are kept"
    prompt: Prompt  # the full prompt, from `read` on

    def __init__(self, family: Family, inputs: Inputs, settings: Settings) -> None:
        self.family, self.inputs, self.settings = family, inputs, settings
        self.question: list[Tensor] = []  # ids [Q] of the words that each row asks

    @abstractmethod
    def read(self) -> None:
        """Find pictures, question and positions, before the encoder keeps the device busy."""

    @abstractmethod
    def encode(self) -> None:
        """Run the vision encoder."""

    @abstractmethod
    def choose(self) -> None:
        """Ask the selector; what it answers is checked."""

    def encode_chosen(self) -> None:  # noqa: B027  (most have encoded everything already)
        """Encode what was chosen, where that was not encoded before."""

    @abstractmethod
    def build(self) -> Shortened:
        """Lay out the shorter prompt."""

    def keep_all(self) -> Shortened:
        """The full prompt, as it was."""
        kept: Kept = [(span.grid, np.arange(cell_count(span.grid))) for span in self.prompt.spans]
        total = self.prompt.count
        return Shortened(dict(self.inputs), [None] * len(kept), kept, total, total)

    def _embed_question(self, inputs: Inputs, prompt: Prompt) -> list[Tensor]:
        """Embeddings `[Q, D]` of the words that each row asks."""
        self.question = find_query(
            self.family, prompt.ids, prompt.mask, prompt.labels, self.settings.query, self.settings.chat
        )
        return embed_question(self.family, self.question, inputs["input_ids"].device, self.settings.query_layers)
