"""What the page draws: pictures with maps over them, and small maps inside the page itself."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from arr_coc.demo.snapshot import Look
from arr_coc.drawing.homunculus import draw_homunculus
from arr_coc.drawing.sheet import colour_map, mark_turns, show_gaze, show_heat, show_kept, stretch

OPACITY = 0.55
DRAWN = 720  # pixels along a drawn picture: text in small ones stays readable
BOX = (230, 97, 1)  # an orange that the colour-blind see, on any map


def enlarge(look: Look) -> Image.Image:
    """The picture at the size in which it is drawn."""
    share = DRAWN / max(look.image.size)
    size = (max(1, round(look.image.width * share)), max(1, round(look.image.height * share)))
    return look.image.resize(size, Image.Resampling.LANCZOS)


def draw_relevance(look: Look, opacity: Any = OPACITY) -> Image.Image:
    """The picture under the map of relevance; without one, the picture. An opacity that is no number is the usual."""
    if look.maps is None:
        return enlarge(look)
    given = isinstance(opacity, int | float) and math.isfinite(opacity)
    return show_heat(enlarge(look), stretch(look.maps.relevance), min(max(opacity, 0.0), 1.0) if given else OPACITY)


def draw_read(look: Look) -> Image.Image:
    """What was read, and in which order it mattered."""
    image = enlarge(look)
    rows, columns = look.grid
    if len(look.cells) == rows * columns:
        return image
    step = (image.width / columns, image.height / rows)
    if look.mode == "saccade":
        blur = max(1, round(look.blur * image.width / look.image.width))
        return show_gaze(image, look.grid, look.cells, step[0], blur)
    kept = show_kept(image, look.tokens > 0)
    return kept if look.maps is None else mark_turns(kept, look.grid, look.cells, step)


def draw_shares(look: Look) -> Image.Image:
    """The homunculus."""
    return draw_homunculus(look.image, look.tokens.astype(np.float64), DRAWN)


def draw_cell(look: Look, cell: tuple[int, int] | None) -> Image.Image:
    """The map of relevance with one cell framed."""
    image = draw_relevance(look)
    if cell is not None:
        frame(image, (cell[1] / look.grid[1], cell[0] / look.grid[0]), (1 / look.grid[1], 1 / look.grid[0]))
    return image


def draw_boxes(image: Image.Image, boxes: tuple[tuple[float, float, float, float], ...]) -> Image.Image:
    """A picture with boxes, in shares of its sides."""
    image = image.copy()
    for left, top, right, bottom in boxes:
        frame(image, (left, top), (right - left, bottom - top))
    return image


def frame(image: Image.Image, corner: tuple[float, float], size: tuple[float, float]) -> None:
    """Frame a part of a picture, in shares of its sides: orange, with a dark line around it."""
    width, height = image.size
    box = [corner[0] * width, corner[1] * height, (corner[0] + size[0]) * width, (corner[1] + size[1]) * height]
    pen = ImageDraw.Draw(image)
    thick = max(2, round(max(image.size) / 240))
    pen.rectangle([box[0] - thick, box[1] - thick, box[2] + thick, box[3] + thick], outline=(20, 20, 22), width=thick)
    pen.rectangle(box, outline=BOX, width=thick)


def cell_at(look: Look, x: float, y: float) -> tuple[int, int]:
    """The cell under a point of a drawn picture."""
    image = enlarge(look)
    row, column = int(y / image.height * look.grid[0]), int(x / image.width * look.grid[1])
    return min(max(row, 0), look.grid[0] - 1), min(max(column, 0), look.grid[1] - 1)


def inline_map(values: np.ndarray) -> str:
    """A small map as an address that holds it: nothing is served as a file."""
    target = io.BytesIO()
    colour_map(stretch(values)).save(target, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
