"""The world `scenes`: coloured shapes and texts, with questions about colours, counts, places, texts and oddities."""

from __future__ import annotations

import random
from dataclasses import dataclass

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.tools.drawing import (
    COLOURS,
    SHAPES,
    Canvas,
    distance,
    jitter_named,
    lightness,
    make_ground,
    random_text,
)
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, World, register_world

# side -> (axis, sign): a thing is left of another if its far edge lies before the other's near edge
_SIDES = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}


@dataclass(frozen=True)
class Shape:
    """A shape in a scene."""

    shape: str
    color: str
    radius: float
    box: Box


def visible_colours(ground: tuple[int, int, int], least: float = 85) -> list[str]:
    """Names of the colours that stand out from a ground."""
    return [name for name, colour in COLOURS.items() if distance(colour, ground) > least]


@register_world("scenes")
class Scenes(World):
    """Shapes and texts on a plain ground."""

    kinds = ("color", "count_shape", "count_color", "relation", "read", "unusual", "overview")

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Draw until the scene has a question of the kind."""
        while True:
            canvas = Canvas(rng, size, *make_ground(rng, size), varied)
            colours = visible_colours(canvas.ground_colour)
            texts: list[tuple[str, str, Box]] = []
            favourite = (rng.choice(SHAPES), rng.choice(colours))
            if kind == "unusual":
                shapes, odd = _draw_odd(canvas, rng, colours)
                questions = [] if odd is None else [_ask_unusual(rng, shapes, odd)]
                shapes = shapes if odd is None else [*shapes, odd]
            elif kind == "overview":
                shapes = _draw_sizes(canvas, rng, colours)
                questions = _ask_overview(rng, shapes)
            else:
                texts = _draw_texts(canvas, rng, colours, least=1 if kind == "read" else 0)
                shapes = _draw_shapes(canvas, rng, colours, kind, favourite)
                questions = []
            questions += [
                *_ask_color(rng, shapes),
                *_ask_counts(rng, shapes, colours, {color for color, _, _ in texts}, favourite),
                *_ask_relations(rng, shapes),
                *_ask_read(rng, texts),
            ]
            if any(question.kind == kind for question in questions):
                return Scene(canvas.finish(), tuple(questions), tuple(canvas.things))


def _radius(rng: random.Random, size: Size) -> float:
    """A radius large enough to recognise the shape, and small enough to leave room for others."""
    return rng.uniform(10, max(14.0, min(38.0, min(size) * 0.15)))


def _draw_texts(canvas: Canvas, rng: random.Random, colours: list[str], least: int) -> list[tuple[str, str, Box]]:
    texts = []
    for color in rng.sample(colours, rng.randint(least, max(least, min(3, min(canvas.size) // 90)))):
        most = 6 if min(canvas.size) > 180 else 4
        ink = jitter_named(rng, color, canvas.ground_colour)
        if abs(lightness(ink) - lightness(canvas.ground_colour)) < 30:  # JPEG loses contrast that is only in color
            continue
        text = random_text(rng, most)
        box = canvas.add_text(text, color, ink, rng.randint(20, 20 + min(canvas.size) // 14))
        if box is not None:
            texts.append((color, text, box))
    return texts


def _draw_shapes(
    canvas: Canvas, rng: random.Random, colours: list[str], kind: str, favourite: tuple[str, str]
) -> list[Shape]:
    """Random shapes; for counting, up to 7 of the favourite shape or colour and up to 3 others."""
    room = canvas.size[0] * canvas.size[1] / 128**2  # 1 to 16
    most = int(min(9, 2 + 2 * room**0.7))
    count = rng.randint(2 if kind == "relation" else 1, 4 if kind == "relation" else most)
    wanted = [(rng.choice(SHAPES), rng.choice(colours)) for _ in range(count)]
    if kind in ("count_shape", "count_color"):
        alike = rng.randint(0, min(7, most))
        part = 0 if kind == "count_shape" else 1
        others = [pair for pair in wanted if pair[part] != favourite[part]][: rng.randint(0, 3)]
        fixed = [
            (favourite[0], rng.choice(colours)) if part == 0 else (rng.choice(SHAPES), favourite[1])
            for _ in range(alike)
        ]
        wanted = fixed + others
        rng.shuffle(wanted)
    shapes = []
    for shape, color in wanted:
        radius = _radius(rng, canvas.size)
        box = canvas.add_shape(shape, color, radius)
        if box is not None:
            shapes.append(Shape(shape, color, radius, box))
    return shapes


def _draw_odd(canvas: Canvas, rng: random.Random, colours: list[str]) -> tuple[list[Shape], Shape | None]:
    """Several equal shapes, and one that differs in shape, in colour, or in both."""
    shape, color = rng.choice(SHAPES), rng.choice(colours)
    other_shape = rng.choice([name for name in SHAPES if name != shape])
    other_color = rng.choice([name for name in colours if name != color])
    differs = rng.choice(("shape", "color", "both"))
    odd_shape = shape if differs == "color" else other_shape
    odd_color = color if differs == "shape" else other_color
    shapes: list[Shape] = []
    radius = _radius(rng, canvas.size)
    box = canvas.add_shape(odd_shape, odd_color, radius)
    odd = None if box is None else Shape(odd_shape, odd_color, radius, box)
    for _ in range(rng.randint(3, 7)):
        radius = _radius(rng, canvas.size)
        box = canvas.add_shape(shape, color, radius)
        if box is not None:
            shapes.append(Shape(shape, color, radius, box))
    return shapes, odd if len(shapes) >= 2 else None


def _draw_sizes(canvas: Canvas, rng: random.Random, colours: list[str]) -> list[Shape]:
    """Different shapes, each clearly smaller than the one before."""
    radius = min(canvas.size) * rng.uniform(0.17, 0.24)
    shapes = []
    for shape in rng.sample(SHAPES, rng.randint(2, 4)):
        if radius < 9:
            break
        color = rng.choice(colours)
        box = canvas.add_shape(shape, color, radius)
        if box is None:
            break
        shapes.append(Shape(shape, color, radius, box))
        radius *= rng.uniform(0.52, 0.7)
    return shapes


def _ask_color(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    return [
        Question("color", put(rng, "color", shape=target.shape), target.color, (target.box,))
        for target in shapes
        if sum(other.shape == target.shape for other in shapes) == 1
    ]


def _ask_counts(
    rng: random.Random, shapes: list[Shape], colours: list[str], written: set[str], favourite: tuple[str, str]
) -> list[Question]:
    """Count the favourite shape and colour, and one more of each; colours of texts are left out as ambiguous."""
    questions = []
    for shape in dict.fromkeys((favourite[0], rng.choice(SHAPES))):
        boxes = tuple(thing.box for thing in shapes if thing.shape == shape)
        questions.append(Question("count_shape", put(rng, "count_shape", shape=shape), str(len(boxes)), boxes))
    for color in dict.fromkeys((favourite[1], rng.choice(colours))):
        if color not in written:
            boxes = tuple(thing.box for thing in shapes if thing.color == color)
            questions.append(Question("count_color", put(rng, "count_color", color=color), str(len(boxes)), boxes))
    return questions


def _ask_relations(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    """Ask what is on a side of a shape, if exactly one other shape is clearly there and no other is almost there."""
    questions = []
    for anchor in shapes:
        if sum((other.shape, other.color) == (anchor.shape, anchor.color) for other in shapes) > 1:
            continue
        for side, (axis, sign) in _SIDES.items():
            middle = (anchor.box[axis] + anchor.box[axis + 2]) / 2
            clear, doubtful = [], 0
            for other in shapes:
                if other is anchor:
                    continue
                inner = other.box[axis + 2] if sign < 0 else other.box[axis]
                edge = anchor.box[axis] if sign < 0 else anchor.box[axis + 2]
                centre = (other.box[axis] + other.box[axis + 2]) / 2
                if sign * (inner - edge) > 0:
                    clear.append(other)
                elif sign * (centre - middle) > -4:
                    doubtful += 1
            if len(clear) == 1 and not doubtful and _most_apart(anchor, clear[0]) == axis:
                text = put(rng, "relation", side=side, color=anchor.color, shape=anchor.shape)
                answer = f"{clear[0].color} {clear[0].shape}"
                questions.append(Question("relation", text, answer, (anchor.box, clear[0].box), clues=1))
    return questions


def _most_apart(first: Shape, second: Shape) -> int:
    """The axis along which two shapes are farther apart: 0 is across, 1 is down."""
    a, b = first.box, second.box
    across, down = (abs(a[axis] + a[axis + 2] - b[axis] - b[axis + 2]) for axis in (0, 1))
    return 0 if across >= down else 1


def _ask_read(rng: random.Random, texts: list[tuple[str, str, Box]]) -> list[Question]:
    questions = []
    for color, text, box in texts:
        alone = len(texts) == 1 and rng.random() < 0.2
        wording = put(rng, "read_only") if alone else put(rng, "read", color=color)
        questions.append(Question("read", wording, text, (box,)))
    return questions


def _ask_unusual(rng: random.Random, shapes: list[Shape], odd: Shape) -> Question:
    boxes = (*(shape.box for shape in shapes), odd.box)
    return Question("unusual", put(rng, "unusual"), f"{odd.color} {odd.shape}", boxes, clues=len(shapes))


def _ask_overview(rng: random.Random, shapes: list[Shape]) -> list[Question]:
    if len(shapes) < 2:
        return []
    answer = ", ".join(shape.shape for shape in shapes)
    return [Question("overview", put(rng, "overview"), answer, tuple(shape.box for shape in shapes))]
