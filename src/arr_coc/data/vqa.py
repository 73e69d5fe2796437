"""VQAv2 as it is published: one file of questions, one of annotations, COCO's pictures."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from arr_coc.data.example import Example, check_examples, open_file

# COCO's pictures as VQAv2 names them, by their numbers, and as they are named since 2017.
_COCO_NAMES = ("COCO_val2014_{:012}.jpg", "{:012}.jpg", "COCO_train2014_{:012}.jpg", "COCO_test2015_{:012}.jpg")
_PUBLISHED = r"(v2_)?OpenEnded_mscoco_(\w+?)_questions\.json"


def read_vqa(questions: Path, annotations: Path, pictures: Path, agreed: bool = False) -> list[Example]:
    """Questions with their answers; questions without answers are left out.

    Args:
        questions (`Path`): such as `v2_OpenEnded_mscoco_val2014_questions.json`.
        annotations (`Path`): such as `v2_mscoco_val2014_annotations.json`.
        pictures (`Path`): folder of COCO's pictures, under their names of 2014 or of 2017.
        agreed (`bool`, *optional*, defaults to `False`): give the one answer on which people agreed, which is learned,
            instead of all ten, by which answers are scored.

    Returns:
        `list[Example]`: in the order of the questions, named by `question_id`.
    """
    if not pictures.is_dir():
        raise ValueError(f"{pictures} is not a folder of pictures")
    for file in (questions, annotations):
        if not file.is_file():
            raise ValueError(f"{file} is not a file")
    published = re.fullmatch(_PUBLISHED, questions.name)
    split = published[2] if published else ""
    names = sorted(_COCO_NAMES, key=lambda name: split not in name)  # a missing picture is named by its own split
    examples = []
    try:
        answers = {row["question_id"]: _answers(row, agreed) for row in _read_list(annotations, "annotations")}
        for row in _read_list(questions, "questions"):
            if row["question_id"] in answers:
                image = int(row["image_id"])
                opener = partial(open_file, *(pictures / name.format(image) for name in names))
                name, said = str(row["question_id"]), answers[row["question_id"]]
                examples.append(Example(str(row["question"]), opener, name, said, picture_id=str(image)))
    except KeyError as error:
        raise ValueError(f"an entry of {questions} or {annotations} has no {error}; they are not VQAv2's") from None
    except TypeError as error:
        raise ValueError(f"{questions} and {annotations} are not VQAv2's JSON: {error}") from None
    return check_examples(examples, questions)


def read_published_vqa(questions: Path) -> list[Example]:
    """Questions with the answer on which people agreed; annotations and pictures are found by their published names.

    Args:
        questions (`Path`): such as `v2_OpenEnded_mscoco_val2014_questions.json`; in the same folder lie
            `v2_mscoco_val2014_annotations.json` and the pictures, in `val2014` or in the folder itself.

    Returns:
        `list[Example]`: as of [`read_vqa`].
    """
    published = re.fullmatch(_PUBLISHED, questions.name)
    if published is None:
        raise ValueError(f"{questions} is not named as VQAv2's questions, v2_OpenEnded_mscoco_val2014_questions.json")
    prefix, split = published[1] or "", published[2]
    annotations = questions.with_name(f"{prefix}mscoco_{split}_annotations.json")
    if not annotations.is_file():
        raise ValueError(f"{annotations} is missing; VQAv2's annotations lie beside its questions")
    folder = questions.parent
    return read_vqa(questions, annotations, folder / split if (folder / split).is_dir() else folder, agreed=True)


def _answers(row: dict[str, Any], agreed: bool) -> tuple[str, ...]:
    if agreed:
        return (str(row["multiple_choice_answer"]),)
    return tuple(str(answer["answer"]) for answer in row["answers"])


def _read_list(path: Path, name: str) -> list[dict[str, Any]]:
    """The rows under a name."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[name]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not VQAv2's JSON with {name!r}: {error}") from None
    return rows
