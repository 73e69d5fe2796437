"""The shorter prompt: encode once, select, and hand back ordinary model arguments with true positions.

Nothing is patched: from transformers 5.19 on, models take encoded pictures (`mm_encoder_outputs`) and positions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from arr_coc.config import Budget, cell_count, check_budget
from arr_coc.models.asking import ChatTokens, find_question
from arr_coc.models.family import Encoded, Family, Inputs, open_family
from arr_coc.selecting import ARRCOCOutput, Selection, TokenSelector, VisualQuery

logger = logging.getLogger(__name__)

Mode = Literal["prune", "weight"]
OnError = Literal["full", "raise"]


class _Span(NamedTuple):
    """One picture in the prompt: its kind, its row, its columns, and where its features begin."""

    kind: str
    row: int
    columns: Tensor  # [n], on the host
    offset: int


class Prepared(NamedTuple):
    """Arguments for the model, and what was seen on the way.

    Args:
        inputs (`dict`): for `model(**inputs)` or `model.generate(**inputs)`.
        outputs (`list[ARRCOCOutput | None]`): one per picture, in the order of the prompt's kinds.
    """

    inputs: dict[str, Any]
    outputs: list[ARRCOCOutput | None]


def prepare(
    model: nn.Module,
    inputs: Inputs,
    selector: TokenSelector,
    *,
    mode: Mode = "prune",
    budget: Budget | None = None,
    query: Sequence[Tensor] | None = None,
    chat: ChatTokens | None = None,
    on_error: OnError = "full",
) -> dict[str, Any]:
    """Make ordinary arguments of a physically shorter prompt.

    Args:
        model (`nn.Module`): a supported model, also below PEFT's LoRA.
        inputs (`Mapping`): what its processor delivered, `labels` included if there are any.
        selector (`TokenSelector`): decides which visual tokens stay.
        mode (`str`, *optional*, defaults to `"prune"`): `"prune"` drops tokens; `"weight"` keeps all and scales their
            embeddings by relevance, which needs a selector that gives an [`ARRCOCOutput`].
        budget (`int`, `float` or `"auto"`, *optional*): wins over the selector's own.
        query (`Sequence[Tensor]`, *optional*): ids of the question of each row, instead of finding it in the prompt.
        chat (`ChatTokens`, *optional*): chat markers; Qwen's by default.
        on_error (`str`, *optional*, defaults to `"full"`): if the selection itself fails, `"full"` warns and keeps all
            tokens, `"raise"` raises. Invalid arguments always raise.

    Returns:
        `dict`: for `model(**kwargs)` or `model.generate(**kwargs)`, once: beams change its features in place. A prompt
        without pictures comes back as it was.

    Example:

    ```python
    >>> from arr_coc import create_selector, prepare
    >>> inputs = processor(images=image, text=prompt, return_tensors="pt")  # doctest: +SKIP
    >>> out = model.generate(**prepare(model, inputs, create_selector("grid"), budget=0.25))  # doctest: +SKIP

    ```
    """
    settings = Settings(mode=mode, budget=budget, query=query, chat=chat, on_error=on_error)
    return prepare_with_outputs(open_family(model), inputs, selector, settings).inputs


@dataclass(frozen=True)
class Settings:
    """How [`prepare`] goes about it, checked once; see there."""

    mode: Mode = "prune"
    budget: Budget | None = None
    query: Sequence[Tensor] | None = None
    chat: ChatTokens | None = None
    on_error: OnError = "full"

    def __post_init__(self) -> None:
        if self.mode not in ("prune", "weight"):
            raise ValueError(f"`mode` must be 'prune' or 'weight', got {self.mode!r}")
        if self.on_error not in ("full", "raise"):
            raise ValueError(f"`on_error` must be 'full' or 'raise', got {self.on_error!r}")
        if self.budget is not None:
            check_budget(self.budget)


def prepare_with_outputs(family: Family, inputs: Inputs, selector: TokenSelector, settings: Settings) -> Prepared:
    """[`prepare`] for an opened family, with the selector's outputs."""
    kinds = family.present(inputs)
    if not kinds:
        return Prepared(dict(inputs), [])
    ids: Tensor = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    positions = family.positions(inputs, mask)  # [P, B, L], of the full prompt
    encoded = {kind: family.encode(inputs, kind) for kind in kinds}
    # planned on the host: ids are small, and one transfer beats one per row
    host_ids, host_mask = ids.cpu(), mask.bool().cpu()
    spans = [span for kind in kinds for span in _find_spans(family, kind, host_ids, host_mask, encoded[kind])]
    words = _embed_question(family, inputs, host_ids, host_mask, settings)
    queries = _make_queries(family, inputs, encoded, spans, words, selector.needs_picture)
    try:
        selections = selector.select(queries, 1.0 if settings.mode == "weight" else settings.budget)
    except Exception as error:
        if settings.on_error == "raise":
            raise
        logger.warning("selection failed, all visual tokens are kept: %s", error)
        return Prepared(dict(inputs), [None] * len(queries))
    prepared = _build(family, inputs, ids, mask, positions, encoded, spans, selections, settings.mode)
    return Prepared(prepared, [selection.output for selection in selections])


def _embed_question(
    family: Family, inputs: Inputs, host_ids: Tensor, host_mask: Tensor, settings: Settings
) -> list[Tensor]:
    """Embeddings `[Q, D]` of the words that each row asks."""
    ids: Tensor = inputs["input_ids"]
    query = settings.query
    if query is None:
        visual = torch.isin(host_ids, torch.tensor([family.token_id(kind) for kind in family.kinds]))
        labels = inputs.get("labels")
        host_labels = None if labels is None else labels.cpu()
        chat = settings.chat or ChatTokens()
        asked = find_question(host_ids, host_mask, visual, family.special_ids(), chat, host_labels)
        query = [host_ids[row][asked[row]] for row in range(ids.shape[0])]
    embed: Any = family.target.get_input_embeddings()  # type: ignore[operator]
    return [embed(row.to(ids.device)).detach() for row in query]


def _make_queries(
    family: Family,
    inputs: Inputs,
    encoded: dict[str, Encoded],
    spans: list[_Span],
    words: list[Tensor],
    needs_picture: bool,
) -> list[VisualQuery]:
    """One query per picture, in the order of the spans."""
    pictures: list[Tensor | None] = []
    for kind, own in encoded.items():
        shown = family.pictures(inputs, kind) if needs_picture else None
        pictures += [None] * len(own.grids) if shown is None else shown
    grids = [grid for own in encoded.values() for grid in own.grids]
    queries = []
    for span, grid, picture in zip(spans, grids, pictures, strict=True):
        features = encoded[span.kind].features[span.offset : span.offset + len(span.columns)].detach()
        queries.append(VisualQuery(features, grid, words[span.row].to(features.dtype), picture=picture))
    return queries


def _find_spans(family: Family, kind: str, ids: Tensor, mask: Tensor, encoded: Encoded) -> list[_Span]:
    """Where each picture's tokens stand; token by token, since a clip may be split into a run per frame."""
    rows, columns = ((ids == family.token_id(kind)) & mask).nonzero(as_tuple=True)
    total = sum(map(cell_count, encoded.grids))
    if len(rows) != total:
        raise ValueError(f"the prompt has {len(rows)} {kind} placeholders, the {kind}s have {total} tokens")
    spans, offset = [], 0
    for grid in encoded.grids:
        count = cell_count(grid)
        spans.append(_Span(kind, int(rows[offset]), columns[offset : offset + count], offset))
        offset += count
    return spans


def _build(
    family: Family,
    inputs: Inputs,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    encoded: dict[str, Encoded],
    spans: list[_Span],
    selections: list[Selection],
    mode: Mode,
) -> dict[str, Any]:
    device = ids.device
    kept_cells = _to_host([selection.indices for selection in selections])
    keep = mask.bool().cpu()
    for span, cells in zip(spans, kept_cells, strict=True):
        dropped = torch.ones(len(span.columns), dtype=torch.bool)
        dropped[cells] = False
        keep[span.row, span.columns[dropped]] = False
    lengths = keep.sum(dim=1)
    longest = int(lengths.max())
    # left padding: the prompt's last token stays last
    source = torch.zeros(ids.shape[0], longest, dtype=torch.long)
    valid = torch.arange(longest) >= (longest - lengths)[:, None]  # [B, L']
    source[valid] = keep.nonzero()[:, 1]
    source, valid = source.to(device), valid.to(device)
    short_mask = valid.to(mask.dtype)
    short_positions = positions.gather(2, source.expand(positions.shape[0], -1, -1)) * valid
    # decoding goes on where the full prompt ended
    next_position = (positions * mask.bool()).amax(dim=(0, 2)) + 1  # [B]
    passed = {name: value for name, value in inputs.items() if name not in family.consumed}
    passed |= {
        "input_ids": ids.gather(1, source).masked_fill(~valid, family.pad_id()),
        "attention_mask": short_mask,
        **family.place(short_mask, short_positions, next_position),
        "mm_encoder_outputs": _features(family, encoded, spans, selections, mode),
    }
    if inputs.get("labels") is not None:
        passed["labels"] = inputs["labels"].gather(1, source).masked_fill(~valid, -100)
    return passed


def _features(
    family: Family, encoded: dict[str, Encoded], spans: list[_Span], selections: list[Selection], mode: Mode
) -> dict[str, Any]:
    """Rows of the kept tokens, of every level, in the order of the prompt."""
    outputs = {}
    for kind, own in encoded.items():
        features: list[Tensor] = []
        levels: list[list[Tensor]] = [[] for _ in own.deepstack]
        for span, selection in zip(spans, selections, strict=True):
            if span.kind != kind:
                continue
            rows = span.offset + selection.indices
            scale = _scale(selection, mode)
            replaced = selection.deepstack or [level[rows] for level in own.deepstack]
            chosen = [own.features[rows] if selection.features is None else selection.features, *replaced]
            if scale is not None:
                chosen = [value * scale.to(value.dtype)[:, None] for value in chosen]
            features.append(chosen[0])
            for level, value in zip(levels, chosen[1:], strict=True):
                level.append(value)
        outputs[kind] = family.wrap(features, levels)
    return outputs


def _scale(selection: Selection, mode: Mode) -> Tensor | None:
    if mode == "prune":
        return selection.gate
    if selection.output is None:
        raise ValueError("mode 'weight' scales by relevance, which this selector does not give; use 'arr-coc'")
    return selection.output.relevance.flatten()


def _to_host(indices: list[Tensor]) -> list[Tensor]:
    """All index tensors in one transfer."""
    return list(torch.split(torch.cat(indices).cpu(), [len(index) for index in indices]))
