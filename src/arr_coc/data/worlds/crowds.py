"""The world `crowds`: many coloured shapes; is there any of a shape, of a colour, or of both?"""

from __future__ import annotations

import random
from collections.abc import Sequence

from arr_coc.data.worlds.lines import start_canvas
from arr_coc.data.worlds.scenes import visible_colours
from arr_coc.data.worlds.tools.drawing import SHAPES
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, Thing, World, register_world

Look = tuple[str, str]  # shape and colour

_COUNTS = (4, 25)
_LEAST_RADIUS = 9.0


@register_world("crowds")
class Crowds(World):
    """Few shapes or many, all of them to be looked at before the answer is no."""

    kinds = ("any",)
    sides = (256, 640)

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Choose the shapes, draw all of them, then ask."""
        most = max(_COUNTS[0], min(_COUNTS[1], size[0] * size[1] // 1600))
        while True:
            canvas = start_canvas(rng, size, varied)
            colours = visible_colours(canvas.ground_colour)
            looks, asked = _gather(rng, colours, rng.randint(_COUNTS[0], most))
            largest = max(_LEAST_RADIUS + 3, min(38.0, 0.24 * (size[0] * size[1] / len(looks)) ** 0.5))
            if all(canvas.add_shape(*look, rng.uniform(_LEAST_RADIUS, largest)) for look in looks):
                questions = _ask(rng, canvas.things, colours, asked)
                return Scene(canvas.finish(), questions, tuple(canvas.things))


def _gather(rng: random.Random, colours: list[str], count: int) -> tuple[list[Look], list[Look]]:
    """Shapes with their colours, and the looks to ask for, half of which are among them.

    A look that is missing was there first: then it exchanged its colour with something else. So there are as many
    stars and as many red things whether there is a red star or not.
    """
    while True:
        shapes = rng.sample(SHAPES, rng.randint(3, len(SHAPES) - 1))
        palette = rng.sample(colours, rng.randint(3, max(3, min(6, len(colours) - 1))))
        asked = list(zip(rng.sample(shapes, 3), rng.sample(palette, 3), strict=True))[: max(1, count // 4)]
        others = count - len(asked)
        looks = asked + [(rng.choice(shapes), rng.choice(palette)) for _ in range(others)]
        exchanges = _find_exchanges(looks, asked)
        if exchanges is None:
            continue
        for pairs in exchanges:
            if rng.random() < 0.5:
                for one, other in pairs:
                    (shape, color), (other_shape, other_color) = looks[one], looks[other]
                    looks[one], looks[other] = (shape, other_color), (other_shape, color)
        rng.shuffle(looks)
        return looks, asked


def _find_exchanges(looks: list[Look], asked: list[Look]) -> list[list[tuple[int, int]]] | None:
    """For each look asked for, the places of such things and of their partners, if all of them have one.

    Partners differ in shape and in colour, and none is asked for or has two partners. As no two looks that are asked
    for share a shape or a colour, an exchange never makes another one of them.
    """
    free = {place for place, look in enumerate(looks) if look not in asked}
    exchanges = []
    for wanted in asked:
        pairs = []
        for one, look in enumerate(looks):
            if look != wanted:
                continue
            partners = [other for other in sorted(free) if not set(looks[other]) & set(wanted)]
            if not partners:
                return None
            pairs.append((one, partners[0]))
            free.remove(partners[0])
        exchanges.append(pairs)
    return exchanges


def _ask(
    rng: random.Random, things: Sequence[Thing], colours: list[str], asked: Sequence[Look]
) -> tuple[Question, ...]:
    """Ask for each look, for one shape and for one colour; as often for what is there as for what is not."""
    shapes, palette = ({thing.words[part] for thing in things} for part in (0, 1))
    questions = []
    for shape, color in asked:
        if all(thing.words != (shape, color) for thing in things) and rng.random() < 0.2:  # not even a part is there
            if rng.random() < 0.5:
                shape = _choose(rng, SHAPES, shapes, there=False)
            else:
                color = _choose(rng, colours, palette, there=False)
        questions.append(_question(things, put(rng, "any_shape", name=f"{color} {shape}"), (shape, color)))
    shape = _choose(rng, SHAPES, shapes, there=rng.random() < 0.5)
    questions.append(_question(things, put(rng, "any_shape", name=shape), (shape,)))
    color = _choose(rng, colours, palette, there=rng.random() < 0.5)
    questions.append(_question(things, put(rng, "any_color", color=color), (color,)))
    return tuple(questions)


def _choose(rng: random.Random, names: Sequence[str], seen: set[str], there: bool) -> str:
    """A name that is there, or one that is not."""
    return rng.choice([name for name in names if (name in seen) == there])


def _question(things: Sequence[Thing], text: str, words: tuple[str, ...]) -> Question:
    boxes = tuple(thing.box for thing in things if set(words) <= set(thing.words))
    return Question("any", text, "yes" if boxes else "no", boxes, any_box=True)
