"""One example: a picture or a clip, a question about it, its answers, and where one has to look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Protocol

from PIL import Image

from arr_coc.data.boxes import Box
from arr_coc.pixels.files import open_picture


class MissingPicture(ValueError):
    """A picture that is missing or broken: its example cannot be used, the others can."""


@dataclass(frozen=True, eq=False)
class Example:
    """A question about a picture or a clip. Worlds and files give it; training, evaluation and the page take it.

    Args:
        question (`str`): or the name of a class, or a referring expression.
        open (`Callable`): gives the picture, upright RGB, or the frames of a clip; called when they are needed. Raises
            [`MissingPicture`].
        id (`str`, *optional*): unique within its source, and the same in every run.
        answers (`tuple[str, ...]`, *optional*): any of them is right; none where only looking is measured.
        boxes (`tuple[Box, ...]`, *optional*): where one has to look, in shares of the sides; what only leads to the
            answer, such as the label of a value, comes first, and where the answer itself stands comes last.
        mask (`Path`, *optional*): a grayscale picture of where people looked, instead of boxes.
        kind (`str`, *optional*): of the question, for tables.
        distractors (`tuple[Box, ...]`, *optional*): what only distracts: less relevant than the background.
        lookalikes (`tuple[Box, ...]`, *optional*): what might be meant, such as other people in a photograph: less
            relevant than what was asked for, but more than distractors.
        picture_id (`str`, *optional*): names the picture; examples about one picture follow each other. Without it the
            picture is the example's own.
        weight (`float`, *optional*, defaults to 1.0): how much it counts in training.
        fps (`float`, *optional*, defaults to 2.0): frames a second, of a clip.
        clues (`int`, *optional*, defaults to 0): how many of the first boxes only lead to the answer.
        any_box (`bool`, *optional*, defaults to `False`): whether one of the answer's own boxes is enough to answer, as
            in "is there a dog?"; otherwise all of them are needed, as in "how many dogs are there?".

    Example:

    ```python
    >>> from PIL import Image
    >>> from arr_coc.data.example import Example
    >>> example = Example("what color is it?", Image.new("RGB", (64, 48), "red").copy, answers=("red",))
    >>> example.answer, example.picture.size
    ('red', (64, 48))

    ```
    """

    question: str
    open: Callable[[], Image.Image | list[Image.Image]] = field(repr=False)
    id: str = ""
    answers: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    mask: Path | None = None
    kind: str = ""
    distractors: tuple[Box, ...] = ()
    lookalikes: tuple[Box, ...] = ()
    picture_id: str = ""
    weight: float = 1.0
    fps: float = 2.0
    clues: int = 0
    any_box: bool = False

    @property
    def answer_boxes(self) -> tuple[Box, ...]:
        """The boxes where the answer itself stands: the last of all boxes, without the clues."""
        return self.boxes[self.clues :]

    @property
    def picture(self) -> Image.Image:
        """The picture, opened now; a clip is refused."""
        opened = self.open()
        if not isinstance(opened, Image.Image):
            name = self.id or self.question
            raise ValueError(f"{name!r} is a clip of {len(opened)} frames, not one picture; `open()` gives its frames")
        return opened

    @property
    def answer(self) -> str:
        """The first of the answers; empty if there is none."""
        return self.answers[0] if self.answers else ""

    def hold(self) -> Example:
        """The same example with its picture or clip opened and kept, so that using it twice does not read it twice."""
        opened = self.open()
        kept = opened.copy if isinstance(opened, Image.Image) else partial(copy_frames, opened)
        return replace(self, open=kept)


def copy_frames(frames: Iterable[Image.Image]) -> list[Image.Image]:
    """All frames of a clip, copied."""
    return [frame.copy() for frame in frames]


class Examples(Protocol):
    """Anything that gives examples by number, always in the same order."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Example: ...


def open_file(*paths: Path) -> Image.Image:
    """The picture of the first of some files that is there, upright RGB; raises [`MissingPicture`]."""
    path = next((path for path in paths if path.is_file()), paths[0])
    try:
        return open_picture(path).image
    except (OSError, ValueError) as error:
        raise MissingPicture(str(error)) from None


def group_by_picture(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Examples about one picture together, where they follow each other.

    Example:

    ```python
    >>> from PIL import Image
    >>> from arr_coc.data.example import Example, group_by_picture
    >>> picture = Image.new("RGB", (8, 8)).copy
    >>> asked = [Example(name, picture, picture_id="a.png") for name in ("dog", "cat")] + [Example("cow", picture)]
    >>> [[example.question for example in group] for group in group_by_picture(asked)]
    [['dog', 'cat'], ['cow']]

    ```
    """
    numbered = enumerate(examples)
    for _, group in groupby(numbered, key=lambda pair: pair[1].picture_id or pair[0]):
        yield [example for _, example in group]


def take_turns(groups: Iterable[Sequence[Example]]) -> list[Example]:
    """The first example of each group, then the second of each: the first n show n pictures if there are as many."""
    return [example for row in zip_longest(*groups) for example in row if example is not None]


def check_examples(examples: Sequence[Example], source: str | Path) -> list[Example]:
    """Refuse a source without any example, or with two of the same id."""
    if not examples:
        raise ValueError(f"{source} has nothing to ask; it is empty or of another kind")
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise ValueError(f"{source} has two items with the id {example.id!r}; each needs its own")
        seen.add(example.id)
    return list(examples)
