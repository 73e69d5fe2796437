"""The gestalt: whole pictures through the encoder at low resolution, compressed if that is wished."""

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
        tokens (`Tensor` of shape `[g, D]`): on the plan's gestalt, by which relevance is judged.
        levels (`tuple[Tensor, ...]`): what is read, `[n, D]`: features, then DeepStack's rows.
        places (`Tensor` of shape `[n]`): cells of full resolution at which they stand.
    """

    tokens: Tensor
    levels: tuple[Tensor, ...]
    places: Tensor

    def where(self, stay: Tensor | None) -> Gestalt:
        """Only the tokens that stay `[n]`."""
        if stay is None:
            return self
        return Gestalt(self.tokens, tuple(level[stay] for level in self.levels), self.places[stay])


def encode_gestalts(
    family: Family, sources: Sequence[PictureSource], plans: Sequence[GazePlan], maps: Sequence[Mipmaps | None]
) -> Encoded:
    """All gestalts in one call of the encoder; a small picture is its own."""
    rows = []
    for source, plan, seen in zip(sources, plans, maps, strict=True):
        if seen is None:
            rows.append(source.patches(torch.arange(cell_count(source.grid), device=source.device)))
        else:
            rows.append(patches_from_picture(source.small_picture(seen, plan.encoded), **family.cut())[0])
    grids = [plan.encoded for plan in plans]
    cells = [torch.arange(cell_count(grid), device=rows[0].device) for grid in grids]
    return family.encode_cells(torch.cat([row.to(family.target.dtype) for row in rows]), cells, grids, replay=True)


def make_gestalts(
    encoded: Encoded,
    plans: Sequence[GazePlan],
    grids: Sequence[Grid],
    words: Sequence[Tensor],
    gaze: Gaze,
    compressor: ConvCompressor | None,
) -> list[Gestalt]:
    """What was encoded, picture by picture; `words` are the question of each, `grids` those of full resolution."""
    counts = [cell_count(plan.encoded) for plan in plans]
    levels = zip(*(torch.split(level, counts) for level in (encoded.features, *encoded.deepstack)), strict=True)
    found = []
    for own, plan, grid, asked in zip(levels, plans, grids, words, strict=True):
        places = place_gestalt(plan, grid).to(own[0].device)
        if plan.squeeze == 1:
            found.append(Gestalt(own[0].detach(), own, places))
            continue
        pooled = tuple(pool_tokens(level, plan.encoded, plan.squeeze) for level in own)
        if gaze.compress == "merge":
            merged = plan_merge(own[0].detach(), asked.to(own[0]), plan.encoded, plan.squeeze)
            read = tuple((merged.share @ level.float()).to(level.dtype) for level in own)
            found.append(Gestalt(pooled[0].detach(), read, _cells_at(merged.middle, plan, grid)))
        elif compressor is not None and gaze.compress == "conv":
            found.append(Gestalt(pooled[0].detach(), compressor(own, plan.encoded, plan.squeeze), places))
        else:
            found.append(Gestalt(pooled[0].detach(), pooled, places))
    return found


def _cells_at(middle: Tensor, plan: GazePlan, grid: Grid) -> Tensor:
    """The cells `[n]` of full resolution at rows and columns `[n, 2]` of the encoded overview."""
    place = ((middle + 0.5) * (plan.scale // plan.squeeze) - 0.5).round().long()
    row, column = (place[:, axis].clamp(max=grid[axis + 1] - 1) for axis in (0, 1))
    return row * grid[2] + column
