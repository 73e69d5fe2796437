"""Selectors that resize the picture: the model reads a smaller one, alone or with tokens of the full one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.prompting.layout import Prompt, choose_columns, read_prompt
from arr_coc.prompting.prune import Pruning
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.shortening import Shortened
from arr_coc.selectors.contract import (
    InvalidSelectorError,
    PictureSelector,
    Selection,
    TokenSelector,
    VisualQuery,
)
from arr_coc.selectors.rules import FullSelector
from arr_coc.selectors.smaller_picture import nearest_cells


class SmallerPicture(Pruning):
    """Replaces the picture by a smaller one, and adds tokens of the full one that a second selector picks.

    Args:
        family, inputs, settings: as in [`Shortening`].
        selector (`PictureSelector`): decides how small.
    """

    def __init__(self, family: Family, inputs: Inputs, settings: Settings, selector: PictureSelector) -> None:
        super().__init__(family, inputs, settings, selector.beside or FullSelector())
        self.resizer = selector
        self.shared = None  # smaller pictures are encoded anew: their size depends on the budget
        self.plans: list[tuple[Grid, int]] = []
        self.small: dict[str, Encoded] = {}

    def read(self) -> None:
        """Plan the sizes. If no tokens of the full pictures are needed, the smaller pictures replace them."""
        self.prompt = self.full_prompt = read_prompt(self.family, self.inputs)
        self._share_budget()
        self.plans = [
            self.resizer.plan(span.grid, budget) for span, budget in zip(self.prompt.spans, self.budgets, strict=True)
        ]
        if not any(count for _, count in self.plans):
            self.inputs = resize_prompt(self.family, self.inputs, self.prompt, [grid for grid, _ in self.plans])
            self.prompt, self.plans = read_prompt(self.family, self.inputs), []
            self.selector = FullSelector()
        self._read_text()

    def encode(self) -> None:
        """Encode the pictures of the prompt, and the smaller ones if both are read."""
        super().encode()
        if self.plans:
            self.small = encode_small(self.family, self.inputs, self.prompt, [grid for grid, _ in self.plans])

    def count_encoded(self) -> list[int]:
        """With tokens of the full pictures, these and the smaller ones."""
        small = [cell_count(grid) for grid, _ in self.plans] or [0] * len(self.prompt.spans)
        return [count + added for count, added in zip(self.prompt.counts, small, strict=True)]

    def _select(self, queries: Sequence[VisualQuery]) -> list[Selection]:
        if not self.plans:
            return super()._select(queries)
        return select_beside(self.prompt, self.encoded, self.small, self.selector, self.plans, queries)

    def build(self) -> Shortened:
        """Build the prompt; `full` counts the tokens of the original pictures."""
        return super().build()._replace(full=self.full_prompt.counts, encoded=self.count_encoded())


def resize_prompt(family: Family, inputs: Inputs, prompt: Prompt, grids: Sequence[Grid]) -> dict[str, Any]:
    """The prompt that the processor would make for pictures of these grids."""
    changed = restate_prompt(family, inputs, prompt, grids)
    for kind in family.present(inputs):
        changed |= family.resize(inputs, kind, _grids_of_kind(prompt, grids, kind))
    return changed


def restate_prompt(family: Family, inputs: Inputs, prompt: Prompt, grids: Sequence[Grid]) -> dict[str, Any]:
    """The prompt with the placeholders of pictures of these grids; the pixels stay as they are."""
    kept = []
    for span, (frames, rows, columns) in zip(prompt.spans, grids, strict=True):
        frame_size = span.grid[1] * span.grid[2]
        places = np.minimum(np.arange(rows * columns), frame_size - 1)  # a larger grid repeats the last placeholder
        kept.append((np.arange(frames)[:, None] * frame_size + places).ravel())
    ids: Tensor = inputs["input_ids"]
    inputs = {name: value for name, value in inputs.items() if name != "position_ids"} | family.completed(inputs)
    source, valid = choose_columns(prompt, kept, ids.device)
    changed: dict[str, Any] = {"attention_mask": valid.long()}
    for name, padding in (("input_ids", family.pad_id()), ("mm_token_type_ids", 0), ("labels", -100)):
        if inputs.get(name) is not None:
            changed[name] = inputs[name].gather(1, source).masked_fill(~valid, padding)
    for kind in family.present(inputs):
        changed |= family.state_grids(kind, _grids_of_kind(prompt, grids, kind), ids.device)
    return {**inputs, **changed}


def _grids_of_kind(prompt: Prompt, grids: Sequence[Grid], kind: str) -> list[Grid]:
    return [grid for span, grid in zip(prompt.spans, grids, strict=True) if span.kind == kind]


def encode_small(family: Family, inputs: Inputs, prompt: Prompt, grids: Sequence[Grid]) -> dict[str, Encoded]:
    """Encode the pictures at smaller grids."""
    encoded = {}
    for kind in family.present(inputs):
        resized = family.resize(inputs, kind, _grids_of_kind(prompt, grids, kind))
        encoded[kind] = family.encode({**inputs, **resized}, kind)
    return encoded


def select_beside(
    prompt: Prompt,
    encoded: dict[str, Encoded],
    small: dict[str, Encoded],
    selector: TokenSelector,
    plans: Sequence[tuple[Grid, int]],
    queries: Sequence[VisualQuery],
) -> list[Selection]:
    """Join the tokens of each smaller picture with those that `selector` picks from the full one.

    The language model knows the spacing of the full picture's tokens, so a token of the smaller picture takes the place
    of the full cell nearest to its middle.
    """
    beside = select_counts(selector, queries, [count for _, count in plans])
    selections, offsets = [], dict.fromkeys(small, 0)
    for span, chosen, (grid, _) in zip(prompt.spans, beside, plans, strict=True):
        begin = offsets[span.kind]
        offsets[span.kind] = end = begin + cell_count(grid)
        overview = small[span.kind].features[begin:end]
        levels = [level[begin:end] for level in small[span.kind].deepstack]
        places = nearest_cells(grid, span.grid).to(overview.device)
        if chosen is not None:
            rows = span.offset + chosen.indices
            full = encoded[span.kind]
            gate = 1 if chosen.gate is None else chosen.gate.to(overview.dtype)[:, None]
            # methods that merge tokens return replacement rows
            features = full.features[rows] if chosen.features is None else chosen.features
            beside_levels = chosen.deepstack or [level[rows] for level in full.deepstack]
            overview = torch.cat([overview, features * gate])
            levels = [torch.cat([level, added * gate]) for level, added in zip(levels, beside_levels, strict=True)]
            places = torch.cat([places, chosen.indices])
        # a clip is read frame by frame
        order = (places // (span.grid[1] * span.grid[2])).argsort(stable=True)
        selections.append(Selection(places[order], overview[order], tuple(level[order] for level in levels)))
    return selections


def select_counts(
    selector: TokenSelector, queries: Sequence[VisualQuery], counts: Sequence[int]
) -> list[Selection | None]:
    """Select a different number of tokens from each picture, with one call for each number; None for 0 tokens."""
    selections: list[Selection | None] = [None] * len(queries)
    for count in sorted(set(counts) - {0}):
        for place, (selection, wanted) in enumerate(zip(selector.select(queries, count), counts, strict=True)):
            if wanted != count:
                continue
            kept = len(selection.indices)
            if kept > count:
                raise InvalidSelectorError(
                    f"the selector kept {kept} tokens for a budget of {count}; keep at most {count}"
                )
            selections[place] = selection
    return selections
