"""Boxes `(left, top, right, bottom)` in shares of the picture's sides, and the cells of a grid that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Box = tuple[float, float, float, float]

# A cell belongs to a box that covers this share of it, or of which it holds half.
_COVERED, _HELD = 0.25, 0.5


def clip_box(box: Sequence[float]) -> Box | None:
    """Cut a box to the picture.

    Args:
        box (`Sequence[float]`): shares of the sides, perhaps beyond the picture.

    Returns:
        `Box`, *optional*: None if nothing of it is left.

    Example:

    ```python
    >>> from arr_coc.data.boxes import clip_box
    >>> clip_box((0.5, -0.1, 1.2, 0.5)), clip_box((1.1, 0, 1.2, 1))
    ((0.5, 0.0, 1.0, 0.5), None)

    ```
    """
    left, top, right, bottom = (min(1.0, max(0.0, float(side))) for side in box)
    return (left, top, right, bottom) if right > left and bottom > top else None


def is_box(box: Any) -> bool:
    """Whether something out of a file is four numbers that can be shares; pixels would be far above 1."""
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(side, int | float) for side in box)
    return numbers and all(-1 <= side <= 2 for side in box)


def cells_inside(boxes: Sequence[Sequence[float]], rows: int, columns: int) -> Tensor:
    """Boolean `[rows, columns]`: the cells that belong to boxes `(left, top, right, bottom)` in shares of the sides.

    Every box has a cell, however small it is.

    Example:

    ```python
    >>> from arr_coc.data.boxes import cells_inside
    >>> cells_inside([(0.5, 0.0, 1.0, 0.5)], 2, 4).int().tolist()
    [[0, 0, 1, 1], [0, 0, 0, 0]]

    ```
    """
    if not len(boxes):
        return torch.zeros(rows, columns, dtype=torch.bool)
    edges = torch.tensor([list(box) for box in boxes], dtype=torch.float32) * torch.tensor([columns, rows] * 2)
    sides = []
    for low, high, count in ((edges[:, 0], edges[:, 2], columns), (edges[:, 1], edges[:, 3], rows)):
        first = torch.arange(count)
        sides.append((torch.minimum(high[:, None], first + 1) - torch.maximum(low[:, None], first)).clamp(min=0))
    area = sides[1][:, :, None] * sides[0][:, None]  # [n, rows, columns]
    size = ((edges[:, 2] - edges[:, 0]) * (edges[:, 3] - edges[:, 1]))[:, None, None]
    inside = (area >= _COVERED) | ((area >= _HELD * size) & (area > 0))
    # on the border of cells, or without any area: the cell of its middle
    column = ((edges[:, 0] + edges[:, 2]) / 2).long().clamp(0, columns - 1)
    row = ((edges[:, 1] + edges[:, 3]) / 2).long().clamp(0, rows - 1)
    missed = ~inside.flatten(1).any(dim=1)
    cells = inside.any(dim=0)  # [rows, columns]
    cells[row[missed], column[missed]] = True
    return cells
