"""`photos`: questions about the photographs of any folder in COCO format. No photograph comes with the package."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from arr_coc.data.worlds.wording import put
from arr_coc.data.worlds.world import Box, Question, Sample, Scene, Thing, sample_of

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
    found: dict[Any, list[tuple[str, Box]]] = defaultdict(list)
    crowds: dict[Any, set[str]] = defaultdict(set)
    for one in content["annotations"]:
        left, top, width, height = one["bbox"]
        if one.get("iscrowd"):
            crowds[one["image_id"]].add(names[one["category_id"]])
        else:
            found[one["image_id"]].append((names[one["category_id"]], (left, top, left + width, top + height)))
    if any(not {"id", "file_name", "width", "height"} <= image.keys() for image in content["images"]):
        raise ValueError(f"the images of {folder}'s annotations need id, file_name, width and height")
    photos = [
        Photo(
            folder / image["file_name"],
            (image["width"], image["height"]),
            tuple(found[image["id"]]),
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
        with Image.open(photo.path) as file:
            picture = file.convert("RGB")
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


def presence_samples(photos: list[Photo], seed: int) -> list[Sample]:
    """Balanced questions such as "is there a dog?": for each photograph one that is true, and another where it is not.

    A class is asked as often where it is absent as where it is present, so that knowing which classes are common
    does not help.
    """
    rng = random.Random(f"presence {seed}")
    samples = []
    for photo in photos:
        scene = photo_scene(photo, rng)
        yes = [question for question in scene.questions if question.kind == "presence"]
        if not yes:
            continue
        question = rng.choice(yes)
        samples.append(sample_of(scene, question, "photos", seed))
        name = next(name for name, box in photo.things if box == question.boxes[0])
        without = [one for one in photos if name not in one.crowds and all(name != other for other, _ in one.things)]
        if without:
            other = rng.choice(without)
            scene = photo_scene(other, rng, (name,))
            [no] = [one for one in scene.questions if one.answer == "no"]
            samples.append(sample_of(scene, no, "photos", seed))
    return samples


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
            doubtful = [one for one in members if 0.45 < (one[1][0] + one[1][2]) / 2 / photo.size[0] < 0.55]
            large = any(_share(box, photo.size) >= 5 * _SMALL for _, box in there)
            if large and len({name for name, _ in there}) == 1 and not doubtful:
                text = put(rng, "photo_side", group=group, side=side)
                questions.append(Question("photo_side", text, there[0][0], tuple(box for _, box in there)))
    return questions
