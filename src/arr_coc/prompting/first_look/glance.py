"""Selectors that let the model read a small picture first, and decide by what it made of that.

The small picture is read with the question in one pass of the language model; where the selector asks for it, a second
pass has the question's words hidden. Hooks set for these passes read the attention of the prompt's last token. A
prompt whose pictures are not made smaller needs no such pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from arr_coc.config import CellBox, Grid, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.families.language_attention import Asking, attending_layers, reading_attention
from arr_coc.prompting.first_look.introspection import READ, find_words
from arr_coc.prompting.layout import Prompt, build, check_selections, read_prompt
from arr_coc.prompting.prune import Pruning
from arr_coc.prompting.resize import resize_prompt, restate_prompt
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.sharing import share_budget
from arr_coc.prompting.shortening import Shortened, Shortening
from arr_coc.runtime.tensors import upload
from arr_coc.selectors.contract import Glance, GlanceSelector, Reading, Selection
from arr_coc.selectors.registry import selector_name
from arr_coc.selectors.rules import FullSelector
from arr_coc.selectors.smaller_picture import nearest_cells

Levels = tuple[Tensor, ...]  # features [n, D] of one picture, then its DeepStack levels


class Glancing(Shortening):
    """Reads small pictures, asks a selector what to read after that, and lays out a prompt of that.

    Args:
        family, inputs, settings: as in [`Shortening`].
        selector (`GlanceSelector`): decides by what the model made of the small pictures.
        call (`Callable`): calls the model on a prompt as it is.
    """

    def __init__(
        self,
        family: Family,
        inputs: Inputs,
        settings: Settings,
        selector: GlanceSelector,
        call: Callable[[Inputs], Any],
    ) -> None:
        super().__init__(family, inputs, settings)
        self.selector, self.call = selector, call
        self.passes = 0  # of the language model over the small pictures
        name = selector_name(selector)
        if family.headless:
            raise ValueError(f"{name!r} reads the model's head, which this model has not; use another selector")
        if inputs.get("labels") is not None:
            raise ValueError(f"{name!r} looks from the prompt's end, where `labels` have the answer; drop `labels`")
        if selector.needs_attention:
            attending_layers(family)  # refuses what cannot be read

    def read(self) -> None:
        """Find the pictures, and state the prompt with small ones."""
        self.prompt = read_prompt(self.family, self.inputs)
        spans = self.prompt.spans
        self.budgets = share_budget(
            self.settings.budget, [span.row for span in spans], [len(span.columns) for span in spans]
        )
        self.small = [self.selector.small(span.grid, budget) for span, budget in zip(spans, self.budgets, strict=True)]
        given = resize_prompt(self.family, self.inputs, self.prompt, self.small)
        everything = replace(self.settings, budget=None, encoded=None)
        self.first = Pruning(self.family, given, everything, FullSelector())
        self.first.read()
        self.question = self.first.question

    def encode(self) -> None:
        """Encode the small pictures."""
        self.first.encode()
        self.first.choose()

    def choose(self) -> None:
        """Let the model read the small pictures, and ask the selector what to read; not if none of them is smaller."""
        spans = self.prompt.spans
        if self.small == [span.grid for span in spans]:
            self.readings = [Reading(grid) for grid in self.small]
            return
        given = self.first.build().inputs
        # what else the caller passed, such as a cache or options of `generate`, belongs to the final prompt
        arguments = {name: given[name] for name in READ if name in given}
        attention, confidence = self._look(arguments)
        standing = attention
        if self.selector.needs_standing:
            hidden = find_words(self.family, self.first.prompt, self.settings.chat)
            mask = arguments["attention_mask"] * upload(torch.from_numpy(~hidden), arguments["attention_mask"].device)
            standing, _ = self._look({**arguments, "attention_mask": mask})
        glances = zip(spans, self.small, attention, standing, strict=True)
        self.readings = [
            self.selector.plan(Glance(span.grid, small, paid, anyway, confidence[span.row]), budget)
            for (span, small, paid, anyway), budget in zip(glances, self.budgets, strict=True)
        ]
        for span, reading in zip(spans, self.readings, strict=True):
            _check_reading(reading, span.grid)

    @torch.no_grad()
    def _look(self, arguments: Inputs) -> tuple[list[Tensor], list[float]]:
        """The attention `[n]` paid to each small picture, and how sure the model is of each row's first token."""
        prompt = self.first.prompt
        mask = arguments["attention_mask"].bool()
        last = Asking.alone(upload(torch.from_numpy(prompt.last_columns()), mask.device))
        with reading_attention(self._layers(), last, mask) as paid:
            self.passes += 1
            output = self.call({**arguments, "use_cache": False, "logits_to_keep": 1})
        confidence = output.logits[:, -1].float().softmax(dim=-1).amax(dim=-1).tolist()
        if not paid:
            return [torch.empty(0)] * len(prompt.spans), confidence
        # [layers, B, heads, 1, L] -> [B, L]
        attention = torch.stack([layer.to(mask.device) for layer in paid]).mean(dim=(0, 2, 3)).cpu()
        return [attention[span.row, torch.from_numpy(span.columns)] for span in prompt.spans], confidence

    def _layers(self) -> list[tuple[int, nn.Module]]:
        """Those whose attention the selector reads."""
        if not self.selector.needs_attention:
            return []
        layers = attending_layers(self.family)
        if self.selector.layer is None:
            return layers
        return [layers[round(self.selector.layer * (len(layers) - 1))]]

    def encode_chosen(self) -> None:
        """Encode what is to be read and is not encoded yet."""
        known = _split(self.first.encoded, self.first.prompt)
        grids = [reading.overview for reading in self.readings]
        new = [place for place, grid in enumerate(grids) if grid != self.small[place]]
        self.overviews = [*known]
        for place, levels in self._encode_parts(new, [grids[place] for place in new]).items():
            self.overviews[place] = levels
        parts = {place: reading for place, reading in enumerate(self.readings) if reading.box is not None}
        self.crops = self._encode_parts(
            list(parts), [(1, *reading.crop) for reading in parts.values()],
            [reading.box for reading in parts.values() if reading.box is not None],
        )  # fmt: skip

    def _encode_parts(
        self, places: Sequence[int], grids: Sequence[Grid], boxes: Sequence[CellBox] | None = None
    ) -> dict[int, Levels]:
        """Encode some pictures, or parts of them, at these grids."""
        encoded: dict[int, Levels] = {}
        for kind in self.family.present(self.inputs):
            own = [number for number, place in enumerate(places) if self.prompt.spans[place].kind == kind]
            if not own:
                continue
            inputs = self._only(kind, [places[number] for number in own])
            sizes = [grids[number] for number in own]
            resized = self.family.resize(
                inputs, kind, sizes, None if boxes is None else [boxes[number] for number in own]
            )
            levels = self.family.encode({**inputs, **resized}, kind)
            counts = [cell_count(size) for size in sizes]
            by_level = [torch.split(level, counts) for level in (levels.features, *levels.deepstack)]
            encoded |= {places[number]: part for number, part in zip(own, zip(*by_level, strict=True), strict=True)}
        return encoded

    def _only(self, kind: str, places: Sequence[int]) -> dict[str, Any]:
        """The pixels and grids of some pictures of a kind."""
        spans = [self.prompt.spans[place] for place in places]
        rows: Tensor = self.inputs[self.family.pixel_names[kind]]
        total = sum(len(span.columns) for span in self.prompt.spans if span.kind == kind)
        per_cell = len(rows) // total
        parts = [rows[span.offset * per_cell : (span.offset + len(span.columns)) * per_cell] for span in spans]
        grids = self.family.state_grids(kind, [span.grid for span in spans], rows.device)
        return {self.family.pixel_names[kind]: torch.cat(parts), **grids}

    def build(self) -> Shortened:
        """A prompt of smaller pictures; if a part of one is read too, both take places on the full picture's grid."""
        grids = [
            reading.overview if reading.box is None else span.grid
            for reading, span in zip(self.readings, self.prompt.spans, strict=True)
        ]
        inputs = restate_prompt(self.family, self.inputs, self.prompt, grids)
        prompt = read_prompt(self.family, inputs)
        selections = []
        for place, (span, reading) in enumerate(zip(prompt.spans, self.readings, strict=True)):
            levels, cells = self.overviews[place], nearest_cells(reading.overview, span.grid)
            if reading.box is not None:
                levels = tuple(torch.cat(pair) for pair in zip(levels, self.crops[place], strict=True))
                cells = torch.cat([cells, _cells_of_part(reading.box, reading.crop, span.grid)])
            selections.append(Selection(upload(cells, levels[0].device), levels[0], tuple(levels[1:])))
        chosen = check_selections(prompt.spans, selections)
        arguments, holding = build(
            self.family, inputs, prompt, self.family.positions(prompt.inputs), self.first.encoded, selections, chosen,
            self.settings.mode,
        )  # fmt: skip
        kept = [(span.grid, cells) for span, cells in zip(prompt.spans, chosen, strict=True)]
        parts = [0 if reading.box is None else reading.crop[0] * reading.crop[1] for reading in self.readings]
        again = [
            0 if reading.overview == first else cell_count(reading.overview)
            for reading, first in zip(self.readings, self.small, strict=True)
        ]
        counts = zip(self.count_encoded(), again, parts, strict=True)
        return Shortened(
            inputs=arguments,
            outputs=[None] * len(kept),
            kept=kept,
            full=self.prompt.counts,
            used=list(map(len, chosen)),
            holding=holding,
            encoded=[sum(of_picture) for of_picture in counts],
            glanced=self._count_glanced(),
        )

    def keep_all(self) -> Shortened:
        """The full prompt, unchanged; what the glance has cost counts too."""
        return super().keep_all()._replace(glanced=self._count_glanced())

    def count_encoded(self) -> list[int]:
        """The small pictures."""
        return list(map(cell_count, self.small))

    def _count_glanced(self) -> list[int]:
        return [self.passes * cell_count(grid) for grid in self.small]


def _check_reading(reading: Reading, full: Grid) -> None:
    """Raise `ValueError` unless what a selector wants to read is there."""
    frames, rows, columns = reading.overview
    if frames != full[0] or not (1 <= rows <= full[1] and 1 <= columns <= full[2]):
        raise ValueError(f"`Reading.overview` must have the frames of {full} and be no larger, got {reading.overview}")
    if reading.box is None:
        return
    top, left, height, width = reading.box
    if full[0] > 1 or min(top, left) < 0 or top + height > full[1] or left + width > full[2]:
        raise ValueError(f"`Reading.box` must be a part of a still picture of grid {full}, got {reading.box}")
    if not (1 <= reading.crop[0] <= height and 1 <= reading.crop[1] <= width):
        raise ValueError(f"`Reading.crop` must have 1 token to as many as cells in {reading.box}, got {reading.crop}")


def _split(encoded: dict[str, Encoded], prompt: Prompt) -> list[Levels]:
    """The features and DeepStack levels of each picture."""
    parts = []
    for span in prompt.spans:
        rows = slice(span.offset, span.offset + len(span.columns))
        full = encoded[span.kind]
        parts.append((full.features[rows], *(level[rows] for level in full.deepstack)))
    return parts


def _cells_of_part(box: CellBox, size: tuple[int, int], grid: Grid) -> Tensor:
    """For each token of a part, the cell of the full grid nearest to its middle `[n]`."""
    top, left, height, width = box
    inside = nearest_cells((1, *size), (1, height, width))  # in cells of the part
    return (top + inside // width) * grid[2] + left + inside % width
