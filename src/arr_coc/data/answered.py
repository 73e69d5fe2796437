"""Questions with answers, by number: samples of worlds, and VQAv2's published JSON as it is."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from pathlib import Path

from PIL import Image

from arr_coc.data.sources import world_size
from arr_coc.data.training_examples import read_listed
from arr_coc.data.worlds import draw_scene, list_worlds, make_sample, split_seed
from arr_coc.data.worlds.world import check_kind
from arr_coc.training.answers import Asked

logger = logging.getLogger(__name__)

# What the third stage counts double, and how many shapes and texts make a crowd.
HARD = ("camouflage", "needles", "crowded")
CROWD = 9


class UnreadableError(ValueError):
    """A picture that is missing or broken."""


class Answered(ABC):
    """A set of questions with answers."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> Asked: ...


class WorldAnswers(Answered):
    """Samples of a world, drawn when they are needed.

    Args:
        name (`str`): a world, one kind of its questions (`scenes/read`), or `crowded`: scenes with many distractors.
        count (`int`): how many.
        seed (`int`): of the first.
        weight (`float`, *optional*, defaults to 1.0): how much each counts.

    Example:

    ```python
    >>> from arr_coc.data.answered import WorldAnswers
    >>> WorldAnswers("scenes/color", 4, 0)[1].question
    'what color is the star?'

    ```
    """

    def __init__(self, name: str, count: int, seed: int, weight: float = 1.0) -> None:
        self.crowded = name == "crowded"
        self.world, _, kind = ("scenes", "", "") if self.crowded else name.partition("/")
        if kind:
            check_kind(self.world, kind)
        self.kind = kind or None
        self.count, self.seed, self.weight = count, seed, weight
        self._crowds: dict[int, int] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Asked:
        place = self.find_crowd(number) if self.crowded else self.seed + number
        sample = make_sample(self.world, split_seed("train", place), self.kind, world_size(self.world, place))
        return Asked(sample.picture, sample.question, sample.answer, self.weight)

    def find_crowd(self, number: int) -> int:
        """The place of a numbered crowd: each has a hundred places of its own to be found in."""
        if number not in self._crowds:
            first = 100 * (self.seed + number)
            found = (place for place in range(first, first + 100) if self._things(place) >= CROWD)
            self._crowds[number] = next(found)
        return self._crowds[number]

    def _things(self, place: int) -> int:
        scene = draw_scene(self.world, split_seed("train", place), self.kind, world_size(self.world, place))
        return sum("text" in thing.words or len(thing.words) > 1 for thing in scene.things)


class VQAAnswers(Answered):
    """VQAv2: its questions, with annotations and pictures found beside them by their published names.

    Args:
        questions (`str` or `Path`): such as `v2_OpenEnded_mscoco_val2014_questions.json`; in the same folder
            `v2_mscoco_val2014_annotations.json`, and pictures in `val2014` or in the folder itself.
    """

    def __init__(self, questions: str | Path) -> None:
        path = Path(questions)
        found = re.fullmatch(r"(v2_)?OpenEnded_mscoco_(\w+?)_questions\.json", path.name)
        if found is None:
            raise ValueError(f"{path} is not named as VQAv2's questions, v2_OpenEnded_mscoco_val2014_questions.json")
        prefix, split = found[1] or "", found[2]
        answers = path.with_name(f"{prefix}mscoco_{split}_annotations.json")
        if not answers.is_file():
            raise ValueError(f"{answers} is missing; VQAv2's annotations lie beside its questions")
        by_number = {one["question_id"]: one["multiple_choice_answer"] for one in read_listed(answers, "annotations")}
        self.folder = path.parent / split if (path.parent / split).is_dir() else path.parent
        self.split = split
        asked = read_listed(path, "questions")
        self.rows = [
            (int(one["image_id"]), str(one["question"]), str(by_number[one["question_id"]]))
            for one in asked
            if one["question_id"] in by_number
        ]
        if not self.rows:
            raise ValueError(f"no question of {path} has an answer in {answers}")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Asked:
        image, question, answer = self.rows[number]
        path = self.folder / f"COCO_{self.split}_{image:012}.jpg"
        try:
            with Image.open(path) as file:
                return Asked(file.convert("RGB"), question, answer)
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {error}") from None


def open_answered(name: str, count: int, seed: int, hard: bool = False) -> Answered:
    """A set of questions by its name: a world, a kind of its questions, `crowded`, or a file of VQAv2's questions."""
    world = name.partition("/")[0]
    if name == "crowded" or world in list_worlds():
        return WorldAnswers(name, count, seed, 2.0 if hard and world in HARD else 1.0)
    if Path(name).is_file():
        return VQAAnswers(name)
    raise ValueError(
        f"{name!r} is neither a world ({', '.join(list_worlds())}, crowded) nor a file of VQAv2's questions"
    )


def take_readable(source: Answered, number: int, most: int = 20) -> Asked:
    """A question, or the next one whose picture can be read; what is skipped is named."""
    for step in range(most):
        try:
            return source[(number + step) % len(source)]
        except UnreadableError as error:
            logger.warning("%s; another question is taken", error)
    raise ValueError(f"{most} pictures in a row cannot be read; is the folder right?")
