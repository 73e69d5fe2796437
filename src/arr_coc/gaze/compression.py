"""COC, contexts optical compression: a larger overview in fewer tokens, after the encoder has read it.

| `compress` | what a token of the result is                                                                  |
|------------|------------------------------------------------------------------------------------------------|
| `pool`     | the mean of the encoder's tokens under it, in its middle                                       |
| `merge`    | the same where neighbours are alike; where they differ or the question points, smaller blocks  |
| `conv`     | the mean and what convolutions add to it, which are learned (`arr-coc train --compress conv`)  |

All give at most as many tokens as the plain overview would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc.config import ARRCOCConfig, Grid
from arr_coc.pixels.mipmaps import pool_to
from arr_coc.runtime.tensors import unit_rows

Compress = Literal["pool", "merge", "conv"]
# These halve the sides of a grid, once or twice.
HALVING = ("merge", "conv")
# Sides of the squares that become one token, at most.
MOST_SIDE = 4


class Merged(NamedTuple):
    """Which squares become tokens.

    Args:
        share (`Tensor` of shape `[n, N]`): how much of each token of the larger grid goes into each of the result.
        middle (`Tensor` of shape `[n, 2]`): row and column of each square's middle, in cells of the larger grid.
    """

    share: Tensor
    middle: Tensor


def check_compress(compress: object) -> None:
    """Refuse what is no way to compress."""
    if compress is not None and compress not in get_args(Compress):
        raise ValueError(f"`compress` must be one of {', '.join(get_args(Compress))} or None, got {compress!r}")


def pool_tokens(tokens: Tensor, grid: Grid, side: int) -> Tensor:
    """Means `[n, D]` of tokens `[N, D]` over squares of `side` x `side`, which divide the grid.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.gaze.compression import pool_tokens
    >>> pool_tokens(torch.arange(16.0)[:, None], (1, 4, 4), 2).flatten().tolist()
    [2.5, 4.5, 10.5, 12.5]

    ```
    """
    maps = tokens.view(grid[1], grid[2], -1).permute(2, 0, 1)[None]  # [1, D, h, w]
    return pool_to(maps.float(), (grid[1] // side, grid[2] // side))[0].flatten(1).mT.to(tokens.dtype)


class ConvCompressor(nn.Module):
    """What is added to the means of squares of 2x2 or 4x4 tokens; nothing at first, so that it begins as `pool`.

    Tokens are narrowed, each convolution halves the sides of their grid, and every level of the encoder gets what was
    found in the first, widened by a map of its own.

    Args:
        hidden_size (`int`): width `D` of the tokens.
        rank (`int`): width inside.
        levels (`int`): of the encoder: its output, then DeepStack's.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.gaze.compression import ConvCompressor
    >>> compressor = ConvCompressor(hidden_size=8, rank=4, levels=2)
    >>> [level.shape for level in compressor([torch.randn(64, 8)] * 2, (1, 8, 8), 4)]
    [torch.Size([4, 8]), torch.Size([4, 8])]

    ```
    """

    def __init__(self, hidden_size: int, rank: int, levels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.narrow = nn.Linear(hidden_size, rank)
        self.halve = nn.ModuleList(nn.Conv2d(rank, rank, 3, stride=2, padding=1) for _ in range(2))
        self.widen = nn.ModuleList(nn.Linear(rank, hidden_size) for _ in range(levels))
        for widen in self.widen.parameters():
            nn.init.zeros_(widen)

    def forward(self, levels: Sequence[Tensor], grid: Grid, side: int) -> tuple[Tensor, ...]:
        """Tokens `[n, D]` of each level `[N, D]` on `grid`, one for each square of `side` (2 or 4) x `side`."""
        if len(levels) != len(self.widen):
            raise ValueError(f"this compressor has {len(self.widen)} levels, the encoder {len(levels)}; train another")
        seen = self.narrow(self.norm(levels[0].float()))  # [N, R]
        maps = seen.view(grid[1], grid[2], -1).permute(2, 0, 1)[None]  # [1, R, h, w]
        for halve in self.halve[: side.bit_length() - 1]:
            maps = F.gelu(halve(maps))
        found = maps[0].flatten(1).mT  # [n, R]
        return tuple(
            pool_tokens(level, grid, side) + widen(found).to(level.dtype)
            for level, widen in zip(levels, self.widen, strict=True)
        )


def make_compressor(config: ARRCOCConfig) -> ConvCompressor | None:
    """An untrained compressor, if a configuration has one."""
    if not config.compressor_levels:
        return None
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(config.seed)
        return ConvCompressor(config.hidden_size, config.low_rank, config.compressor_levels)


def plan_merge(tokens: Tensor, words: Tensor, grid: Grid, side: int) -> Merged:
    """Squares of half, once or twice `side`, as many as squares of `side` alone would be, or a few less.

    A square is worth splitting if its tokens differ from their mean, or if one of them is near a word of the question.

    Args:
        tokens (`Tensor` of shape `[N, D]`): on `grid`, which `side` divides.
        words (`Tensor` of shape `[Q, D]`): of the question.
        grid (`Grid`): of the tokens.
        side (`int`): of the squares on average; even.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.gaze.compression import plan_merge
    >>> merged = plan_merge(torch.randn(256, 8), torch.randn(2, 8), (1, 16, 16), 4)
    >>> len(merged.share) <= 16, torch.allclose(merged.share.sum(dim=1), torch.ones(len(merged.share)))
    (True, True)

    ```
    """
    rows, columns = grid[1] // side, grid[2] // side  # squares of `side`
    large = (-(-rows // 2), -(-columns // 2))
    unit = unit_rows(tokens.float())
    near = (unit_rows(words.float()) @ unit.mT).amax(dim=0)  # [N]
    row, column = torch.arange(grid[1]) // (2 * side), torch.arange(grid[2]) // (2 * side)
    owner = (row[:, None] * large[1] + column).flatten().to(tokens.device)  # the large square of each token
    total, count = large[0] * large[1], rows * columns
    size = torch.zeros(total, device=tokens.device).index_add(0, owner, torch.ones_like(near))
    mean = torch.zeros(total, unit.shape[1], device=tokens.device).index_add(0, owner, unit) / size[:, None]
    unlike = 1 - mean.norm(dim=1)  # 0 where all are alike
    worth = unlike / unlike.max().clamp(min=1e-6)
    pointed = torch.zeros(total, device=tokens.device).scatter_reduce(0, owner, near - near.mean(), "amax")
    worth = worth + pointed / pointed.max().clamp(min=1e-6)
    # of what is left after one token for each large square, half buys sixteenths and half quarters
    left = count - total
    fine = left // 2 // 15
    order = worth.argsort(descending=True, stable=True)
    level = torch.zeros(total, dtype=torch.long, device=tokens.device)
    level[order[fine : fine + (left - 15 * fine) // 3]] = 1
    level[order[:fine]] = 2
    return _squares(level[owner], grid, side)


def _squares(level: Tensor, grid: Grid, side: int) -> Merged:
    """The squares of tokens whose large square is split `level` `[N]` times."""
    row = torch.arange(grid[1], device=level.device)[:, None].expand(grid[1], grid[2]).flatten()
    column = torch.arange(grid[2], device=level.device).expand(grid[1], grid[2]).flatten()
    edge = torch.tensor([2 * side, side, side // 2], device=level.device)[level]  # [N]
    # a name for each square: its corner; squares of one large square have one size
    name = row // edge * edge * grid[2] + column // edge * edge
    _, square = torch.unique(name, return_inverse=True)
    count = int(square.max()) + 1
    share = torch.zeros(count, len(level), device=level.device)
    share[square, torch.arange(len(level), device=level.device)] = 1.0
    share = share / share.sum(dim=1, keepdim=True)
    return Merged(share, torch.stack([share @ row.float(), share @ column.float()], dim=1))
