"""Numbered examples of a world, drawn on access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from arr_coc.data.example import Example
from arr_coc.data.worlds.world import Size, Split, check_kind, make_example, split_seed


class WorldExamples:
    """A sequence of examples of a world. Each access draws the example, which then keeps its picture in memory.

    Args:
        name (`str`): a world, or one kind of its questions (`scenes/read`).
        count (`int`): number of examples.
        split (`str`): the split whose seeds are used.
        size (`tuple[int, int]` or `Callable`): width and height in pixels, or a function of the place that gives them.
        first (`int`, *optional*, defaults to 0): place of the first example in the split.
        weight (`float`, *optional*, defaults to 1.0): weight of each example in training.

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
        split_seed(split, first + count - 1)  # raises if the split has too few seeds
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
        """The place in the split of an example."""
        return self.first + number

    def size_at(self, place: int) -> Size:
        """Width and height of the picture at a place."""
        return self.size(place) if callable(self.size) else self.size
