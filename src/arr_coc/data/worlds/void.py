"""The world `void`: splatter, noise and flat fields with nothing to count, or with a single text."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageDraw

from arr_coc.data.worlds.tools.drawing import (
    COLOURS,
    SHAPES,
    Canvas,
    Colour,
    distance,
    jitter,
    lightness,
    make_noise,
    random_text,
)
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Question, Scene, Size, World, register_world


@register_world("void")
class Void(World):
    """Grounds without anything to see, or with only a text."""

    kinds = ("void_count", "void_read")

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Draw a ground, mostly empty; for `void_read`, with one text."""
        while True:
            ground, colour = _make_void(rng, size)
            canvas = Canvas(rng, size, ground, colour, varied)
            if kind == "void_count":
                return self._nothing_to_count(rng, canvas)
            bright = [name for name, value in COLOURS.items() if distance(value, colour) > 130]
            bright = [name for name in bright if abs(lightness(COLOURS[name]) - lightness(colour)) > 40]
            if not bright:
                continue
            color = rng.choice(bright)
            text = random_text(rng, 6 if min(size) > 180 else 4)
            box = canvas.add_text(text, color, COLOURS[color], rng.randint(26, 28 + min(size) // 12))
            if box is not None:
                question = put(rng, "read", color=color) if rng.random() < 0.8 else put(rng, "read_only")
                return Scene(canvas.finish(), (Question("void_read", question, text, (box,)),), tuple(canvas.things))

    @staticmethod
    def _nothing_to_count(rng: random.Random, canvas: Canvas) -> Scene:
        """Mostly nothing; sometimes a few shapes, so that the ground alone does not give the answer away."""
        shape, other = rng.sample(SHAPES, 2)
        boxes = []
        bright = [name for name, value in COLOURS.items() if distance(value, canvas.ground_colour) > 130]
        if bright and rng.random() < 0.3:
            for _ in range(rng.randint(1, 3)):
                box = canvas.add_shape(shape, rng.choice(bright), rng.uniform(14, max(16, min(canvas.size) * 0.12)))
                boxes += [] if box is None else [box]
        questions = [
            Question("void_count", put(rng, "count_shape", shape=shape), str(len(boxes)), tuple(boxes)),
            Question("void_count", put(rng, "count_shape", shape=other), "0"),
        ]
        color = rng.choice(list(COLOURS))
        if not boxes and _is_neutral(canvas.ground_colour) and color not in ("gray", "white", "black"):
            questions.append(Question("void_count", put(rng, "count_color", color=color), "0"))
        return Scene(canvas.finish(), tuple(questions), tuple(canvas.things))


def _is_neutral(colour: Colour) -> bool:
    return max(colour) - min(colour) < 12


def _make_void(rng: random.Random, size: Size) -> tuple[Image.Image, Colour]:
    """A flat field, noise, or splattered paint, and its main colour."""
    width, height = size
    kind = rng.choice(("flat", "noise", "noise", "splatter"))
    shade = rng.randint(0, 255)
    colour = jitter(rng, (shade, shade, shade), 3) if rng.random() < 0.6 else jitter(rng, (shade, shade, shade), 60)
    if kind == "flat":
        return Image.new("RGB", size, colour), colour
    generator = np.random.default_rng(rng.getrandbits(32))
    if kind == "noise":
        coarse = rng.choice((1, 1, 2, 4))
        paint = np.empty((height // coarse + 1, width // coarse + 1, 3), dtype=np.float32)
        paint[:] = colour
        paint += make_noise(generator, paint.shape[:2], rng.choice((1, 3))) * rng.uniform(12, 40)
        small = Image.fromarray(paint.clip(0, 255).astype(np.uint8))
        return small.resize((coarse * small.width, coarse * small.height)).crop((0, 0, width, height)), colour
    image = Image.new("RGB", size, colour)
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(15, 60)):
        # strokes and ragged blots near the ground's colour, so that none passes for a shape
        ink = jitter(rng, colour, 55)
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        if rng.random() < 0.5:
            reach = rng.uniform(10, min(size) / 2)
            end = (x + rng.uniform(-reach, reach), y + rng.uniform(-reach, reach))
            pen.line([(x, y), end], fill=ink, width=rng.randint(1, 5))
        else:
            spread = rng.uniform(4, min(size) / 7)
            corners = [(x + rng.gauss(0, spread), y + rng.gauss(0, spread)) for _ in range(rng.randint(6, 11))]
            pen.polygon(corners, fill=ink)
    return image, colour
