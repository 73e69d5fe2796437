"""Mode `"saccade"`: encode the whole picture small, ask where it matters, and encode full resolution only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from arr_coc.prompting.layout import Prompt, build, read_prompt
from arr_coc.prompting.resize import restate_prompt, select_counts
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.shortening import Shortened, Shortening
from arr_coc.selectors.contract import Selection, TokenSelector, VisualQuery


class Saccading(Shortening):
    """Read the whole picture small (the gestalt), and full resolution only in the windows that a selector picks.

    Args:
        family, inputs, settings: as in [`Shortening`].
        selector (`TokenSelector`): picks windows.
    """

    def __init__(self, family: Family, inputs: Inputs, settings: Settings, selector: TokenSelector) -> None:
        super().__init__(family, inputs, settings)
        self.selector, self.gaze = selector, settings.gaze or Gaze()
        self.compressor: ConvCompressor | None = getattr(selector, "compressor", None)
        _check(family, inputs, selector)
        if self.gaze.compress == "conv" and self.compressor is None:
            raise ValueError(
                "compress 'conv' needs a selector that learned it (arr-coc train --stage answers --mode saccade "
                "--compress conv); use 'pool' or 'merge'"
            )
        if settings.images is not None:
            self.fallback = "the picture is read small"  # the prompt holds only a small copy of it

    def read(self) -> None:
        """Plan the gaze, make room for it in the prompt, and measure the pictures."""
        self.prompt = read_prompt(self.family, self.inputs)
        self.sources = _open_sources(self.family, self.inputs, self.prompt, self.settings.images)
        self.grids = [source.grid for source in self.sources]
        self.plans = [plan_gaze(grid, self.settings.budget, self.gaze) for grid in self.grids]
        rooms = [_room(grid, plan) for grid, plan in zip(self.grids, self.plans, strict=True)]
        self.room = restate_prompt(self.family, self.inputs, self.prompt, rooms)
        self.roomy = read_prompt(self.family, self.room)
        words = self._embed_question(self.room, self.roomy)
        self.words = [words[span.row] for span in self.roomy.spans]
        self.positions = self.family.positions(self.room)
        self.maps = [_measure(source, plan) for source, plan in zip(self.sources, self.plans, strict=True)]

    def encode(self) -> None:
        """The gestalts."""
        self.encoded = encode_gestalts(self.family, self.sources, self.plans, self.maps)

    def choose(self) -> None:
        """Windows of each picture, and the cells of them that are read."""
        self.gestalts = make_gestalts(self.encoded, self.plans, self.grids, self.words, self.gaze, self.compressor)
        queries = [
            VisualQuery(gestalt.tokens, plan.gestalt, words.to(gestalt.tokens), plan.windows, measured,
                        details=self.settings.details)
            for gestalt, plan, words, measured in zip(self.gestalts, self.plans, self.words, self.maps, strict=True)
        ]  # fmt: skip
        self.selector.check(queries)
        self.windows = _choose_windows(self.selector, queries, self.plans, self.grids)
        _check_windows(self.windows, self.plans)
        self.looks = [
            _order_cells(selection, plan, grid, self.gaze)
            for selection, plan, grid in zip(self.windows, self.plans, self.grids, strict=True)
        ]

    def encode_chosen(self) -> None:
        """The chosen cells at full resolution."""
        # where covered tokens make room, every question has another number of cells
        steady = not any(plan.drop or plan.saccades is None for plan in self.plans)
        self.details = _encode_cells(self.family, self.sources, [cells for cells, _ in self.looks], steady)

    def build(self) -> Shortened:
        """Gestalt, then saccades, each token at its true place."""
        selections = _join(self.gestalts, self.details, self.windows, self.looks, self.plans, self.sources)
        positions = _place(self.positions, self.roomy, selections, self.sources)
        places = [torch.arange(len(one.indices), device=one.indices.device) for one in selections]
        taken = [replace(one, indices=place) for one, place in zip(selections, places, strict=True)]
        chosen = [np.arange(len(one.indices)) for one in selections]
        encoded = {"image": self.encoded}
        inputs = build(self.family, self.room, self.roomy, positions, encoded, taken, chosen, "saccade")
        # a picture that is its own gestalt was read at full resolution everywhere
        kept = [
            (grid, np.arange(cell_count(grid)) if plan.scale == 1 else cells.cpu().numpy())
            for grid, plan, (cells, _) in zip(self.grids, self.plans, self.looks, strict=True)
        ]
        outputs = [None if selection is None else selection.output for selection in self.windows]
        return Shortened(inputs, outputs, kept, sum(map(cell_count, self.grids)), sum(map(len, chosen)))


def _room(grid: Grid, plan: GazePlan) -> Grid:
    """A grid with a place for every token that will be read, after which text goes on as after the full one.

    Text goes on behind the longer side of a picture, so that this side alone has to be as long as it is.
    """
    longer = max(grid[1:])
    most = plan.tokens + (cell_count(plan.gestalt) if plan.saccades is None else 0)
    return 1, longer, -(-most // longer)


def _place(
    positions: Tensor, prompt: Prompt, selections: Sequence[Selection], sources: Sequence[PictureSource]
) -> Tensor:
    """Positions `[3, B, L]` in which the first tokens of each picture stand where their cells are."""
    positions = positions.clone()
    for span, selection, source in zip(prompt.spans, selections, sources, strict=True):
        cells, width = selection.indices, source.grid[2]
        columns = torch.from_numpy(span.columns[: len(cells)]).to(positions.device)
        places = torch.stack([0 * cells, cells // width, cells % width]).to(positions.device)  # [3, k]
        positions[:, span.row, columns] = positions[:, span.row, columns[:1]] + places
    return positions


def _check(family: Family, inputs: Inputs, selector: TokenSelector) -> None:
    if family.present(inputs) != ["image"]:
        raise ValueError("mode 'saccade' looks at pictures; for clips use mode 'prune'")
    if selector.encoder_layers:
        raise ValueError("this selector reads the encoder of the full picture, which mode 'saccade' never runs")


def _open_sources(
    family: Family, inputs: Inputs, prompt: Prompt, images: Sequence[Image.Image | Tensor] | None
) -> list[PictureSource]:
    """The pictures at full resolution: the originals, or what the processor delivered of them."""
    device, cut = inputs["input_ids"].device, family.cut()
    if images is not None:
        if len(images) != len(prompt.spans):
            raise ValueError(f"`images` has {len(images)} pictures, the prompt has {len(prompt.spans)}")
        return [NativeSource(image, cut, device) for image in images]
    pictures = family.pictures(inputs, "image")
    if pictures is None:
        raise ValueError(f"{family.config.model_type} does not show its pictures; use mode 'prune'")
    rows: Tensor = inputs[family.pixel_names["image"]]
    grids = [span.grid for span in prompt.spans]
    rows_per_cell = len(rows) // sum(map(cell_count, grids))
    parts = torch.split(rows, [cell_count(grid) * rows_per_cell for grid in grids])
    frames = [clip[0] for clip in pictures]
    return [ProcessedSource(part, frame, grid) for part, frame, grid in zip(parts, frames, grids, strict=True)]


def _measure(source: PictureSource, plan: GazePlan) -> Mipmaps | None:
    """Nothing is measured of a picture that is encoded as a whole."""
    if plan.saccades == 0 and plan.gestalt == source.grid:
        return None
    return source.measure(plan)


def _choose_windows(
    selector: TokenSelector, queries: Sequence[VisualQuery], plans: Sequence[GazePlan], grids: Sequence[Grid]
) -> list[Selection | None]:
    """Windows of each picture that has saccades."""
    if any(plan.saccades is None for plan in plans):
        return list(selector.select(queries, "auto"))
    counts = []
    for plan, grid in zip(plans, grids, strict=True):
        # where tokens of the gestalt make room, more may fit than at first; without an order nothing says which
        refilled = plan.drop and plan.saccades and selector.ordered
        cells = plan.tokens if refilled else plan.saccades or 0
        count = -(-cells // plan.side**2)
        if cells and selector.ordered:  # the last windows may lie beyond the picture, which a selector does not know
            count += count_beyond(plan, grid)
        counts.append(min(count, cell_count(plan.windows)))
    return select_counts(selector, queries, counts)


def _check_windows(windows: Sequence[Selection | None], plans: Sequence[GazePlan]) -> None:
    """Refuse what names no windows of a plan, in one transfer for all pictures."""
    named = [
        (selection.indices, cell_count(plan.windows))
        for selection, plan in zip(windows, plans, strict=True)
        if selection is not None
    ]
    if any(indices.dtype != torch.long or indices.ndim != 1 for indices, _ in named):
        raise ValueError("`Selection.indices` must be a one-dimensional tensor of int64")
    if not all(len(indices) for indices, _ in named):
        raise ValueError("`Selection.indices` must name at least one cell")
    if named and bool(torch.stack([((own < 0) | (own >= total)).any() for own, total in named]).any()):
        raise ValueError(f"`Selection.indices` must name cells of `VisualQuery.cells`, here {named[0][1]}, none beyond")


def _order_cells(selection: Selection | None, plan: GazePlan, grid: Grid, gaze: Gaze) -> tuple[Tensor, Tensor | None]:
    """The cells `[k]` of one picture in the order in which they are read, and which of the gestalt's tokens stay."""
    if selection is None:
        return torch.zeros(0, dtype=torch.long), None
    windows = selection.by_relevance()
    most = plan.tokens if plan.saccades is None or plan.drop else plan.saccades
    cells, stay = open_windows(windows, plan, grid, most), None
    if plan.drop:
        cells, stay = replace_covered(cells, plan, grid)
    return (cells.sort().values if gaze.order == "raster" else cells), stay


def _encode_cells(
    family: Family, sources: Sequence[PictureSource], cells: Sequence[Tensor], steady: bool
) -> Encoded | None:
    """All saccades of a batch in one call of the encoder."""
    looked = [(source, chosen) for source, chosen in zip(sources, cells, strict=True) if len(chosen)]
    if not looked:
        return None
    patches = torch.cat([source.patches(chosen).to(family.target.dtype) for source, chosen in looked])
    grids = [source.grid for source, _ in looked]
    return family.encode_cells(patches, [chosen for _, chosen in looked], grids, steady)


def _join(
    gestalts: Sequence[Gestalt],
    details: Encoded | None,
    windows: Sequence[Selection | None],
    looks: Sequence[tuple[Tensor, Tensor | None]],
    plans: Sequence[GazePlan],
    sources: Sequence[PictureSource],
) -> list[Selection]:
    """Gestalt first, then saccades. Both stand on the scale of the full grid, whose spacing the model knows."""
    counts = [len(cells) for cells, _ in looks]
    parts: list[tuple[Tensor, ...]] = [()] * len(plans)
    if details is not None:
        all_levels = (details.features, *details.deepstack)
        parts = list(zip(*(torch.split(level, counts) for level in all_levels), strict=True))
    selections = []
    for gestalt, part, selection, (cells, stay), plan, source in zip(
        gestalts, parts, windows, looks, plans, sources, strict=True
    ):
        _, levels, places = gestalt.where(stay)
        if len(cells):
            gate = _gate(selection, cells, plan, source.grid)
            sharp = part if gate is None else tuple(level * gate.to(level.dtype)[:, None] for level in part)
            levels = tuple(torch.cat(both) for both in zip(levels, sharp, strict=True))
            places = torch.cat([places, cells])
        output = None if selection is None else selection.output
        selections.append(Selection(places, levels[0], levels[1:], output=output))
    return selections


def _gate(selection: Selection | None, cells: Tensor, plan: GazePlan, grid: Grid) -> Tensor | None:
    """The gate `[k]` of each cell's window, if there is a gradient to carry."""
    if selection is None or selection.gate is None:
        return None
    gates = selection.gate.new_ones(cell_count(plan.windows)).scatter(0, selection.indices, selection.gate)
    window = cells // grid[2] // plan.side * plan.windows[2] + cells % grid[2] // plan.side
    return gates[window]
