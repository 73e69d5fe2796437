"""Referring expressions: JSON lines of `image`, `expression`, `box` in shares of the sides, perhaps `category`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from arr_coc.data.boxes import clip_box
from arr_coc.data.example import Example, check_examples, group_by_picture, open_file, take_turns
from arr_coc.data.held_out import find_held_out
from arr_coc.data.json_lines import relative_name, rows_by_picture

FIELDS = ("image", "expression", "box")


def read_expressions(path: str | Path, pictures: str | Path | None = None) -> Iterator[Example]:
    """Expressions as questions, one picture after the other; what else is named in a picture looks alike.

    Args:
        path (`str` or `Path`): JSON lines, perhaps gzipped. A box beyond the picture is cut to it, and its expression
            left out when nothing remains.
        pictures (`str` or `Path`, *optional*): folder of the pictures; by default that of the file.

    Returns:
        `Iterator[Example]`: each with one box, named by its picture and its number.
    """
    folder = Path(pictures or Path(path).parent)
    for name, rows in rows_by_picture(Path(path), FIELDS).items():
        clipped = [(str(row["expression"]), clip_box(row["box"])) for row in rows]
        known = tuple(dict.fromkeys(box for _, box in clipped if box is not None))
        place = folder / name
        shown = relative_name(place, folder)
        said = [(text, box) for text, box in clipped if box is not None]
        for number, (text, box) in enumerate(said):
            yield Example(
                text, partial(open_file, place), f"{shown}#{number}", boxes=(box,), kind="expression",
                lookalikes=known, picture_id=str(place),
            )  # fmt: skip


def read_held_out_expressions(place: Path) -> list[Example]:
    """Expressions that training did not see, the first of each picture, then the second of each.

    Args:
        place (`Path`): a folder, or the file; see [`~arr_coc.data.held_out.find_held_out`].

    Returns:
        `list[Example]`: all of them.
    """
    file = find_held_out(place, ("*.jsonl", "*.jsonl.gz"))
    return check_examples(take_turns(group_by_picture(read_expressions(file))), file)
