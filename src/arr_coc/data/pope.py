"""POPE as it is published: lines of `question_id, image, text, label`, which is yes or no."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from arr_coc.data.example import Example, check_examples, open_file
from arr_coc.data.json_lines import read_rows, text_of

FIELDS = ("question_id", "image", "text", "label")


def read_pope(file: Path, pictures: Path) -> list[Example]:
    """Questions whether something is in a picture.

    Args:
        file (`Path`): such as `coco_pope_random.json`, which has a row in each line.
        pictures (`Path`): folder of the pictures.

    Returns:
        `list[Example]`: named by `question_id`.
    """
    if not pictures.is_dir():
        raise ValueError(f"{pictures} is not a folder of pictures")
    examples = []
    for number, row in read_rows(file, FIELDS):
        where = f"{file}, line {number}"
        label = str(row["label"]).strip().lower()
        if label not in ("yes", "no"):
            raise ValueError(f"{where}: a label is yes or no, got {row['label']!r}")
        path = pictures / text_of(row, "image", where)
        question, opener = text_of(row, "text", where), partial(open_file, path)
        examples.append(Example(question, opener, str(row["question_id"]), (label,), picture_id=str(path)))
    return check_examples(examples, file)
