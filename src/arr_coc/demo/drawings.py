"""The pictures of the page, drawn from a snapshot."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from arr_coc.demo.snapshot import Snapshot
from arr_coc.drawing.homunculus import draw_homunculus
from arr_coc.drawing.looks import number_cells, seen_cells, show_look, show_looks
from arr_coc.drawing.overlay import colour_map, mark_turns, show_gaze, show_heat, show_kept, stretch

OPACITY = 0.55
LONGEST_SIDE = 720  # pixels of a drawing: text in small pictures stays readable
LEAST_NUMBER = 18.0  # height of a number in a drawing, which a phone shows at less than half its size
FRAME = (230, 97, 1)  # an orange that the colour-blind can see on any map
EDGE = (20, 20, 22)

Cell = tuple[int, int]


def enlarge(snapshot: Snapshot) -> Image.Image:
    """The picture at the size at which it is drawn."""
    scale = LONGEST_SIDE / max(snapshot.image.size)
    size = (max(1, round(snapshot.image.width * scale)), max(1, round(snapshot.image.height * scale)))
    return snapshot.image.resize(size, Image.Resampling.LANCZOS)


def draw_relevance(snapshot: Snapshot, opacity: Any = OPACITY) -> Image.Image:
    """The picture under its relevance map, or the plain picture without one; an opacity may be missing."""
    if snapshot.maps is None:
        return enlarge(snapshot)
    valid = isinstance(opacity, int | float) and math.isfinite(opacity)
    strength = min(max(opacity, 0.0), 1.0) if valid else OPACITY
    return show_heat(enlarge(snapshot), stretch(snapshot.maps.relevance), strength)


def draw_read(snapshot: Snapshot) -> Image.Image:
    """What was read, with the regions that mattered first numbered."""
    image = enlarge(snapshot)
    rows, columns = snapshot.grid
    if len(snapshot.cells) == rows * columns:
        return image
    step = (image.width / columns, image.height / rows)
    blur = _find_blur(snapshot)
    if blur is not None:
        return show_gaze(image, snapshot.grid, snapshot.cells, step[0], blur)
    kept = show_kept(image, snapshot.tokens > 0)
    return kept if snapshot.maps is None else mark_turns(kept, snapshot.grid, snapshot.cells, step)


def draw_tokens_as_area(snapshot: Snapshot) -> Image.Image:
    """The homunculus: every part of the picture with an area in proportion to its tokens."""
    return draw_homunculus(snapshot.image, snapshot.tokens.astype(np.float64), LONGEST_SIDE)


def draw_cell(snapshot: Snapshot, cell: Cell | None) -> Image.Image:
    """The relevance map with one cell framed."""
    image = draw_relevance(snapshot)
    if cell is not None:
        rows, columns = snapshot.grid
        draw_frame(image, (cell[1] / columns, cell[0] / rows), (1 / columns, 1 / rows))
    return image


def draw_boxes(image: Image.Image, boxes: tuple[tuple[float, float, float, float], ...]) -> Image.Image:
    """A copy of the picture with boxes `(left, top, right, bottom)`, given as shares of its sides."""
    image = image.copy()
    for left, top, right, bottom in boxes:
        draw_frame(image, (left, top), (right - left, bottom - top))
    return image


def draw_frame(image: Image.Image, corner: tuple[float, float], size: tuple[float, float]) -> None:
    """Frame a part of the picture, given in shares of its sides, in orange with a dark edge."""
    width, height = image.size
    box = [corner[0] * width, corner[1] * height, (corner[0] + size[0]) * width, (corner[1] + size[1]) * height]
    pen = ImageDraw.Draw(image)
    thick = max(2, round(max(image.size) / 240))
    pen.rectangle([box[0] - thick, box[1] - thick, box[2] + thick, box[3] + thick], outline=EDGE, width=thick)
    pen.rectangle(box, outline=FRAME, width=thick)


def cell_at(snapshot: Snapshot, x: float, y: float) -> Cell:
    """The cell (row, column) under a point of a drawing, in pixels."""
    image = enlarge(snapshot)
    rows, columns = snapshot.grid
    row, column = int(y / image.height * rows), int(x / image.width * columns)
    return min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)


def draw_seen(snapshot: Snapshot) -> Image.Image:
    """What was read at full resolution, without numbers."""
    return show_look(enlarge(snapshot), snapshot.tokens >= 1, 1, _find_blur(snapshot))


def draw_look(snapshot: Snapshot, number: int) -> Image.Image:
    """What one look, by its number, could use."""
    return show_look(enlarge(snapshot), seen_cells(snapshot.looks[number - 1]), number, _find_blur(snapshot))


def draw_all_looks(snapshot: Snapshot) -> Image.Image:
    """Every cell that was seen with the number of the look that first saw it."""
    return show_looks(enlarge(snapshot), number_cells(snapshot.looks), _find_blur(snapshot), LEAST_NUMBER)


def encode_picture(image: Image.Image) -> str:
    """A drawing as a data URL, so that any number of them can be shown."""
    target = io.BytesIO()
    image.save(target, format="JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode()


def _find_blur(snapshot: Snapshot) -> int | None:
    """Side of a pixel of the gestalt, in pixels of a drawing; None without a gestalt."""
    if snapshot.mode != "saccade":
        return None
    return max(1, round(snapshot.blur * enlarge(snapshot).width / snapshot.image.width))


def encode_map(values: np.ndarray) -> str:
    """A small map as a data URL, so that no file has to be served."""
    target = io.BytesIO()
    colour_map(stretch(values)).save(target, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
