"""Which questions a step sees: a function of the seed and the step alone, so that a run can be resumed exactly."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

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
