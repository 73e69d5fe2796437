"""A picture with something drawn over it: relevance as colours, unread cells faded, regions numbered in order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from arr_coc.selectors.output import spread_windows

if TYPE_CHECKING:
    from arr_coc.inference.answer import Answer

PAPER = (250, 250, 248)
# Ten anchors of the viridis colormap: perceptually even, readable for the colour-blind.
_VIRIDIS = np.array(
    [
        *((68, 1, 84), (72, 40, 120), (62, 73, 137), (49, 104, 142), (38, 130, 142)),
        *((31, 158, 137), (53, 183, 121), (110, 206, 88), (181, 222, 43), (253, 231, 37)),
    ],
    dtype=np.float32,
)
_NUMBERED = 12  # regions that get a number
# Selectors whose choice cannot be laid over the picture, and why.
_NOT_DRAWN = {
    "oracle": "must be told where to look",
    "downsample": "shrinks the picture instead of choosing cells",
    "half-and-half": "shrinks the picture instead of choosing cells",
}


def colour_map(values: np.ndarray) -> Image.Image:
    """Values `[h, w]` in [0, 1] as an RGB picture in the viridis colours.

    Example:

    ```python
    >>> import numpy as np
    >>> from arr_coc.drawing.overlay import colour_map
    >>> colour_map(np.array([[0.0, 1.0]])).getpixel((1, 0))
    (253, 231, 37)

    ```
    """
    place = np.clip(np.nan_to_num(values), 0, 1) * (len(_VIRIDIS) - 1)
    low = np.minimum(place.astype(int), len(_VIRIDIS) - 2)
    share = (place - low)[..., None]
    return Image.fromarray((_VIRIDIS[low] * (1 - share) + _VIRIDIS[low + 1] * share).round().astype(np.uint8))


def stretch(values: Tensor | np.ndarray) -> np.ndarray:
    """Scale values to [0, 1] by their own range, so that a faint map can be seen; a flat map stays flat."""
    array = values if isinstance(values, np.ndarray) else values.detach().float().cpu().numpy()
    low, high = float(array.min()), float(array.max())
    if high - low < 1e-3:
        return np.full_like(array, min(max(low, 0.0), 1.0))
    return (array - low) / (high - low)


def show_kept(image: Image.Image, kept: np.ndarray) -> Image.Image:
    """The picture with every cell that was not kept (`kept` is a mask `[h, w]`) faded to a light gray."""
    mask = Image.fromarray((kept * 255).astype(np.uint8)).resize(image.size, Image.Resampling.NEAREST)
    faded = Image.blend(image.convert("L").convert("RGB"), Image.new("RGB", image.size, PAPER), 0.82)
    return Image.composite(image, faded, mask)


def show_gaze(
    image: Image.Image, grid: tuple[int, int], cells: np.ndarray, cell: float, scale: int, most: int = 1400
) -> Image.Image:
    """The picture blurred, with the cells that were looked at sharp and the first third of them outlined and numbered.

    Args:
        image (`PIL.Image.Image`): the picture at full resolution.
        grid (`tuple[int, int]`): rows and columns of its cells.
        cells (`ndarray` of shape `[k]`): flat indices of the cells that were looked at, first one first.
        cell (`float`): side of a cell in pixels.
        scale (`int`): how many times coarser the blurred part is.
        most (`int`, *optional*, defaults to 1400): longest side of the drawing in pixels.
    """
    step = cell * min(1.0, most / max(image.size))
    return mark_turns(show_sharp(image, grid, cells, cell, scale, most), grid, cells, (step, step))


def show_sharp(
    image: Image.Image, grid: tuple[int, int], cells: np.ndarray, cell: float, scale: int, most: int = 1400
) -> Image.Image:
    """The picture blurred, with the cells that were looked at sharp; the arguments are those of [`show_gaze`]."""
    share = min(1.0, most / max(image.size))
    size = (max(1, round(image.width * share)), max(1, round(image.height * share)))
    sharp = image.resize(size, Image.Resampling.LANCZOS)
    coarse = image.resize((max(1, image.width // scale), max(1, image.height // scale)), Image.Resampling.BOX)
    blurred = Image.blend(coarse.resize(size, Image.Resampling.BICUBIC), Image.new("RGB", size, PAPER), 0.45)
    looked_at = np.zeros(grid[0] * grid[1], dtype=np.uint8)
    looked_at[cells] = 255
    reach = (grid[1] * cell * share, grid[0] * cell * share)  # the last cells may reach beyond the picture
    mask = Image.fromarray(looked_at.reshape(grid)).resize((round(reach[0]), round(reach[1])), Image.Resampling.NEAREST)
    return Image.composite(sharp, blurred, mask.crop((0, 0, *size)))


def mark_turns(seen: Image.Image, grid: tuple[int, int], cells: np.ndarray, step: tuple[float, float]) -> Image.Image:
    """Outline the first third of `cells` and number each region; a cell is `step` pixels (x, y) large."""
    regions = find_regions(grid, cells[: -(-len(cells) // 3)])
    pen, size = ImageDraw.Draw(seen), seen.size
    ink = tuple(int(value) for value in _VIRIDIS[0])
    for line in outline(regions > 0):
        pen.line([(x * step[0], y * step[1]) for x, y in line], fill=ink, width=2)
    for number in range(1, min(_NUMBERED, int(regions.max(initial=0))) + 1):
        rows, columns = (regions == number).nonzero()
        text, height = str(number), max(14, round(size[0] / 55))
        font = ImageFont.load_default(height)
        left, top = columns[rows == rows.min()].min() * step[0], max(0.0, rows.min() * step[1] - height - 4)
        width = pen.textlength(text, font=font) + 8
        pen.rectangle([left, top, left + width, top + height + 4], fill=ink)
        pen.text((left + 4, top), text, fill=PAPER, font=font)
    return seen


def outline(chosen: np.ndarray) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Edges between chosen cells and others, as lines from `(x, y)` to `(x, y)`, counted in cells."""
    framed = np.pad(chosen, 1)
    rows, columns = (framed[1:, 1:-1] != framed[:-1, 1:-1]).nonzero()
    lines = [((x, y), (x + 1, y)) for y, x in zip(rows.tolist(), columns.tolist(), strict=True)]
    rows, columns = (framed[1:-1, 1:] != framed[1:-1, :-1]).nonzero()
    return lines + [((x, y), (x, y + 1)) for y, x in zip(rows.tolist(), columns.tolist(), strict=True)]


def find_regions(grid: tuple[int, int], cells: np.ndarray) -> np.ndarray:
    """Number the regions of touching cells by the turn of their first cell: `[h, w]`, 0 where no cell was chosen.

    Example:

    ```python
    >>> import numpy as np
    >>> from arr_coc.drawing.overlay import find_regions
    >>> find_regions((2, 4), np.array([3, 0, 4])).tolist()
    [[2, 0, 0, 1], [2, 0, 0, 0]]

    ```
    """
    turn = np.full((grid[0] + 2, grid[1] + 2), np.inf)
    turn[1 + cells // grid[1], 1 + cells % grid[1]] = np.arange(len(cells))
    chosen = np.isfinite(turn)
    while True:  # the earliest turn spreads over its region
        first = np.minimum.reduce([turn, *(np.roll(turn, by, axis) for axis in (0, 1) for by in (-1, 1))])
        first = np.where(chosen, first, np.inf)
        if (first == turn).all():
            break
        turn = first
    numbers = np.unique(turn[chosen])
    return np.where(chosen, np.searchsorted(numbers, turn) + 1, 0)[1:-1, 1:-1]


def show_heat(image: Image.Image, values: np.ndarray, opacity: float = 0.65) -> Image.Image:
    """The picture in gray under a colour map of values `[h, w]` in [0, 1]; at opacity 0 the plain picture."""
    heat = colour_map(values).resize(image.size, Image.Resampling.BILINEAR)
    return Image.blend(image.convert("L").convert("RGB") if opacity else image, heat, opacity)


def check_drawable(selector: str) -> None:
    """Refuse a selector, by its name, whose choice cannot be drawn on the picture.

    Example:

    ```python
    >>> from arr_coc.drawing.overlay import check_drawable
    >>> check_drawable("downsample")
    Traceback (most recent call last):
        ...
    ValueError: downsample shrinks the picture instead of choosing cells, so nothing can be shown; use another selector

    ```
    """
    if selector in _NOT_DRAWN:
        raise ValueError(f"{selector} {_NOT_DRAWN[selector]}, so nothing can be shown; use another selector")


def is_drawable(selector: str) -> bool:
    """Whether a selector, by its name, chooses cells that can be drawn on the picture."""
    return selector not in _NOT_DRAWN


def kept_cells(answer: Answer) -> np.ndarray:
    """Mask `[h, w]` of the cells of the first picture that were read, in any of its frames."""
    (_, rows, columns), cells = answer.kept[0]
    kept = np.zeros(rows * columns, dtype=bool)
    kept[cells % (rows * columns)] = True
    return kept.reshape(rows, columns)


def count_seen(answer: Answer) -> int:
    """Visual tokens that the answer could use: those of the last look, if there were several."""
    return answer.looks[-1].seen if answer.looks else answer.tokens.used


def find_scale(answer: Answer) -> float:
    """How many cells a side stand under a token of the first picture's gestalt, in mode `"saccade"`; 1 without one."""
    (_, rows, columns), cells = answer.looks[0].kept[0] if answer.looks else answer.kept[0]
    seen = answer.looks[0].seen if answer.looks else answer.tokens.used
    if answer.mode != "saccade" or len(cells) == rows * columns:
        return 1.0
    return max(1.0, math.sqrt(rows * columns / max(1, seen - len(cells))))


def draw_overlay(picture: Image.Image, answer: Answer, cell: int = 32) -> Image.Image:
    """The first picture at the resolution at which it was read, with the cells that were not read faded.

    Args:
        picture (`PIL.Image.Image`): the picture that was asked about.
        answer (`Answer`): of mode `"prune"`, `"weight"` or `"full"`.
        cell (`int`, *optional*, defaults to 32): side of a token in pixels.
    """
    (_, rows, columns), _ = answer.kept[0]
    if rows * columns * cell**2 < 0.9 * picture.width * picture.height:
        picture = picture.resize((columns * cell, rows * cell)).resize(picture.size)
    return show_kept(picture, kept_cells(answer))


def draw_gaze(picture: Image.Image, answer: Answer, cell: float = 32) -> Image.Image:
    """The first picture as it was seen in mode `"saccade"`: blurred, and sharp where the gaze went, numbered in order.

    Args:
        picture (`PIL.Image.Image`): the picture that was asked about, at full resolution.
        answer (`Answer`): of mode `"saccade"`.
        cell (`float`, *optional*, defaults to 32): side of a token in pixels.
    """
    (_, rows, columns), cells = answer.kept[0]
    if len(cells) == rows * columns:
        return picture
    scale = round(find_scale(answer))
    if answer.output is not None and len(cells):
        relevance = spread_windows(answer.output.relevance[0, 0], (rows, columns)).cpu().numpy().flatten()  # [N]
        cells = cells[(-relevance[cells]).argsort(kind="stable")]
    return show_gaze(picture, (rows, columns), cells, cell, scale)


def fit_to_cells(picture: Image.Image, answer: Answer, cell: int) -> Image.Image:
    """The first picture at exactly the size of its grid of cells.

    In mode `"saccade"` cells are cut from the picture itself, which is continued where the last ones reach beyond it.
    In the other modes the whole picture is resized.
    """
    (_, rows, columns), _ = answer.kept[0]
    size = (columns * cell, rows * cell)
    if answer.strategy == "saccade":
        return continue_edges(picture, size)
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)


def continue_edges(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The picture enlarged to a size (width, height) by repeating its last row and column of pixels.

    Example:

    ```python
    >>> from PIL import Image
    >>> from arr_coc.drawing.overlay import continue_edges
    >>> continue_edges(Image.new("RGB", (30, 20), "red"), (32, 32)).getpixel((31, 31))
    (255, 0, 0)

    ```
    """
    pixels = np.asarray(image)  # [H, W, 3]
    below, right = max(0, size[1] - image.height), max(0, size[0] - image.width)
    if not below and not right:
        return image
    return Image.fromarray(np.pad(pixels, ((0, below), (0, right), (0, 0)), mode="edge"))
