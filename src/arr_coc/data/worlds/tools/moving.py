"""Drawing of clips: things are cut out once, and pasted into each frame that they are in."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.scenes import visible_colours
from arr_coc.data.worlds.tools.drawing import (
    Canvas,
    Colour,
    choose_font,
    distance,
    draw_shape,
    jitter,
    jitter_named,
    lightness,
    make_ground,
    make_noise,
)
from arr_coc.data.worlds.world import Clip, Question, Size, Thing

Corner = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Sprite:
    """Something to paste: its pixels, how far they cover the ground (None: fully), and its things from its corner."""

    paint: Image.Image
    mask: Image.Image | None
    things: tuple[Thing, ...]


@dataclass(frozen=True, eq=False)
class Actor:
    """A shape or a sign in a clip: its top left corner in each frame, None where it is absent.

    Args:
        name (`str`): the shape, or what the sign says.
        color (`str`): of the shape, or of the letters.
        sprite (`Sprite`): what is pasted.
        corners (`tuple`): one for each frame.
    """

    name: str
    color: str
    sprite: Sprite
    corners: tuple[Corner | None, ...]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Where it is in the course of the clip, each place once."""
        whole = self.sprite.things[0].box
        return tuple(shift(whole, *corner) for corner in dict.fromkeys(self.corners) if corner is not None)


def shift(box: Box, x: float, y: float) -> Box:
    """A box moved by (x, y)."""
    return box[0] + x, box[1] + y, box[2] + x, box[3] + y


def cut_shape(rng: random.Random, shape: str, color: str, radius: int, ground: Colour, scale: int) -> Sprite:
    """A shape of a named colour; with scale 2 its edges are soft."""
    side = 2 * radius + 1
    mask = Image.new("L", (side * scale, side * scale))
    middle = (side * scale - 1) / 2
    draw_shape(ImageDraw.Draw(mask), shape, middle, middle, radius * scale, 255)  # type: ignore[arg-type]
    mask = mask.reduce(scale) if scale > 1 else mask
    paint = Image.new("RGB", mask.size, jitter_named(rng, color, ground))
    return Sprite(paint, mask, (Thing((0.0, 0.0, float(side), float(side)), (shape, color)),))


def cut_sign(
    rng: random.Random, text: str, color: str, height: int, ground: Colour, plate: bool, varied: bool
) -> Sprite | None:
    """A text in letters of a named colour, on a plate of its own or on the ground; None if it would hardly show."""
    ink = jitter_named(rng, color, ground)
    if plate:
        behind = jitter(rng, (28, 28, 30) if lightness(ink) > 125 else (240, 240, 236), 10)
    elif abs(lightness(ink) - lightness(ground)) < 40:
        return None
    font = choose_font(rng, height, varied)
    left, top, right, bottom = font.getbbox(text)
    edge = round(0.3 * height) if plate else 1
    size = (round(right - left) + 2 * edge, round(bottom - top) + 2 * edge)
    canvas = Canvas(rng, size, Image.new("RGB", size, behind if plate else (0, 0, 0)), ground, varied, scale=1)
    canvas.write(text, edge, edge, ink if plate else (255, 255, 255), font, ("text", color))
    things = tuple(canvas.things)
    if not plate:
        return Sprite(Image.new("RGB", size, ink), canvas.image.getchannel(0), things)
    canvas.pen.rectangle([0, 0, size[0] - 1, size[1] - 1], outline=ink)
    return Sprite(canvas.image, None, things)


class Reel:
    """Frames of one scene being drawn: a still ground, and actors that come, go and move on it.

    Args:
        rng (`random.Random`): makes all random choices.
        size (`tuple[int, int]`): width and height.
        count (`int`): number of frames.
        varied (`bool`): also use the extra fonts.
        unlike (`tuple[int, int, int]`, *optional*): a colour from which the ground differs clearly.
    """

    def __init__(self, rng: random.Random, size: Size, count: int, varied: bool, unlike: Colour | None = None) -> None:
        self.rng, self.size, self.count, self.varied = rng, size, count, varied
        self.ground, self.colour = make_ground(rng, size)
        while unlike is not None and distance(self.colour, unlike) < 60:
            self.ground, self.colour = make_ground(rng, size)
        self.colours = visible_colours(self.colour)
        self.scale = rng.choice((1, 2, 2))
        self.actors: list[Actor] = []
        self._room = Canvas(rng, size, Image.new("L", (1, 1)), self.colour, scale=1)  # only for its free places

    def radius(self) -> int:
        """A radius large enough to recognise a shape, and small enough to leave room for others."""
        return round(self.rng.uniform(10, max(14.0, min(38.0, min(self.size) * 0.14))))

    def add_shape(self, shape: str, color: str, path: Sequence[Corner | None], radius: int | None = None) -> bool:
        """Place a shape with a path from its own corner, one step for each frame; False if there is no room."""
        radius = self.radius() if radius is None else radius
        return self._add(shape, color, cut_shape(self.rng, shape, color, radius, self.colour, self.scale), path)

    def add_sign(self, text: str, color: str, path: Sequence[Corner | None], plate: bool) -> bool:
        """Place a sign, its capitals at least 16 pixels high; False if there is no room, or it would hardly show."""
        height = self.rng.randint(23, 23 + min(self.size) // 18)
        sprite = cut_sign(self.rng, text, color, height, self.colour, plate, self.varied)
        return sprite is not None and self._add(text, color, sprite, path)

    def _add(self, name: str, color: str, sprite: Sprite, path: Sequence[Corner | None]) -> bool:
        """Find a free place for all of a path."""
        steps = [step for step in path if step is not None]
        left, top = (min(step[axis] for step in steps) for axis in (0, 1))
        wide, high = (
            max(step[axis] for step in steps) - (left, top)[axis] + sprite.paint.size[axis] for axis in (0, 1)
        )
        corner = self._room.place(wide, high)
        if corner is None:
            return False
        x, y = round(corner[0]) - left, round(corner[1]) - top
        corners = tuple(None if step is None else (x + step[0], y + step[1]) for step in path)
        self.actors.append(Actor(name, color, sprite, corners))
        return True

    def shoot(self) -> tuple[list[Image.Image], list[tuple[Thing, ...]]]:
        """All frames, and the things in each; what never changes is pasted once."""
        still = [actor for actor in self.actors if len(set(actor.corners)) == 1]
        changing = [actor for actor in self.actors if len(set(actor.corners)) > 1]
        ground = self.ground.copy()
        for actor in still:
            ground.paste(actor.sprite.paint, actor.corners[0], actor.sprite.mask)
        frames, things = [], []
        for number in range(self.count):
            frame = ground.copy()
            for actor in changing:
                if (corner := actor.corners[number]) is not None:
                    frame.paste(actor.sprite.paint, corner, actor.sprite.mask)
            frames.append(frame)
            things.append(
                tuple(
                    Thing(shift(thing.box, *corner), thing.words)
                    for actor in self.actors
                    if (corner := actor.corners[number]) is not None
                    for thing in actor.sprite.things
                )
            )
        return frames, things


def finish_clip(
    rng: random.Random,
    frames: Sequence[Image.Image],
    things: Sequence[tuple[Thing, ...]],
    questions: Sequence[Question],
) -> Clip:
    """The clip of one camera: sometimes with noise that differs from frame to frame, sometimes with JPEG artefacts."""
    shown = list(frames)
    if rng.random() < 0.2:
        generator, strength = np.random.default_rng(rng.getrandbits(32)), rng.uniform(2, 5)
        shown = [_add_noise(frame, generator, strength) for frame in shown]
    if rng.random() < 0.25:
        quality = rng.randint(55, 95)
        shown = [_compress(frame, quality) for frame in shown]
    middle = len(shown) // 2
    return Clip(shown[middle], tuple(questions), things[middle], frames=tuple(shown), frame_things=tuple(things))


def _add_noise(frame: Image.Image, generator: np.random.Generator, strength: float) -> Image.Image:
    noise = (make_noise(generator, (frame.height, frame.width), 1) * strength).astype(np.int16)
    return Image.fromarray((np.asarray(frame) + noise).clip(0, 255).astype(np.uint8))


def _compress(frame: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    frame.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")
