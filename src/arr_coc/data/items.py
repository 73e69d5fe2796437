"""What is measured: a task is a named source of items, each a question about a picture that is opened when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL import Image

from arr_coc.data.worlds.world import Box
from arr_coc.pixels.files import open_picture


class MissingPicture(ValueError):
    """A picture that is missing or broken: its item cannot be measured, the others can."""


@dataclass(frozen=True)
class Item:
    """A question about a picture.

    Args:
        id (`str`): unique in its task, and the same in every run.
        question (`str`): or a name, or an expression.
        answers (`tuple[str, ...]`): any of which is true; none where only looking is measured.
        boxes (`tuple[Box, ...]`): where one has to look, in shares of the picture's sides; none if that is not known.
        open (`Callable`): gives the picture, RGB, or raises [`MissingPicture`].
    """

    id: str
    question: str
    answers: tuple[str, ...]
    boxes: tuple[Box, ...]
    open: Callable[[], Image.Image] = field(repr=False, compare=False)


class Items(Protocol):
    """Anything that gives items by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Item: ...


@dataclass(frozen=True)
class Task:
    """Items under one name.

    Args:
        name (`str`): for tables.
        metric (`str`, *optional*): how answers are scored, a name of [`~arr_coc.evaluation.scoring.METRICS`]; None
            where the items have no answers.
        items (`Items`): always in the same order.
    """

    name: str
    metric: str | None
    items: Items = field(repr=False)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Item:
        return self.items[number]

    def __iter__(self) -> Iterator[Item]:
        return (self.items[number] for number in range(len(self.items)))


def open_file(*paths: Path) -> Image.Image:
    """The picture of the first of some files that is there, RGB and upright."""
    path = next((one for one in paths if one.is_file()), paths[0])
    try:
        return open_picture(path).image
    except (OSError, ValueError) as error:
        raise MissingPicture(str(error)) from None
