"""Encode gestalts: whole pictures at low resolution, optionally compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from arr_coc.config import Grid, cell_count
from arr_coc.families.family import Encoded, Family
from arr_coc.gaze.compression import ConvCompressor, plan_merge, pool_tokens
from arr_coc.gaze.plan import Gaze, GazePlan, place_gestalt
from arr_coc.gaze.source import PictureSource
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.pixels.patches import patches_from_picture


class Gestalt(NamedTuple):
    """The gestalt of one picture.

    Args:
        tokens (`Tensor` of shape `[g, D]`): on the plan's gestalt grid, for the selector.
        levels (`tuple[Tensor, ...]`): what the language model reads, `[n, D]` each: features, then DeepStack's.
        places (`Tensor` of shape `[n]`): their places as full-resolution cells.
    """

    tokens: Tensor
    levels: tuple[Tensor, ...]
    places: Tensor

    def where(self, stay: Tensor | None) -> Gestalt:
        """The gestalt with only the tokens of a mask `[n]`; unchanged if it is None."""
        if stay is None:
            return self
        return Gestalt(self.tokens, tuple(level[stay] for level in self.levels), self.places[stay])


def encode_gestalts(
    family: Family,
    sources: Sequence[PictureSource],
    plans: Sequence[GazePlan],
    maps: Sequence[Mipmaps | None],
    replay: bool,
) -> Encoded:
    """Encode all gestalts in one call; a picture without mipmaps is small and is encoded whole.

    Args:
        family (`Family`): the opened model.
        sources (`Sequence[PictureSource]`): the pictures.
        plans (`Sequence[GazePlan]`): the gaze at each.
        maps (`Sequence[Mipmaps]`): what was measured of each.
        replay (`bool`): whether a CUDA graph may encode them.
    """
    rows = []
    for source, plan, mipmaps in zip(sources, plans, maps, strict=True):
        if mipmaps is None:
            rows.append(source.patches(torch.arange(cell_count(source.grid), device=source.device)))
        else:
            rows.append(patches_from_picture(source.small_picture(mipmaps, plan.encoded), **family.cut())[0])
    grids = [plan.encoded for plan in plans]
    cells = [torch.arange(cell_count(grid), device=rows[0].device) for grid in grids]
    return family.encode_cells(torch.cat([row.to(family.target.dtype) for row in rows]), cells, grids, replay=replay)


def make_gestalts(
    encoded: Encoded,
    plans: Sequence[GazePlan],
    grids: Sequence[Grid],
    words: Sequence[Tensor],
    gaze: Gaze,
    compressor: ConvCompressor | None,
) -> list[Gestalt]:
    """Split the encoding by picture and compress it, given each picture's question and full-resolution grid."""
    counts = [cell_count(plan.encoded) for plan in plans]
    by_picture = zip(*(torch.split(level, counts) for level in (encoded.features, *encoded.deepstack)), strict=True)
    gestalts = []
    for levels, plan, grid, question in zip(by_picture, plans, grids, words, strict=True):
        places = place_gestalt(plan, grid, levels[0].device)
        if plan.squeeze == 1:
            gestalts.append(Gestalt(levels[0].detach(), levels, places))
            continue
        pooled = tuple(pool_tokens(level, plan.encoded, plan.squeeze) for level in levels)
        if gaze.compress == "merge":
            with torch.autocast(levels[0].device.type, enabled=False):  # it would round the places of the squares
                squares = plan_merge(levels[0].detach(), question.to(levels[0]), plan.encoded, plan.squeeze)
                merged = tuple((squares.share @ level.float()).to(level.dtype) for level in levels)
            gestalts.append(Gestalt(pooled[0].detach(), merged, _cells_at(squares.middle, plan, grid)))
        elif compressor is not None and gaze.compress == "conv":
            gestalts.append(Gestalt(pooled[0].detach(), compressor(levels, plan.encoded, plan.squeeze), places))
        else:
            gestalts.append(Gestalt(pooled[0].detach(), pooled, places))
    return gestalts


def _cells_at(middle: Tensor, plan: GazePlan, grid: Grid) -> Tensor:
    """Full-resolution cells `[n]` at rows and columns `[n, 2]` of the encoded overview."""
    place = ((middle + 0.5) * (plan.scale // plan.squeeze) - 0.5).round().long()
    row, column = (place[:, axis].clamp(max=grid[axis + 1] - 1) for axis in (0, 1))
    return row * grid[2] + column
