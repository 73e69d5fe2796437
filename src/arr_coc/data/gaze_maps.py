"""Where people looked: JSON lines of `image`, `question` and `map`, a grayscale picture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from arr_coc.data.example import Example, open_file
from arr_coc.data.json_lines import relative_name, rows_by_picture

FIELDS = ("image", "question", "map")


def read_gaze_maps(path: str | Path, pictures: str | Path | None = None) -> Iterator[Example]:
    """Questions with a map instead of boxes, one picture after the other.

    Args:
        path (`str` or `Path`): JSON lines, perhaps gzipped.
        pictures (`str` or `Path`, *optional*): folder of pictures and maps; by default that of the file.

    Returns:
        `Iterator[Example]`: each with its `mask`.
    """
    folder = Path(pictures or Path(path).parent)
    for name, rows in rows_by_picture(Path(path), FIELDS).items():
        place = folder / name
        shown = relative_name(place, folder)
        for number, row in enumerate(rows):
            yield Example(
                str(row["question"]), partial(open_file, place), f"{shown}#{number}", mask=folder / str(row["map"]),
                kind="gaze", picture_id=str(place),
            )  # fmt: skip


def read_map(path: Path, rows: int, columns: int) -> np.ndarray:
    """A map on a grid `[rows, columns]` in [0, 1]; the most looked at is 1. Raises `MissingPicture`."""
    small = open_file(path).convert("L").resize((columns, rows), Image.Resampling.BOX)
    values = np.asarray(small, dtype=np.float32)
    return values / max(1.0, float(values.max()))
