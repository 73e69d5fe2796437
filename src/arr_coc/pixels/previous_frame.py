"""Memory of the previous frame, and the temporal channels of a stream made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from arr_coc.pixels.mipmaps import Mipmaps, halve, luminance, pool_to

# Frames after which three quarters of the trust in carried relevance are gone.
MEMORY_FRAMES = 8
TEMPORAL = ("motion", "carried_relevance", "carried_age", "carried_trust", "motion_boost", "fixation_history")


@dataclass(frozen=True, eq=False)
class PreviousFrame:
    """Memory of the previous frame of a stream.

    Args:
        picture (`Tensor` of shape `[B, 3, H, W]`): the previous frame, in [0, 1].
        relevance (`Tensor` of shape `[B, h, w]`, *optional*): relevance of its cells.
        age (`Tensor` of shape `[B, h, w]`, *optional*): frames since each cell was last kept.
        fixations (`Tensor` of shape `[B, h, w]`, *optional*): fading record in [0, 1] of the kept cells.

    [`ARRCOCLayer.remember`] makes it from a picture and its output.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import generate_texture_array
    >>> from arr_coc.texture import CHANNELS, PreviousFrame
    >>> black, white = torch.zeros(1, 3, 64, 64), torch.ones(1, 3, 64, 64)
    >>> texture = generate_texture_array(white, (2, 2), "full", previous=PreviousFrame(black))
    >>> texture[0, CHANNELS["full"]["motion"]].tolist()
    [[1.0, 1.0], [1.0, 1.0]]

    ```
    """

    picture: Tensor
    relevance: Tensor | None = None
    age: Tensor | None = None
    fixations: Tensor | None = None


def temporal_channels(maps: Mipmaps, image: Tensor | None, previous: PreviousFrame | None) -> dict[str, Tensor]:
    """The `TEMPORAL` channels by name, each `[B, 1, h, w]`; zero without a previous frame."""
    zeros = maps.cells.new_zeros(maps.cells.shape[0], 1, *maps.grid)
    if previous is None or image is None:
        return dict.fromkeys(TEMPORAL, zeros)
    if previous.picture.shape != image.shape:
        raise ValueError(
            f"`previous` must have the picture's shape {tuple(image.shape)}, got {tuple(previous.picture.shape)}"
        )
    last = luminance(previous.picture)
    for _ in range(maps.level):
        last = halve(last)
    motion = (2 * pool_to((maps.intensity - last).abs_(), maps.grid)).clamp_(max=1)  # [B, 1, h, w]
    memory = {}
    for name in ("relevance", "age", "fixations"):
        value = getattr(previous, name)
        expected = (image.shape[0], *maps.grid)
        if value is not None and tuple(value.shape) != expected:
            raise ValueError(f"`previous.{name}` must have shape {expected}, got {tuple(value.shape)}")
        memory[name] = zeros if value is None else value[:, None].float()
    carried = zeros
    if previous.relevance is not None:
        carried = _carry(memory["relevance"], pool_to(previous.picture, maps.grid).float(), maps.cells)
    trust = torch.exp(-memory["age"] * (math.log(4) / MEMORY_FRAMES))
    channels = (motion, carried, 1 - trust, carried * trust, motion * (0.5 + 0.5 * carried), memory["fixations"])
    return {name: value.clamp(0, 1) for name, value in zip(TEMPORAL, channels, strict=True)}


def _carry(relevance: Tensor, last: Tensor, now: Tensor) -> Tensor:
    """Move relevance with its content: each cell takes that of the most similar of the nine cells around it."""
    batch, _, rows, columns = now.shape
    around = F.unfold(F.pad(last, (1, 1, 1, 1), mode="replicate"), 3).view(batch, 3, 9, -1)  # [B, 3, 9, N]
    difference = (around - now.view(batch, 3, 1, -1)).abs_().sum(dim=1)  # [B, 9, N]
    difference[:, 4] -= 0.02  # prefer no movement
    source = difference.argmin(dim=1, keepdim=True)  # [B, 1, N]
    values = F.unfold(F.pad(relevance, (1, 1, 1, 1), mode="replicate"), 3)  # [B, 9, N]
    return values.gather(1, source).view(batch, 1, rows, columns)
