"""What `--data` names: for stage `proxy` examples that say where to look, for `answers` examples with answers.

| name                            | `proxy`                                           | `answers`, `hard`             |
|---------------------------------|---------------------------------------------------|-------------------------------|
| `scenes`, `scenes/read`         | a world, or one kind of its questions             | the same                      |
| `crowded`                       | -                                                 | scenes with many distractors  |
| a folder                        | photographs in COCO format                        | -                             |
| a file                          | JSON lines of expressions, or of gaze maps        | VQAv2's questions             |
| `gaze:` before any of these     | as mode `saccade` shows it; worlds are larger     | -                             |

Stage `distill` takes what `proxy` takes, but for `gaze:`, and any file of JSON lines with `image` and `question`.

What cannot be used is treated by rule:

| what                                | rule                                                                       |
|-------------------------------------|----------------------------------------------------------------------------|
| a picture that is missing or broken | skipped and named; refused are one in ten (`proxy`), or twenty in a row    |
| a box that leaves the picture       | cut to it; skipped when nothing of it is left                              |
| a class without a box               | never asked for as if it were there                                        |
| a line that cannot be read          | refused, with its number                                                   |
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from arr_coc.data import expressions, gaze_maps
from arr_coc.data.coco import read_class_questions
from arr_coc.data.example import Example, Examples, MissingPicture
from arr_coc.data.expressions import read_expressions
from arr_coc.data.gaze_maps import read_gaze_maps
from arr_coc.data.json_lines import first_fields, read_asked
from arr_coc.data.vqa import read_published_vqa
from arr_coc.data.worlds import draw_scene, list_worlds, make_example, split_seed
from arr_coc.data.worlds.numbered import WorldExamples
from arr_coc.data.worlds.world import Size, Split, check_kind

logger = logging.getLogger(__name__)

GAZE = "gaze:"
# What stage `hard` counts double, and how many shapes and texts make a crowd.
HARD = ("camouflage", "needles", "crowded")
CROWD = 9

# Few sizes make full batches; in pixels, whole tokens of 32.
_SCENE_SIZES = ((384, 384), (512, 512), (512, 384), (384, 512), (448, 320), (320, 448), (512, 256), (256, 256))
_PAGE_SIZES = ((768, 768), (768, 576), (576, 768), (512, 640))
_FORM_SIZES = ((768, 1024), (640, 896), (576, 768), (768, 768))
_NEEDLE_SIZES = ((1024, 1024), (1024, 768), (512, 512), (768, 512))
_WORLD_SIZES = {"pages": _PAGE_SIZES, "forms": _FORM_SIZES, "needles": _NEEDLE_SIZES}
# More tokens than are read in mode "saccade".
_GAZE_SIZES = ((1024, 1024), (1024, 768), (768, 1024), (1280, 960))
_GAZE_NEEDLE_SIZES = ((2048, 2048), (2048, 1536), (1024, 1024))


def world_size(world: str, place: int) -> Size:
    """The size of the picture at a place, one of a few."""
    sizes = sizes_of(world)
    return sizes[place % len(sizes)]


def sizes_of(name: str) -> Sequence[Size]:
    """The sizes in which a world is drawn for a source of this name; those of files are their own."""
    world = name.removeprefix(GAZE).partition("/")[0]
    if world not in list_worlds():
        return ()
    if name.startswith(GAZE):
        return _GAZE_NEEDLE_SIZES if world == "needles" else _GAZE_SIZES
    return _WORLD_SIZES.get(world, _SCENE_SIZES)


def open_places(name: str, count: int, seed: int = 0, split: Split = "train") -> Iterator[Example]:
    """Examples that say where to look: what stage `proxy` learns from.

    Args:
        name (`str`): see the table above.
        count (`int`): how many examples of a world; files and folders are read to their end.
        seed (`int`, *optional*, defaults to 0): of a world's first example, and of what is asked about photographs.
        split (`str`, *optional*, defaults to `"train"`): of worlds.

    Returns:
        `Iterator[Example]`: those about one picture follow each other.

    Example:

    ```python
    >>> from arr_coc.data.sources import open_places
    >>> [example] = open_places("scenes/color", 1)
    >>> example.kind, len(example.boxes)
    ('color', 1)

    ```
    """
    sizes, name = sizes_of(name), name.removeprefix(GAZE)
    world, _, kind = name.partition("/")
    path = Path(name)
    if world in list_worlds() and not path.exists():
        if kind:
            check_kind(world, kind)
        return mix_worlds([name], count, split, seed, sizes)
    if path.is_dir():
        return read_class_questions(path, seed)
    if path.is_file():
        fields = first_fields(path)
        if set(expressions.FIELDS) <= fields:
            return read_expressions(path)
        if set(gaze_maps.FIELDS) <= fields:
            return read_gaze_maps(path)
        wanted = f"{', '.join(expressions.FIELDS)}, or {', '.join(gaze_maps.FIELDS)}"
        raise ValueError(f"{path} has lines of {', '.join(sorted(fields)) or 'nothing'}; needed are {wanted}")
    _refuse_clips(world)
    raise ValueError(f"{name!r} is neither a world ({', '.join(list_worlds())}) nor a folder nor a file")


def open_pictures(name: str, count: int, seed: int = 0, split: Split = "train") -> Iterator[Example]:
    """Examples with pictures and questions, whatever else they have: what stage `distill` asks the model.

    Args:
        name (`str`): see the table above.
        count, seed, split: as of [`open_places`].

    Example:

    ```python
    >>> from arr_coc.data.sources import open_pictures
    >>> next(open_pictures("scenes/color", 1)).question
    'what color is the square?'

    ```
    """
    path = Path(name)
    fields = first_fields(path) if path.is_file() else set[str]()
    if {"image", "question"} <= fields:
        return read_asked(path)
    return open_places(name, count, seed, split)


def mix_worlds(
    names: Sequence[str], count: int, split: Split = "train", seed: int = 0, sizes: Sequence[Size] = ()
) -> Iterator[Example]:
    """Examples of several worlds in turn.

    Args:
        names (`Sequence[str]`): worlds, or kinds of questions of one, as `scenes` or `scenes/read`.
        count (`int`): how many in all.
        split (`str`, *optional*, defaults to `"train"`): whose seeds.
        seed (`int`, *optional*, defaults to 0): of the first example.
        sizes (`Sequence[tuple[int, int]]`, *optional*): widths and heights to choose from; few sizes make full
            batches. By default the examples decide.

    Returns:
        `Iterator[Example]`: drawn one by one.
    """
    rng = random.Random(f"sizes {seed}")
    for index in range(count):
        world, _, kind = names[index % len(names)].partition("/")
        size = rng.choice(sizes) if sizes else None
        yield make_example(world, split_seed(split, seed + index), kind or None, size)


def open_answers(name: str, count: int, seed: int, hard: bool = False) -> Examples:
    """Examples with answers by number: what stages `answers` and `hard` learn from.

    Args:
        name (`str`): see the table above.
        count (`int`): how many examples of a world; files are read to their end.
        seed (`int`): of a world's first example.
        hard (`bool`, *optional*, defaults to `False`): count camouflage, needles and crowded scenes double.

    Returns:
        `Examples`: worlds are drawn, and pictures opened, when an example is used.

    Example:

    ```python
    >>> from arr_coc.data.sources import open_answers
    >>> open_answers("scenes/color", 4, 0)[1].answer
    'purple'

    ```
    """
    world = name.partition("/")[0]
    weight = 2.0 if hard and world in HARD else 1.0
    if name == "crowded":
        return CrowdedScenes(count, seed, weight)
    if world in list_worlds():
        return WorldExamples(name, count, "train", lambda place: world_size(world, place), seed, weight)
    if Path(name).is_file():
        return read_published_vqa(Path(name))
    _refuse_clips(world)
    raise ValueError(
        f"{name!r} is neither a world ({', '.join(list_worlds())}, crowded) nor a file of VQAv2's questions"
    )


def _refuse_clips(world: str) -> None:
    """Raise `ValueError` for a world of clips."""
    if world in list_worlds(moving=True):
        raise ValueError(f"{world!r} draws clips, and stages learn from pictures; use {', '.join(list_worlds())}")


class CrowdedScenes(WorldExamples):
    """Scenes with many distractors; arguments as of [`WorldExamples`]."""

    def __init__(self, count: int, first: int, weight: float = 1.0) -> None:
        super().__init__("scenes", count, "train", lambda place: world_size("scenes", place), first, weight)
        self._places: dict[int, int] = {}

    def place(self, number: int) -> int:
        """The place of a numbered crowd: each has a hundred places of its own to be found in."""
        if number not in self._places:
            first = 100 * (self.first + number)
            crowds = (place for place in range(first, first + 100) if self.count_things(place) >= CROWD)
            self._places[number] = next(crowds)
        return self._places[number]

    def count_things(self, place: int) -> int:
        """How many shapes and texts the scene at a place has."""
        scene = draw_scene("scenes", split_seed("train", place), None, self.size_at(place))
        return sum("text" in thing.words or len(thing.words) > 1 for thing in scene.things)


def take_readable(source: Examples, number: int, most: int = 20) -> Example:
    """An example with its picture or clip opened, or the next one whose picture can be read; what is skipped is named.

    Args:
        source (`Examples`): see [`open_answers`].
        number (`int`): which one.
        most (`int`, *optional*, defaults to 20): how many may fail in a row.

    Returns:
        [`~arr_coc.data.example.Example`]: holds its picture.
    """
    for step in range(most):
        try:
            return source[(number + step) % len(source)].hold()
        except MissingPicture as error:
            logger.warning("%s; another question is taken", error)
    raise ValueError(f"{most} pictures in a row cannot be read; is the folder right?")
