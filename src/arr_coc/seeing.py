"""Seeing: the texture of a picture with the encoder's own tokens in it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from arr_coc.config import ARRCOCConfig, ChannelSet, Grid
from arr_coc.knowing import unit_rows
from arr_coc.mipmaps import Mipmaps, resize
from arr_coc.texture import CHANNELS, SEMANTIC_CHANNELS, PreviousFrame, TextDetector, describe, generate_texture_array


def semantic_channels(projection: Tensor, tokens: Tensor, grid: Grid, size: tuple[int, int]) -> Tensor:
    """Semantic channels `[B * t, 16, h, w]` in [0, 1] of tokens `[B, N, D]`, by a projection `[16, D]`."""
    seen = F.linear(unit_rows(tokens), projection.to(tokens.dtype)).float()  # [B, N, 16]
    # a projection of a unit vector has deviation 1 / sqrt(D); two of them reach 0 and 1
    seen = torch.sigmoid(seen * math.sqrt(tokens.shape[-1]))
    seen = seen.view(-1, grid[1], grid[2], SEMANTIC_CHANNELS).permute(0, 3, 1, 2)  # [B * t, 16, h, w]
    return resize(seen, size)


def put_semantic(texture: Tensor, semantic: Tensor | None, channels: str) -> Tensor:
    """A texture `[B * t, C, h, w]` with these semantic channels instead of its own."""
    if semantic is None:
        return texture
    first = CHANNELS[channels]["semantic_0"]
    return torch.cat([texture[:, :first], semantic, texture[:, first + SEMANTIC_CHANNELS :]], dim=1)


def blank_texture(
    config: ARRCOCConfig, batch: int, cells: Grid, semantic: Tensor | None, device: torch.device
) -> Tensor:
    """The texture where there is no picture: all that is known is semantic."""
    blank = torch.zeros(batch * cells[0], len(CHANNELS[config.channels]), cells[1], cells[2], device=device)
    return put_semantic(blank, semantic, config.channels)


def picture_texture(
    config: ARRCOCConfig,
    frames: Tensor | Mipmaps,
    cells: Grid,
    semantic: Tensor | None,
    previous: PreviousFrame | None,
    text_detector: TextDetector | None,
) -> Tensor:
    """Texture `[B * t, C, h, w]` in float32 of frames `[B * t, 3, H, W]`; each of a clip knows the one before.

    A still picture may have been measured already.
    """
    if isinstance(frames, Mipmaps):
        return describe(frames, config.channels, semantic, config.gestalt_tokens, config.cell_pixels)
    if previous is None and cells[0] > 1 and config.channels == "full":
        clips = frames.view(-1, cells[0], *frames.shape[1:])
        previous = PreviousFrame(torch.cat([clips[:, :1], clips[:, :-1]], dim=1).flatten(0, 1))
    return generate_texture_array(
        frames,
        (cells[1], cells[2]),
        config.channels,
        previous=previous,
        semantic=semantic,
        text_detector=text_detector,
        gestalt_tokens=config.gestalt_tokens,
        cell_pixels=config.cell_pixels,
        check_values=False,
    ).float()


def text_channel(texture: Tensor, channels: ChannelSet, windows: bool) -> Tensor | None:
    """How likely there is text `[B, t, h, w]` in a texture `[B, t, C, h, w]`; None if it has no such channel.

    In windows of several cells, strokes take little room: there it is relative to the most of a picture.
    """
    if "text" not in CHANNELS[channels]:
        return None
    text = texture[:, :, CHANNELS[channels]["text"]]
    return text / text.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-3) if windows else text
