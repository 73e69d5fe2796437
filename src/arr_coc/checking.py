"""What a call of the layer is refused for: shapes before any work, values with the one transfer after it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arr_coc.config import ARRCOCConfig, Grid, cell_count
from arr_coc.texture import PreviousFrame, raise_for_range


def check_inputs(
    config: ARRCOCConfig,
    tokens: Tensor,
    words: Tensor,
    grid: Grid,
    cells: Grid,
    picture: Tensor | None,
    word_mask: Tensor | None,
    previous: PreviousFrame | None,
) -> Tensor | None:
    """Refuse shapes that do not fit each other; returns the frames `[B * t, 3, H, W]`."""
    width, total = config.hidden_size, cell_count(grid)
    if tokens.ndim != 3 or tokens.shape[1:] != (total, width) or tokens.shape[0] == 0:
        raise ValueError(
            f"`tokens` must have shape [B, {total}, {width}] for grid {grid} and this layer, got {tuple(tokens.shape)}"
        )
    if not tokens.is_floating_point():
        raise TypeError(f"`tokens` must be a floating point tensor, got {tokens.dtype}")
    batch = tokens.shape[0]
    if words.ndim != 3 or words.shape[0] != batch or words.shape[2] != width or words.shape[1] == 0:
        raise ValueError(f"`words` must have shape [{batch}, Q, {width}] with Q >= 1, got {tuple(words.shape)}")
    if words.dtype != tokens.dtype:
        raise TypeError(f"`words` and `tokens` must have one dtype, got {words.dtype} and {tokens.dtype}")
    if word_mask is not None and (word_mask.shape != words.shape[:2] or word_mask.dtype != torch.bool):
        raise ValueError(
            f"`word_mask` must be bool of shape {tuple(words.shape[:2])}, got {word_mask.dtype} "
            f"{tuple(word_mask.shape)}"
        )
    if cells[0] != grid[0]:
        raise ValueError(f"`cells` must have the {grid[0]} frames of `grid`, got {cells[0]}")
    if previous is not None and (grid[0] > 1 or picture is None):
        raise ValueError("`previous` belongs to single frames with their picture; a clip carries its own past")
    return None if picture is None else _check_picture(config, picture, batch, cells)


def _check_picture(config: ARRCOCConfig, picture: Tensor, batch: int, cells: Grid) -> Tensor:
    if picture.ndim == 4 and cells[0] == 1:
        picture = picture[:, None]
    if picture.ndim != 5 or picture.shape[:3] != (batch, cells[0], 3):
        short = " or [B, 3, H, W]" if cells[0] == 1 else ""
        raise ValueError(f"`picture` must have shape [{batch}, {cells[0]}, 3, H, W]{short}, got {tuple(picture.shape)}")
    pixels = picture.shape[-2] * picture.shape[-1]
    if pixels > config.max_image_pixels:
        raise ValueError(
            f"`picture` has {pixels:,} pixels, the limit is {config.max_image_pixels:,}; "
            "downsample it or raise `max_image_pixels`"
        )
    return picture.flatten(0, 1)


def input_extremes(tokens: Tensor, words: Tensor, frames: Tensor | None) -> Tensor:
    """Least and largest value of each input, still on the device; NaN and infinity show in them."""
    inputs = [tokens, words] if frames is None else [tokens, words, frames]
    return torch.stack([end.float() for value in inputs for end in torch.aminmax(value)])


def read_report(report: Tensor, batch: int, pictured: bool) -> list[list[float]]:
    """The one transfer of a call: extremes of the inputs, which are checked, then one row per picture."""
    values: list[float] = report.tolist()
    names = ("tokens", "words", "picture") if pictured else ("tokens", "words")
    for place, name in enumerate(names):
        low, high = values[2 * place : 2 * place + 2]
        if name == "picture":
            raise_for_range(low, high, name)
        elif not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"`{name}` contains NaN or infinity; check the model's dtype and inputs")
    rest = values[2 * len(names) :]
    columns = len(rest) // batch
    return [rest[start : start + columns] for start in range(0, len(rest), columns)]
