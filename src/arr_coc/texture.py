"""Texture: a cheap multi-channel description `[B, C, h, w]` of the picture on the token grid.

Pixel channels come from one pass over the pixels (`mipmaps.py`), temporal channels from the previous frame, and
semantic channels from the encoder's tokens. To add a channel, add its name to the table and fill it under that name:
the table alone decides the order.

[`generate_texture_array`] is the public function. The layer calls [`picture_texture`], or [`blank_texture`] if it has
tokens but no picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arr_coc.config import CHANNEL_SETS, ARRCOCConfig, ChannelSet, Grid
from arr_coc.pixels.mipmaps import Mipmaps, build_mipmaps, gradient, pool_to, resize
from arr_coc.pixels.patches import patches_from_picture, picture_from_patches
from arr_coc.pixels.previous_frame import TEMPORAL, PreviousFrame, temporal_channels
from arr_coc.pixels.saliency import (
    centre_surround,
    cluster_cells,
    colour_rarity,
    edge_distance,
    opponent_colours,
    orientation,
    stroke_density,
)
from arr_coc.runtime.tensors import constant, unit_rows

__all__ = [
    "CHANNELS",
    "SEMANTIC_CHANNELS",
    "PreviousFrame",
    "generate_texture_array",
    "patches_from_picture",
    "picture_from_patches",
]

SEMANTIC_CHANNELS = 16

_CORE = (
    *("red", "green", "blue", "y", "x"),
    *("sobel_x", "sobel_y", "sobel_magnitude"),
    *("saliency_intensity", "saliency_color", "saliency_orientation"),
    *("local_variance", "color_rarity"),
)
_FULL = (
    *("red", "green", "blue", "y", "x", "eccentricity"),
    *("edges", "inverted_edges", "high_pass", "low_pass"),
    *(TEMPORAL[0], "saliency", "edge_distance"),
    *("cluster_largest", "cluster_second", "cluster_third"),
    "text",
    *(f"semantic_{i}" for i in range(SEMANTIC_CHANNELS)),
    *TEMPORAL[1:],
    *("detail_lost", "detail_lost_octave"),
)
CHANNELS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        name: MappingProxyType({channel: index for index, channel in enumerate(channels)})
        for name, channels in zip(CHANNEL_SETS, (_CORE, _FULL), strict=True)
    }
)
"""Index of every channel by name: `CHANNELS["full"]["text"] == 16`; iterating gives the names in order."""

TextDetector = Callable[[Tensor], Tensor]
"""Takes the picture `[B, 3, H, W]`, returns text likelihood `[B, h', w']` in [0, 1] at any size."""


def generate_texture_array(
    image: Tensor,
    grid: tuple[int, int],
    channels: ChannelSet = "core",
    *,
    previous: PreviousFrame | Tensor | None = None,
    semantic: Tensor | None = None,
    text_detector: TextDetector | None = None,
    gestalt_tokens: int = 256,
    cell_pixels: int = 32,
    check_values: bool = True,
) -> Tensor:
    """Describe a picture on the token grid. Every channel lies in [0, 1].

    Args:
        image (`Tensor` of shape `[B, 3, H, W]`): float16, bfloat16 or float32, in [0, 1].
        grid (`tuple[int, int]`): rows and columns `(h, w)` of the token grid, any rectangle.
        channels (`str`, *optional*, defaults to `"core"`): `"core"` (13) or `"full"` (40); see `CHANNELS`.
        previous (`PreviousFrame` or `Tensor`, *optional*): the previous frame, or its picture alone.
        semantic (`Tensor` of shape `[B, 16, h, w]`, *optional*): projections of the encoder's tokens in [0, 1];
            the only channels that carry a gradient. Without it they are 0.5 everywhere.
        text_detector (`Callable`, *optional*): replaces stroke density in the `text` channel.
        gestalt_tokens (`int`, *optional*, defaults to 256): size of the overview; sets the scale of `detail_lost`.
        cell_pixels (`int`, *optional*, defaults to 32): pixels a side of one token.
        check_values (`bool`, *optional*, defaults to `True`): refuse NaN and values outside [0, 1]. This costs one
            transfer from the device, so the layer turns it off and does all its checks in one transfer.

    Returns:
        `Tensor` of shape `[B, C, h, w]` in the picture's dtype.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import generate_texture_array
    >>> generate_texture_array(torch.rand(2, 3, 224, 320), grid=(7, 10), channels="full").shape
    torch.Size([2, 40, 7, 10])

    ```
    """
    grid = _check_inputs(image, grid, channels, semantic)
    if channels == "core" and (previous is not None or text_detector is not None):
        raise ValueError("`previous` and `text_detector` belong to channels='full'; the core set has no such channels")
    if isinstance(previous, Tensor):
        previous = PreviousFrame(previous)
    if check_values:
        check_range(image)
        if previous is not None:
            check_range(previous.picture, "previous")
        if semantic is not None:
            check_range(semantic.detach(), "semantic")
    with torch.no_grad():
        maps = build_mipmaps(image, grid, coarsest_level(image.shape[-2:], gestalt_tokens, cell_pixels))
        text = None if text_detector is None else _detected_text(text_detector, image, grid)
        octave = gestalt_octave(image.shape[-2:], gestalt_tokens, cell_pixels)
        by_name = _channels(maps, channels, text, octave) | temporal_channels(maps, image, previous)
    return _join(by_name, maps, channels, semantic).to(image.dtype)


def describe(
    maps: Mipmaps, channels: ChannelSet, semantic: Tensor | None, gestalt_tokens: int = 256, cell_pixels: int = 32
) -> Tensor:
    """[`generate_texture_array`] for a still picture whose mipmaps are already built; float32."""
    with torch.no_grad():
        by_name = _channels(maps, channels, None, gestalt_octave(maps.size, gestalt_tokens, cell_pixels))
        by_name |= temporal_channels(maps, None, None)
    return _join(by_name, maps, channels, semantic)


def picture_texture(
    config: ARRCOCConfig,
    frames: Tensor | Mipmaps,
    cells: Grid,
    semantic: Tensor | None,
    previous: PreviousFrame | None,
    text_detector: TextDetector | None,
) -> Tensor:
    """Texture `[B * t, C, h, w]` in float32 of frames `[B * t, 3, H, W]`, or of a still picture's mipmaps.

    In a clip, each frame's `previous` is the frame before it.
    """
    if isinstance(frames, Mipmaps):
        return describe(frames, config.channels, semantic, config.gestalt_tokens, config.cell_pixels)
    if previous is None and cells[0] > 1 and config.channels == "full":
        clips = frames.view(-1, cells[0], *frames.shape[1:])  # [B, t, 3, H, W]
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


def blank_texture(
    config: ARRCOCConfig, batch: int, cells: Grid, semantic: Tensor | None, device: torch.device
) -> Tensor:
    """Texture `[B * t, C, h, w]` without a picture: zeros, but for the semantic channels."""
    blank = torch.zeros(batch * cells[0], len(CHANNELS[config.channels]), cells[1], cells[2], device=device)
    return put_semantic(blank, semantic, config.channels)


def text_channel(texture: Tensor, channels: ChannelSet, windows: bool) -> Tensor | None:
    """Text likelihood `[B, t, h, w]` from a texture `[B, t, C, h, w]`; None if the channel set has no `text`.

    Strokes fill only a little of a window of several cells, so with `windows` it is relative to the picture's maximum.
    """
    if "text" not in CHANNELS[channels]:
        return None
    text = texture[:, :, CHANNELS[channels]["text"]]
    return text / text.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-3) if windows else text


def semantic_channels(projection: Tensor, tokens: Tensor, grid: Grid, size: tuple[int, int]) -> Tensor:
    """Semantic channels `[B * t, 16, h, w]` in [0, 1]: tokens `[B, N, D]` projected by `[16, D]` and resized."""
    values = F.linear(unit_rows(tokens), projection.to(tokens.dtype)).float()  # [B, N, 16]
    # a projection of a unit vector has a deviation of about 1 / sqrt(D): scaled to 1 for the sigmoid
    values = torch.sigmoid(values * math.sqrt(tokens.shape[-1]))
    values = values.view(-1, grid[1], grid[2], SEMANTIC_CHANNELS).permute(0, 3, 1, 2)  # [B * t, 16, h, w]
    return resize(values, size)


def put_semantic(texture: Tensor, semantic: Tensor | None, channels: str) -> Tensor:
    """The texture `[B * t, C, h, w]` with its semantic channels replaced; unchanged if `semantic` is None."""
    if semantic is None:
        return texture
    first = CHANNELS[channels]["semantic_0"]
    return torch.cat([texture[:, :first], semantic, texture[:, first + SEMANTIC_CHANNELS :]], dim=1)


def gestalt_octave(size: Sequence[int], gestalt_tokens: int = 256, cell_pixels: int = 32) -> float:
    """Octaves between a picture of `size` and a gestalt of `gestalt_tokens` tokens, each `cell_pixels` a side."""
    return 0.5 * math.log2(max(1.0, size[0] * size[1] / (gestalt_tokens * cell_pixels**2)))


def coarsest_level(size: Sequence[int], gestalt_tokens: int = 256, cell_pixels: int = 32) -> int:
    """The coarsest mip level that the channels need."""
    return math.ceil(gestalt_octave(size, gestalt_tokens, cell_pixels)) + 1


def _channels(maps: Mipmaps, channels: ChannelSet, text: Tensor | None, octave: float) -> dict[str, Tensor]:
    features = _extract_features(maps)
    rest = _core_channels(maps, features) if channels == "core" else _full_channels(maps, features, text, octave)
    return _place_channels(maps) | rest


def _join(by_name: dict[str, Tensor], maps: Mipmaps, channels: ChannelSet, semantic: Tensor | None) -> Tensor:
    if channels == "full":
        if semantic is None:
            semantic = maps.cells.new_full((maps.cells.shape[0], SEMANTIC_CHANNELS, *maps.grid), 0.5)
        by_name |= _named((f"semantic_{i}" for i in range(SEMANTIC_CHANNELS)), semantic.to(maps.cells.dtype))
    # the table alone decides the order
    return torch.cat([by_name[name] for name in CHANNELS[channels]], dim=1)


def _named(names: Iterable[str], maps: Tensor) -> dict[str, Tensor]:
    """The channels of `[B, C, h, w]` as `[B, 1, h, w]` by name."""
    return dict(zip(names, maps.split(1, dim=1), strict=True))  # type: ignore[no-untyped-call]


def _place_channels(maps: Mipmaps) -> dict[str, Tensor]:
    place = _positions(maps.grid, maps.cells.device).expand(maps.cells.shape[0], -1, -1, -1)
    return _named(("red", "green", "blue"), maps.cells) | _named(("y", "x", "eccentricity"), place)


@constant
def _positions(grid: tuple[int, int], device: torch.device) -> Tensor:
    """y, x and eccentricity `[1, 3, h, w]`, made once per grid and device."""
    y = torch.linspace(0, 1, grid[0], device=device)[:, None].expand(grid)
    x = torch.linspace(0, 1, grid[1], device=device)[None].expand(grid)
    centre = [0.0 if side == 1 else 0.5 for side in grid]
    distance = (2 * ((y - centre[0]).square() + (x - centre[1]).square())).sqrt()
    return torch.stack([y, x, distance.clamp(max=1)])[None]


class _Features(NamedTuple):
    """Features that both channel sets are built from."""

    gradients: Tensor  # [B, 2, H / f, W / f]
    magnitude: Tensor  # [B, 1, H / f, W / f]
    edges: Tensor  # [B, 1, h, w]
    contrast: Tensor  # [B, 3, h, w]: intensity, colour, orientation
    rarity: Tensor  # [B, 1, h, w]


def _extract_features(maps: Mipmaps) -> _Features:
    gradients, magnitude = gradient(maps.intensity)
    oriented = 2 * orientation(gradients, magnitude)  # [B, 2, H / f, W / f]
    # opponent colours are halved to match the range of the others
    stacked = torch.cat([maps.intensity, opponent_colours(maps.colour) / 2, oriented], dim=1)  # [B, 5, H / f, W / f]
    edges = (2 * pool_to(magnitude, maps.grid)).clamp_(max=1)
    return _Features(gradients, magnitude, edges, centre_surround(stacked, maps.grid), colour_rarity(maps.cells))


def _core_channels(maps: Mipmaps, features: _Features) -> dict[str, Tensor]:
    return {
        **_named(("sobel_x", "sobel_y"), (0.5 + pool_to(features.gradients, maps.grid)).clamp_(0, 1)),
        "sobel_magnitude": features.edges,
        **_named(("saliency_intensity", "saliency_color", "saliency_orientation"), features.contrast),
        "local_variance": maps.cell_deviation(),
        "color_rarity": features.rarity,
    }


def _full_channels(maps: Mipmaps, features: _Features, text: Tensor | None, octave: float) -> dict[str, Tensor]:
    high = maps.deviation(maps.level + 1)
    grey = pool_to(maps.intensity, maps.grid)
    clusters = cluster_cells(torch.cat([grey, opponent_colours(maps.cells), features.edges, high], dim=1))
    return {
        "edges": features.edges,
        "inverted_edges": 1 - features.edges,
        "high_pass": high,
        "low_pass": F.avg_pool2d(grey, 3, stride=1, padding=1, count_include_pad=False),
        "saliency": features.contrast.mean(dim=1, keepdim=True) * (0.5 + 0.5 * features.rarity),
        "edge_distance": edge_distance(features.magnitude, maps.grid),
        **_named(("cluster_largest", "cluster_second", "cluster_third"), clusters),
        "text": stroke_density(features.gradients, maps.grid) if text is None else text,
        "detail_lost": maps.deviation(octave),
        "detail_lost_octave": maps.deviation(octave + 1),
    }


def _detected_text(detector: TextDetector, image: Tensor, grid: tuple[int, int]) -> Tensor:
    text = detector(image)
    if text.ndim != 3 or text.shape[0] != image.shape[0]:
        raise ValueError(f"`text_detector` must return [B, h, w] with B={image.shape[0]}, got {tuple(text.shape)}")
    return pool_to(text[:, None].float(), grid).clamp_(0, 1)  # [B, 1, h, w]


def check_range(image: Tensor, name: str = "image") -> None:
    """Raise for NaN, infinity and values outside [0, 1]; costs one transfer from the device."""
    low, high = torch.stack(torch.aminmax(image)).tolist()
    raise_for_range(low, high, name)


def raise_for_range(low: float, high: float, name: str) -> None:
    """Raise if `low` and `high`, a picture's smallest and largest value, are not finite or not in [0, 1]."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"`{name}` contains NaN or infinity; every value must lie in [0, 1]")
    if low < 0 or high > 1:
        raise ValueError(
            f"`{name}` must lie in [0, 1], got values from {low:.4g} to {high:.4g}; "
            "divide 8-bit pictures by 255, or undo the processor's normalisation with `picture_from_patches`"
        )


def _check_inputs(image: Tensor, grid: tuple[int, int], channels: str, semantic: Tensor | None) -> tuple[int, int]:
    if channels not in CHANNELS:
        raise ValueError(f"`channels` must be one of {', '.join(CHANNELS)}, got {channels!r}")
    if not isinstance(image, Tensor):
        raise TypeError(f"`image` must be a tensor [B, 3, H, W], got {type(image).__name__}")
    if image.ndim != 4 or image.shape[1] != 3 or 0 in image.shape:
        raise ValueError(f"`image` must have shape [B, 3, H, W] with no empty side, got {tuple(image.shape)}")
    if image.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        fix = "use `.float()`" if image.is_floating_point() else "use `image / 255`"
        raise TypeError(f"`image` must be float16, bfloat16 or float32 in [0, 1], got {image.dtype}; {fix}")
    if len(grid) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in grid):
        raise ValueError(f"`grid` must be (rows, columns) in whole numbers of at least 1, got {grid!r}")
    if semantic is not None:
        expected = (image.shape[0], SEMANTIC_CHANNELS, *grid)
        if channels == "core":
            raise ValueError("`semantic` belongs to channels='full'; the core set has no semantic channels")
        if tuple(semantic.shape) != expected:
            raise ValueError(f"`semantic` must have shape {expected}, got {tuple(semantic.shape)}")
    return grid[0], grid[1]
