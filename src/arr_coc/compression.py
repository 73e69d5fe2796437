"""COC, contexts optical compression: a larger overview in fewer tokens, after the encoder has read it.

| `compress` | what a token of the result is                                                               | trained |
|------------|---------------------------------------------------------------------------------------------|---------|
| `pool`     | the mean of the encoder's tokens under it                                                   | no      |
| `merge`    | the same, but tokens that are unlike their neighbours, or relevant, stay as they are        | no      |
| `conv`     | a learned sum of the tokens under it, 4x4 of them, that starts as their mean                | yes     |
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from arr_coc.config import Grid
from arr_coc.mipmaps import pool_to

Compress = Literal["pool", "merge", "conv"]
# How many tokens become one, at most.
RATIO = 16


def check_compress(compress: object) -> None:
    """Refuse what is no way to compress."""
    if compress is not None and compress not in get_args(Compress):
        raise ValueError(f"`compress` must be one of {', '.join(get_args(Compress))} or None, got {compress!r}")


def pool_tokens(tokens: Tensor, grid: Grid, small: Grid) -> Tensor:
    """Means `[n, D]` of tokens `[N, D]` over the cells of a smaller grid.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.compression import pool_tokens
    >>> pool_tokens(torch.arange(16.0)[:, None], (1, 4, 4), (1, 2, 2)).flatten().tolist()
    [2.5, 4.5, 10.5, 12.5]

    ```
    """
    maps = tokens.view(grid[1], grid[2], -1).permute(2, 0, 1)[None]  # [1, D, h, w]
    return pool_to(maps.float(), (small[1], small[2]))[0].flatten(1).mT.to(tokens.dtype)
