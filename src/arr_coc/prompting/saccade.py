"""Mode `"saccade"`: encode the whole picture small, ask where it matters, and encode full resolution only there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Encoded, Family, Inputs
from arr_coc.gaze.compression import ConvCompressor
from arr_coc.gaze.gestalt import Overview, encode_overviews, make_overviews
from arr_coc.gaze.plan import Gaze, GazePlan, count_beyond, open_windows, plan_gaze, replace_covered
from arr_coc.gaze.source import DeliveredSight, NativeSight, Sight
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.prompting.layout import Prompt, build, read_prompt
from arr_coc.prompting.resize import restate_prompt, select_counts
from arr_coc.prompting.settings import Prepared, Settings, count_visual, embed_question
from arr_coc.runtime.stopwatch import Stopwatch
from arr_coc.selectors.contract import InvalidSelectorError, Selection, Selector, TokenSelector, VisualQuery

logger = logging.getLogger(__name__)


def prepare_saccades(
    family: Family, inputs: Inputs, selector: Selector, settings: Settings, watch: Stopwatch
) -> Prepared:
    """[`~arr_coc.prepare`] in this mode."""
    picking, gaze = _check(family, inputs, selector), settings.gaze or Gaze()
    compressor: ConvCompressor | None = getattr(picking, "compressor", None)
    if gaze.compress == "conv" and compressor is None:
        raise ValueError(
            "compress 'conv' needs a selector that learned it (arr-coc train --stage answers --mode saccade "
            "--compress conv); use 'pool' or 'merge'"
        )
    with watch.stage("select"):
        given = read_prompt(family, inputs)
        sights = _open_sights(family, inputs, given, settings.images)
        grids = [sight.grid for sight in sights]
        plans = [plan_gaze(grid, settings.budget, gaze) for grid in grids]
        rooms = [_room(grid, plan) for grid, plan in zip(grids, plans, strict=True)]
        room = restate_prompt(family, inputs, given, rooms)
        prompt = read_prompt(family, room)
        words = embed_question(family, room, prompt, settings)
        positions = family.positions(room)
        maps = [_measure(sight, plan) for sight, plan in zip(sights, plans, strict=True)]
    with watch.stage("encode"):
        encoded = encode_overviews(family, sights, plans, maps)
    try:
        with watch.stage("select"):
            asked = [words[span.row] for span in prompt.spans]
            overviews = make_overviews(encoded, plans, grids, asked, gaze, compressor)
            queries = [
                VisualQuery(own.tokens, plan.gestalt, words_of.to(own.tokens), plan.windows, seen)
                for own, plan, words_of, seen in zip(overviews, plans, asked, maps, strict=True)
            ]
            picking.check(queries)
            chosen = _choose(picking, queries, plans, grids)
            _check_windows(chosen, plans)
            looked = [_look(one, plan, grid, gaze) for one, plan, grid in zip(chosen, plans, grids, strict=True)]
    except (InvalidSelectorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if settings.on_error == "raise":
            raise
        what = "all visual tokens are kept" if settings.images is None else "the picture is read small"
        logger.warning("selection failed, %s: %s", what, error)
        total = count_visual(given)
        everything = [(span.grid, np.arange(cell_count(span.grid))) for span in given.spans]
        return Prepared(dict(inputs), [None] * len(sights), everything, total, total, str(error))
    with watch.stage("encode"):
        # where covered tokens make room, every question has another number of cells
        steady = not any(plan.drop or plan.saccades is None for plan in plans)
        details = _encode_cells(family, sights, [cells for cells, _ in looked], steady)
    with watch.stage("select"):
        selections = _join(overviews, details, chosen, looked, plans, sights)
        positions = _place(positions, prompt, selections, sights)
        taken = [replace(one, indices=torch.arange(len(one.indices), device=one.indices.device)) for one in selections]
        places = [np.arange(len(one.indices)) for one in selections]
        built = build(family, room, prompt, positions, {"image": encoded}, taken, places, "saccade")
        # a picture that is its own gestalt was read at full resolution everywhere
        kept = [
            (grid, np.arange(cell_count(grid)) if plan.scale == 1 else cells.cpu().numpy())
            for grid, plan, (cells, _) in zip(grids, plans, looked, strict=True)
        ]
    outputs = [None if one is None else one.output for one in chosen]
    total = sum(map(cell_count, grids))
    return Prepared(built, outputs, kept, total, sum(map(len, places)))


def _room(grid: Grid, plan: GazePlan) -> Grid:
    """A grid with a place for every token that will be read, after which text goes on as after the full one.

    Text goes on behind the longer side of a picture, so that this side alone has to be as long as it is.
    """
    longer = max(grid[1:])
    most = plan.tokens + (cell_count(plan.gestalt) if plan.saccades is None else 0)
    return 1, longer, -(-most // longer)


def _place(positions: Tensor, prompt: Prompt, selections: Sequence[Selection], sights: Sequence[Sight]) -> Tensor:
    """Positions `[3, B, L]` in which the first tokens of each picture stand where their cells are."""
    positions = positions.clone()
    for span, one, sight in zip(prompt.spans, selections, sights, strict=True):
        columns = torch.from_numpy(span.columns[: len(one.indices)]).to(positions.device)
        cells = torch.stack([0 * one.indices, one.indices // sight.grid[2], one.indices % sight.grid[2]])  # [3, k]
        positions[:, span.row, columns] = positions[:, span.row, columns[:1]] + cells.to(positions.device)
    return positions


def _check(family: Family, inputs: Inputs, selector: Selector) -> TokenSelector:
    if family.present(inputs) != ["image"]:
        raise ValueError("mode 'saccade' looks at pictures; for clips use mode 'prune'")
    if not isinstance(selector, TokenSelector):
        raise ValueError("mode 'saccade' needs a selector that picks cells; this one changes the picture itself")
    if selector.encoder_layers:
        raise ValueError("this selector reads the encoder of the full picture, which mode 'saccade' never runs")
    return selector


def _open_sights(
    family: Family, inputs: Inputs, prompt: Prompt, images: Sequence[Image.Image | Tensor] | None
) -> list[Sight]:
    """The pictures at full resolution: the originals, or what the processor delivered of them."""
    device, cut = inputs["input_ids"].device, family.cut()
    if images is not None:
        if len(images) != len(prompt.spans):
            raise ValueError(f"`images` has {len(images)} pictures, the prompt has {len(prompt.spans)}")
        return [NativeSight(image, cut, device) for image in images]
    pictures = family.pictures(inputs, "image")
    if pictures is None:
        raise ValueError(f"{family.config.model_type} does not show its pictures; use mode 'prune'")
    rows: Tensor = inputs[family.pixel_names["image"]]
    grids = [span.grid for span in prompt.spans]
    a_cell = len(rows) // sum(map(cell_count, grids))
    parts = torch.split(rows, [cell_count(grid) * a_cell for grid in grids])
    return [DeliveredSight(*one) for one in zip(parts, [clip[0] for clip in pictures], grids, strict=True)]


def _measure(sight: Sight, plan: GazePlan) -> Mipmaps | None:
    """Nothing is measured of a picture that is encoded as a whole."""
    if plan.saccades == 0 and plan.gestalt == sight.grid:
        return None
    return sight.measure(plan)


def _choose(
    selector: TokenSelector, queries: Sequence[VisualQuery], plans: Sequence[GazePlan], grids: Sequence[Grid]
) -> list[Selection | None]:
    """Windows of each picture that has saccades."""
    if any(plan.saccades is None for plan in plans):
        return list(selector.select(queries, "auto"))
    ordered = isinstance(selector, nn.Module)  # others give no order in which to stop
    counts = []
    for plan, grid in zip(plans, grids, strict=True):
        # where tokens of the gestalt make room, more may fit than at first
        cells = plan.tokens if plan.drop and plan.saccades and ordered else plan.saccades or 0
        count = -(-cells // plan.side**2)
        if cells and ordered:  # the last windows may lie beyond the picture, which a selector does not know
            count += count_beyond(plan, grid)
        counts.append(min(count, cell_count(plan.windows)))
    return select_counts(selector, queries, counts)


def _check_windows(chosen: Sequence[Selection | None], plans: Sequence[GazePlan]) -> None:
    """Refuse what names no windows of a plan, in one transfer for all pictures."""
    found = [
        (one.indices, cell_count(plan.windows)) for one, plan in zip(chosen, plans, strict=True) if one is not None
    ]
    if any(indices.dtype != torch.long or indices.ndim != 1 for indices, _ in found):
        raise ValueError("`Selection.indices` must be a one-dimensional tensor of int64")
    if not all(len(indices) for indices, _ in found):
        raise ValueError("`Selection.indices` must name at least one cell")
    if found and bool(torch.stack([((own < 0) | (own >= total)).any() for own, total in found]).any()):
        raise ValueError(f"`Selection.indices` must name cells of `VisualQuery.cells`, here {found[0][1]}, none beyond")


def _look(one: Selection | None, plan: GazePlan, grid: Grid, gaze: Gaze) -> tuple[Tensor, Tensor | None]:
    """The cells `[k]` of one picture in the order in which they are read, and which of the gestalt's tokens stay."""
    if one is None:
        return torch.zeros(0, dtype=torch.long), None
    windows = one.indices
    if one.output is not None:
        windows = windows[one.output.order[0]]
    most = plan.tokens if plan.saccades is None or plan.drop else plan.saccades
    cells, stay = open_windows(windows, plan, grid, most), None
    if plan.drop:
        cells, stay = replace_covered(cells, plan, grid)
    return (cells.sort().values if gaze.order == "raster" else cells), stay


def _encode_cells(family: Family, sights: Sequence[Sight], cells: Sequence[Tensor], steady: bool) -> Encoded | None:
    """All saccades of a batch in one call of the encoder."""
    looked = [(sight, own) for sight, own in zip(sights, cells, strict=True) if len(own)]
    if not looked:
        return None
    patches = torch.cat([sight.patches(own).to(family.target.dtype) for sight, own in looked])
    return family.encode_cells(patches, [own for _, own in looked], [sight.grid for sight, _ in looked], steady)


def _join(
    overviews: Sequence[Overview],
    details: Encoded | None,
    chosen: Sequence[Selection | None],
    looked: Sequence[tuple[Tensor, Tensor | None]],
    plans: Sequence[GazePlan],
    sights: Sequence[Sight],
) -> list[Selection]:
    """Gestalt first, then saccades. Both stand on the scale of the full grid, whose spacing the model knows."""
    counts = [len(cells) for cells, _ in looked]
    parts: list[tuple[Tensor, ...]] = [()] * len(plans)
    if details is not None:
        all_levels = (details.features, *details.deepstack)
        parts = list(zip(*(torch.split(level, counts) for level in all_levels), strict=True))
    selections = []
    for overview, part, one, (cells, stay), plan, sight in zip(
        overviews, parts, chosen, looked, plans, sights, strict=True
    ):
        _, levels, places = overview.where(stay)
        if len(cells):
            gate = _gate(one, cells, plan, sight.grid)
            sharp = part if gate is None else tuple(level * gate.to(level.dtype)[:, None] for level in part)
            levels = tuple(torch.cat(both) for both in zip(levels, sharp, strict=True))
            places = torch.cat([places, cells])
        output = None if one is None else one.output
        selections.append(Selection(places, levels[0], levels[1:], output=output))
    return selections


def _gate(one: Selection | None, cells: Tensor, plan: GazePlan, grid: Grid) -> Tensor | None:
    """The gate `[k]` of each cell's window, if there is a gradient to carry."""
    if one is None or one.gate is None:
        return None
    gates = one.gate.new_ones(cell_count(plan.windows)).scatter(0, one.indices, one.gate)
    window = cells // grid[2] // plan.side * plan.windows[2] + cells % grid[2] // plan.side
    return gates[window]
