"""The builder of the shorter prompt: which columns stay, whose positions they take, which features fill them.

It is planned on the host with numpy: ids are small, one transfer beats one per row, and torch would wake all its
threads for each of these steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.prompting.question import Bools, Ints
from arr_coc.prompting.settings import Mode
from arr_coc.selectors.contract import Selection


class Span(NamedTuple):
    """One picture in the prompt: its kind, its grid, its row, its columns `[N]`, and where its features begin."""

    kind: str
    grid: Grid
    row: int
    columns: Ints
    offset: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """The full prompt on the host.

    Args:
        ids, mask (`ndarray` of shape `[B, L]`): the tokens, and where they are not padding.
        spans (`list[Span]`): its pictures, kind by kind, in the order of the prompt.
        labels (`ndarray` of shape `[B, L]`, *optional*): what is to be learned.
    """

    ids: Ints
    mask: Bools
    spans: list[Span]
    labels: Ints | None = None

    @property
    def count(self) -> int:
        """How many visual tokens it has."""
        return sum(len(span.columns) for span in self.spans)

    def last_columns(self) -> Ints:
        """Column `[B]` of the last token of each row."""
        columns: Ints = self.mask.shape[1] - 1 - self.mask[:, ::-1].argmax(axis=1)
        return columns


def read_prompt(family: Family, inputs: Inputs) -> Prompt:
    """Find the pictures of a prompt, before the encoder keeps the device busy."""
    if inputs.get("input_ids") is None:
        raise ValueError("selecting tokens needs `input_ids`; `inputs_embeds` do not say where the pictures are")
    missing = [name for name in family.needs(inputs) if inputs.get(name) is None]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing; pass all that the processor gave")
    ids = inputs["input_ids"].cpu().numpy()
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if mask is None and len(ids) > 1 and (ids == family.pad_id()).any():
        raise ValueError("a batch with padding needs its `attention_mask`; pass what the processor gave")
    seen = np.ones(ids.shape, dtype=bool) if mask is None else mask.bool().cpu().numpy()
    spans = [span for kind in family.present(inputs) for span in _find_spans(family, kind, inputs, ids, seen)]
    return Prompt(ids, seen, spans, None if labels is None else labels.cpu().numpy())


def _find_spans(family: Family, kind: str, inputs: Inputs, ids: Ints, mask: Bools) -> list[Span]:
    """Where each picture's tokens stand; token by token, since a clip may be split into a run per frame."""
    rows, columns = ((ids == family.token_id(kind)) & mask).nonzero()
    grids = family.grids(inputs, kind)
    total = sum(map(cell_count, grids))
    if len(rows) != total:
        raise ValueError(f"the prompt has {len(rows)} {kind} placeholders, the {kind}s have {total} tokens")
    spans, offset = [], 0
    for grid in grids:
        count = cell_count(grid)
        if rows[offset] != rows[offset + count - 1]:
            raise ValueError(
                f"row {int(rows[offset])} of the prompt has fewer {kind} placeholders than its {kind}s have tokens"
            )
        spans.append(Span(kind, grid, int(rows[offset]), columns[offset : offset + count], offset))
        offset += count
    return spans


def choose_columns(prompt: Prompt, kept: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns `[B, L']` of the full prompt that each token of the shorter one comes from, and where it is not padding.

    Args:
        prompt (`Prompt`): the full one.
        kept (`Sequence[ndarray]`): for each span the cells `[K]` whose places its tokens take, in the order of the
            shorter prompt; tokens stay within the run of their frame.
        device (`torch.device`): where the result goes.
    """
    text = prompt.mask.copy()
    for span in prompt.spans:
        text[span.row, span.columns] = False
    columns = [[line.nonzero()[0]] for line in text]
    order = [[line[0].astype(np.float64)] for line in columns]
    for span, cells in zip(prompt.spans, kept, strict=True):
        a_frame = span.grid[1] * span.grid[2]
        first = span.columns[cells // a_frame * a_frame]  # where the run of the frame begins
        columns[span.row].append(span.columns[cells])
        order[span.row].append(first + np.arange(len(cells)) / (len(cells) + 1))
    lines = [
        np.concatenate(line)[np.concatenate(keys).argsort(kind="stable")]
        for line, keys in zip(columns, order, strict=True)
    ]
    longest = max(map(len, lines))
    # left padding: the prompt's last token stays last
    source = np.stack([np.pad(line, (longest - len(line), 0)) for line in lines])
    valid = np.arange(longest) >= longest - np.array([len(line) for line in lines])[:, None]
    return torch.from_numpy(source).to(device), torch.from_numpy(valid).to(device)


def check_selections(spans: Sequence[Span], selections: Sequence[Selection]) -> list[Ints]:
    """The chosen cells on the host, in one transfer; what breaks the contract is refused.

    Cells ascend, but with `features` of their own only within each frame's run.
    """
    if len(selections) != len(spans):
        raise ValueError(f"the selector gave {len(selections)} selections for {len(spans)} pictures")
    if any(selection.indices.dtype != torch.long or selection.indices.ndim != 1 for selection in selections):
        raise ValueError("`Selection.indices` must be a one-dimensional tensor of int64")
    ends = np.cumsum([len(selection.indices) for selection in selections])[:-1]
    chosen = np.split(torch.cat([selection.indices for selection in selections]).cpu().numpy(), ends)
    for span, selection, cells in zip(spans, selections, chosen, strict=True):
        total, a_frame = len(span.columns), span.grid[1] * span.grid[2]
        if not len(cells) or cells.min() < 0 or cells.max() >= total:
            raise ValueError(f"`Selection.indices` must name at least one of {total} cells, and none beyond them")
        order = cells if selection.features is None else cells // a_frame
        if (np.diff(order) < (selection.features is None)).any():
            raise ValueError("`Selection.indices` must ascend, each cell once")
        rows = [selection.features, selection.gate, *(selection.deepstack or ())]
        if any(row is not None and len(row) != len(cells) for row in rows):
            raise ValueError(f"a selection of {len(cells)} cells must have as many features, levels and gates")
    return chosen


def build(
    family: Family,
    inputs: Inputs,
    prompt: Prompt,
    positions: Tensor,
    encoded: dict[str, Encoded],
    selections: Sequence[Selection],
    chosen: Sequence[Ints],
    mode: Mode,
) -> dict[str, Any]:
    """Arguments of the shorter prompt, given the positions `[P, B, L]` of the full one."""
    ids: Tensor = inputs["input_ids"]
    source, valid = choose_columns(prompt, chosen, ids.device)
    short_mask = valid.long()
    short_positions = positions.gather(2, source.expand(positions.shape[0], -1, -1)) * valid
    mask = inputs.get("attention_mask")
    # decoding goes on where the full prompt ended
    next_position = (positions if mask is None else positions * mask.bool()).amax(dim=(0, 2)) + 1  # [B]
    passed = {name: value for name, value in inputs.items() if name not in family.consumed}
    passed |= {
        "input_ids": ids.gather(1, source).masked_fill(~valid, family.pad_id()),
        "attention_mask": short_mask,
        **family.place(short_mask, short_positions, next_position),
        "mm_encoder_outputs": _features(family, encoded, prompt.spans, selections, mode),
    }
    if inputs.get("labels") is not None:
        passed["labels"] = inputs["labels"].gather(1, source).masked_fill(~valid, -100)
    return passed


def encode_full(family: Family, inputs: Inputs, prompt: Prompt) -> dict[str, Any]:
    """Arguments of the full prompt as they are, with the pictures encoded instead of their pixels."""
    features = {}
    for kind in family.present(inputs):
        counts = [len(span.columns) for span in prompt.spans if span.kind == kind]
        encoded = family.encode(inputs, kind)
        levels = [list(torch.split(level, counts)) for level in encoded.deepstack]
        features[kind] = family.wrap(list(torch.split(encoded.features, counts)), levels)
    pixels = set(family.pixel_names.values())
    passed = {name: value for name, value in inputs.items() if name not in pixels}
    return {**passed, **family.completed(inputs), "mm_encoder_outputs": features}


def _features(
    family: Family, encoded: dict[str, Encoded], spans: Sequence[Span], selections: Sequence[Selection], mode: Mode
) -> dict[str, Any]:
    """Rows of the kept tokens, of every level, in the order of the prompt."""
    outputs = {}
    for kind, own in encoded.items():
        features: list[Tensor] = []
        levels: list[list[Tensor]] = [[] for _ in own.deepstack]
        for span, selection in zip(spans, selections, strict=True):
            if span.kind != kind:
                continue
            rows: Tensor | slice = span.offset + selection.indices
            if len(selection.indices) == len(span.columns):  # all of them: nothing to copy
                rows = slice(span.offset, span.offset + len(span.columns))
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
    if mode != "weight":
        return selection.gate
    if selection.output is None:
        raise ValueError("mode 'weight' scales by relevance, which this selector does not give; use 'arr-coc'")
    return selection.output.relevance.flatten()
