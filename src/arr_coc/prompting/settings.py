"""What every way to prepare a prompt needs: its settings, its result, the words of the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arr_coc.config import Budget, Grid, check_budget
from arr_coc.families.family import Family, Inputs
from arr_coc.gaze.plan import Gaze
from arr_coc.prompting.layout import Mode, Prompt
from arr_coc.prompting.question import ChatTokens, Ints, find_question
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.output import ARRCOCOutput

OnError = Literal["full", "raise"]


class Prepared(NamedTuple):
    """Arguments for the model, and what was seen on the way.

    Args:
        inputs (`dict`): for `model(**inputs)` or `model.generate(**inputs)`.
        outputs (`list[ARRCOCOutput | None]`): one per picture, in the order of the prompt's kinds.
        kept (`list[tuple[Grid, ndarray]]`): for each picture its grid and the cells whose tokens stayed.
        full, used (`int`): visual tokens of the full prompt, and of this one.
        failure (`str`, *optional*): why all tokens were kept, if the selection failed.
    """

    inputs: dict[str, Any]
    outputs: list[ARRCOCOutput | None]
    kept: list[tuple[Grid, Ints]]
    full: int = 0
    used: int = 0
    failure: str | None = None


@dataclass(frozen=True)
class Settings:
    """How [`prepare`] goes about it, checked once; see there."""

    mode: Mode = "prune"
    budget: Budget | None = None
    query: Sequence[Tensor] | None = None
    query_layers: int = 0
    chat: ChatTokens | None = None
    on_error: OnError = "full"
    images: Sequence[Image.Image | Tensor] | None = None
    gaze: Gaze | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if self.mode != "saccade" and (self.images is not None or self.gaze is not None):
            raise ValueError(f"`images` and `gaze` belong to mode 'saccade', got mode {self.mode!r}")
        if self.on_error not in ("full", "raise"):
            raise ValueError(f"`on_error` must be 'full' or 'raise', got {self.on_error!r}")
        if isinstance(self.query_layers, bool) or not isinstance(self.query_layers, int) or self.query_layers < 0:
            raise ValueError(f"`query_layers` must be a whole number of at least 0, got {self.query_layers!r}")
        if self.budget is not None:
            check_budget(self.budget)


def check_selector(selector: object) -> None:
    """Refuse what is no selector."""
    if not isinstance(selector, Selector):
        given = f"the class {selector.__name__}" if isinstance(selector, type) else repr(selector)
        raise TypeError(f"`selector` must be a selector, got {given}; make one with create_selector(name)")


def count_visual(prompt: Prompt) -> int:
    """Visual tokens of a prompt."""
    return sum(len(span.columns) for span in prompt.spans)


def embed_question(family: Family, inputs: Inputs, prompt: Prompt, settings: Settings) -> list[Tensor]:
    """Embeddings `[Q, D]` of the words that each row asks."""
    device, rows = inputs["input_ids"].device, len(prompt.ids)
    query = settings.query
    if query is None:
        visual = np.isin(prompt.ids, [family.token_id(kind) for kind in family.kinds])
        chat = settings.chat or ChatTokens()
        asked = find_question(prompt.ids, prompt.mask, visual, family.special_ids(), chat, prompt.labels)
        query = [torch.from_numpy(prompt.ids[row][asked[row]]) for row in range(rows)]
    elif len(query) != rows:
        raise ValueError(f"`query` must have the ids of one question per row, got {len(query)} for {rows} rows")
    elif any(not isinstance(row, Tensor) or row.ndim != 1 or not len(row) for row in query):
        raise ValueError("`query` must have the ids of each question as a one-dimensional tensor, and at least one id")
    with torch.no_grad():
        return [family.embed_words(row.to(device), settings.query_layers) for row in query]
