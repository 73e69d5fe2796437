"""Photographs of any folder in COCO format, and questions that their boxes answer.

| for          | questions                                                               | from                       |
|--------------|-------------------------------------------------------------------------|----------------------------|
| training     | names of classes, or "is there a dog?", also of classes that are absent | [`read_class_questions`]   |
| evaluation   | names of classes, where all of their boxes are known                    | [`read_held_out_classes`]  |
| yes and no   | "is there a dog?", as often yes as no for each class                    | [`presence_examples`]      |
| a base model | all of these, and how many, and on which side                           | [`photo_scene`]            |

No photograph comes with the package.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from arr_coc.data.boxes import Box, clip_box
from arr_coc.data.example import Example, check_examples, open_file, take_turns
from arr_coc.data.held_out import find_held_out
from arr_coc.data.json_lines import relative_name
from arr_coc.data.worlds.wording import put
from arr_coc.data.worlds.world import Question, Scene, Thing, ask_scene

# COCO's classes that have a common name.
GROUPS = {
    "animal": ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"),
    "vehicle": ("bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat"),
    "food": ("banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake"),
}
_PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "skis": "skis", "scissors": "scissors"}
_ONLY_MANY = ("skis", "scissors")
_MOST = 6  # beyond that people do not count at a glance
_SMALL = 0.002  # share of the picture below which a thing may be overlooked


@dataclass(frozen=True)
class Photo:
    """A photograph and what is in it: names, and boxes in pixels; `crowds` names what was not counted one by one."""

    path: Path
    size: tuple[int, int]
    things: tuple[tuple[str, Box], ...]
    crowds: frozenset[str] = frozenset()


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
    crowds: dict[Any, set[str]] = defaultdict(set)
    for row in content["annotations"]:
        left, top, width, height = row["bbox"]
        if row.get("iscrowd"):
            crowds[row["image_id"]].add(names[row["category_id"]])
        else:
            things[row["image_id"]].append((names[row["category_id"]], (left, top, left + width, top + height)))
    if any(not {"id", "file_name", "width", "height"} <= image.keys() for image in content["images"]):
        raise ValueError(f"the images of {folder}'s annotations need id, file_name, width and height")
    photos = [
        Photo(
            folder / image["file_name"],
            (image["width"], image["height"]),
            tuple(things[image["id"]]),
            frozenset(crowds[image["id"]]),
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


def photo_scene(
    photo: Photo, rng: random.Random, absent: tuple[str, ...] = (), picture: Image.Image | None = None
) -> Scene:
    """A photograph with all questions that its boxes answer.

    Args:
        photo (`Photo`): from [`read_photos`].
        rng (`random.Random`): decides the wording.
        absent (`tuple[str, ...]`, *optional*): names to ask for that are not in it.
        picture (`PIL.Image.Image`, *optional*): by default the file is opened.
    """
    if picture is None:
        picture = open_file(photo.path)
    boxes: dict[str, list[Box]] = defaultdict(list)
    for name, box in photo.things:
        boxes[name].append(box)
    questions = [
        Question("presence", ask_presence(rng, name), "yes", tuple(places))
        for name, places in boxes.items()
        if max(_share(box, photo.size) for box in places) >= _SMALL
    ]
    missing = [name for name in absent if name not in boxes and name not in photo.crowds]
    questions += [Question("presence", ask_presence(rng, name), "no") for name in missing]
    questions += [Question("photo_count", put(rng, "photo_count", name=_plural(name)), "0") for name in missing[:1]]
    for name, places in boxes.items():
        clear = all(_share(box, photo.size) >= _SMALL for box in places)
        if name not in photo.crowds and len(places) <= _MOST and clear:
            text = put(rng, "photo_count", name=_plural(name))
            questions.append(Question("photo_count", text, str(len(places)), tuple(places)))
    questions += _ask_sides(rng, photo)
    things = tuple(Thing(box, (name,)) for name, box in photo.things)
    return Scene(picture, tuple(questions), things)


def presence_examples(photos: list[Photo], seed: int) -> list[Example]:
    """Balanced yes/no questions such as "is there a dog?".

    For each photograph one question that is true, and the same about another photograph where it is not. Each class is
    asked as often where it is absent as where it is present, so that knowing which classes are common does not help.

    Args:
        photos (`list[Photo]`): from [`read_photos`].
        seed (`int`): decides which classes are asked for, and how.

    Returns:
        `list[Example]`: with yes and no in turn, but for classes that are in every photograph.
    """
    rng = random.Random(f"presence {seed}")
    examples: list[Example] = []
    for photo in photos:
        scene = photo_scene(photo, rng)
        yes = [question for question in scene.questions if question.kind == "presence"]
        if not yes:
            continue
        question = rng.choice(yes)
        examples.append(ask_scene(scene, question, f"presence#{len(examples)}"))
        name = next(name for name, box in photo.things if box == question.boxes[0])
        without = [
            other for other in photos if name not in other.crowds and all(name != there for there, _ in other.things)
        ]
        if without:
            scene = photo_scene(rng.choice(without), rng, (name,))
            [no] = [question for question in scene.questions if question.answer == "no"]
            examples.append(ask_scene(scene, no, f"presence#{len(examples)}"))
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


def _share(box: Box, size: tuple[int, int]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) / (size[0] * size[1])


def _plural(name: str) -> str:
    return _PLURALS.get(name, name + ("es" if name.endswith(("s", "sh", "ch")) else "s"))


def ask_presence(rng: random.Random, name: str) -> str:
    """A question such as "is there a dog?", in one of its wordings."""
    if name in _ONLY_MANY:
        return f"are there {name}?"
    return put(rng, "presence", name=f"{'an' if name[0] in 'aeiou' else 'a'} {name}")


def _ask_sides(rng: random.Random, photo: Photo) -> list[Question]:
    """What animal is on the left, if one and only one is there, clearly."""
    questions = []
    for group, names in GROUPS.items():
        members = [(name, box) for name, box in photo.things if name in names]
        if photo.crowds & set(names):
            continue
        for side, low, high in (("left", 0.0, 0.45), ("right", 0.55, 1.0)):
            there = [(name, box) for name, box in members if low <= (box[0] + box[2]) / 2 / photo.size[0] <= high]
            doubtful = [box for _, box in members if 0.45 < (box[0] + box[2]) / 2 / photo.size[0] < 0.55]
            large = any(_share(box, photo.size) >= 5 * _SMALL for _, box in there)
            if large and len({name for name, _ in there}) == 1 and not doubtful:
                text = put(rng, "photo_side", group=group, side=side)
                questions.append(Question("photo_side", text, there[0][0], tuple(box for _, box in there)))
    return questions
