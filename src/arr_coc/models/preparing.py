"""The shorter prompt: encode once, select, and hand back ordinary model arguments with true positions.

Nothing is patched: from transformers 5.19 on, models take encoded pictures (`mm_encoder_outputs`) and positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from arr_coc.baselines import FullSelector
from arr_coc.config import Budget, Grid, check_budget
from arr_coc.models.asking import ChatTokens, Ints, find_question
from arr_coc.models.building import Mode, Prompt, build, check_selections, read_prompt
from arr_coc.models.family import Encoded, Family, Inputs, open_family
from arr_coc.models.resizing import encode_small, resize_prompt, select_beside
from arr_coc.models.stages import OFF, Stopwatch
from arr_coc.selecting import (
    ARRCOCOutput,
    InvalidSelectorError,
    PictureSelector,
    Selector,
    TokenSelector,
    VisualQuery,
)

logger = logging.getLogger(__name__)

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


def prepare(
    model: nn.Module,
    inputs: Inputs,
    selector: Selector,
    *,
    mode: Mode = "prune",
    budget: Budget | None = None,
    query: Sequence[Tensor] | None = None,
    query_layers: int = 0,
    chat: ChatTokens | None = None,
    on_error: OnError = "full",
) -> dict[str, Any]:
    """Make ordinary arguments of a physically shorter prompt.

    Args:
        model (`nn.Module`): a supported model, also below PEFT's LoRA.
        inputs (`Mapping`): what its processor delivered, `labels` included if there are any.
        selector (`TokenSelector` or `PictureSelector`): decides which visual tokens stay.
        mode (`str`, *optional*, defaults to `"prune"`): `"prune"` drops tokens; `"weight"` keeps all and scales their
            embeddings by relevance, which needs a selector that gives an [`ARRCOCOutput`].
        budget (`int`, `float` or `"auto"`, *optional*): wins over the selector's own.
        query (`Sequence[Tensor]`, *optional*): ids of the question of each row, instead of finding it in the prompt.
        query_layers (`int`, *optional*, defaults to 0): take the question's words after this many layers of the
            language model, read by themselves, instead of from its embedding table; it binds "the *left* dog".
        chat (`ChatTokens`, *optional*): chat markers; Qwen's by default.
        on_error (`str`, *optional*, defaults to `"full"`): if the selection itself fails, `"full"` warns and keeps all
            tokens, `"raise"` raises. Invalid arguments always raise.

    Returns:
        `dict`: for `model(**kwargs)` or `model.generate(**kwargs)`, once and before the next `prepare`: beams change
        its features in place, and where decoding goes on is kept in the model, as in its own `forward`. LLaVA needs a
        cache to decode (no `use_cache=False`). A prompt without pictures comes back as it was.

    Example:

    ```python
    >>> from arr_coc import create_selector, prepare
    >>> inputs = processor(images=image, text=prompt, return_tensors="pt")  # doctest: +SKIP
    >>> out = model.generate(**prepare(model, inputs, create_selector("grid"), budget=0.25))  # doctest: +SKIP

    ```
    """
    settings = Settings(mode=mode, budget=budget, query=query, query_layers=query_layers, chat=chat, on_error=on_error)
    return prepare_with_outputs(open_family(model), inputs, selector, settings).inputs


@dataclass(frozen=True)
class Settings:
    """How [`prepare`] goes about it, checked once; see there."""

    mode: Mode = "prune"
    budget: Budget | None = None
    query: Sequence[Tensor] | None = None
    query_layers: int = 0
    chat: ChatTokens | None = None
    on_error: OnError = "full"

    def __post_init__(self) -> None:
        if self.mode not in ("prune", "weight"):
            raise ValueError(f"`mode` must be 'prune' or 'weight', got {self.mode!r}")
        if self.on_error not in ("full", "raise"):
            raise ValueError(f"`on_error` must be 'full' or 'raise', got {self.on_error!r}")
        if isinstance(self.query_layers, bool) or not isinstance(self.query_layers, int) or self.query_layers < 0:
            raise ValueError(f"`query_layers` must be a whole number of at least 0, got {self.query_layers!r}")
        if self.budget is not None:
            check_budget(self.budget)


def prepare_with_outputs(
    family: Family, inputs: Inputs, selector: Selector, settings: Settings, watch: Stopwatch = OFF
) -> Prepared:
    """[`prepare`] for an opened family, with the selector's outputs."""
    check_selector(selector)
    kinds = family.present(inputs)
    if not kinds:
        return Prepared(dict(inputs), [], [])
    with watch.stage("select"):
        prompt = read_prompt(family, inputs)
    picking, plans = _plan(selector, prompt, settings)
    if plans and not any(count for _, count in plans):
        with watch.stage("select"):
            resized = resize_prompt(family, inputs, prompt, [grid for grid, _ in plans])
        small = prepare_with_outputs(family, resized, FullSelector(), replace(settings, budget=None), watch)
        return small._replace(full=_count(prompt))
    with watch.stage("select"):
        words = _embed_question(family, inputs, prompt, settings)
        positions = family.positions(inputs)
    with watch.stage("encode"):
        encoded = {kind: family.encode(inputs, kind, picking.encoder_layers) for kind in kinds}
        overview = encode_small(family, inputs, prompt, [grid for grid, _ in plans]) if plans else {}
    try:
        with watch.stage("select"):
            queries = _make_queries(family, inputs, encoded, prompt, words, picking.needs_picture)
            picking.check(queries)
            if plans:
                selections = select_beside(prompt, encoded, overview, picking, plans, queries)
            else:
                selections = picking.select(queries, 1.0 if settings.mode == "weight" else settings.budget)
            chosen = check_selections(prompt.spans, selections)
    except (InvalidSelectorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if settings.on_error == "raise":
            raise
        logger.warning("selection failed, all visual tokens are kept: %s", error)
        everything = [(span.grid, np.arange(len(span.columns))) for span in prompt.spans]
        total = _count(prompt)
        return Prepared(dict(inputs), [None] * len(prompt.spans), everything, total, total, str(error))
    with watch.stage("select"):
        built = build(family, inputs, prompt, positions, encoded, selections, chosen, settings.mode)
    outputs = [selection.output for selection in selections]
    kept = [(span.grid, cells) for span, cells in zip(prompt.spans, chosen, strict=True)]
    return Prepared(built, outputs, kept, _count(prompt), sum(map(len, chosen)))


def check_selector(selector: object) -> None:
    """Refuse what is no selector."""
    if not isinstance(selector, TokenSelector | PictureSelector):
        given = f"the class {selector.__name__}" if isinstance(selector, type) else repr(selector)
        raise TypeError(f"`selector` must be a selector, got {given}; make one with create_selector(name)")


def _plan(selector: Selector, prompt: Prompt, settings: Settings) -> tuple[TokenSelector, list[tuple[Grid, int]]]:
    """What picks tokens, and for selectors that change the picture the grid and number for each of them."""
    if isinstance(selector, TokenSelector):
        return selector, []
    if settings.mode == "weight":
        raise ValueError("mode 'weight' scales by relevance, which this selector does not give; use 'arr-coc'")
    plans = [selector.plan(span.grid, settings.budget) for span in prompt.spans]
    return selector.beside or FullSelector(), plans


def _count(prompt: Prompt) -> int:
    """Visual tokens of a prompt."""
    return sum(len(span.columns) for span in prompt.spans)


def _embed_question(family: Family, inputs: Inputs, prompt: Prompt, settings: Settings) -> list[Tensor]:
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


def _make_queries(
    family: Family,
    inputs: Inputs,
    encoded: dict[str, Encoded],
    prompt: Prompt,
    words: list[Tensor],
    needs_picture: bool,
) -> list[VisualQuery]:
    """One query per picture, in the order of the spans."""
    pictures: list[Tensor | None] = []
    for kind in encoded:
        count = sum(span.kind == kind for span in prompt.spans)
        shown = family.pictures(inputs, kind) if needs_picture else None
        pictures += [None] * count if shown is None else shown
    queries = []
    for span, picture in zip(prompt.spans, pictures, strict=True):
        own = encoded[span.kind]
        place = slice(span.offset, span.offset + len(span.columns))
        features = own.features[place].detach()
        queries.append(
            VisualQuery(
                features,
                span.grid,
                words[span.row].to(features),
                picture=picture,
                attention_reader=None if own.reader is None else _part(own.reader.attention, place),
                key_reader=None if own.reader is None else _part(own.reader.keys, place),
            )
        )
    return queries


def _part(read: Callable[[int], Tensor], place: slice) -> Callable[[int], Tensor]:
    """A reader of one picture's cells."""
    return lambda layer: read(layer)[place]
