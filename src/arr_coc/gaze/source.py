"""A picture at full resolution, read where it is needed and never held as floats as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from arr_coc.config import Grid
from arr_coc.gaze.plan import GazePlan
from arr_coc.pixels.mipmaps import Mipmaps, measure_strips
from arr_coc.pixels.patches import patches_from_picture
from arr_coc.texture import coarsest_level, gestalt_octave

# Pixels that are held as floats at a time.
STRIP_PIXELS = {"cpu": 2**21, "cuda": 2**26}


class PictureSource(ABC):
    """One still picture as the gaze sees it.

    Args:
        grid (`Grid`): cells of full resolution.
        size (`tuple[int, int]`): rows and columns of pixels.
        cell (`int`): pixels a side of a cell.
        device (`torch.device`): where the model is.
    """

    def __init__(self, grid: Grid, size: tuple[int, int], cell: int, device: torch.device) -> None:
        self.grid, self.size, self.cell, self.device = grid, size, cell, device

    def measure(self, plan: GazePlan) -> Mipmaps:
        """One pass over all pixels, for relevance on the windows of a plan and for its gestalt.

        The picture is continued with its last pixels as far as the gestalt reaches.
        """
        size = (plan.gestalt[1] * plan.scale * self.cell, plan.gestalt[2] * plan.scale * self.cell)
        step = self.cell * plan.side
        rows = max(1, STRIP_PIXELS[self.device.type] // (step * size[1])) * step
        strips = (self._filled(top, min(rows, size[0] - top), size[1]) for top in range(0, size[0], rows))
        finest = max(1, int(gestalt_octave(size, cell_pixels=self.cell)))
        levels = (finest, coarsest_level(size, cell_pixels=self.cell))
        least = (plan.encoded[1] * self.cell, plan.encoded[2] * self.cell)
        return measure_strips(strips, size, plan.windows[1:], levels, least)

    def small_picture(self, maps: Mipmaps, grid: Grid) -> Tensor:
        """The picture `[1, 3, h, w]` at the size of a gestalt, from what was measured."""
        size = (grid[1] * self.cell, grid[2] * self.cell)
        return F.interpolate(maps.colour, size, mode="bicubic", antialias=True).clamp(0, 1)

    def _filled(self, top: int, rows: int, columns: int) -> Tensor:
        """A strip, continued where it reaches beyond the picture; at least the last row is repeated."""
        return _fill(self.strip(min(top, self.size[0] - 1), top + rows), rows, columns)

    @abstractmethod
    def strip(self, top: int, bottom: int) -> Tensor:
        """Rows of pixels `[3, rows, W]`, bytes or floats in [0, 1]; fewer where the picture ends."""

    @abstractmethod
    def patches(self, cells: Tensor) -> Tensor:
        """Rows of pixel values of cells `[k]`, as the encoder takes them."""


class ProcessedSource(PictureSource):
    """A picture that a processor has cut into patches.

    Args:
        rows (`Tensor` of shape `[patches, F]`): its pixel values.
        picture (`Tensor` of shape `[3, H, W]`): the same, put together.
    """

    def __init__(self, rows: Tensor, picture: Tensor, grid: Grid) -> None:
        super().__init__(grid, (picture.shape[1], picture.shape[2]), picture.shape[1] // grid[1], rows.device)
        self.rows, self.picture = rows, picture

    def strip(self, top: int, bottom: int) -> Tensor:
        """A slice of the picture."""
        return self.picture[:, top:bottom]

    def patches(self, cells: Tensor) -> Tensor:
        """The processor's own rows."""
        total = self.grid[1] * self.grid[2]
        return self.rows.view(total, -1, self.rows.shape[1])[cells].flatten(0, 1)  # [k, m * m, F] -> [k * m * m, F]


class NativeSource(PictureSource):
    """A picture at its own resolution: no resampling, its last cells are continued with the last pixels.

    Args:
        picture (`PIL.Image.Image` or `Tensor` of shape `[3, H, W]`): of bytes, or floats in [0, 1].
        cut (`Mapping`): how it is cut into patches, as in [`~arr_coc.patches_from_picture`].
        device (`torch.device`): where the model is.
    """

    def __init__(self, picture: Image.Image | Tensor, cut: Mapping[str, Any], device: torch.device) -> None:
        height, width = picture.shape[1:] if isinstance(picture, Tensor) else picture.size[::-1]
        cell = cut["patch_size"] * cut["merge_size"]
        super().__init__((1, -(-height // cell), -(-width // cell)), (height, width), cell, device)
        self.picture, self.cut = picture, dict(cut)

    def strip(self, top: int, bottom: int) -> Tensor:
        """A slice of the picture; a file's is decoded already, but only this much of it becomes an array."""
        bottom = min(bottom, self.size[0])
        if isinstance(self.picture, Tensor):
            return self.picture[:, top:bottom].to(self.device)
        bands = self.picture.crop((0, top, self.size[1], bottom)).split()
        return torch.from_numpy(np.stack([np.asarray(band) for band in bands])).to(self.device)

    def patches(self, cells: Tensor) -> Tensor:
        """Cells cut out and laid below each other: a picture of one column."""
        column = self._cut_out(cells).transpose(0, 1).flatten(1, 2)  # [k, 3, P, P] -> [3, k * P, P]
        column = column.float() if column.is_floating_point() else column / 255
        return patches_from_picture(column, **self.cut)[0]

    def _cut_out(self, cells: Tensor) -> Tensor:
        """Pixels `[k, 3, P, P]` of cells, whatever the order."""
        inside = torch.arange(self.cell, device=cells.device)
        rows, columns = cells // self.grid[2], cells % self.grid[2]
        down = (rows[:, None] * self.cell + inside).clamp(max=self.size[0] - 1)  # [k, P]
        along = (columns[:, None] * self.cell + inside).clamp(max=self.size[1] - 1)
        if isinstance(self.picture, Tensor):
            place = self.picture.device
            found = self.picture[:, down.to(place)[:, :, None], along.to(place)[:, None]]  # [3, k, P, P]
            return found.transpose(0, 1).to(self.device)
        # a file's rows of cells one by one, each with all of its chosen cells
        found = torch.empty(len(cells), 3, self.cell, self.cell, dtype=torch.uint8)
        for row in sorted(set(rows.tolist())):
            own = (rows == row).nonzero()[:, 0].cpu()
            strip = self.strip(row * self.cell, (row + 1) * self.cell).cpu()  # [3, rows, W]
            strip = _fill(strip, self.cell, strip.shape[2])
            found[own] = strip[:, :, along.cpu()[own]].permute(2, 0, 1, 3)  # [3, P, k, P] -> [k, 3, P, P]
        return found.to(self.device)


def _fill(strip: Tensor, rows: int, columns: int) -> Tensor:
    """A strip `[3, h, w]` continued with its last row and column."""
    if strip.shape[2] < columns:
        strip = torch.cat([strip, strip[:, :, -1:].expand(-1, -1, columns - strip.shape[2])], dim=2)
    if strip.shape[1] < rows:
        strip = torch.cat([strip, strip[:, -1:].expand(-1, rows - strip.shape[1], -1)], dim=1)
    return strip
