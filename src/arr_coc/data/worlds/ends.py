"""The world `ends`: a sign or a shape at each of two opposite ends; do they say the same, are they alike?"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.lines import LEAST_LETTERS, readable_ink, shape_radius, start_canvas
from arr_coc.data.worlds.scenes import visible_colours
from arr_coc.data.worlds.tools.drawing import (
    CHARACTERS,
    SHAPES,
    Canvas,
    Font,
    choose_font,
    draw_shape,
    jitter,
    jitter_named,
    lightness,
    random_text,
)
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, Thing, World, register_world

Look = tuple[str, str]  # shape and colour
T = TypeVar("T", str, Look)

_NAMES = (("left", "right"), ("top", "bottom"))  # of the ends of each axis
_ALIKE = str.maketrans("OI", "01")  # what hardly differs in print


class Pair(NamedTuple):
    """What is to stand at two ends: on which axis, what, and where across the axis, in shares of that side."""

    axis: int
    what: Literal["sign", "shape"]
    span: tuple[float, float]


class Sign(NamedTuple):
    """A text in its font, with a margin around it, on a board or on the ground itself."""

    text: str
    font: Font
    margin: int
    boarded: bool


@register_world("ends")
class Ends(World):
    """What matters is far apart, and what lies in between distracts."""

    kinds = ("two_ends",)
    sides = (256, 768)

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Draw the ends, then what lies between them."""
        while True:
            canvas = start_canvas(rng, size, varied)
            colours = visible_colours(canvas.ground_colour)
            texts: tuple[str, str] | None = None
            looks: tuple[Look, Look] | None = None
            questions: list[Question | None] = []
            plan = _plan(rng, size)
            for pair in plan:
                same = rng.random() < 0.5
                names = rng.sample(_NAMES[pair.axis], 2)
                if pair.what == "sign":
                    texts = _two_texts(rng, _most_letters(_sign_room(pair, size)), same)
                    boxes = _add_signs(canvas, rng, pair, texts, colours)
                else:
                    looks = _two_looks(rng, colours, same)
                    boxes = _add_shapes(canvas, rng, pair, looks)
                text = put(rng, f"two_{pair.what}s", first=names[0], second=names[1])
                answer = "yes" if same else "no"
                questions.append(None if boxes is None else Question("two_ends", text, answer, boxes))
            asked = tuple(question for question in questions if question is not None)
            if len(asked) < len(plan):
                continue
            _keep_ends_free(canvas, [(pair.axis, question.boxes) for pair, question in zip(plan, asked, strict=True)])
            _distract(canvas, rng, colours, texts, looks)
            return Scene(canvas.finish(), asked, tuple(canvas.things))


def _plan(rng: random.Random, size: Size) -> list[Pair]:
    """One pair along the longer side, a sign and a shape there, or a pair along each side of an almost square one."""
    short, long = sorted(size)
    almost_square = long < 1.3 * short
    axis = rng.randrange(2) if almost_square else size.index(long)
    what: list[Literal["sign", "shape"]] = ["sign", "shape"]
    rng.shuffle(what)
    if rng.random() < 0.45:
        return [Pair(axis, what[0], (0, 0.5)), Pair(axis, what[1], (0.5, 1))]
    if almost_square and short >= 256 and rng.random() < 0.6:
        return [Pair(0, what[0], (0.3, 0.7)), Pair(1, rng.choice(what), (0.3, 0.7))]
    return [Pair(axis, what[0], (0, 1))]


def _sign_room(pair: Pair, size: Size) -> float:
    """How wide a sign may be."""
    return 0.34 * size[0] if pair.axis == 0 else (pair.span[1] - pair.span[0]) * size[0] - 12


def _most_letters(room: float) -> int:
    return max(2, min(6, int(room / (0.8 * LEAST_LETTERS))))


def _two_texts(rng: random.Random, most: int, same: bool) -> tuple[str, str]:
    """Two equal texts, or two that differ in one or two characters, or wholly."""
    first = random_text(rng, most)
    if same:
        return first, first
    while True:
        second = _change(rng, first) if rng.random() < 0.5 else random_text(rng, most)
        if second.translate(_ALIKE) != first.translate(_ALIKE):
            return (first, second) if rng.random() < 0.5 else (second, first)


def _change(rng: random.Random, text: str) -> str:
    """The text with one or two other characters."""
    letters = CHARACTERS if any(letter in string.digits for letter in text) else string.ascii_uppercase
    changed = list(text)
    for place in rng.sample(range(len(text)), rng.choice((1, 1, 2))):
        changed[place] = rng.choice(letters)
    return "".join(changed)


def _two_looks(rng: random.Random, colours: list[str], same: bool) -> tuple[Look, Look]:
    """Two equal shapes, or two that differ in shape, in colour, or in both."""
    shapes, chosen = rng.sample(SHAPES, 2), rng.sample(colours, 2)
    differs = rng.choice(("shape", "color", "both"))
    if same or differs == "color":
        shapes[1] = shapes[0]
    if same or differs == "shape":
        chosen[1] = chosen[0]
    return (shapes[0], chosen[0]), (shapes[1], chosen[1])


def _corners(
    canvas: Canvas, rng: random.Random, pair: Pair, extents: list[tuple[float, float]]
) -> list[tuple[float, float]] | None:
    """Top left corners near the ends for things of these widths and heights, or None if they do not fit."""
    axis, across = pair.axis, 1 - pair.axis
    length, side = canvas.size[axis], canvas.size[across]
    corners = []
    for extent, far in zip(extents, (False, True), strict=True):
        margin = rng.uniform(3, max(5.0, 0.06 * length))
        along = length - margin - extent[axis] if far else margin
        low, high = pair.span[0] * side + 3, pair.span[1] * side - extent[across] - 3
        if high < low:
            return None
        place = rng.uniform(low, high)
        corner = (along, place) if axis == 0 else (place, along)
        box = (corner[0], corner[1], corner[0] + extent[0], corner[1] + extent[1])
        if any(_near(box, other) for other in canvas.taken):
            return None
        canvas.taken.append(box)
        corners.append(corner)
    between = corners[1][axis] - corners[0][axis] - extents[0][axis]
    return corners if between > 0.1 * length else None


def _near(first: Box, second: Box, gap: float = 6) -> bool:
    return all(first[axis] < second[axis + 2] + gap and second[axis] < first[axis + 2] + gap for axis in (0, 1))


def _add_signs(
    canvas: Canvas, rng: random.Random, pair: Pair, texts: tuple[str, str], colours: list[str]
) -> tuple[Box, Box] | None:
    """Two signs; each looks as it likes."""
    room = _sign_room(pair, canvas.size)
    signs, extents = [], []
    for text in texts:
        largest = min(20 + min(canvas.size) // 14, int(room / (0.8 * len(text))))
        sign, extent = _make_sign(canvas, rng, text, rng.randint(LEAST_LETTERS, max(LEAST_LETTERS, largest)))
        signs.append(sign)
        extents.append(extent)
    corners = _corners(canvas, rng, pair, extents)
    if corners is None:
        return None
    first, second = (
        _write_sign(canvas, rng, sign, corner, extent, colours)
        for sign, corner, extent in zip(signs, corners, extents, strict=True)
    )
    return first, second


def _make_sign(canvas: Canvas, rng: random.Random, text: str, letters: int) -> tuple[Sign, tuple[float, float]]:
    """A sign and its width and height."""
    font = choose_font(rng, letters * canvas.scale, canvas.varied)
    width, height = canvas.measure(text, font)
    sign = Sign(text, font, rng.randint(3, 7), rng.random() < 0.5)
    return sign, (width + 2 * sign.margin, height + 2 * sign.margin)


def _write_sign(
    canvas: Canvas,
    rng: random.Random,
    sign: Sign,
    corner: tuple[float, float],
    extent: tuple[float, float],
    colours: list[str],
) -> Box:
    """Write a sign at a place and give the box of its text."""
    x, y = corner
    color, ink = readable_ink(rng, colours, canvas.ground_colour)
    words: tuple[str, ...] = ("text", "sign", color)
    if sign.boarded:
        board = jitter(rng, rng.choice(((235, 235, 230), (40, 44, 50), (200, 190, 160), (30, 60, 110))), 18)
        ink = jitter(rng, (25, 25, 28) if lightness(board) > 128 else (235, 235, 235), 18)
        words = ("text", "sign")
        edges = (x, y, x + extent[0], y + extent[1])
        canvas.pen.rectangle([edge * canvas.scale for edge in edges], fill=board)
    return canvas.write(sign.text, x + sign.margin, y + sign.margin, ink, sign.font, words)


def _add_shapes(canvas: Canvas, rng: random.Random, pair: Pair, looks: tuple[Look, Look]) -> tuple[Box, Box] | None:
    """Two shapes of one size."""
    radius = shape_radius(rng, canvas.size)
    corners = _corners(canvas, rng, pair, [(2 * radius, 2 * radius)] * 2)
    if corners is None:
        return None
    boxes = []
    for (shape, color), (x, y) in zip(looks, corners, strict=True):
        middle = ((x + radius) * canvas.scale, (y + radius) * canvas.scale)
        ink = jitter_named(rng, color, canvas.ground_colour)
        draw_shape(canvas.pen, shape, *middle, radius * canvas.scale, ink)
        boxes.append((x, y, x + 2 * radius, y + 2 * radius))
        canvas.things.append(Thing(boxes[-1], (shape, color)))
    return boxes[0], boxes[1]


def _keep_ends_free(canvas: Canvas, ends: list[tuple[int, tuple[Box, ...]]]) -> None:
    """Occupy the ends of the picture as far as something stands there, and a little more."""
    width, height = canvas.size
    for axis, (first, second) in ends:
        gap = 0.04 * canvas.size[axis]
        near, far = first[axis + 2] + gap, second[axis] - gap
        if axis == 0:
            canvas.taken += [(0, 0, near, height), (far, 0, width, height)]
        else:
            canvas.taken += [(0, 0, width, near), (0, far, width, height)]


def _distract(
    canvas: Canvas,
    rng: random.Random,
    colours: list[str],
    texts: tuple[str, str] | None,
    looks: tuple[Look, Look] | None,
) -> None:
    """Signs and shapes between the ends, wherever there is room; some are like those at an end."""
    room = canvas.size[0] * canvas.size[1] / 256**2  # 1 to 9
    for _ in range(rng.randint(0, 1 + round(room**0.7))):
        text = _one_between(rng, texts, lambda: random_text(rng, 4))
        sign, extent = _make_sign(canvas, rng, text, rng.randint(16, 20 + min(canvas.size) // 20))
        corner = canvas.place(*extent)
        if corner is not None:
            _write_sign(canvas, rng, sign, corner, extent, colours)
    for _ in range(rng.randint(1, 2 + round(1.5 * room**0.7))):
        look = _one_between(rng, looks, lambda: (rng.choice(SHAPES), rng.choice(colours)))
        canvas.add_shape(*look, shape_radius(rng, canvas.size))


def _one_between(rng: random.Random, ends: tuple[T, T] | None, make: Callable[[], T]) -> T:
    """The same as at one end, or something else; equally often like a certain end, whether both are alike or not."""
    place = rng.randrange(4)
    if ends is not None and (place == 0 or (place == 1 and ends[0] != ends[1])):
        return ends[place]
    return make()
