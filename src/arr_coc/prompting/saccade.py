"""Mode `saccade`: encode the whole picture small, ask where it matters, and encode full resolution only there.

The prompt gets the tokens of the gestalt (the small picture) and of the saccades (the chosen cells), each at the
position of its cell in the full picture.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.gaze.compression import ConvCompressor
from arr_coc.gaze.gestalt import Gestalt, encode_gestalts, make_gestalts
from arr_coc.gaze.plan import Gaze, GazePlan, count_beyond, open_windows, plan_gaze, replace_covered
from arr_coc.gaze.source import NativeSource, PictureSource, ProcessedSource
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.prompting.cache import Beginning
from arr_coc.prompting.encodings import Encodings, encode_cells
from arr_coc.prompting.first_look.introspection import (
    choose_introspection,
    introspect_gestalts,
    is_tight,
    layers_to_read,
)
from arr_coc.prompting.layout import Gazed, Prompt, build, read_prompt
from arr_coc.prompting.prefix import Prefix, open_cache
from arr_coc.prompting.resize import restate_prompt, select_counts
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.sharing import share_budget
from arr_coc.prompting.shortening import KeptCells, Shortened, Shortening
from arr_coc.selectors.contract import Selection, TokenSelector, VisualQuery


class Saccading(Shortening):
    """Encodes the whole picture small (the gestalt), and at full resolution only the windows that a selector picks.

    A window is a small square of cells.

    Args:
        family, inputs, settings: as in [`Shortening`].
        selector (`TokenSelector`): picks the windows.
    """

    def __init__(self, family: Family, inputs: Inputs, settings: Settings, selector: TokenSelector) -> None:
        super().__init__(family, inputs, settings)
        self.selector, self.gaze = selector, settings.gaze or Gaze()
        self.attended: list[Tensor] = []  # of each picture's windows, if the model was asked
        self.begun: Prefix | None = None  # what was read of this prompt to choose the rest of it
        self.compressor: ConvCompressor | None = getattr(selector, "compressor", None)
        _check_support(family, inputs, selector)
        self.introspect = choose_introspection(family, settings, selector)
        if self.gaze.compress == "conv" and self.compressor is None:
            raise ValueError(
                "compress 'conv' needs a selector that learned it (arr-coc train --stage answers --mode saccade "
                "--compress conv); use 'pool' or 'merge'"
            )
        if settings.images is not None:
            self.fallback = "the picture is read small"  # the prompt holds only a small copy of it

    def read(self) -> None:
        """Plan the gaze, and measure the pictures."""
        self.prompt = read_prompt(self.family, self.inputs)
        self.sources = _open_sources(self.family, self.inputs, self.prompt, self.settings.images, self.shared)
        self.grids = [source.grid for source in self.sources]
        if self.shared is not None:
            self.shared.check([("image", grid) for grid in self.grids])
        rows = [span.row for span in self.prompt.spans]
        budgets = share_budget(self.settings.budget, rows, list(map(cell_count, self.grids)))
        self.plans = [
            plan_gaze(grid, budget, self.gaze).part(self.settings.share)
            for grid, budget in zip(self.grids, budgets, strict=True)
        ]
        known = None if self.shared is None else self.shared.mipmaps(self.plans)
        if known is None:
            known = [_measure(source, plan) for source, plan in zip(self.sources, self.plans, strict=True)]
        self.mipmaps = known

    def _read_text(self) -> None:
        """Give the prompt a placeholder for each token of the gaze, and find question and positions."""
        gaze_grids = [_placeholder_grid(grid, plan) for grid, plan in zip(self.grids, self.plans, strict=True)]
        self.gaze_prompt = read_prompt(
            self.family, restate_prompt(self.family, self.prompt.inputs, self.prompt, gaze_grids)
        )
        words = self._embed_question(self.inputs, self.gaze_prompt)
        self.words = [words[span.row] for span in self.gaze_prompt.spans]
        self.positions = self.family.positions(self.gaze_prompt.inputs)

    def encode(self) -> None:
        """Encode the gestalts; the host reads the text meanwhile."""
        encode = encode_gestalts if self.shared is None else self.shared.gestalts
        self.encoded = encode(self.family, self.sources, self.plans, self.mipmaps, self.settings.graphs)
        self._read_text()

    def count_encoded(self) -> list[int]:
        """The gestalts, before compression."""
        return [cell_count(plan.encoded) for plan in self.plans]

    def choose(self) -> None:
        """Ask the selector for windows of each picture, and list their cells."""
        self.gestalts = make_gestalts(self.encoded, self.plans, self.grids, self.words, self.gaze, self.compressor)
        if self._asks_the_model():
            self.asked_layers = layers_to_read(self.family, self.introspect)
            self.attended = self._ask(self._introspect, *self._overviews())
        attended: Sequence[Tensor | None] = self.attended or [None] * len(self.plans)
        queries = [
            VisualQuery(gestalt.tokens, plan.gestalt, words.to(gestalt.tokens), plan.windows, mipmaps,
                        attended=paid, details=self.settings.details)
            for gestalt, plan, words, mipmaps, paid in zip(
                self.gestalts, self.plans, self.words, self.mipmaps, attended, strict=True
            )
        ]  # fmt: skip
        self.selector.check(queries)
        self.windows = _choose_windows(self.selector, queries, self.plans, self.grids)
        if not self.selector.checked:
            _check_windows(self.windows, self.plans)
        self.saccades = [
            _list_saccades(selection, plan, grid, self.gaze, self.selector.ordered)
            for selection, plan, grid in zip(self.windows, self.plans, self.grids, strict=True)
        ]

    def _asks_the_model(self) -> bool:
        """Whether the model is asked where it looks: if it is wanted, and there are windows to choose."""
        if self.introspect == "off" or all(plan.saccades == 0 for plan in self.plans):
            return False
        if self._has_asked(layers_to_read(self.family, self.introspect), *self._overviews()):
            return True
        # where saccades replace tokens of the gestalt, nearly all tokens may become saccades
        kept = [plan.tokens if plan.drop and plan.saccades else plan.saccades for plan in self.plans]
        return self.introspect != "auto" or is_tight(self.selector, kept, self.grids)

    def _overviews(self) -> list[Hashable]:
        return [plan.overview for plan in self.plans]

    def _introspect(self) -> list[Tensor]:
        """Let the model read the gestalts; what it reads before the question need not be read again, in one row."""
        gestalts = self.gestalts
        alone = self.reads_on and len(gestalts) == 1
        beginning = self._find_beginning(len(gestalts[0].places)) if alone else None
        deepest = len(self.family.inner.language_model.layers) - 1
        cache = open_cache(self.family) if beginning is not None and self.asked_layers[-1] == deepest else None
        attended, read = introspect_gestalts(
            self.family, self.inputs, self.gaze_prompt, self.positions, self.encoded, gestalts, self.plans, self.grids,
            self.settings.chat, self.asked_layers, cache,
        )  # fmt: skip
        if cache is not None and beginning is not None:
            seen = Encoded(gestalts[0].levels[0], tuple(gestalts[0].levels[1:]))
            self.begun = Prefix.of(self.family, cache, replace(read, beginning=beginning), {"image": seen})
        return attended

    def encode_chosen(self) -> None:
        """Encode the chosen cells at full resolution."""
        # if saccades replace tokens of the gestalt, or relevance sets the budget, the number of cells varies
        fixed_count = not any(plan.drop or plan.saccades is None for plan in self.plans)
        cells = [saccades.cells for saccades in self.saccades]
        # cells see those that are encoded with them: a word in parts of several looks would be misread
        if self.shared is None or self.settings.further:
            self.encoded_cells = encode_cells(self.family, self.sources, cells, self.settings.graphs and fixed_count)
        else:
            self.encoded_cells = self.shared.cells(self.family, self.sources, cells, fixed_count, self.settings.graphs)

    def build(self) -> Shortened:
        """Build the prompt: gestalt, then saccades, each token at the position of its cell."""
        selections = _join(self.gestalts, self.encoded_cells, self.windows, self.saccades, self.plans, self.sources)
        gestalt = [
            # a picture that is its own gestalt was read at full resolution everywhere
            0 if plan.scale == 1 else len(selection.indices) - len(saccades.cells)
            for plan, selection, saccades in zip(self.plans, selections, self.saccades, strict=True)
        ]
        gazes = [
            Gazed(selection.indices, grid, count)
            for selection, grid, count in zip(selections, self.grids, gestalt, strict=True)
        ]
        # each token just takes the next placeholder
        numbered = [
            replace(selection, indices=torch.arange(len(selection.indices), device=selection.indices.device))
            for selection in selections
        ]
        chosen = [np.arange(len(selection.indices)) for selection in selections]
        inputs, holding = build(
            self.family, self.inputs, self.gaze_prompt, self.positions, {"image": self.encoded}, numbered, chosen,
            "saccade", gazes,
        )  # fmt: skip
        if self.shared is not None or self.begun is not None:
            holding = replace(holding, beginning=self._find_beginning(gestalt[0]))
        kept = KeptCells(
            (grid, np.arange(cell_count(grid)) if plan.scale == 1 else saccades.cells)
            for grid, plan, saccades in zip(self.grids, self.plans, self.saccades, strict=True)
        )
        outputs = [None if selection is None else selection.output for selection in self.windows]
        full = list(map(cell_count, self.grids))
        encoded = [
            # a picture that is its own gestalt is encoded once
            made + (0 if plan.scale == 1 else len(saccades.cells))
            for made, plan, saccades in zip(self.count_encoded(), self.plans, self.saccades, strict=True)
        ]
        return Shortened(
            inputs,
            outputs,
            kept,
            full,
            list(map(len, chosen)),
            holding,
            encoded,
            self._count_glanced(),
            self.count_asked_layers(),
            self.begun,
        )

    def keep_all(self) -> Shortened:
        """The prompt as it came; what the model read to choose counts too."""
        return super().keep_all()._replace(glanced=self._count_glanced(), glanced_layers=self.count_asked_layers())

    def _count_glanced(self) -> list[int] | None:
        return [len(gestalt.places) for gestalt in self.gestalts] if self.attended and not self.known else None

    def _find_beginning(self, gestalt: int) -> Beginning | None:
        """What the prompt of the next question about the same pictures will begin with; None if that is not known."""
        prompt, span = self.gaze_prompt, self.gaze_prompt.spans[0]
        if len(prompt.ids) > 1 or not gestalt or self.plans[0].drop or self.gaze.compress == "merge":
            return None  # the question decides what stays of the gestalt
        text = prompt.ids[0, : span.columns[0]][prompt.mask[0, : span.columns[0]]]
        read = (self.plans[0].overview, self.gaze)
        return Beginning(tuple(text.tolist()), gestalt, read, self.encoded.features)


class _Saccades(NamedTuple):
    """The cells `[k]` of one picture in reading order, and which tokens `[g]` of its gestalt stay; None for all."""

    cells: Tensor
    gestalt_mask: Tensor | None


def _placeholder_grid(grid: Grid, plan: GazePlan) -> Grid:
    """A grid with a placeholder for every token of the gaze, and the same text positions after it as the full grid.

    Text continues after the longer side of a picture, so only that side must keep its length.
    """
    longer = max(grid[1:])
    most = plan.tokens + (cell_count(plan.gestalt) if plan.saccades is None else 0)
    return 1, longer, -(-most // longer)


def _check_support(family: Family, inputs: Inputs, selector: TokenSelector) -> None:
    if family.present(inputs) != ["image"]:
        raise ValueError("mode 'saccade' takes still pictures only; for clips use mode 'prune'")
    if selector.encoder_layers:
        raise ValueError(
            "this selector reads the encoder on the full picture, which mode 'saccade' never runs; use mode 'prune'"
        )


def _open_sources(
    family: Family,
    inputs: Inputs,
    prompt: Prompt,
    images: Sequence[Image.Image | Tensor] | None,
    shared: Encodings | None,
) -> list[PictureSource]:
    """The pictures at full resolution: the originals if given, else the processor's pixels."""
    device, cut = inputs["input_ids"].device, family.cut()
    if images is not None:
        if len(images) != len(prompt.spans):
            raise ValueError(f"`images` has {len(images)} pictures, the prompt has {len(prompt.spans)}; pass one each")
        modes = [image.mode for image in images if not isinstance(image, Tensor) and image.mode != "RGB"]
        if modes:  # of a palette, for one, the numbers of the colours would be read as brightness
            raise ValueError(f"`images` must be RGB, got a picture of mode {modes[0]!r}; pass image.convert('RGB')")
        return [NativeSource(image, cut, device) for image in images]
    pictures = family.pictures(inputs, "image") if shared is None else shared.pictures(family, inputs, "image")
    if pictures is None:
        raise ValueError(f"the pictures of {family.config.model_type} cannot be rebuilt; use mode 'prune'")
    rows: Tensor = inputs[family.pixel_names["image"]]
    grids = [span.grid for span in prompt.spans]
    rows_per_cell = len(rows) // sum(map(cell_count, grids))
    parts = torch.split(rows, [cell_count(grid) * rows_per_cell for grid in grids])
    frames = [clip[0] for clip in pictures]
    return [ProcessedSource(part, frame, grid) for part, frame, grid in zip(parts, frames, grids, strict=True)]


def _measure(source: PictureSource, plan: GazePlan) -> Mipmaps | None:
    """The picture's statistics; None if the whole picture is encoded at full resolution anyway."""
    if plan.saccades == 0 and plan.gestalt == source.grid:
        return None
    return source.measure(plan)


def _choose_windows(
    selector: TokenSelector, queries: Sequence[VisualQuery], plans: Sequence[GazePlan], grids: Sequence[Grid]
) -> list[Selection | None]:
    """Choose windows of each picture; None for a picture without saccades."""
    if any(plan.saccades is None for plan in plans):
        return list(selector.select(queries, "auto"))
    counts = []
    for plan, grid in zip(plans, grids, strict=True):
        # if saccades replace tokens of the gestalt, more of them fit; only an order tells which come next
        replaces = plan.drop and plan.saccades and selector.ordered
        cells = plan.tokens if replaces else plan.saccades or 0
        count = -(-cells // plan.side**2)
        if cells and selector.ordered:  # the selector may pick windows beyond the picture's edge, which hold no cells
            count += count_beyond(plan, grid)
        counts.append(min(count, cell_count(plan.windows)))
    return select_counts(selector, queries, counts)


def _check_windows(windows: Sequence[Selection | None], plans: Sequence[GazePlan]) -> None:
    """Raise `ValueError` unless all indices are windows of the plans, in one transfer for all pictures."""
    checked = [
        (selection.indices, cell_count(plan.windows))
        for selection, plan in zip(windows, plans, strict=True)
        if selection is not None
    ]
    if any(indices.dtype != torch.long or indices.ndim != 1 for indices, _ in checked):
        raise ValueError("`Selection.indices` must be a one-dimensional tensor of int64")
    if not all(len(indices) for indices, _ in checked):
        raise ValueError("`Selection.indices` must name at least one cell")
    if checked and bool(torch.stack([((indices < 0) | (indices >= total)).any() for indices, total in checked]).any()):
        total = checked[0][1]
        raise ValueError(f"`Selection.indices` must name cells of `VisualQuery.cells`, here {total}, none beyond")


def _list_saccades(selection: Selection | None, plan: GazePlan, grid: Grid, gaze: Gaze, ordered: bool) -> _Saccades:
    """The cells of the chosen windows of one picture, as many as fit; an `ordered` selector was asked for enough."""
    if selection is None:
        return _Saccades(torch.zeros(0, dtype=torch.long), None)
    windows = selection.by_relevance()
    most = plan.tokens if plan.saccades is None or plan.drop else plan.saccades
    # unless the edge cuts through windows, those asked for hold as many cells as are wanted
    enough = ordered and plan.saccades is not None and not (grid[1] % plan.side or grid[2] % plan.side)
    cells, gestalt_mask = open_windows(windows, plan, grid, most, enough), None
    if plan.drop:
        cells, gestalt_mask = replace_covered(cells, plan, grid)
    return _Saccades(cells.sort().values if gaze.order == "raster" else cells, gestalt_mask)


def _join(
    gestalts: Sequence[Gestalt],
    encoded_cells: Encoded | None,
    windows: Sequence[Selection | None],
    saccades: Sequence[_Saccades],
    plans: Sequence[GazePlan],
    sources: Sequence[PictureSource],
) -> list[Selection]:
    """Gestalt first, then saccades. Both are placed on the full grid, because the model knows its spacing."""
    counts = [len(cells) for cells, _ in saccades]
    details: list[tuple[Tensor, ...]] = [()] * len(plans)  # for each picture the levels [k, D] of its cells
    if encoded_cells is not None:
        all_levels = (encoded_cells.features, *encoded_cells.deepstack)
        details = list(zip(*(torch.split(level, counts) for level in all_levels), strict=True))
    selections = []
    for gestalt, detail, selection, (cells, gestalt_mask), plan, source in zip(
        gestalts, details, windows, saccades, plans, sources, strict=True
    ):
        _, levels, places = gestalt.where(gestalt_mask)
        if len(cells):
            gate = _gate(selection, cells, plan, source.grid)
            if gate is not None:
                detail = tuple(level * gate.to(level.dtype)[:, None] for level in detail)
            levels = tuple(torch.cat(pair) for pair in zip(levels, detail, strict=True))
            places = torch.cat([places, cells])
        output = None if selection is None else selection.output
        selections.append(Selection(places, levels[0], levels[1:], output=output))
    return selections


def _gate(selection: Selection | None, cells: Tensor, plan: GazePlan, grid: Grid) -> Tensor | None:
    """The gate `[k]` of each cell's window, if the selector has gates."""
    if selection is None or selection.gate is None:
        return None
    gates = selection.gate.new_ones(cell_count(plan.windows)).scatter(0, selection.indices, selection.gate)
    window = cells // grid[2] // plan.side * plan.windows[2] + cells % grid[2] // plan.side
    return gates[window]
