"""Items out of files: photographs with boxes, referring expressions, JSON lines, VQAv2 and POPE as published.

| what                                | rule                                                                          |
|-------------------------------------|-------------------------------------------------------------------------------|
| a picture that is missing or broken | its item is listed; opening it raises `MissingPicture`                        |
| a line or entry that cannot be used | refused, with the file and the line                                           |
| nothing to ask in a file            | refused                                                                       |
| several questions about one picture | of photographs and expressions first one of each picture comes, then the next |
|                                     | of each, so that the first n items show n pictures where there are as many    |
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from arr_coc.data.coco import Photo, read_photos
from arr_coc.data.items import Item, open_file
from arr_coc.data.training_examples import clip_box, expression_examples, is_box, numbered_rows, read_listed
from arr_coc.data.worlds.world import Box

# COCO's pictures as VQAv2 names them, by their numbers, and as they are named since 2017.
_COCO_NAMES = ("COCO_val2014_{:012}.jpg", "{:012}.jpg", "COCO_train2014_{:012}.jpg", "COCO_test2015_{:012}.jpg")
_PARTS = ("val", "test", "")

Row = TypeVar("Row")


def read_class_items(place: Path) -> list[Item]:
    """Classes of photographs in COCO format as questions, their boxes as truth.

    A class of which some were annotated as a crowd is left out: its boxes are not all there is.
    """
    file = find_held_out(place, ("instances*.json", "instances*.json.gz"))
    try:
        photos = read_photos(file.parent, file, missing="keep")
    except KeyError as error:
        raise ValueError(f"{file} has an entry without {error}; it is not COCO's JSON") from None
    return _in_turns([_class_items(photo, file.parent) for photo in photos], file)


def _class_items(photo: Photo, folder: Path) -> list[Item]:
    width, height = photo.size
    found: dict[str, list[Box]] = defaultdict(list)
    for name, (left, top, right, bottom) in photo.things:
        box = clip_box((left / width, top / height, right / width, bottom / height))
        if box is not None and name not in photo.crowds:
            found[name].append(box)
    shown = _relative(photo.path, folder)
    return [
        Item(f"{shown}#{name}", name, (), tuple(boxes), partial(open_file, photo.path)) for name, boxes in found.items()
    ]


def read_expression_items(place: Path) -> list[Item]:
    """Referring expressions as questions, the box of each as truth; lines as in training."""
    file = find_held_out(place, ("*.jsonl", "*.jsonl.gz"))
    groups = []
    for shown in _reading(file, expression_examples(file)):
        path = Path(shown.name)
        name = _relative(path, file.parent)
        groups.append(
            [
                Item(f"{name}#{number}", ask.question, (), ask.boxes, partial(open_file, path))
                for number, ask in enumerate(shown.asks)
            ]
        )
    return _in_turns(groups, file)


def read_jsonl_items(file: Path) -> list[Item]:
    """JSON lines of `image, question, answer | answers[, boxes][, id]`.

    Pictures are named relative to the file, boxes are shares of the sides, `answers` goes before `answer`, and
    without an `id` an item is named by its line.
    """
    items = []
    for number, row in _lines(file, ("image", "question")):
        where = f"{file}, line {number}"
        image, question = _text(row, "image", where), _text(row, "question", where)
        boxes = row.get("boxes") or []
        if not isinstance(boxes, list) or not all(is_box(box) for box in boxes):
            raise ValueError(f"{where}: boxes are lists of four shares of the picture's sides, got {boxes}")
        clipped = tuple(box for one in boxes if (box := clip_box(one)) is not None)
        name = str(row.get("id", f"line {number}"))
        items.append(Item(name, question, _answers(row, where), clipped, partial(open_file, file.parent / image)))
    return _checked(items, file)


def read_vqa_items(questions: Path, annotations: Path, pictures: Path) -> list[Item]:
    """VQAv2 as published: questions with ten answers each; questions without answers are left out."""
    _check_folder(pictures)
    for file in (questions, annotations):
        _check_file(file)
    items = []
    try:
        said = {
            row["question_id"]: tuple(str(one["answer"]) for one in row["answers"])
            for row in read_listed(annotations, "annotations")
        }
        for row in read_listed(questions, "questions"):
            if row["question_id"] in said:
                paths = [pictures / name.format(int(row["image_id"])) for name in _COCO_NAMES]
                name, question = str(row["question_id"]), str(row["question"])
                items.append(Item(name, question, said[row["question_id"]], (), partial(open_file, *paths)))
    except KeyError as error:
        raise ValueError(f"an entry of {questions} or {annotations} has no {error}; they are not VQAv2's") from None
    except TypeError as error:
        raise ValueError(f"{questions} and {annotations} are not VQAv2's JSON: {error}") from None
    return _checked(items, questions)


def read_pope_items(file: Path, pictures: Path) -> list[Item]:
    """POPE as published: lines of `question_id, image, text, label`, which is yes or no."""
    _check_folder(pictures)
    items = []
    for number, row in _lines(file, ("question_id", "image", "text", "label")):
        where = f"{file}, line {number}"
        label = str(row["label"]).strip().lower()
        if label not in ("yes", "no"):
            raise ValueError(f"{where}: a label is yes or no, got {row['label']!r}")
        opener = partial(open_file, pictures / _text(row, "image", where))
        items.append(Item(str(row["question_id"]), _text(row, "text", where), (label,), (), opener))
    return _checked(items, file)


def find_held_out(place: Path, patterns: Sequence[str]) -> Path:
    """The file of a folder that training did not see: one named val or test, or the only one not named train.

    Args:
        place (`Path`): a folder, or one whose subfolder `validation`, `val` or `test` has the file, or the file itself.
        patterns (`Sequence[str]`): of its name.
    """
    if place.is_file():
        return place
    if not place.is_dir():
        raise ValueError(f"{place} is neither a folder nor a file")
    folders = [place, *(place / name for name in ("validation", "val", "test"))]
    for folder in folders:
        files = sorted(file for pattern in patterns for file in folder.glob(pattern) if "train" not in file.name)
        for part in _PARTS:
            found = [file for file in files if part in file.name]
            if len(found) == 1:
                return found[0]
            if found:
                names = ", ".join(file.name for file in found)
                raise ValueError(f"{folder} has several files to measure on ({names}); name one of them")
    raise ValueError(f"{place} has no {' or '.join(patterns)} that is not for training; name a file to use it anyway")


def _in_turns(groups: Iterable[list[Item]], file: Path) -> list[Item]:
    """The first item of each picture, then the second of each."""
    rows = zip_longest(*groups)
    return _checked([item for row in rows for item in row if item is not None], file)


def _checked(items: list[Item], file: Path) -> list[Item]:
    if not items:
        raise ValueError(f"{file} has nothing to ask; it is empty or of another kind")
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ValueError(f"{file} has two items with the id {item.id!r}; each needs its own")
        seen.add(item.id)
    return items


def _lines(file: Path, needed: tuple[str, ...]) -> list[tuple[int, dict[str, Any]]]:
    _check_file(file)
    return _reading(file, numbered_rows(file, needed))


def _reading(file: Path, rows: Iterable[Row]) -> list[Row]:
    """All rows of a file; what is no text at all is refused by the file's name."""
    try:
        return list(rows)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read as JSON lines: {error}") from None


def _text(row: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"{where}: {name!r} must be a text, got {row[name]!r}")
    return str(row[name])


def _answers(row: dict[str, Any], where: str) -> tuple[str, ...]:
    if "answers" not in row and "answer" not in row:
        raise ValueError(f"{where} has no 'answer' and no 'answers'; each needs one of them")
    answers = row["answers"] if "answers" in row else [row["answer"]]
    plain = isinstance(answers, list) and all(
        isinstance(one, str | int | float) and not isinstance(one, bool) for one in answers
    )
    if not plain or not answers:
        raise ValueError(f"{where}: answers must be texts or numbers, at least one, got {answers}")
    return tuple(str(one) for one in answers)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is not a file")


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder of pictures")


def _relative(path: Path, folder: Path) -> str:
    """A path that is the same wherever the folder lies."""
    return Path(os.path.relpath(path, folder)).as_posix()
