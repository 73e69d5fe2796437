"""A photograph with boxes, and the questions that they answer, in several wordings.

| kind             | such as                       | asked where                                             |
|------------------|-------------------------------|---------------------------------------------------------|
| `presence`       | "is there a dog?"             | it is large enough to be seen, or not there             |
| `photo_count`    | "how many dogs are there?"    | there are few, and none that was not annotated          |
| `photo_side`     | "what animal is on the left?" | one kind of animal is there, clearly                    |
| `photo_relation` | "what is left of the dog?"    | there is one dog, and one class is there, clearly       |
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from PIL import Image

from arr_coc.data.boxes import Box
from arr_coc.data.example import open_file
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Thing

# Our own wordings; POPE's as published; everything that people write, to learn from.
Wording = Literal["own", "pope", "all"]

# COCO's classes that have a common name.
GROUPS = {
    "animal": ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"),
    "vehicle": ("bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat"),
    "food": ("banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake"),
}
_PLURALS = {
    "person": "people", "sheep": "sheep", "knife": "knives", "skis": "skis", "scissors": "scissors",
    "mouse": "mice", "broccoli": "broccoli",
}  # fmt: skip
_ONLY_MANY = ("skis", "scissors")
_YES_OR_NO = (
    "answer yes or no.",
    "please answer yes or no.",
    "answer with yes or no.",
    "answer the question using a single word or phrase.",
)
_SHORTLY = ("answer the question using a single word or phrase.",)
_MOST = {"own": 6, "pope": 6, "all": 4}  # beyond that people do not count at a glance
_SELDOM = {0: 0.4, 1: 0.3}  # how often the commonest numbers are asked for, to learn from the others too
_SMALL = 0.002  # share of the picture below which a thing may be overlooked
_LARGE = 5 * _SMALL  # from here on it may be the answer
# A side, how it is said, the axis (0 is across) and whether coordinates grow towards it.
_SIDES = (
    (("left of", "to the left of"), 0, False),
    (("right of", "to the right of"), 0, True),
    (("above",), 1, False),
    (("below",), 1, True),
)


@dataclass(frozen=True)
class Photo:
    """A photograph and what is in it.

    Args:
        path (`Path`): of the picture.
        size (`tuple[int, int]`): width and height in pixels.
        things (`tuple[tuple[str, Box], ...]`): names, and boxes in pixels.
        crowds (`frozenset[str]`, *optional*): names of what was not annotated one by one, or is cut by the border.
        unclear (`tuple[tuple[str, Box], ...]`, *optional*): where these are.
    """

    path: Path
    size: tuple[int, int]
    things: tuple[tuple[str, Box], ...]
    crowds: frozenset[str] = frozenset()
    unclear: tuple[tuple[str, Box], ...] = ()


def photo_scene(
    photo: Photo,
    rng: random.Random,
    absent: tuple[str, ...] = (),
    picture: Image.Image | None = None,
    wording: Wording = "own",
) -> Scene:
    """A photograph with all questions that its boxes answer.

    Args:
        photo (`Photo`): from [`~arr_coc.data.coco.read_photos`].
        rng (`random.Random`): decides the wording.
        absent (`tuple[str, ...]`, *optional*): names to ask for that are not in it.
        picture (`PIL.Image.Image`, *optional*): by default the file is opened.
        wording (`str`, *optional*, defaults to `"own"`): see [`ask_presence`]. With `"all"`, to learn from, things are
            counted up to four instead of six, none and one less often, and what is beside a thing is asked too.

    Example:

    ```python
    >>> import random
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from arr_coc.data.photo_questions import Photo, photo_scene
    >>> things = (("dog", (60.0, 40.0, 90.0, 80.0)), ("cat", (5.0, 40.0, 35.0, 80.0)))
    >>> photo = Photo(Path("a.png"), (100, 100), things)
    >>> scene = photo_scene(photo, random.Random(1), ("cow",), Image.new("RGB", (100, 100)), wording="all")
    >>> for question in scene.questions[1:3]:
    ...     print(question.text, question.answer)
    is there any cat in the photo? yes
    is there a cow? no
    >>> [question.answer for question in scene.questions if question.kind == "photo_relation"]
    ['cat', 'dog']

    ```
    """
    _check_wording(wording)
    if picture is None:
        picture = open_file(photo.path)
    boxes: dict[str, list[Box]] = defaultdict(list)
    for name, box in photo.things:
        boxes[name].append(box)
    questions = [
        Question("presence", ask_presence(rng, name, wording), "yes", tuple(places), any_box=True)
        for name, places in boxes.items()
        if max(_share(box, photo.size) for box in places) >= _SMALL
    ]
    missing = [name for name in absent if name not in boxes and name not in photo.crowds]
    questions += [Question("presence", ask_presence(rng, name, wording), "no") for name in missing]
    counted: list[tuple[str, list[Box]]] = [(name, []) for name in missing[:1]]
    for name, places in boxes.items():
        clear = all(_share(box, photo.size) >= _SMALL for box in places)
        if name not in photo.crowds and len(places) <= _MOST[wording] and clear:
            counted.append((name, places))
    questions += [
        Question("photo_count", _ask_count(rng, name, wording), str(len(places)), tuple(places))
        for name, places in counted
        if wording != "all" or rng.random() < _SELDOM.get(len(places), 1.0)
    ]
    questions += _ask_sides(rng, photo)
    if wording == "all":
        questions += _ask_relations(rng, photo)
    things = tuple(Thing(box, (name,)) for name, box in photo.things)
    return Scene(picture, tuple(questions), things)


def ask_presence(rng: random.Random, name: str, wording: Wording = "own") -> str:
    """A question such as "is there a dog?".

    Args:
        rng (`random.Random`): decides between wordings.
        name (`str`): of a class.
        wording (`str`, *optional*, defaults to `"own"`): `"own"`, one of our wordings; `"pope"`, as POPE publishes it;
            `"all"`, both of these and others that people use, with and without a capital, sometimes with how to answer.

    Example:

    ```python
    >>> import random
    >>> from arr_coc.data.photo_questions import ask_presence
    >>> ask_presence(random.Random(0), "apple"), ask_presence(random.Random(0), "apple", "pope")
    ('can you see an apple?', 'Is there an apple in the image?')

    ```
    """
    _check_wording(wording)
    one = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    if wording == "pope":
        return f"Is there {one} in the image?"
    if wording == "own":
        return f"are there {name}?" if name in _ONLY_MANY else put(rng, "presence", name=one)
    chance = rng.random()
    if chance < 0.6:
        text = ask_presence(rng, name, "own" if chance < 0.3 else "pope")
    else:
        kind = "presence_of_many" if name in _ONLY_MANY else "presence_asked"
        text = put(rng, kind, name=one, single=name, many=_plural(name))
    return _as_people_write(rng, text, _YES_OR_NO)


def _check_wording(wording: str) -> None:
    if wording not in get_args(Wording):
        raise ValueError(f"no wording is named {wording!r}; there are {', '.join(get_args(Wording))}")


def _as_people_write(rng: random.Random, text: str, endings: tuple[str, ...]) -> str:
    """With a capital or without, and now and then with how to answer, in the same line or in the next."""
    parts = [text, rng.choice(endings)] if rng.random() < 0.25 else [text]
    capital = rng.random() < 0.5
    parts = [(part[0].upper() if capital else part[0].lower()) + part[1:] for part in parts]
    return ("\n" if rng.random() < 0.3 else " ").join(parts)


def _ask_count(rng: random.Random, name: str, wording: Wording) -> str:
    if wording != "all":
        return put(rng, "photo_count", name=_plural(name))
    return _as_people_write(rng, put(rng, "photo_number", name=_plural(name)), _SHORTLY)


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
            large = any(_share(box, photo.size) >= _LARGE for _, box in there)
            if large and len({name for name, _ in there}) == 1 and not doubtful:
                text = put(rng, "photo_side", group=group, side=side)
                boxes = tuple(box for _, box in there)
                questions.append(Question("photo_side", text, there[0][0], boxes, any_box=True))
    return questions


def _ask_relations(rng: random.Random, photo: Photo) -> list[Question]:
    """What is left of the dog, if there is one dog, and things of one class and no other are there, clearly."""
    if photo.crowds - {name for name, _ in photo.unclear}:  # these may be anywhere
        return []
    counted = Counter(name for name, _ in (*photo.things, *photo.unclear))
    questions = []
    for anchor in photo.things:
        name, place = anchor
        if counted[name] > 1 or _share(place, photo.size) < _LARGE:
            continue
        for sides, axis, grows in _SIDES:
            found = _find_beside(photo, anchor, axis, grows)
            if found:
                text = put(rng, "photo_relation", side=rng.choice(sides), name=name)
                text = _as_people_write(rng, text, _SHORTLY)
                boxes = (place, *(box for _, box in found))
                questions.append(Question("photo_relation", text, found[0][0], boxes, clues=1, any_box=True))
    return questions


def _find_beside(photo: Photo, anchor: tuple[str, Box], axis: int, grows: bool) -> list[tuple[str, Box]]:
    """All that is left of a thing, if it is of one class, and clearly there; else nothing."""
    near, far, low, high = _turn(anchor[1], photo.size, axis, grows)
    middle = (near + far) / 2
    found: list[tuple[str, Box]] = []
    clear = False
    for thing in (*photo.things, *photo.unclear):
        name, box = thing
        if name == anchor[0]:
            continue
        begin, end, under, over = _turn(box, photo.size, axis, grows)
        centre = (begin + end) / 2
        overlap = min(high, over) - max(low, under)
        if overlap < -0.1 or (middle - centre < 0.05 and near - begin < 0.2):
            continue  # not even almost there
        if end > middle or name in photo.crowds or (found and name != found[0][0]):
            return []
        found.append(thing)
        apart = middle - centre >= 0.2 and centre <= near
        beside = overlap >= 0.5 * min(high - low, over - under)
        clear = clear or (apart and beside and _share(box, photo.size) >= _LARGE)
    return found if clear else []


def _turn(box: Box, size: tuple[int, int], axis: int, grows: bool) -> Box:
    """A box in shares of the sides as (begin, end, low, high), turned so that what was asked for comes before."""
    begin, end = box[axis] / size[axis], box[axis + 2] / size[axis]
    low, high = box[1 - axis] / size[1 - axis], box[3 - axis] / size[1 - axis]
    return (1 - end, 1 - begin, low, high) if grows else (begin, end, low, high)


def _share(box: Box, size: tuple[int, int]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) / (size[0] * size[1])


def _plural(name: str) -> str:
    return _PLURALS.get(name, name + ("es" if name.endswith(("s", "sh", "ch")) else "s"))
