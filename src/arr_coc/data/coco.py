"""Photographs of any folder in COCO format, and questions that their boxes answer.

| for          | questions                                                               | from                       |
|--------------|-------------------------------------------------------------------------|----------------------------|
| training     | names of classes, or "is there a dog?", also of classes that are absent | [`read_class_questions`]   |
| evaluation   | names of classes, where all of their boxes are known                    | [`read_held_out_classes`]  |
| yes and no   | "is there a dog?", as often yes as no for each class                    | [`presence_examples`]      |
| others       | how many, on which side, and beside what                                | [`photo_examples`]         |

What else a photograph can be asked is in `photo_questions.py`. No photograph comes with the package.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from arr_coc.data.boxes import Box, clip_box
from arr_coc.data.example import Example, check_examples, open_file, take_turns
from arr_coc.data.held_out import find_held_out
from arr_coc.data.json_lines import relative_name
from arr_coc.data.photo_questions import Photo, Wording, ask_presence, photo_scene
from arr_coc.data.worlds.world import ask_scene


def read_photos(
    folder: str | Path, annotations: str | Path | None = None, missing: Literal["refuse", "keep"] = "refuse"
) -> list[Photo]:
    """Read a folder in COCO format.

    Args:
        folder (`str` or `Path`): where the pictures are.
        annotations (`str` or `Path`, *optional*): the JSON file with `images`, `annotations` and `categories`, perhaps
            gzipped. By default the only `instances*.json` or `instances*.json.gz` of the folder.
        missing (`str`, *optional*, defaults to `"refuse"`): whether a picture that is not there is an error.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    content = _read_json(_find_annotations(folder) if annotations is None else Path(annotations))
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    things: dict[Any, list[tuple[str, Box]]] = defaultdict(list)
    crowds: dict[Any, list[tuple[str, Box]]] = defaultdict(list)
    for row in content["annotations"]:
        left, top, width, height = row["bbox"]
        found = crowds if row.get("iscrowd") else things
        found[row["image_id"]].append((names[row["category_id"]], (left, top, left + width, top + height)))
    if any(not {"id", "file_name", "width", "height"} <= image.keys() for image in content["images"]):
        raise ValueError(f"the images of {folder}'s annotations need id, file_name, width and height")
    photos = [
        Photo(
            folder / image["file_name"],
            (image["width"], image["height"]),
            tuple(things[image["id"]]),
            frozenset(name for name, _ in crowds[image["id"]]),
            tuple(crowds[image["id"]]),
        )
        for image in content["images"]
    ]
    for photo in photos:
        if missing == "refuse" and not photo.path.is_file():
            raise ValueError(f"{photo.path} is missing; the annotations name it")
    return photos


def _find_annotations(folder: Path) -> Path:
    files = sorted([*folder.glob("instances*.json"), *folder.glob("instances*.json.gz")])
    if len(files) != 1:
        raise ValueError(f"{folder} has {len(files)} files named instances*.json or .json.gz; name one of them")
    return files[0]


def _read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ValueError(f"{path} is not a file; give COCO's JSON")
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as COCO's JSON: {error}") from None
    if not isinstance(content, dict) or not content.keys() >= {"images", "annotations", "categories"}:
        raise ValueError(f"{path} is not COCO's JSON; it needs images, annotations and categories")
    return content


def presence_examples(photos: list[Photo], seed: int, wording: Wording = "own") -> list[Example]:
    """Balanced yes/no questions such as "is there a dog?".

    For each photograph one question that is true, and the same about another photograph where it is not. Each class is
    asked as often where it is absent as where it is present, so that knowing which classes are common does not help.

    Args:
        photos (`list[Photo]`): from [`read_photos`].
        seed (`int`): decides which classes are asked for, and how.
        wording (`str`, *optional*, defaults to `"own"`): see [`~arr_coc.data.photo_questions.ask_presence`]. The
            photographs and classes of a seed are the same in each.

    Returns:
        `list[Example]`: with yes and no in turn, but for classes that are in every photograph.
    """
    rng = random.Random(f"presence {seed}")
    others = random.Random(f"presence {seed} {wording}")  # so that the wording does not change what is asked
    examples: list[Example] = []
    for photo in photos:
        scene = photo_scene(photo, rng)
        yes = [question for question in scene.questions if question.kind == "presence"]
        if not yes:
            continue
        question = rng.choice(yes)
        name = next(name for name, box in photo.things if box == question.boxes[0])
        asked = [(scene, question)]
        without = [
            other for other in photos if name not in other.crowds and all(name != there for there, _ in other.things)
        ]
        if without:
            scene = photo_scene(rng.choice(without), rng, (name,))
            [no] = [question for question in scene.questions if question.answer == "no"]
            asked.append((scene, no))
        for scene, question in asked:
            if wording != "own":
                question = replace(question, text=ask_presence(others, name, wording))
            examples.append(ask_scene(scene, question, f"presence#{len(examples)}"))
    return examples


def photo_examples(photos: list[Photo], kind: str, seed: int) -> list[Example]:
    """Questions of one kind to measure on, one for each photograph that has any, in all wordings.

    Args:
        photos (`list[Photo]`): from [`read_photos`].
        kind (`str`): `"photo_count"`, `"photo_side"` or `"photo_relation"`; see `photo_questions.py`.
        seed (`int`): decides which class is asked for, and how.

    Returns:
        `list[Example]`: none of a kind that no photograph has.
    """
    rng = random.Random(f"{kind} {seed}")
    frequencies = class_frequencies(photos)
    examples: list[Example] = []
    for photo in photos:
        absent = tuple(rng.choices(list(frequencies), list(frequencies.values())))
        scene = photo_scene(photo, rng, absent, wording="all")
        wanted = [question for question in scene.questions if question.kind == kind]
        if wanted:
            examples.append(ask_scene(scene, rng.choice(wanted), f"{kind}#{len(examples)}"))
    return examples


def read_class_questions(folder: str | Path, seed: int = 0, most: int = 4, absent: int = 1) -> Iterator[Example]:
    """Classes as questions to learn from, one photograph after the other, and some classes that are not there.

    Args:
        folder (`str` or `Path`): pictures and one `instances*.json`, perhaps gzipped. A box beyond the picture is cut
            to it; a class without a box is never asked for as if it were there.
        seed (`int`, *optional*, defaults to 0): decides what is asked and how.
        most (`int`, *optional*, defaults to 4): questions about classes that are in a picture, at most.
        absent (`int`, *optional*, defaults to 1): questions about one that is not.

    Returns:
        `Iterator[Example]`: kind `"class"` with boxes, or `"absent"` without.
    """
    rng = random.Random(f"coco {seed}")
    folder = Path(folder)
    photos = read_photos(folder, missing="keep")
    frequencies = class_frequencies(photos)
    if not frequencies:
        raise ValueError(f"no picture of {folder} has a box; there is nothing to learn from")
    for photo in photos:
        boxes = _boxes_by_class(photo)
        present = rng.sample(sorted(boxes), min(most, len(boxes)))
        drawn = rng.choices(list(frequencies), list(frequencies.values()), k=4 * absent)
        elsewhere = [name for name in drawn if name not in boxes and name not in photo.crowds]
        asked = [(name, _word(rng, name)) for name in present] + [
            (name, _word(rng, name)) for name in elsewhere[:absent]
        ]
        known = tuple(box for places in boxes.values() for box in places)
        for name, question in asked:
            there = name in boxes
            yield Example(
                question, partial(open_file, photo.path), f"{relative_name(photo.path, folder)}#{name}",
                boxes=tuple(boxes[name]) if there else (), kind="class" if there else "absent",
                lookalikes=known if there else (), picture_id=str(photo.path),
            )  # fmt: skip


def _word(rng: random.Random, name: str) -> str:
    return name if rng.random() < 0.5 else ask_presence(rng, name)


def read_held_out_classes(place: Path) -> list[Example]:
    """Classes as questions to measure looking on, the first of each photograph, then the second of each.

    A class of which some were annotated as a crowd is left out: its boxes are not all there is.

    Args:
        place (`Path`): a folder, or the file; see [`~arr_coc.data.held_out.find_held_out`].

    Returns:
        `list[Example]`: with boxes and without answers.
    """
    file = find_held_out(place, ("instances*.json", "instances*.json.gz"))
    try:
        photos = read_photos(file.parent, file, missing="keep")
    except KeyError as error:
        raise ValueError(f"{file} has an entry without {error}; it is not COCO's JSON") from None
    groups = [list(_ask_classes(photo, file.parent)) for photo in photos]
    return check_examples(take_turns(groups), file)


def _ask_classes(photo: Photo, folder: Path) -> Iterator[Example]:
    for name, boxes in _boxes_by_class(photo).items():
        if name not in photo.crowds:
            yield Example(
                name, partial(open_file, photo.path), f"{relative_name(photo.path, folder)}#{name}",
                boxes=tuple(boxes), kind="class", picture_id=str(photo.path),
            )  # fmt: skip


def _boxes_by_class(photo: Photo) -> dict[str, list[Box]]:
    """Boxes in shares of the sides, cut to the picture, by the name of their class."""
    width, height = photo.size
    boxes: dict[str, list[Box]] = defaultdict(list)
    for name, (left, top, right, bottom) in photo.things:
        box = clip_box((left / width, top / height, right / width, bottom / height))
        if box is not None:
            boxes[name].append(box)
    return dict(boxes)


def class_names(photos: list[Photo]) -> list[str]:
    """Names of what there is, the commonest first."""
    return [name for name, _ in Counter(name for photo in photos for name, _ in photo.things).most_common()]


def class_frequencies(photos: list[Photo]) -> dict[str, int]:
    """In how many photographs each class is, in the order of [`class_names`]."""
    counted = Counter(name for photo in photos for name in {name for name, _ in photo.things})
    return {name: counted[name] for name in class_names(photos)}
