"""The world `lines`: one long line of capitals and digits to read from its first character to its last."""

from __future__ import annotations

import random
import string

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.scenes import visible_colours
from arr_coc.data.worlds.tools.drawing import (
    CHARACTERS,
    COLOURS,
    SHAPES,
    Canvas,
    Colour,
    Font,
    choose_font,
    jitter_named,
    lightness,
    make_ground,
    random_text,
)
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, World, register_world

LEAST_LETTERS = 18  # height of the smallest letters to read, in pixels
_LENGTHS = (12, 20)
_LEAST_LENGTH = 8  # in a narrow picture
_GROUPS = (2, 5)
_LARGE = 2**17  # pixels; larger pictures are drawn at their own size, which is faster


@register_world("lines")
class Lines(World):
    """A long line among shorter texts and shapes."""

    kinds = ("long_line",)
    sides = (384, 1024)
    least = 96

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Write the line, then whatever fits beside it."""
        while True:
            canvas = start_canvas(rng, size, varied)
            colours = visible_colours(canvas.ground_colour)
            line, font = _fit_line(canvas, rng)
            box = _add_text(canvas, rng, line, font, colours)
            if box is None:
                continue
            room = size[0] * size[1] / 256**2  # 1 to 16
            for _ in range(rng.randint(1, 3 + round(room**0.7))):
                _add_short_text(canvas, rng, colours, (box[2] - box[0]) * 0.55)
            for _ in range(rng.randint(0, 3 + round(room**0.7))):
                canvas.add_shape(rng.choice(SHAPES), rng.choice(colours), shape_radius(rng, size))
            questions = (Question("long_line", put(rng, "long_line"), line, (box,)),)
            return Scene(canvas.finish(), questions, tuple(canvas.things))


def start_canvas(rng: random.Random, size: Size, varied: bool) -> Canvas:
    """A canvas with a ground; large pictures are drawn without enlarging them first."""
    scale = 1 if size[0] * size[1] > _LARGE else None
    return Canvas(rng, size, *make_ground(rng, size), varied, scale)


def readable_ink(rng: random.Random, colours: list[str], ground: Colour) -> tuple[str, Colour]:
    """A colour whose lightness differs from the ground's, and a shade of it; black or white always does."""
    clear = [name for name in colours if abs(lightness(COLOURS[name]) - lightness(ground)) > 60]
    color = rng.choice(clear)
    ink = jitter_named(rng, color, ground)
    return color, ink if abs(lightness(ink) - lightness(ground)) > 45 else COLOURS[color]


def shape_radius(rng: random.Random, size: Size) -> float:
    """A radius large enough to recognise a shape, and small enough to leave room for others."""
    return rng.uniform(10, max(14.0, min(38.0, min(size) * 0.1)))


def _fit_line(canvas: Canvas, rng: random.Random) -> tuple[str, Font]:
    """A line that fits the width, and its font: large letters shrink first, then the line gets shorter."""
    width = canvas.size[0] - 12
    length = rng.randint(*_LENGTHS)
    line = _make_line(rng, length)
    largest = min(20 + min(canvas.size) // 16, int(width / (0.66 * len(line))))
    letters = rng.randint(LEAST_LETTERS, max(LEAST_LETTERS, largest))
    while True:
        font = choose_font(rng, letters * canvas.scale, canvas.varied)
        if canvas.measure(line, font)[0] <= width:
            return line, font
        if letters > LEAST_LETTERS:
            letters = max(LEAST_LETTERS, letters - 3)
        else:
            length = max(_LEAST_LENGTH, length - 1)
            line = _make_line(rng, length)


def _make_line(rng: random.Random, length: int) -> str:
    """Capitals, digits, or both, in groups with a space between them."""
    pools: tuple[str, ...] = rng.choice(
        ((string.ascii_uppercase,), (CHARACTERS,), (string.ascii_uppercase, string.digits))
    )
    groups = []
    while length:
        sizes = [size for size in range(_GROUPS[0], _GROUPS[1] + 1) if size == length or size <= length - _GROUPS[0]]
        count = rng.choice(sizes)
        groups.append("".join(rng.choices(rng.choice(pools), k=count)))
        length -= count
    return " ".join(groups)


def _add_short_text(canvas: Canvas, rng: random.Random, colours: list[str], widest: float) -> None:
    """A text that is clearly shorter than the line, also in pixels."""
    text = random_text(rng)
    font = choose_font(rng, rng.randint(16, 20 + min(canvas.size) // 20) * canvas.scale, canvas.varied)
    if canvas.measure(text, font)[0] < widest:
        _add_text(canvas, rng, text, font, colours)


def _add_text(canvas: Canvas, rng: random.Random, text: str, font: Font, colours: list[str]) -> Box | None:
    """Write a text where no other comes so near that both could be read as one."""
    width, height = canvas.measure(text, font)
    beside = min(1.2 * height, (canvas.size[0] - width - 6) / 2)
    corner = canvas.place(width + 2 * beside, height + 4)
    if corner is None:
        return None
    color, ink = readable_ink(rng, colours, canvas.ground_colour)
    return canvas.write(text, corner[0] + beside, corner[1] + 2, ink, font, ("text", color))
