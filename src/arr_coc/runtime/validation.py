"""Input checks of the layer: shapes before the work, values after it, in a single transfer to the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.config import ARRCOCConfig, Grid, cell_count
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.selectors.contract import InvalidSelectorError, VisualQuery, check_cells
from arr_coc.texture import PreviousFrame, TextDetector, raise_for_range

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_width(config: ARRCOCConfig, queries: Sequence[VisualQuery]) -> None:
    """Raise if the tokens of a query have another width than the layer."""
    for query in queries:
        if query.tokens.shape[1] != config.hidden_size:
            raise InvalidSelectorError(
                f"the layer was made for models of width {config.hidden_size}, this one has {query.tokens.shape[1]}; "
                "make it with ARRCOCConfig.for_model(model)"
            )


def check_inputs(
    config: ARRCOCConfig,
    tokens: Tensor,
    words: Tensor,
    grid: Grid,
    cells: Grid,
    picture: Tensor | Mipmaps | None,
    word_mask: Tensor | None,
    previous: PreviousFrame | None,
    attended: Tensor | None = None,
) -> Tensor | Mipmaps | None:
    """Raise if shapes, dtypes or devices do not fit; returns the frames `[B * t, 3, H, W]` or the mipmaps."""
    width, total = config.hidden_size, cell_count(grid)
    if tokens.ndim != 3 or tokens.shape[1:] != (total, width) or tokens.shape[0] == 0:
        raise ValueError(
            f"`tokens` must have shape [B, {total}, {width}] for grid {grid} and this layer, got {tuple(tokens.shape)}"
        )
    if tokens.dtype not in _DTYPES:
        raise TypeError(f"`tokens` must be float16, bfloat16 or float32, got {tokens.dtype}; use `.float()`")
    batch = tokens.shape[0]
    if words.ndim != 3 or words.shape[0] != batch or words.shape[2] != width or words.shape[1] == 0:
        raise ValueError(f"`words` must have shape [{batch}, Q, {width}] with Q >= 1, got {tuple(words.shape)}")
    if words.dtype != tokens.dtype:
        raise TypeError(f"`words` and `tokens` must have one dtype, got {words.dtype} and {tokens.dtype}")
    if word_mask is not None and (word_mask.shape != words.shape[:2] or word_mask.dtype != torch.bool):
        raise ValueError(
            f"`word_mask` must be bool of shape {tuple(words.shape[:2])}, got {word_mask.dtype} "
            f"{tuple(word_mask.shape)}; use `mask.bool()`"
        )
    check_cells(cells, grid)
    if attended is not None and attended.shape != (batch, cell_count(cells)):
        raise ValueError(f"`attended` must have shape [{batch}, {cell_count(cells)}], got {tuple(attended.shape)}")
    pixels = picture.cells if isinstance(picture, Mipmaps) else picture
    for name, value in (("words", words), ("word_mask", word_mask), ("attended", attended), ("picture", pixels)):
        if value is not None and value.device != tokens.device:
            raise ValueError(f"`{name}` is on {value.device}, `tokens` on {tokens.device}; move them to one device")
    if previous is not None and (grid[0] > 1 or picture is None):
        raise ValueError("`previous` needs a single frame with its picture; the frames of a clip are each other's past")
    if isinstance(picture, Mipmaps):
        count = len(picture.cells)
        if (count, 1, *picture.grid) != (batch, *cells) or previous is not None:
            raise ValueError(
                f"mipmaps of {count} on {picture.grid} need as many stills on these cells and no `previous`, "
                f"got {batch} on {cells}"
            )
        return picture
    return None if picture is None else _check_picture(config, picture, batch, cells)


def _check_picture(config: ARRCOCConfig, picture: Tensor, batch: int, cells: Grid) -> Tensor:
    if picture.ndim == 4 and cells[0] == 1:
        picture = picture[:, None]
    if picture.ndim != 5 or picture.shape[:3] != (batch, cells[0], 3):
        alternative = f" or [{batch}, 3, H, W]" if cells[0] == 1 else ""
        raise ValueError(
            f"`picture` must have shape [{batch}, {cells[0]}, 3, H, W]{alternative}, got {tuple(picture.shape)}"
        )
    if picture.dtype not in _DTYPES:
        fix = "use `.float()`" if picture.is_floating_point() else "use `picture / 255`"
        raise TypeError(f"`picture` must be float16, bfloat16 or float32 in [0, 1], got {picture.dtype}; {fix}")
    pixels = picture.shape[-2] * picture.shape[-1]
    if pixels > config.max_image_pixels:
        raise ValueError(
            f"`picture` has {pixels:,} pixels, the limit is {config.max_image_pixels:,}; "
            "downsample it or raise `max_image_pixels`"
        )
    return picture.flatten(0, 1)


def extremes(tokens: Tensor, words: Tensor, relevance: Tensor, frames: Tensor | Mipmaps | None) -> Tensor:
    """Smallest and largest value of each tensor, still on the device; NaN and infinity show up in them."""
    frames = frames.cells if isinstance(frames, Mipmaps) else frames
    values = [tokens, words, relevance] if frames is None else [tokens, words, relevance, frames]
    return torch.stack([end.float() for value in values for end in torch.aminmax(value.detach())])


def read_report(report: Tensor, batch: int, pictured: bool) -> list[list[float]]:
    """Transfer a call's report to the host, check the extremes at its start, and return one row per picture."""
    values: list[float] = report.tolist()
    names = ("tokens", "words", "relevance", "picture") if pictured else ("tokens", "words", "relevance")
    ends = {name: values[2 * index : 2 * index + 2] for index, name in enumerate(names)}
    for name in ("tokens", "words"):
        if not all(map(math.isfinite, ends[name])):
            raise ValueError(f"`{name}` contains NaN or infinity; check the model's dtype and inputs")
    if pictured:
        low, high = ends["picture"]
        raise_for_range(low, high, "picture")
    if not all(map(math.isfinite, ends["relevance"])):
        raise ValueError(
            "relevance is NaN or infinite; check the layer's weights, `previous`, `attended` and `text_detector`"
        )
    rest = values[2 * len(names) :]
    columns = len(rest) // batch
    return [rest[start : start + columns] for start in range(0, len(rest), columns)]


def record_detector(config: ARRCOCConfig, detector: TextDetector | None) -> ARRCOCConfig:
    """The config with the detector's name; raises if the layer was made with a detector and none is given."""
    if detector is None:
        if config.text_detector is not None:
            raise ValueError(
                f"this layer was made with the text detector {config.text_detector!r}; pass it as `text_detector=`, "
                "or set `text_detector` in its config to null for the built-in stroke density"
            )
        return config
    if config.channels == "core":
        raise ValueError("`text_detector` belongs to channels='full'; the core set has no text channel")
    return dataclasses.replace(config, text_detector=getattr(detector, "__name__", type(detector).__name__))
