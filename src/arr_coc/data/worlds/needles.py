"""The world `needles`: large pictures with signs too small to survive downsampling, each beside a larger mark."""

from __future__ import annotations

import random

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.scenes import visible_colours
from arr_coc.data.worlds.tools.drawing import (
    SHAPES,
    Canvas,
    Colour,
    choose_font,
    draw_shape,
    jitter,
    jitter_named,
    lightness,
    make_ground,
    random_text,
)
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, Thing, World, register_world

_LETTERS = (18, 24)  # height of the signs' letters in pixels, for pictures of any size


@register_world("needles")
class Needles(World):
    """Marks and signs, far apart."""

    kinds = ("needle",)
    sides = (1024, 2048)

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Two to six marks, each with its sign, and a few signs without a mark."""
        while True:
            canvas = Canvas(rng, size, *make_ground(rng, size), varied, scale=1)
            colours = visible_colours(canvas.ground_colour)
            pairs = [(color, shape) for color in colours for shape in SHAPES]
            questions = []
            for color, shape in rng.sample(pairs, rng.randint(2, 6)):
                added = _add_mark(canvas, rng, color, shape)
                if added is not None:
                    text = put(rng, "needle", color=color, shape=shape)
                    questions.append(Question("needle", text, added[2], added[:2], clues=1))
            for _ in range(rng.randint(0, 4)):
                _add_lonely_sign(canvas, rng)
            if questions:
                return Scene(canvas.finish(), tuple(questions), tuple(canvas.things))


def _add_mark(canvas: Canvas, rng: random.Random, color: str, shape: str) -> tuple[Box, Box, str] | None:
    """Add a mark and its sign, with room around them; give both boxes and the sign's text."""
    radius = min(canvas.size) * rng.uniform(0.025, 0.04)
    text, font = random_text(rng), choose_font(rng, rng.randint(*_LETTERS), canvas.varied)
    width, height = canvas.measure(text, font)
    pad, gap = rng.randint(3, 8), rng.uniform(4, 12)
    sign_width, sign_height = width + 2 * pad, height + 2 * pad
    beside = rng.random() < 0.6
    whole = (
        (2 * radius + gap + sign_width, max(2 * radius, sign_height))
        if beside
        else (max(2 * radius, sign_width), 2 * radius + gap + sign_height)
    )
    place = canvas.place(*whole, gap=max(60, 1.5 * radius))
    if place is None:
        return None
    before = rng.random() < 0.5  # the sign is left of the mark, or above it
    x, y = place
    middle = (
        (x + (sign_width + gap if before else 0) + radius, y + whole[1] / 2)
        if beside
        else (x + whole[0] / 2, y + (sign_height + gap if before else 0) + radius)
    )
    corner = (
        (x if before else x + 2 * radius + gap, y + (whole[1] - sign_height) / 2)
        if beside
        else (x + (whole[0] - sign_width) / 2, y if before else y + 2 * radius + gap)
    )
    draw_shape(canvas.pen, shape, *middle, radius, jitter_named(rng, color, canvas.ground_colour))
    mark = (middle[0] - radius, middle[1] - radius, middle[0] + radius, middle[1] + radius)
    canvas.things.append(Thing(mark, (shape, color)))
    board, ink = _sign_colours(rng, canvas.ground_colour)
    canvas.pen.rectangle([*corner, corner[0] + sign_width, corner[1] + sign_height], fill=board)
    return mark, canvas.write(text, corner[0] + pad, corner[1] + pad, ink, font, ("text", "sign")), text


def _add_lonely_sign(canvas: Canvas, rng: random.Random) -> None:
    """Add a sign without a mark."""
    text, font = random_text(rng), choose_font(rng, rng.randint(*_LETTERS), canvas.varied)
    width, height = canvas.measure(text, font)
    corner = canvas.place(width + 10, height + 10, gap=max(80, 0.06 * min(canvas.size)))
    if corner is not None:
        board, ink = _sign_colours(rng, canvas.ground_colour)
        canvas.pen.rectangle([*corner, corner[0] + width + 10, corner[1] + height + 10], fill=board)
        canvas.write(text, corner[0] + 5, corner[1] + 5, ink, font, ("text", "sign"))


def _sign_colours(rng: random.Random, ground: Colour) -> tuple[Colour, Colour]:
    """The colour of a board, often that of the ground, and an ink that can be read on it."""
    board = ground if rng.random() < 0.4 else jitter(rng, rng.choice(((235, 235, 230), (40, 44, 50))), 18)
    ink = jitter(rng, (25, 25, 28) if lightness(board) > 128 else (235, 235, 235), 18)
    return board, ink
