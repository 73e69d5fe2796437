"""COC, contexts optical compression: encode a larger overview, then compress it to fewer tokens.

| `compress` | a token of the result                                                                          |
|------------|------------------------------------------------------------------------------------------------|
| `pool`     | the mean of a square of the encoder's tokens, placed in its middle                             |
| `merge`    | the same, but with smaller squares where tokens differ or the question points                  |
| `conv`     | the mean plus a correction by learned convolutions (`arr-coc train --compress conv`)           |

None gives more tokens than the plain overview would have.
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
# Methods that halve the sides of a grid, once or twice.
HALVING = ("merge", "conv")
# Largest side of a square that becomes one token.
MOST_SIDE = 4


class Merged(NamedTuple):
    """The squares that become tokens.

    Args:
        share (`Tensor` of shape `[n, N]`): weight of each token of the larger grid in each token of the result.
        middle (`Tensor` of shape `[n, 2]`): row and column of each square's centre, in cells of the larger grid.
    """

    share: Tensor
    middle: Tensor


def check_compress(compress: object) -> None:
    """Raise if `compress` is not a known method or None."""
    if compress is not None and compress not in get_args(Compress):
        raise ValueError(f"`compress` must be one of {', '.join(get_args(Compress))} or None, got {compress!r}")


def pool_tokens(tokens: Tensor, grid: Grid, side: int) -> Tensor:
    """Means `[n, D]` of tokens `[N, D]` over squares of `side` x `side`, where `side` divides the grid.

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
    """Means of squares of 2x2 or 4x4 tokens plus a learned correction, zero at first, so that it starts as `pool`.

    The tokens of the first level are projected to `rank`, and each convolution halves the sides of their grid. Every
    level of the encoder adds the result, projected back to `hidden_size` by a linear layer per level.

    Args:
        hidden_size (`int`): width `D` of the tokens.
        rank (`int`): width of the convolutions.
        levels (`int`): number of encoder levels: its output, then DeepStack's.

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
        for parameter in self.widen.parameters():
            nn.init.zeros_(parameter)

    def forward(self, levels: Sequence[Tensor], grid: Grid, side: int) -> tuple[Tensor, ...]:
        """Compressed tokens `[n, D]` of each level `[N, D]` on `grid`, one per square of `side` (2 or 4) x `side`."""
        if len(levels) != len(self.widen):
            raise ValueError(f"this compressor has {len(self.widen)} levels, the encoder {len(levels)}; train another")
        narrowed = self.narrow(self.norm(levels[0].float()))  # [N, R]
        maps = narrowed.view(grid[1], grid[2], -1).permute(2, 0, 1)[None]  # [1, R, h, w]
        for halve in self.halve[: side.bit_length() - 1]:
            maps = F.gelu(halve(maps))
        features = maps[0].flatten(1).mT  # [n, R]
        return tuple(
            pool_tokens(level, grid, side) + widen(features).to(level.dtype)
            for level, widen in zip(levels, self.widen, strict=True)
        )


def make_compressor(config: ARRCOCConfig) -> ConvCompressor | None:
    """An untrained compressor; None if the configuration has none."""
    if not config.compressor_levels:
        return None
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
        torch.manual_seed(config.seed)
        return ConvCompressor(config.hidden_size, config.low_rank, config.compressor_levels)


def plan_merge(tokens: Tensor, words: Tensor, grid: Grid, side: int) -> Merged:
    """Choose squares of half, once or twice `side`; together no more than squares of `side` alone would be.

    A square is worth splitting if its tokens differ from their mean, or if one of them is close to a word of the
    question.

    Args:
        tokens (`Tensor` of shape `[N, D]`): on `grid`, which `side` divides.
        words (`Tensor` of shape `[Q, D]`): embeddings of the question's words.
        grid (`Grid`): grid of the tokens.
        side (`int`): average side of the squares; even.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.gaze.compression import plan_merge
    >>> merged = plan_merge(torch.randn(256, 8), torch.randn(2, 8), (1, 16, 16), 4)
    >>> len(merged.share) <= 16, torch.allclose(merged.share.sum(dim=1), torch.ones(len(merged.share)))
    (True, True)

    ```
    """
    rows, columns = grid[1] // side, grid[2] // side  # of squares of `side`
    large = (-(-rows // 2), -(-columns // 2))  # rows and columns of squares of twice `side`
    unit = unit_rows(tokens.float())
    near = (unit_rows(words.float()) @ unit.mT).amax(dim=0)  # [N]
    row, column = torch.arange(grid[1]) // (2 * side), torch.arange(grid[2]) // (2 * side)
    owner = (row[:, None] * large[1] + column).flatten().to(tokens.device)  # the large square of each token
    total, count = large[0] * large[1], rows * columns
    size = torch.zeros(total, device=tokens.device).index_add(0, owner, torch.ones_like(near))
    mean = torch.zeros(total, unit.shape[1], device=tokens.device).index_add(0, owner, unit) / size[:, None]
    unlike = 1 - mean.norm(dim=1)  # 0 where all tokens are alike
    worth = unlike / unlike.max().clamp(min=1e-6)
    pointed = torch.zeros(total, device=tokens.device).scatter_reduce(0, owner, near - near.mean(), "amax")
    worth = worth + pointed / pointed.max().clamp(min=1e-6)
    # each large square gets one token; half of the rest splits squares into sixteen, half into four
    left = count - total
    fine = left // 2 // 15
    order = worth.argsort(descending=True, stable=True)
    level = torch.zeros(total, dtype=torch.long, device=tokens.device)
    level[order[fine : fine + (left - 15 * fine) // 3]] = 1
    level[order[:fine]] = 2
    return _squares(level[owner], grid, side)


def _squares(level: Tensor, grid: Grid, side: int) -> Merged:
    """Squares for tokens whose large square is split `level` `[N]` times."""
    row = torch.arange(grid[1], device=level.device)[:, None].expand(grid[1], grid[2]).flatten()
    column = torch.arange(grid[2], device=level.device).expand(grid[1], grid[2]).flatten()
    edge = torch.tensor([2 * side, side, side // 2], device=level.device)[level]  # [N]
    # each square is identified by its corner; all squares of a large square have the same size
    corner = row // edge * edge * grid[2] + column // edge * edge
    _, square = torch.unique(corner, return_inverse=True)
    count = int(square.max()) + 1
    share = torch.zeros(count, len(level), device=level.device)
    share[square, torch.arange(len(level), device=level.device)] = 1.0
    share = share / share.sum(dim=1, keepdim=True)
    return Merged(share, torch.stack([share @ row.float(), share @ column.float()], dim=1))
