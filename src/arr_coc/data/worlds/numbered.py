"""Examples of a world by number, each drawn when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from arr_coc.data.example import Example
from arr_coc.data.worlds.world import Size, Split, check_kind, make_example, split_seed


class WorldExamples:
    """The first so many examples of a world. Each is drawn once when it is asked for, and holds its picture.

    Args:
        name (`str`): a world, or one kind of its questions (`scenes/read`).
        count (`int`): how many.
        split (`str`): whose seeds.
        size (`tuple[int, int]` or `Callable`): width and height in pixels, or a function from the place to them.
        first (`int`, *optional*, defaults to 0): place of the first in its split.
        weight (`float`, *optional*, defaults to 1.0): how much each counts in training.

    Example:

    ```python
    >>> from arr_coc.data.worlds.numbered import WorldExamples
    >>> WorldExamples("scenes/color", 4, "train", (384, 384))[1].question
    'what color is the star?'

    ```
    """

    def __init__(
        self,
        name: str,
        count: int,
        split: Split,
        size: Size | Callable[[int], Size],
        first: int = 0,
        weight: float = 1.0,
    ) -> None:
        self.name, self.count, self.split, self.size = name, count, split, size
        self.first, self.weight = first, weight
        self.world, _, kind = name.partition("/")
        if kind:
            check_kind(self.world, kind)
        split_seed(split, first + count - 1)  # refuses more than there are
        self.kind = kind or None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        place = self.place(range(self.count)[number])
        width, height = size = self.size_at(place)
        example = make_example(self.world, split_seed(self.split, place), self.kind, size)
        name = f"{self.name}#{place}@{width}" if width == height else f"{self.name}#{place}@{width}x{height}"
        return replace(example, id=name, weight=self.weight)

    def place(self, number: int) -> int:
        """The place in the split of a numbered example."""
        return self.first + number

    def size_at(self, place: int) -> Size:
        """Width and height of the picture at a place."""
        return self.size(place) if callable(self.size) else self.size
