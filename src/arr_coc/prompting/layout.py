"""The layout of a prompt: where its pictures are, which columns stay, and with which positions and features.

It is computed on the host with numpy: ids are small, one transfer is cheaper than one per row, and torch would start
all its threads for each of these small steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.prompting.cache import Holding, Role
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.question import Bools, Ints
from arr_coc.prompting.settings import Mode
from arr_coc.runtime.tensors import upload
from arr_coc.selectors.contract import Selection


class Span(NamedTuple):
    """One picture in the prompt: kind, grid, row, columns `[N]`, and the offset of its features."""

    kind: str
    grid: Grid
    row: int
    columns: Ints
    offset: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """The full prompt on the host.

    Args:
        ids (`ndarray` of shape `[B, L]`): the tokens.
        mask (`ndarray` of shape `[B, L]`): False where padded.
        spans (`list[Span]`): its pictures, images before clips, each kind in the order of the prompt.
        labels (`ndarray` of shape `[B, L]`, *optional*): the tokens to learn.
        inputs (`dict`): the inputs that it was read from, all but pixels on the host.
    """

    ids: Ints
    mask: Bools
    spans: list[Span]
    labels: Ints | None = None
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """Number of visual tokens of each picture."""
        return [len(span.columns) for span in self.spans]

    def last_columns(self) -> Ints:
        """Column `[B]` of the last token of each row."""
        columns: Ints = self.mask.shape[1] - 1 - self.mask[:, ::-1].argmax(axis=1)
        return columns


def read_prompt(family: Family, inputs: Inputs) -> Prompt:
    """Find the pictures of a prompt."""
    if inputs.get("input_ids") is None:
        raise ValueError("selecting tokens needs `input_ids`: `inputs_embeds` do not show where pictures are; pass ids")
    missing = [name for name in family.needs(inputs) if inputs.get(name) is None]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing; pass all of the processor's output")
    # the device is idle still: later transfers would wait for it
    described = {"input_ids", "attention_mask", "labels", *family.consumed} - {*family.pixel_names.values()}
    on_host = {name: value.cpu() for name, value in inputs.items() if name in described and isinstance(value, Tensor)}
    inputs = {**inputs, **on_host}
    ids = inputs["input_ids"].numpy()
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if mask is None and len(ids) > 1 and (ids == family.pad_id()).any():
        raise ValueError("a batch with padding needs its `attention_mask`; pass all of the processor's output")
    valid = np.ones(ids.shape, dtype=bool) if mask is None else mask.bool().numpy()
    spans = [span for kind in family.present(inputs) for span in _find_spans(family, kind, inputs, ids, valid)]
    return Prompt(ids, valid, spans, None if labels is None else labels.numpy(), inputs)


def _find_spans(family: Family, kind: str, inputs: Inputs, ids: Ints, mask: Bools) -> list[Span]:
    """The columns of each picture's tokens, one by one: a clip may be split into a run of tokens per frame."""
    rows, columns = ((ids == family.token_id(kind)) & mask).nonzero()
    grids = family.grids(inputs, kind)
    total = sum(map(cell_count, grids))
    if len(rows) != total:
        raise ValueError(
            f"the prompt has {len(rows)} {kind} placeholders, but its {kind}s have {total} tokens; "
            "make both with one call of the processor"
        )
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
    """For each token of the shorter prompt, its column in the full one `[B, L']`, and a mask that is False at padding.

    Args:
        prompt (`Prompt`): the full prompt.
        kept (`Sequence[ndarray]`): for each span the cells `[K]` whose places its tokens take, in the order of the
            shorter prompt; tokens stay within the run of their frame.
        device (`torch.device`): device of the result.
    """
    if prompt.mask.all() and all(
        np.array_equal(cells, np.arange(len(span.columns))) for span, cells in zip(prompt.spans, kept, strict=True)
    ):  # nothing leaves
        source = np.tile(np.arange(prompt.mask.shape[1]), (len(prompt.mask), 1))
        return upload(torch.from_numpy(source), device), upload(torch.from_numpy(prompt.mask.copy()), device)
    text = prompt.mask.copy()
    for span in prompt.spans:
        text[span.row, span.columns] = False
    columns = [[row.nonzero()[0]] for row in text]  # for each row its text, then the tokens of each picture
    sort_keys = [[row[0].astype(np.float64)] for row in columns]
    for span, cells in zip(prompt.spans, kept, strict=True):
        frame_size = span.grid[1] * span.grid[2]
        first = span.columns[cells // frame_size * frame_size]  # start of the frame's run
        columns[span.row].append(span.columns[cells])
        # fractions below 1 keep the tokens in this order, and before the text that follows
        sort_keys[span.row].append(first + np.arange(len(cells)) / (len(cells) + 1))
    rows = [
        np.concatenate(row)[np.concatenate(keys).argsort(kind="stable")]
        for row, keys in zip(columns, sort_keys, strict=True)
    ]
    longest = max(map(len, rows))
    # left padding: the prompt's last token stays last
    source = np.stack([np.pad(row, (longest - len(row), 0)) for row in rows])
    valid = np.arange(longest) >= longest - np.array([len(row) for row in rows])[:, None]
    return upload(torch.from_numpy(source), device), upload(torch.from_numpy(valid), device)


def check_selections(spans: Sequence[Span], selections: Sequence[Selection]) -> list[Ints]:
    """Check selections and return their cells on the host, in one transfer.

    Cells must ascend. With replacement `features`, only their frames must.
    """
    if len(selections) != len(spans):
        raise ValueError(
            f"the selector returned {len(selections)} selections for {len(spans)} pictures; return one for each"
        )
    if any(selection.indices.dtype != torch.long or selection.indices.ndim != 1 for selection in selections):
        raise ValueError("`Selection.indices` must be a one-dimensional tensor of int64")
    ends = np.cumsum([len(selection.indices) for selection in selections])[:-1]
    chosen = np.split(torch.cat([selection.indices for selection in selections]).cpu().numpy(), ends)
    for span, selection, cells in zip(spans, selections, chosen, strict=True):
        total, frame_size = len(span.columns), span.grid[1] * span.grid[2]
        if not len(cells) or cells.min() < 0 or cells.max() >= total:
            raise ValueError(f"`Selection.indices` must name at least one of {total} cells, and none beyond them")
        order = cells if selection.features is None else cells // frame_size
        if (np.diff(order) < (selection.features is None)).any():
            raise ValueError("`Selection.indices` must ascend, each cell once")
        rows = [selection.features, selection.gate, *(selection.deepstack or ())]
        if any(row is not None and len(row) != len(cells) for row in rows):
            raise ValueError(f"a selection of {len(cells)} cells needs as many rows in features, deepstack and gate")
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
    gazes: Sequence[Gazed] | None = None,
) -> tuple[dict[str, Any], Holding]:
    """The model's arguments for the shorter prompt, and what a cache that it fills will hold.

    Args:
        family (`Family`): the opened model.
        inputs (`Mapping`): the inputs of the call; what describes the full prompt is taken from `prompt` instead.
        prompt (`Prompt`): the full prompt.
        positions (`Tensor` of shape `[P, B, L]`): its positions, on the host.
        encoded, selections, chosen: for each kind what was encoded, and for each picture what was selected of it, and
            the cells `[K]` whose columns the selected tokens take.
        mode (`str`): how the prompt is shortened.
        gazes (`Sequence[Gazed]`, *optional*): for each picture the cells whose places its tokens take instead.
    """
    device = inputs["input_ids"].device
    source, valid = choose_columns(prompt, chosen, torch.device("cpu"))
    # decoding continues after the last position of the full prompt
    mask = torch.from_numpy(prompt.mask)
    next_position = (positions * mask).amax(dim=(0, 2)) + 1  # [B]
    roles, cells = _describe(prompt, [0] * len(chosen) if gazes is None else [gazed.gestalt for gazed in gazes])
    described = [torch.from_numpy(prompt.ids), roles, cells]
    padding = [family.pad_id(), int(Role.PADDING), -1]
    if prompt.labels is not None:
        described, padding = [*described, torch.from_numpy(prompt.labels)], [*padding, -100]
    full = torch.cat([torch.stack(described), positions])  # [n, B, L]
    fill = torch.tensor([*padding, *[0] * len(positions)])[:, None, None]
    short = torch.where(valid, full.gather(2, source.expand(len(full), -1, -1)), fill)
    short = upload(torch.cat([valid.long()[None], short]), device)  # [n + 1, B, L'], in one transfer
    short_mask, short_ids, short_roles, short_cells = short[:4]
    short_positions = short[-len(positions) :]
    if gazes is not None:
        _place(gazes, prompt, positions, source, short_positions, short_cells)
    next_position = upload(next_position, device)
    arguments = {name: value for name, value in inputs.items() if name not in family.consumed}
    arguments |= {
        "input_ids": short_ids,
        "attention_mask": short_mask,
        **family.place(short_mask, short_positions, next_position),
        "mm_encoder_outputs": _gather_features(family, encoded, prompt.spans, selections, mode),
    }
    if prompt.labels is not None:
        arguments["labels"] = short[4]
    ids: Tensor = inputs["input_ids"]
    holding = Holding(
        ids, short_ids, short_mask, short_positions, next_position, short_roles, short_cells, not bool(valid.all())
    )
    return arguments, holding


class Gazed(NamedTuple):
    """The cells `[k]` of a grid whose places the tokens of a picture take; the first `gestalt` are its gestalt's."""

    cells: Tensor
    grid: Grid
    gestalt: int


def _place(
    gazes: Sequence[Gazed], prompt: Prompt, positions: Tensor, source: Tensor, placed: Tensor, cells: Tensor
) -> None:
    """Write the positions `[3, B, L']` of cells, and the cells `[B, L']`, into the shorter prompt on the device.

    Only the device knows which cells they are. `positions` `[3, B, L]` are those of the full prompt and `source`
    `[B, L']` its columns, both on the host.
    """
    for gazed, span in zip(gazes, prompt.spans, strict=True):
        count, width = len(gazed.cells), gazed.grid[2]
        begin = int(
            (source[span.row] == int(span.columns[0])).nonzero()[-1, 0]
        )  # padding, on the left, has a column too
        run = slice(begin, begin + count)
        chosen = gazed.cells.to(placed.device)
        first = positions[:, span.row, int(span.columns[0])].tolist()
        for axis, place in enumerate((0 * chosen, chosen // width, chosen % width)):
            placed[axis, span.row, run] = place + first[axis]
        cells[span.row, run] = chosen


def _describe(prompt: Prompt, gestalt: Sequence[int]) -> Tensor:
    """For each column of a prompt its role, and its cell if it is a visual token, else -1: `[2, B, L]`."""
    roles = np.where(prompt.mask, int(Role.TEXT), int(Role.PADDING))
    cells = np.full(prompt.mask.shape, -1)
    for span, count in zip(prompt.spans, gestalt, strict=True):
        roles[span.row, span.columns] = Role.CELL
        roles[span.row, span.columns[:count]] = Role.GESTALT
        cells[span.row, span.columns] = np.arange(len(span.columns))
    return torch.from_numpy(np.stack([roles, cells]))


def encode_full(family: Family, inputs: Inputs, prompt: Prompt, shared: Encodings | None = None) -> dict[str, Any]:
    """The model's arguments for the full prompt, with features in place of pixels."""
    features = {}
    for kind in family.present(inputs):
        counts = [len(span.columns) for span in prompt.spans if span.kind == kind]
        encoded = family.encode(inputs, kind) if shared is None else shared.full(family, inputs, kind)
        levels = [list(torch.split(level, counts)) for level in encoded.deepstack]
        features[kind] = family.wrap(list(torch.split(encoded.features, counts)), levels)
    pixels = set(family.pixel_names.values())
    arguments = {name: value for name, value in inputs.items() if name not in pixels}
    return {**arguments, **family.completed(inputs), "mm_encoder_outputs": features}


def _gather_features(
    family: Family, encoded: dict[str, Encoded], spans: Sequence[Span], selections: Sequence[Selection], mode: Mode
) -> dict[str, Any]:
    """Feature rows of the kept tokens, on every level, in the order of the prompt."""
    outputs = {}
    for kind, full in encoded.items():
        features: list[Tensor] = []
        levels: list[list[Tensor]] = [[] for _ in full.deepstack]
        for span, selection in zip(spans, selections, strict=True):
            if span.kind != kind:
                continue
            rows: Tensor | slice = span.offset + selection.indices
            if len(selection.indices) == len(span.columns):  # all tokens: a slice copies nothing
                rows = slice(span.offset, span.offset + len(span.columns))
            scale = _scale(selection, mode)
            deepstack = selection.deepstack or [level[rows] for level in full.deepstack]
            kept = [full.features[rows] if selection.features is None else selection.features, *deepstack]
            if scale is not None:
                kept = [value * scale.to(value.dtype)[:, None] for value in kept]
            features.append(kept[0])
            for level, value in zip(levels, kept[1:], strict=True):
                level.append(value)
        outputs[kind] = family.wrap(features, levels)
    return outputs


def _scale(selection: Selection, mode: Mode) -> Tensor | None:
    """Factor `[K]` of the kept tokens: their relevance in mode `weight`, else the gate, if there is one."""
    if mode != "weight":
        return selection.gate
    if selection.output is None:
        raise ValueError("mode 'weight' scales by relevance, which this selector does not compute; use arr-coc")
    return selection.output.relevance.flatten()
