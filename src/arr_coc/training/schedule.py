"""What a step sees, its questions and its budget: a function of seed and step alone, so that runs resume exactly."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from arr_coc.config import Budget, check_budget
from arr_coc.training.feature_cache import Features


class Source:
    """Batches of one set of features, pictures of one grid together, in an order that changes every epoch.

    Args:
        features (`Features`): what is learned from.
        size (`int`): questions of a batch, over all processes.
        seed (`int`): decides the order.
    """

    def __init__(self, features: Features, size: int, seed: int) -> None:
        self.features, self.size, self.seed = features, size, seed
        self.groups: dict[object, list[int]] = defaultdict(list)
        for number, grids in enumerate(zip(features.grids, features.cells, strict=True)):
            self.groups[grids].append(number)
        self.length = sum(max(1, len(group) // size) for group in self.groups.values())
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def numbers(self, place: int) -> list[int]:
        """The questions of the batch at a place in the endless order."""
        epoch, within = divmod(place, self.length)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        return self._epoch[1][within]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        rng = random.Random(f"{self.seed} {epoch}")
        batches = []
        for group in self.groups.values():
            order = group * -(-self.size // len(group)) if len(group) < self.size else list(group)
            rng.shuffle(order)
            batches += [order[first : first + self.size] for first in range(0, len(order) - self.size + 1, self.size)]
        rng.shuffle(batches)
        return batches[: self.length]


class Schedule:
    """Several sources, each with its share of the steps."""

    def __init__(self, sources: Sequence[Source], shares: Sequence[float], steps: int, seed: int) -> None:
        rng = random.Random(f"schedule {seed}")
        self.sources = sources
        self.turns = rng.choices(range(len(sources)), shares, k=steps)
        self.places = []
        seen = [0] * len(sources)
        for turn in self.turns:
            self.places.append(seen[turn])
            seen[turn] += 1

    def at(self, step: int) -> tuple[Features, list[int]]:
        """The features and the questions of a step."""
        source = self.sources[self.turns[step]]
        return source.features, source.numbers(self.places[step])


@dataclass(frozen=True)
class BudgetPlan:
    """How many tokens are read as training goes on.

    Args:
        first, last (`float`): shares of the tokens at the beginning and at the end; the same is constant.
        sampled (`bool`, *optional*, defaults to `False`): draw a share between them for each step instead, so that
            one selector serves all budgets.

    Example:

    ```python
    >>> from arr_coc.training.schedule import BudgetPlan
    >>> plan = BudgetPlan.parse("1.0>0.25")
    >>> plan.at(0, 100), plan.at(99, 100)
    (1.0, 0.25)

    ```
    """

    first: Budget
    last: Budget
    sampled: bool = False

    @classmethod
    def parse(cls, text: str) -> BudgetPlan:
        """`0.25` is constant, `1.0>0.25` falls, `0.06-0.5` is drawn for each step, `auto` is decided by relevance."""
        if text == "auto":
            return cls("auto", "auto")
        for mark in (">", "-"):
            parts = text.split(mark)
            if len(parts) == 2:
                first, last = (cls._share(part, text) for part in parts)
                return cls(first, last, mark == "-")
        share = cls._share(text, text)
        return cls(share, share)

    @staticmethod
    def _share(part: str, text: str) -> float:
        try:
            return float(check_budget(float(part)))
        except ValueError:
            raise ValueError(f"`budget` must be as 0.25, 1.0>0.25, 0.06-0.5 or auto, got {text!r}") from None

    def at(self, step: int, steps: int, seed: int = 0) -> Budget:
        """The budget of a step."""
        if isinstance(self.first, str) or isinstance(self.last, str):
            return "auto"
        share = random.Random(f"budget {seed} {step}").random() if self.sampled else step / max(1, steps - 1)
        return float(self.first * (self.last / self.first) ** share)  # by ratio: half of half is a quarter
