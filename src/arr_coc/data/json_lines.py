"""JSON lines, perhaps gzipped: reading rows by number, and questions with answers (`jsonl:FILE`)."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from arr_coc.data.boxes import clip_box, is_box
from arr_coc.data.example import Example, check_examples, open_file


def open_lines(path: Path) -> TextIO:
    """Open a file of lines, perhaps gzipped."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def first_fields(path: Path) -> set[str]:
    """The names in the first row of a file: they say what kind of rows it has."""
    try:
        with open_lines(path) as lines:
            row = json.loads(next(lines, ""))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not JSON lines: {error}") from None
    return set(row) if isinstance(row, dict) else set()


def read_rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows that have all that is needed, with the numbers of their lines; any other row is refused by its number.

    Args:
        path (`Path`): a file of JSON lines; empty lines are passed over.
        needed (`tuple[str, ...]`): names that every row must have.

    Returns:
        `Iterator[tuple[int, dict]]`: number of the line, counted from 1, and the row.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        with open_lines(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(line, f"{path}, line {number}", needed)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as JSON lines: {error}") from None


def _parse(line: str, where: str, needed: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    missing = [name for name in needed if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}; each needs {', '.join(needed)}")
    content: dict[str, Any] = row
    return content


def rows_by_picture(path: Path, needed: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Rows by their `image`, in the order in which the pictures come first; a `box` that is needed is checked."""
    by_picture: dict[str, list[dict[str, Any]]] = {}
    for number, row in read_rows(path, needed):
        if "box" in needed and not is_box(row["box"]):
            raise ValueError(f"{path}, line {number}: a box is four shares of the picture's sides, got {row['box']}")
        by_picture.setdefault(str(row["image"]), []).append(row)
    return by_picture


def text_of(row: dict[str, Any], name: str, where: str) -> str:
    """A value of a row that must be a text with something in it."""
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"{where}: {name!r} must be a text, got {row[name]!r}")
    return str(row[name])


def relative_name(path: Path, folder: Path) -> str:
    """A path that is the same wherever the folder lies."""
    return Path(os.path.relpath(path, folder)).as_posix()


def read_questions(file: Path) -> list[Example]:
    """Rows of `image, question, answer | answers[, boxes][, id]`.

    Pictures are named relative to the file, boxes are shares of the sides, `answers` goes before `answer`, and without
    an `id` an example is named by its line.

    Args:
        file (`Path`): JSON lines, perhaps gzipped.

    Returns:
        `list[Example]`: one a row.
    """
    examples = []
    for number, row in read_rows(file, ("image", "question")):
        where = f"{file}, line {number}"
        image, question = text_of(row, "image", where), text_of(row, "question", where)
        boxes = row.get("boxes") or []
        if not isinstance(boxes, list) or not all(is_box(box) for box in boxes):
            raise ValueError(f"{where}: boxes are lists of four shares of the picture's sides, got {boxes}")
        clipped = tuple(cut for box in boxes if (cut := clip_box(box)) is not None)
        path = file.parent / image
        name = str(row.get("id", f"line {number}"))
        opener = partial(open_file, path)
        examples.append(Example(question, opener, name, _answers(row, where), clipped, picture_id=str(path)))
    return check_examples(examples, file)


def read_asked(file: Path) -> Iterator[Example]:
    """Rows of `image, question`, one picture after the other; whatever else they have is left out.

    Args:
        file (`Path`): JSON lines, perhaps gzipped; pictures are named relative to it.

    Returns:
        `Iterator[Example]`: without answers and boxes.
    """
    for name, rows in rows_by_picture(file, ("image", "question")).items():
        place = file.parent / name
        for number, row in enumerate(rows):
            question = text_of(row, "question", f"{file}, a row of {name}")
            shown = f"{relative_name(place, file.parent)}#{number}"
            yield Example(question, partial(open_file, place), shown, kind="asked", picture_id=str(place))


def _answers(row: dict[str, Any], where: str) -> tuple[str, ...]:
    if "answers" not in row and "answer" not in row:
        raise ValueError(f"{where} has no 'answer' and no 'answers'; each needs one of them")
    answers = row["answers"] if "answers" in row else [row["answer"]]
    plain = isinstance(answers, list) and all(
        isinstance(answer, str | int | float) and not isinstance(answer, bool) for answer in answers
    )
    if not plain or not answers:
        raise ValueError(f"{where}: answers must be texts or numbers, at least one, got {answers}")
    return tuple(str(answer) for answer in answers)
