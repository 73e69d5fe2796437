"""What is learned from: pictures, each with questions and the places that answer them.

Anything that says where to look can be a source: folders in COCO format, referring expressions, human gaze, worlds
with their boxes, or any function that finds boxes in a picture. What cannot be used is skipped and named, by rule:

| what                                | rule                                                       |
|-------------------------------------|------------------------------------------------------------|
| a picture that is missing or broken | skipped; refused when more than one in ten is              |
| a box that leaves the picture       | cut to it; skipped when nothing of it is left              |
| a class without a box               | never asked for as if it were there                        |
| a line that cannot be read          | refused, with its number                                   |
"""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from PIL import Image

from arr_coc.data.coco import ask_presence, class_frequencies, read_photos
from arr_coc.data.worlds import draw_scene, make_sample, split_seed
from arr_coc.data.worlds.world import Box, Split

logger = logging.getLogger(__name__)

MOST_SKIPPED = 0.1


@dataclass(frozen=True)
class Ask:
    """A question about a picture, and where its answer lies.

    Args:
        question (`str`): or a name, or an expression.
        boxes (`tuple[Box, ...]`): in shares of the picture's sides; none if what is asked for is not there.
        kind (`str`): of the question, for tables.
        others (`tuple[Box, ...]`): what only distracts, and matters less than nothing in particular.
        alike (`tuple[Box, ...]`): what may be meant as long as the question is not understood, as other people in a
            photograph: less than what was asked for, but not less than nothing.
        gaze (`Path`, *optional*): a grayscale picture of where people looked, instead of boxes.
    """

    question: str
    boxes: tuple[Box, ...] = ()
    kind: str = ""
    others: tuple[Box, ...] = ()
    alike: tuple[Box, ...] = ()
    gaze: Path | None = None


@dataclass(frozen=True)
class Shown:
    """A picture, opened when it is needed, and what is asked about it."""

    name: str
    open: Callable[[], Image.Image] = field(repr=False)
    asks: tuple[Ask, ...] = ()


def clip_box(box: Sequence[float]) -> Box | None:
    """A box in shares of the sides, cut to the picture; None if nothing of it is left.

    Example:

    ```python
    >>> from arr_coc.data.training_examples import clip_box
    >>> clip_box((0.5, -0.1, 1.2, 0.5)), clip_box((1.1, 0, 1.2, 1))
    ((0.5, 0.0, 1.0, 0.5), None)

    ```
    """
    left, top, right, bottom = (min(1.0, max(0.0, float(side))) for side in box)
    return (left, top, right, bottom) if right > left and bottom > top else None


def world_examples(
    names: Sequence[str], count: int, split: Split = "train", seed: int = 0, sizes: Sequence[tuple[int, int]] = ()
) -> Iterator[Shown]:
    """Samples of worlds in turn.

    Args:
        names (`Sequence[str]`): worlds, or kinds of questions of one, as `scenes` or `scenes/read`.
        count (`int`): how many.
        split (`str`, *optional*, defaults to `"train"`): whose seeds.
        seed (`int`, *optional*, defaults to 0): of the first sample.
        sizes (`Sequence[tuple[int, int]]`, *optional*): widths and heights to choose from; few sizes make full
            batches. By default the samples decide.
    """
    rng = random.Random(f"sizes {seed}")
    for index in range(count):
        world, _, kind = names[index % len(names)].partition("/")
        size = rng.choice(sizes) if sizes else None
        place = split_seed(split, seed + index)
        sample = make_sample(world, place, kind or None, size)
        width, height = sample.picture.size
        # on a page that is not understood, other lines are where the answer may be
        things = () if world == "pages" else draw_scene(world, place, kind or None, size).things
        scale = np.array([width, height, width, height])
        boxes = (clip_box((np.array(thing.box) / scale).tolist()) for thing in things)
        ask = Ask(sample.question, sample.boxes, sample.kind, tuple(box for box in boxes if box is not None))
        yield Shown(f"{world} {sample.seed}", lambda sample=sample: sample.picture, (ask,))  # type: ignore[misc]


def coco_examples(folder: str | Path, seed: int = 0, most: int = 4, absent: int = 1) -> Iterator[Shown]:
    """Classes of a folder in COCO format as questions, and some that are not there.

    Args:
        folder (`str` or `Path`): pictures and one `instances*.json`, perhaps gzipped.
        seed (`int`, *optional*, defaults to 0): decides what is asked and how.
        most (`int`, *optional*, defaults to 4): questions about classes that are in a picture, at most.
        absent (`int`, *optional*, defaults to 1): questions about one that is not.
    """
    rng = random.Random(f"coco {seed}")
    photos = read_photos(folder, missing="keep")
    frequencies = class_frequencies(photos)
    if not frequencies:
        raise ValueError(f"no picture of {folder} has a box; there is nothing to learn from")
    for photo in photos:
        boxes: dict[str, list[Box]] = defaultdict(list)
        for name, (left, top, right, bottom) in photo.things:
            width, height = photo.size
            box = clip_box((left / width, top / height, right / width, bottom / height))
            if box is not None:
                boxes[name].append(box)
        present = rng.sample(sorted(boxes), min(most, len(boxes)))
        drawn = rng.choices(list(frequencies), list(frequencies.values()), k=4 * absent)
        others = [name for name in drawn if name not in boxes and name not in photo.crowds]
        known = tuple(box for own in boxes.values() for box in own)
        asks = [Ask(_say(rng, name), tuple(boxes[name]), "class", alike=known) for name in present]
        asks += [Ask(_say(rng, name), (), "absent") for name in others[:absent]]
        yield Shown(str(photo.path), _opener(photo.path), tuple(asks))


def _say(rng: random.Random, name: str) -> str:
    return name if rng.random() < 0.5 else ask_presence(rng, name)


def expression_examples(path: str | Path, pictures: str | Path | None = None) -> Iterator[Shown]:
    """Referring expressions, JSON lines of `image`, `expression`, `box` in shares of the sides, perhaps `category`."""
    for name, rows in read_rows(path, ("image", "expression", "box")).items():
        clipped = [(str(row["expression"]), clip_box(row["box"])) for row in rows]
        known = tuple(dict.fromkeys(box for _, box in clipped if box is not None))
        asks = [Ask(text, (box,), "expression", alike=known) for text, box in clipped if box is not None]
        place = Path(pictures or Path(path).parent) / name
        yield Shown(str(place), _opener(place), tuple(asks))


def gaze_examples(path: str | Path, pictures: str | Path | None = None) -> Iterator[Shown]:
    """Where people looked, JSON lines of `image`, `question` and `map`, a grayscale picture."""
    folder = Path(pictures or Path(path).parent)
    for name, rows in read_rows(path, ("image", "question", "map")).items():
        asks = tuple(Ask(str(row["question"]), kind="gaze", gaze=folder / str(row["map"])) for row in rows)
        yield Shown(str(folder / name), _opener(folder / name), asks)


def detected_examples(
    pictures: Iterable[str | Path], find: Callable[[Image.Image], dict[str, Sequence[Sequence[float]]]]
) -> Iterator[Shown]:
    """Pictures without boxes, and any function that finds some: a detector's guesses as labels.

    Args:
        pictures (`Iterable[str | Path]`): files.
        find (`Callable`): from a picture to boxes by name, in shares of the sides.
    """
    for path in map(Path, pictures):
        with Image.open(path) as file:
            found = find(file.convert("RGB"))
        asks = []
        for name, boxes in found.items():
            clipped = tuple(box for one in boxes if (box := clip_box(one)) is not None)
            if clipped:
                asks.append(Ask(name, clipped, "detected"))
        yield Shown(str(path), _opener(path), tuple(asks))


def _opener(path: Path) -> Callable[[], Image.Image]:
    def read() -> Image.Image:
        with Image.open(path) as file:
            return file.convert("RGB")

    return read


def open_lines(path: Path) -> TextIO:
    """Open a file of lines, perhaps gzipped."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def numbered_rows(path: str | Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of JSON lines that have all that is needed, with the numbers of their lines."""
    path = Path(path)
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
            missing = [name for name in needed if not isinstance(row, dict) or name not in row]
            if missing:
                raise ValueError(f"{path}, line {number} has no {missing[0]!r}; each needs {', '.join(needed)}")
            yield number, row


def read_rows(path: str | Path, needed: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Rows of JSON lines, by picture, in the order in which these come first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, row in numbered_rows(path, needed):
        if "box" in needed and not is_box(row["box"]):
            raise ValueError(f"{path}, line {number}: a box is four shares of the picture's sides, got {row['box']}")
        found.setdefault(str(row["image"]), []).append(row)
    return found


def read_listed(path: Path, name: str) -> list[dict[str, Any]]:
    """The rows under a name of VQAv2's published JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = content[name]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not VQAv2's JSON with {name!r}: {error}") from None
    return rows


def is_box(box: Any) -> bool:
    """Four numbers, as shares: pixels would be far above 1."""
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(side, int | float) for side in box)
    return numbers and all(-1 <= side <= 2 for side in box)


def open_all(shown: Iterable[Shown]) -> tuple[list[tuple[Shown, Image.Image]], list[str]]:
    """Pictures that can be read and are asked about, and the names of those that cannot be read, with the reason."""
    found: list[tuple[Shown, Image.Image]] = []
    skipped: list[str] = []
    for one in shown:
        if one.asks:
            try:
                lost = [ask.gaze for ask in one.asks if ask.gaze is not None and not ask.gaze.is_file()]
                if lost:
                    raise FileNotFoundError(f"its map {lost[0]} is missing")
                found.append((one, one.open()))
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                skipped.append(f"{one.name} ({error})")
    return found, skipped


def check_skipped(skipped: Sequence[str], seen: int) -> None:
    """Name pictures that cannot be read; refuse when they are more than one in ten."""
    if not skipped:
        return
    message = f"{len(skipped)} of {seen} pictures cannot be read, the first is {skipped[0]}"
    if len(skipped) > MOST_SKIPPED * seen:
        raise ValueError(message)
    logger.warning(message)


def read_gaze(path: Path, rows: int, columns: int) -> np.ndarray:
    """Where people looked, on a grid `[rows, columns]` in [0, 1], the most looked at is 1."""
    with Image.open(path) as file:
        small = file.convert("L").resize((columns, rows), Image.Resampling.BOX)
    values = np.asarray(small, dtype=np.float32)
    return values / max(1.0, float(values.max()))
