"""Full-resolution pictures, read strip by strip or cell by cell and never held as floats as a whole."""

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
from arr_coc.runtime.tensors import constant
from arr_coc.texture import coarsest_level, gestalt_octave

# Most pixels that are held as floats at a time.
STRIP_PIXELS = {"cpu": 2**21, "cuda": 2**26}
# Most pixels of a picture in the host's memory that is uploaded as a whole, 3 bytes each.
MOST_UPLOADED = 2**26


class PictureSource(ABC):
    """One still picture at full resolution.

    Args:
        grid (`Grid`): grid of its cells.
        size (`tuple[int, int]`): height and width in pixels.
        cell (`int`): pixels a side of a cell.
        device (`torch.device`): where the model is.
    """

    def __init__(self, grid: Grid, size: tuple[int, int], cell: int, device: torch.device) -> None:
        self.grid, self.size, self.cell, self.device = grid, size, cell, device

    def measure(self, plan: GazePlan) -> Mipmaps:
        """Mipmaps from one pass over all pixels, for relevance on the plan's windows and for its gestalt.

        Where the gestalt reaches beyond the picture, the last pixels are repeated.
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
        """The picture `[1, 3, h, w]` at the size of a gestalt, from its mipmaps."""
        rows, columns = (
            _bicubic_weights(source, cells * self.cell, maps.colour.device)
            for source, cells in zip(maps.colour.shape[2:], grid[1:], strict=True)
        )
        with torch.autocast(maps.colour.device.type, enabled=False):
            return (rows @ maps.colour @ columns.mT).clamp(0, 1)

    def _filled(self, top: int, rows: int, columns: int) -> Tensor:
        """A strip of exactly this size; beyond the picture, its last row and column are repeated."""
        return _fill(self.strip(min(top, self.size[0] - 1), top + rows), rows, columns)

    @abstractmethod
    def strip(self, top: int, bottom: int) -> Tensor:
        """Pixel rows `top` to `bottom` as `[3, rows, W]`, bytes or floats in [0, 1]; fewer where the picture ends."""

    @abstractmethod
    def patches(self, cells: Tensor) -> Tensor:
        """Flattened patches of cells `[k]`, as the encoder takes them."""


class ProcessedSource(PictureSource):
    """A picture that the processor has already cut into patches.

    Args:
        rows (`Tensor` of shape `[patches, F]`): its patches.
        picture (`Tensor` of shape `[3, H, W]`): the picture rebuilt from them.
    """

    def __init__(self, rows: Tensor, picture: Tensor, grid: Grid) -> None:
        super().__init__(grid, (picture.shape[1], picture.shape[2]), picture.shape[1] // grid[1], rows.device)
        self.rows, self.picture = rows, picture

    def strip(self, top: int, bottom: int) -> Tensor:
        """A slice of the picture."""
        return self.picture[:, top:bottom]

    def patches(self, cells: Tensor) -> Tensor:
        """The processor's patches, unchanged."""
        total = self.grid[1] * self.grid[2]
        return self.rows.view(total, -1, self.rows.shape[1])[cells].flatten(0, 1)  # [k, m * m, F] -> [k * m * m, F]


class NativeSource(PictureSource):
    """A picture at its original resolution: no resampling; incomplete cells at the border repeat the last pixels.

    Args:
        picture (`PIL.Image.Image` or `Tensor` of shape `[3, H, W]`): of bytes, or floats in [0, 1].
        cut (`Mapping`): keyword arguments of [`~arr_coc.patches_from_picture`].
        device (`torch.device`): where the model is.
    """

    def __init__(self, picture: Image.Image | Tensor, cut: Mapping[str, Any], device: torch.device) -> None:
        height, width = picture.shape[1:] if isinstance(picture, Tensor) else picture.size[::-1]
        cell = cut["patch_size"] * cut["merge_size"]
        super().__init__((1, -(-height // cell), -(-width // cell)), (height, width), cell, device)
        if device.type == "cuda" and isinstance(picture, Image.Image) and height * width <= MOST_UPLOADED:
            picture = _upload(picture, device)
        self.picture, self.cut = picture, dict(cut)

    def strip(self, top: int, bottom: int) -> Tensor:
        """A slice of the picture; of a PIL image, only this slice becomes an array."""
        bottom = min(bottom, self.size[0])
        if isinstance(self.picture, Tensor):
            return self.picture[:, top:bottom].to(self.device)
        bands = self.picture.crop((0, top, self.size[1], bottom)).split()
        return torch.from_numpy(np.stack([np.asarray(band) for band in bands])).to(self.device)

    def patches(self, cells: Tensor) -> Tensor:
        """Cut the cells out, stack them into a picture of one column, and cut that into patches."""
        column = self._cut_out(cells).transpose(0, 1).flatten(1, 2)  # [k, 3, P, P] -> [3, k * P, P]
        column = column.float() if column.is_floating_point() else column / 255
        return patches_from_picture(column, **self.cut)[0]

    def _cut_out(self, cells: Tensor) -> Tensor:
        """Pixels `[k, 3, P, P]` of cells in any order."""
        rows, columns = cells // self.grid[2], cells % self.grid[2]
        whole = self.size == (self.grid[1] * self.cell, self.grid[2] * self.cell)
        if whole and isinstance(self.picture, Tensor) and self.picture.device == cells.device:
            by_cell = self.picture.view(3, self.grid[1], self.cell, self.grid[2], self.cell)
            return by_cell[:, rows, :, columns].to(self.device)  # indices first: [k, 3, P, P]
        inside = torch.arange(self.cell, device=cells.device)
        down = (rows[:, None] * self.cell + inside).clamp(max=self.size[0] - 1)  # [k, P]
        along = (columns[:, None] * self.cell + inside).clamp(max=self.size[1] - 1)
        if isinstance(self.picture, Tensor):
            device = self.picture.device
            pixels = self.picture[:, down.to(device)[:, :, None], along.to(device)[:, None]]  # [3, k, P, P]
            return pixels.transpose(0, 1).to(self.device)
        # a PIL image one row of cells at a time
        pixels = torch.empty(len(cells), 3, self.cell, self.cell, dtype=torch.uint8)
        for row in sorted(set(rows.tolist())):
            in_row = (rows == row).nonzero()[:, 0].cpu()
            strip = self.strip(row * self.cell, (row + 1) * self.cell).cpu()  # [3, rows, W]
            strip = _fill(strip, self.cell, strip.shape[2])
            pixels[in_row] = strip[:, :, along.cpu()[in_row]].permute(2, 0, 1, 3)  # [3, P, k, P] -> [k, 3, P, P]
        return pixels.to(self.device)


def _upload(picture: Image.Image, device: torch.device) -> Tensor:
    """Bytes `[3, H, W]` on a device, from memory that it reads by itself, so that the host goes on meanwhile."""
    pinned = torch.from_numpy(np.array(picture)).pin_memory()  # [H, W, 3]
    return pinned.to(device, non_blocking=True).permute(2, 0, 1).contiguous()


@constant
def _bicubic_weights(source: int, target: int, device: torch.device) -> Tensor:
    """Matrix `[target, source]` of a bicubic resize along one side, antialiased.

    Two matrix products take a small part of the time of `interpolate` on CUDA.
    """
    every = torch.eye(source)[None, None]  # what becomes of each row by itself
    return F.interpolate(every, (target, source), mode="bicubic", antialias=True)[0, 0].to(device)


def _fill(strip: Tensor, rows: int, columns: int) -> Tensor:
    """Extend a strip `[3, h, w]` to `rows` x `columns` by repeating its last row and column."""
    if strip.shape[2] < columns:
        strip = torch.cat([strip, strip[:, :, -1:].expand(-1, -1, columns - strip.shape[2])], dim=2)
    if strip.shape[1] < rows:
        strip = torch.cat([strip, strip[:, -1:].expand(-1, rows - strip.shape[1], -1)], dim=1)
    return strip
