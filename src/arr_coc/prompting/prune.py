"""The shorter prompt: encode once, select, and hand back ordinary model arguments with true positions.

Nothing is patched: from transformers 5.19 on, models take encoded pictures (`mm_encoder_outputs`) and positions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from arr_coc.config import Budget, Grid
from arr_coc.families.family import Encoded, Family, Inputs, open_family
from arr_coc.gaze.plan import Gaze
from arr_coc.prompting.layout import Mode, Prompt, build, check_selections, read_prompt
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.resize import encode_small, resize_prompt, select_beside
from arr_coc.prompting.saccade import prepare_saccades
from arr_coc.prompting.settings import OnError, Prepared, Settings, check_selector, count_visual, embed_question
from arr_coc.runtime.stopwatch import OFF, Stopwatch
from arr_coc.selectors.contract import (
    InvalidSelectorError,
    LanguageSelector,
    LayerReader,
    PictureSelector,
    Selector,
    TokenSelector,
    VisualQuery,
)
from arr_coc.selectors.registry import selector_name
from arr_coc.selectors.rules import FullSelector

logger = logging.getLogger(__name__)


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
    images: Sequence[Image.Image | Tensor] | None = None,
    gaze: Gaze | None = None,
) -> dict[str, Any]:
    """Make ordinary arguments of a physically shorter prompt.

    Args:
        model (`nn.Module`): a supported model, also below PEFT's LoRA.
        inputs (`Mapping`): what its processor delivered, `labels` included if there are any.
        selector (`TokenSelector` or `PictureSelector`): decides which visual tokens stay.
        mode (`str`, *optional*, defaults to `"prune"`): `"prune"` drops tokens; `"weight"` keeps all and scales their
            embeddings by relevance, which needs a selector that gives an [`ARRCOCOutput`]; `"saccade"` encodes the
            whole picture small, and cells of full resolution only where it matters.
        budget (`int`, `float` or `"auto"`, *optional*): wins over the selector's own.
        query (`Sequence[Tensor]`, *optional*): ids of the question of each row, instead of finding it in the prompt.
        query_layers (`int`, *optional*, defaults to 0): take the question's words after this many layers of the
            language model, read by themselves, instead of from its embedding table; it binds "the *left* dog".
        chat (`ChatTokens`, *optional*): chat markers; Qwen's by default.
        on_error (`str`, *optional*, defaults to `"full"`): if the selection itself fails, `"full"` warns and keeps all
            tokens, `"raise"` raises. Invalid arguments always raise.
        images (`Sequence[PIL.Image.Image | Tensor]`, *optional*): for `"saccade"`, the original pictures in the order
            of the prompt, RGB, or `[3, H, W]` of bytes; cells are cut from them at their own resolution, and what the
            processor made of them only holds their places. By default cells are those that it delivered.
        gaze (`Gaze`, *optional*): for `"saccade"`, how tokens are shared between the whole and its parts.

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
    settings = Settings(mode, budget, query, query_layers, chat, on_error, images, gaze)
    return prepare_with_outputs(open_family(model), inputs, selector, settings).inputs


def prepare_with_outputs(
    family: Family, inputs: Inputs, selector: Selector, settings: Settings, watch: Stopwatch = OFF
) -> Prepared:
    """[`prepare`] for an opened family, with the selector's outputs."""
    check_selector(selector)
    if isinstance(selector, LanguageSelector):
        name = selector_name(selector)
        raise ValueError(f"{name!r} acts inside the language model, which no arguments can say; use `attach`")
    kinds = family.present(inputs)
    if not kinds:
        return Prepared(dict(inputs), [], [])
    if settings.mode == "saccade":
        return prepare_saccades(family, inputs, selector, settings, watch)
    with watch.stage("select"):
        prompt = read_prompt(family, inputs)
    picking, plans = _plan(selector, prompt, settings)
    if plans and not any(count for _, count in plans):
        with watch.stage("select"):
            resized = resize_prompt(family, inputs, prompt, [grid for grid, _ in plans])
        small = prepare_with_outputs(family, resized, FullSelector(), replace(settings, budget=None), watch)
        return small._replace(full=count_visual(prompt))
    with watch.stage("select"):
        words = embed_question(family, inputs, prompt, settings)
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
        total = count_visual(prompt)
        return Prepared(dict(inputs), [None] * len(prompt.spans), everything, total, total, str(error))
    with watch.stage("select"):
        built = build(family, inputs, prompt, positions, encoded, selections, chosen, settings.mode)
    outputs = [selection.output for selection in selections]
    kept = [(span.grid, cells) for span, cells in zip(prompt.spans, chosen, strict=True)]
    return Prepared(built, outputs, kept, count_visual(prompt), sum(map(len, chosen)))


def _plan(
    selector: TokenSelector | PictureSelector, prompt: Prompt, settings: Settings
) -> tuple[TokenSelector, list[tuple[Grid, int]]]:
    """What picks tokens, and for selectors that change the picture the grid and number for each of them."""
    if isinstance(selector, TokenSelector):
        return selector, []
    if settings.mode == "weight":
        raise ValueError("mode 'weight' scales by relevance, which this selector does not give; use 'arr-coc'")
    plans = [selector.plan(span.grid, settings.budget) for span in prompt.spans]
    return selector.beside or FullSelector(), plans


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
                deepstack=tuple(level[place].detach() for level in own.deepstack),
            )
        )
    return queries


def _part(read: LayerReader, place: slice) -> LayerReader:
    """A reader of one picture's cells."""
    return lambda layer: read(layer)[place]
