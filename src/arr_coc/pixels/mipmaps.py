"""Block means and variances of a picture from one pass over its pixels; all pixel channels of a texture use them.

Every level of the pyramid holds the mean and the mean square of the luminance over blocks of 2, 4, 8, ... pixels. The
detail lost at any scale is then a subtraction (law of total variance), not another pass over the pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arr_coc.runtime.tensors import constant

# A cell keeps at least this many samples a side in the reduced picture: 28- and 32-pixel cells are halved once.
SAMPLES_PER_CELL = 14
# ITU-R BT.601 luma.
LUMA = (0.299, 0.587, 0.114)


def halve(x: Tensor) -> Tensor:
    """Mean over 2x2 blocks; incomplete blocks at an odd border average the pixels they have."""
    height, width = x.shape[-2:]
    if x.is_cuda or x.dtype != torch.float32 or height % 2 or width % 2:
        return F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
    # the same in two sums, which on a CPU take an eighth of the time
    columns = x[..., ::2] + x[..., 1::2]  # [..., H, W / 2]
    return (columns[..., ::2, :] + columns[..., 1::2, :]).mul_(0.25)


def pool_to(x: Tensor, size: tuple[int, int]) -> Tensor:
    """`adaptive_avg_pool2d`, by plain means where the sizes divide, which is several times faster."""
    rows, columns = x.shape[-2] // size[0], x.shape[-1] // size[1]
    if (rows * size[0], columns * size[1]) != tuple(x.shape[-2:]):
        return F.adaptive_avg_pool2d(x, size)
    lead = x.shape[:-2]
    if rows > 1:
        x = x.reshape(*lead, size[0], rows, -1).mean(dim=-2)  # [..., h, W]
    if columns > 1:
        x = x.reshape(*lead, size[0], size[1], columns).mean(dim=-1)  # [..., h, w]
    return x


@constant
def _bilinear_weights(source: int, target: int, device: torch.device) -> Tensor:
    """Matrix `[target, source]` of bilinear sampling along one side, pixel centres aligned."""
    return F.interpolate(torch.eye(source)[None], size=target, mode="linear")[0].mT.contiguous().to(device)


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear resize of small float32 maps `[..., h, w]`, a no-op at the same size.

    Two matrix products: with many channels far faster on CUDA than `interpolate`, and the backward is deterministic.
    """
    height, width = x.shape[-2:]
    if height != size[0]:
        x = _bilinear_weights(height, size[0], x.device) @ x
    if width != size[1]:
        x = x @ _bilinear_weights(width, size[1], x.device).mT
    return x


def luminance(colour: Tensor) -> Tensor:
    """Luminance `[B, 1, H, W]` in float32 of a picture `[B, 3, H, W]` in any float dtype."""
    red, green, blue = colour.chunk(3, dim=1)
    # one channel at a time, so that a half-precision picture is never copied as a whole
    return (red.float() * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def gradient(intensity: Tensor) -> tuple[Tensor, Tensor]:
    """Sobel derivatives `[B, 2, H, W]` (x, y) of `[B, 1, H, W]` in [0, 1], and their length `[B, 1, H, W]`.

    A unit step gives 0.5.
    """
    padded = F.pad(intensity, (1, 1, 1, 1), mode="replicate")
    # each kernel is a sum of three along one side, with weights 1, 2, 1, and a difference along the other
    down = (padded[:, :, :-2] + padded[:, :, 2:]).add_(padded[:, :, 1:-1], alpha=2)  # [B, 1, H, W + 2]
    right = (padded[..., :-2] + padded[..., 2:]).add_(padded[..., 1:-1], alpha=2)  # [B, 1, H + 2, W]
    x, y = down[..., 2:] - down[..., :-2], right[:, :, 2:] - right[:, :, :-2]
    derivatives = torch.cat([x, y], dim=1).mul_(1 / 8)
    return derivatives, torch.hypot(derivatives[:, :1], derivatives[:, 1:])


@dataclass(frozen=True)
class Mipmaps:
    """Block statistics from one pass over the pixels.

    Args:
        cells (`Tensor` of shape `[B, 3, h, w]`): mean colour of each cell.
        colour (`Tensor` of shape `[B, 3, H / f, W / f]`): the reduced picture, float32.
        moments (`tuple[Tensor, ...]`): level `l` is `[B, 2, H / 2**l, W / 2**l]`, mean and mean square of the
            luminance over blocks of `2**l` pixels; level 0 is `None` unless it is the working level.
        level (`int`): the working level, `f = 2**level`.
        size (`tuple[int, int]`): height and width of the picture in pixels.
    """

    cells: Tensor
    colour: Tensor
    moments: tuple[Tensor | None, ...]
    level: int
    size: tuple[int, int]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order that [`~Mipmaps.with_tensors`] takes."""
        return self.cells, self.colour, *self.moments

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Mipmaps:
        """A copy that holds these tensors instead."""
        return replace(self, cells=tensors[0], colour=tensors[1], moments=tuple(tensors[2:]))

    @staticmethod
    def stack(maps: Sequence[Mipmaps]) -> Mipmaps:
        """The mipmaps of several pictures of one size as those of a batch."""
        if len(maps) == 1:
            return maps[0]
        parts = zip(*(one.tensors for one in maps), strict=True)
        joined: list[Any] = [None if same[0] is None else torch.cat(same) for same in parts]
        return maps[0].with_tensors(tuple(joined))

    @property
    def form(self) -> tuple[object, ...]:
        """What mipmaps that can be stacked have in common."""
        return self.level, self.size, tuple(None if part is None else part.shape for part in self.tensors)

    @property
    def grid(self) -> tuple[int, int]:
        """Size `(h, w)` of the token grid."""
        return self.cells.shape[-2], self.cells.shape[-1]

    @property
    def intensity(self) -> Tensor:
        """Luminance `[B, 1, H / f, W / f]` of the reduced picture."""
        return self._at(self.level)[:, :1]

    def _at(self, level: int) -> Tensor:
        moments = self.moments[min(level, len(self.moments) - 1)]
        if moments is None:
            raise ValueError(f"mip level {level} was not kept; the finest kept level is {self.level}")
        return moments

    def deviation(self, level: float) -> Tensor:
        """Root mean square `[B, 1, h, w]` of detail finer than blocks of `2**level` pixels; a fraction interpolates.

        Black-and-white detail has deviation 0.5, so the result is doubled into [0, 1].
        """
        low, share = math.floor(level), level - math.floor(level)
        variance = self._variance(low)
        if share:
            variance = torch.lerp(variance, self._variance(low + 1), share)
        return (2 * variance.clamp_(min=0).sqrt_()).clamp_(max=1)

    def _variance(self, level: int) -> Tensor:
        if level <= 0:
            return self.cells.new_zeros((self.cells.shape[0], 1, *self.grid), dtype=torch.float32)
        mean, square = self._at(level).chunk(2, dim=1)
        return pool_to(square - mean * mean, self.grid)

    def cell_deviation(self) -> Tensor:
        """Root mean square `[B, 1, h, w]` inside each whole cell, doubled into [0, 1]."""
        mean, square = pool_to(self._at(self.level), self.grid).chunk(2, dim=1)
        return (2 * (square - mean * mean).clamp_(min=0).sqrt_()).clamp_(max=1)


def working_level(height: int, width: int, grid: tuple[int, int]) -> int:
    """Largest mip level at which a cell still has `SAMPLES_PER_CELL` samples a side."""
    return max(0, math.floor(math.log2(max(1.0, min(height / grid[0], width / grid[1]) / SAMPLES_PER_CELL))))


def build_mipmaps(picture: Tensor, grid: tuple[int, int], coarsest: int) -> Mipmaps:
    """Mipmaps of a picture `[B, 3, H, W]`, up to blocks of `2**coarsest` pixels.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.pixels.mipmaps import build_mipmaps
    >>> maps = build_mipmaps(torch.rand(1, 3, 64, 96), grid=(2, 3), coarsest=3)
    >>> maps.cells.shape, maps.colour.shape
    (torch.Size([1, 3, 2, 3]), torch.Size([1, 3, 32, 48]))

    ```
    """
    height, width = picture.shape[-2:]
    level = working_level(height, width, grid)
    luma = luminance(picture)
    moments: list[Tensor | None]
    if level == 0 or (height, width) == (1, 1):
        current = torch.cat([luma, luma * luma], dim=1)  # [B, 2, H, W]
        moments = [current]
    else:  # level 0 is not needed: halve before joining, so that only one full-size map exists at a time
        mean = halve(luma)
        current = torch.cat([mean, halve(luma.square_())], dim=1)  # [B, 2, H / 2, W / 2]
        moments = [None, current]
    for _ in range(len(moments) - 1, max(level, coarsest)):
        if current.shape[-2:] == (1, 1):
            break
        current = halve(current)
        moments.append(current)
    colour = picture
    for _ in range(level):
        colour = halve(colour)
    cells = pool_to(picture, grid) if picture.dtype == torch.float32 else pool_to(picture, grid).float()
    return Mipmaps(cells, colour.float(), tuple(moments), level, (height, width))


def measure_strips(
    strips: Iterable[Tensor],
    size: tuple[int, int],
    grid: tuple[int, int],
    levels: tuple[int, int],
    least: tuple[int, int],
) -> Mipmaps:
    """[`build_mipmaps`] for one picture in strips; only one strip at a time is held as floats.

    Args:
        strips (`Iterable[Tensor]`): `[3, rows, W]` from top to bottom, bytes or floats in [0, 1]. In all but the last,
            `2**level` must divide the number of rows, which whole cells guarantee.
        size (`tuple[int, int]`): height and width of the picture.
        grid (`tuple[int, int]`): rows and columns of the cells.
        levels (`tuple[int, int]`): the finest and the coarsest level that will be needed.
        least (`tuple[int, int]`): fewest rows and columns of the reduced picture.
    """
    level = min(working_level(*size, grid), levels[0])
    while level and any(side >> level < minimum for side, minimum in zip(size, least, strict=True)):
        level -= 1
    small = (size[0] >> level, size[1] >> level)
    reduced, colour = None, None
    top = 0
    for strip in strips:
        pixels = strip[None].float() if strip.is_floating_point() else strip[None] / 255
        if reduced is None or colour is None:  # allocated once: pieces would fragment the memory
            reduced, colour = pixels.new_empty(1, 2, *small), pixels.new_empty(1, 3, *small)
        luma = luminance(pixels)
        rows = slice(top, top + (pixels.shape[2] >> level))
        reduced[:, :1, rows], reduced[:, 1:, rows] = _reduce(luma, level), _reduce(luma.square_(), level)
        colour[:, :, rows] = _reduce(pixels, level)
        top = rows.stop
    if reduced is None or colour is None:
        raise ValueError("`strips` is empty; give at least one strip [3, rows, W]")
    moments: list[Tensor | None] = [*[None] * level, reduced]
    for _ in range(level, levels[1]):
        current = moments[-1]
        if current is None or current.shape[-2:] == (1, 1):
            break
        moments.append(halve(current))
    return Mipmaps(pool_to(colour, grid), colour, tuple(moments), level, size)


def peak_to(x: Tensor, size: tuple[int, int]) -> Tensor:
    """`adaptive_max_pool2d`, by the much faster fixed-size kernel where the sizes divide."""
    rows, columns = x.shape[-2] // size[0], x.shape[-1] // size[1]
    if (rows * size[0], columns * size[1]) == tuple(x.shape[-2:]):
        return F.max_pool2d(x, (rows, columns))
    pool: Callable[[Tensor, tuple[int, int]], Tensor] = F.adaptive_max_pool2d
    return pool(x, size)


def halve_peaks(x: Tensor) -> Tensor:
    """Maximum over 2x2 blocks; an odd border has smaller blocks. On a CPU much faster than `max_pool2d`."""
    height, width = x.shape[-2:]
    if height % 2 or width % 2:
        x = F.pad(x, (0, width % 2, 0, height % 2), mode="replicate")
    x = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
    return torch.maximum(x[..., ::2], x[..., 1::2])


def peaks_around(x: Tensor) -> Tensor:
    """Maximum of each sample and its eight neighbours. On a CPU much faster than `max_pool2d`."""
    padded = F.pad(x, (1, 1, 1, 1), value=-math.inf)
    rows = torch.maximum(torch.maximum(padded[..., :-2], padded[..., 1:-1]), padded[..., 2:])
    return torch.maximum(torch.maximum(rows[..., :-2, :], rows[..., 1:-1, :]), rows[..., 2:, :])


def _reduce(x: Tensor, level: int) -> Tensor:
    """Means over blocks of `2**level` pixels; a single halving has a faster kernel."""
    if level <= 1:
        return halve(x) if level else x
    return pool_to(x, (x.shape[-2] >> level, x.shape[-1] >> level))
