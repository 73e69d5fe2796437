"""Selectors that change the picture: a smaller one is read, alone or beside tokens of the full one."""

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


class SmallerPicture(Pruning):
    """Have a smaller picture read, and beside it the tokens of the full one that a second selector picks.

    Args:
        family, inputs, settings: as in [`Shortening`].
        selector (`PictureSelector`): says how small.
    """

    def __init__(self, family: Family, inputs: Inputs, settings: Settings, selector: PictureSelector) -> None:
        if settings.mode == "weight":
            raise ValueError("mode 'weight' scales by relevance, which this selector does not give; use 'arr-coc'")
        super().__init__(family, inputs, settings, selector.beside or FullSelector())
        self.resizer = selector
        self.plans: list[tuple[Grid, int]] = []
        self.small: dict[str, Encoded] = {}

    def read(self) -> None:
        """Lay out the prompt; of the smaller pictures, where nothing is read beside them."""
        self.prompt = self.given = read_prompt(self.family, self.inputs)
        self.plans = [self.resizer.plan(span.grid, self.settings.budget) for span in self.prompt.spans]
        if not any(count for _, count in self.plans):
            self.inputs = resize_prompt(self.family, self.inputs, self.prompt, [grid for grid, _ in self.plans])
            self.prompt, self.plans = read_prompt(self.family, self.inputs), []
            self.selector = FullSelector()
        self._read_text()

    def encode(self) -> None:
        """The full pictures, and the smaller ones if both are read."""
        super().encode()
        if self.plans:
            self.small = encode_small(self.family, self.inputs, self.prompt, [grid for grid, _ in self.plans])

    def _select(self, queries: Sequence[VisualQuery]) -> list[Selection]:
        if not self.plans:
            return super()._select(queries)
        return select_beside(self.prompt, self.encoded, self.small, self.selector, self.plans, queries)

    def build(self) -> Shortened:
        """The shorter prompt; `full` counts the tokens of the pictures as they were given."""
        return super().build()._replace(full=self.given.count)


def resize_prompt(family: Family, inputs: Inputs, prompt: Prompt, grids: Sequence[Grid]) -> dict[str, Any]:
    """The prompt as a processor would have made it for pictures of these grids."""
    changed = restate_prompt(family, inputs, prompt, grids)
    for kind in family.present(inputs):
        own = [grid for span, grid in zip(prompt.spans, grids, strict=True) if span.kind == kind]
        changed |= family.resize(inputs, kind, own)
    return changed


def restate_prompt(family: Family, inputs: Inputs, prompt: Prompt, grids: Sequence[Grid]) -> dict[str, Any]:
    """The prompt with as many placeholders as pictures of these grids have tokens; their pixels stay as they are."""
    kept = []
    for span, (frames, rows, columns) in zip(prompt.spans, grids, strict=True):
        a_frame = span.grid[1] * span.grid[2]
        places = np.minimum(np.arange(rows * columns), a_frame - 1)  # of more tokens than there were, the last again
        kept.append((np.arange(frames)[:, None] * a_frame + places).ravel())
    ids: Tensor = inputs["input_ids"]
    inputs = {name: value for name, value in inputs.items() if name != "position_ids"} | family.completed(inputs)
    source, valid = choose_columns(prompt, kept, ids.device)
    changed: dict[str, Any] = {"attention_mask": valid.long()}
    for name, padding in (("input_ids", family.pad_id()), ("mm_token_type_ids", 0), ("labels", -100)):
        if inputs.get(name) is not None:
            changed[name] = inputs[name].gather(1, source).masked_fill(~valid, padding)
    for kind in family.present(inputs):
        own = [grid for span, grid in zip(prompt.spans, grids, strict=True) if span.kind == kind]
        changed |= family.state_grids(kind, own, ids.device)
    return {**inputs, **changed}


def encode_small(family: Family, inputs: Inputs, prompt: Prompt, grids: Sequence[Grid]) -> dict[str, Encoded]:
    """Encode the pictures at smaller grids."""
    encoded = {}
    for kind in family.present(inputs):
        own = [grid for span, grid in zip(prompt.spans, grids, strict=True) if span.kind == kind]
        encoded[kind] = family.encode({**inputs, **family.resize(inputs, kind, own)}, kind)
    return encoded


def select_beside(
    prompt: Prompt,
    encoded: dict[str, Encoded],
    small: dict[str, Encoded],
    selector: TokenSelector,
    plans: Sequence[tuple[Grid, int]],
    queries: Sequence[VisualQuery],
) -> list[Selection]:
    """Tokens of the smaller pictures, each at the place of the full cell nearest to its middle, then those beside it.

    The language model knows the spacing of the full picture's tokens, so the smaller one's are placed on its scale.
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
            # methods that merge tokens bring rows of their own
            features = full.features[rows] if chosen.features is None else chosen.features
            beside_levels = chosen.deepstack or [level[rows] for level in full.deepstack]
            overview = torch.cat([overview, features * gate])
            levels = [torch.cat([level, own * gate]) for level, own in zip(levels, beside_levels, strict=True)]
            places = torch.cat([places, chosen.indices])
        # a clip is read frame by frame
        order = (places // (span.grid[1] * span.grid[2])).argsort(stable=True)
        selections.append(Selection(places[order], overview[order], tuple(level[order] for level in levels)))
    return selections


def select_counts(
    selector: TokenSelector, queries: Sequence[VisualQuery], counts: Sequence[int]
) -> list[Selection | None]:
    """Choose each picture's own number of tokens; pictures with the same number are chosen together."""
    found: list[Selection | None] = [None] * len(queries)
    for count in sorted(set(counts) - {0}):
        chosen = selector.select(queries, count)
        if any(len(new.indices) > count for new, own in zip(chosen, counts, strict=True) if own == count):
            raise InvalidSelectorError(f"the selector of the second half kept more than its {count} tokens")
        found = [new if own == count else old for old, new, own in zip(found, chosen, counts, strict=True)]
    return found


def nearest_cells(small: Grid, full: Grid) -> Tensor:
    """For each cell of a smaller grid the index `[n]` of the cell of the full one that is nearest to its middle.

    Example:

    ```python
    >>> from arr_coc.prompting.resize import nearest_cells
    >>> nearest_cells((1, 1, 2), (1, 3, 6)).tolist()
    [7, 10]

    ```
    """
    rows = ((torch.arange(small[1]) + 0.5) * full[1] / small[1] - 0.5).round().long()
    columns = ((torch.arange(small[2]) + 0.5) * full[2] / small[2] - 0.5).round().long()
    frames = torch.arange(small[0])[:, None, None] * full[1] * full[2]
    return (frames + rows[:, None] * full[2] + columns).flatten()
