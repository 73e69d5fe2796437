"""On the device: pictures of nearly one size brought to one size, each a little elsewhere, and the words under tokens.

A batch is used several times while others are drawn; every time its things fall elsewhere on the grid of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CELL = 32  # pixels of a token's side
SHRUNK = 0.92  # least size of a moved picture; its edges fill what is left over


class Placed(NamedTuple):
    """Where pictures lie in the one size: the scale and the offset of each in x and y, both `[B, 2]`."""

    scale: Tensor
    offset: Tensor


def place(sizes: Tensor, grid: tuple[int, int], moved: bool) -> Placed:
    """Fill the grid with each picture of a size `[B, 2]` (width, height), or if `moved`, nearly, somewhere in it."""
    whole = torch.tensor([grid[1] * CELL, grid[0] * CELL], device=sizes.device, dtype=torch.float32)
    least = SHRUNK if moved else 1.0
    share = least + (1 - least) * torch.rand(len(sizes), 2, device=sizes.device)
    offset = (1 - share) * torch.rand(len(sizes), 2, device=sizes.device) * whole
    return Placed(share * whole / sizes, offset)


def taps(scale: Tensor, offset: Tensor, side: Tensor, into: int, out_of: int, dtype: torch.dtype) -> Tensor:
    """Weights `[B, into, out_of]` of a cubic interpolation along one side, smoothed where it shrinks."""
    middle = (torch.arange(into, device=scale.device) + 0.5 - offset[:, None]) / scale[:, None]  # [B, into]
    middle = torch.minimum(middle.clamp(min=0.5), side[:, None] - 0.5)  # beyond an edge, the edge
    source = torch.arange(out_of, device=scale.device) + 0.5
    far = (source - middle[:, :, None]).abs() * scale[:, None, None].clamp(max=1.0)
    near = (1.5 * far - 2.5) * far * far + 1
    further = ((-0.5 * far + 2.5) * far - 4) * far + 2
    weight = torch.where(far < 1, near, torch.where(far < 2, further, torch.zeros_like(far)))
    weight = weight * (source < side[:, None, None])
    return (weight / weight.sum(dim=-1, keepdim=True)).to(dtype)


class Resampler:
    """Brings pictures to one size.

    Args:
        compiled (`bool`): compile the weights of the interpolation, which are as many as a picture's pixels.
    """

    def __init__(self, compiled: bool) -> None:
        self.taps = torch.compile(taps, dynamic=True) if compiled else taps

    def __call__(self, pictures: Tensor, sizes: Tensor, placed: Placed, grid: tuple[int, int]) -> Tensor:
        """Pictures `[B, F, 3, H', W']` of bytes, of which each fills a part, as `[B, F, 3, H, W]` in 0 to 255."""
        precise = torch.float16 if pictures.is_cuda else torch.float32  # bytes are exact in both
        across, down = (
            self.taps(placed.scale[:, axis], placed.offset[:, axis], sizes[:, axis], into * CELL, out_of, precise)
            for axis, into, out_of in ((0, grid[1], pictures.shape[4]), (1, grid[0], pictures.shape[3]))
        )
        return (down[:, None, None] @ pictures.to(precise) @ across[:, None, None].mT).clamp(0, 255)


def words_under(batch: dict[str, Any], placed: Placed, count: int) -> Tensor:
    """Which of `count` words lie under each token, `[B * G, N, W]`: half of the word's box, or a quarter of the token.

    A box that is on the border of tokens lies under the one that holds its middle.
    """
    rows, columns = batch["grid"]
    image, word = batch["owner"], batch["word"]  # [P], [P]: which picture or pair of frames, and which word
    row = image // batch["groups"]
    scale, offset = placed.scale[row].repeat(1, 2), placed.offset[row].repeat(1, 2)
    box = batch["boxes"] * scale + offset  # [P, 4]
    y, x = (torch.arange(side, device=box.device) * CELL for side in (rows, columns))
    across = (torch.minimum(x + CELL, box[:, 2:3]) - torch.maximum(x, box[:, 0:1])).clamp(min=0)  # [P, w]
    down = (torch.minimum(y + CELL, box[:, 3:4]) - torch.maximum(y, box[:, 1:2])).clamp(min=0)  # [P, h]
    size = ((box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])).clamp(min=1.0)
    wanted = torch.minimum(0.5 * size, torch.full_like(size, 0.25 * CELL * CELL))
    under = (down[:, :, None] * across[:, None]).flatten(1) >= wanted[:, None]  # [P, h, w] -> [P, N]
    middle = ((box[:, :2] + box[:, 2:]) / 2 / CELL).long()
    cell = middle[:, 1].clamp(0, rows - 1) * columns + middle[:, 0].clamp(0, columns - 1)
    lost = ~under.any(dim=1)
    under[torch.arange(len(under), device=box.device), cell] |= lost
    found = torch.zeros(batch["images"] * count, rows * columns, device=box.device, dtype=torch.float16)
    found.index_add_(0, image * count + word, under.half())
    return (found > 0).view(batch["images"], count, rows * columns).transpose(1, 2)  # [B * G * W, N] -> [B * G, N, W]
