"""A scanned sheet of paper: text in kept glyphs, rules, one skew of the whole, and the noise of a scanner."""

from __future__ import annotations

import io
import math
import random
import re
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.tools.drawing import Colour, Font, choose_font, jitter, make_noise
from arr_coc.data.worlds.world import Size, Thing

MOST_SKEW = 3.0  # degrees


class Face(NamedTuple):
    """How letters look.

    Args:
        font (`Font`): with its size.
        size (`int`): in pixels, as the font's.
        bold (`bool`, *optional*, defaults to `False`): strokes a pixel thicker.
        slanted (`bool`, *optional*, defaults to `False`): leaning to the right.
        pitch (`float`, *optional*, defaults to 0): the width of every letter, as a typewriter has it; 0: their own.
        shaky (`bool`, *optional*, defaults to `False`): letters leave the line a little, as by hand.
    """

    font: Font
    size: int
    bold: bool = False
    slanted: bool = False
    pitch: float = 0.0
    shaky: bool = False

    def width(self, text: str) -> float:
        """How much room a text takes."""
        if self.pitch:
            return self.pitch * len(text)
        return sum(_glyph(self.font, letter, self.bold, self.slanted).advance for letter in text)


def choose_face(rng: random.Random, size: int, varied: bool) -> Face:
    """A face of a size: mostly plain, else bold, slanted or a typewriter's."""
    font, style = choose_font(rng, size, varied), rng.random()
    return Face(font, size, style < 0.2, 0.2 <= style < 0.3, 0.66 * size if 0.3 <= style < 0.4 else 0.0)


class _Glyph(NamedTuple):
    """A letter's cover `[h, w]` from 0 to 255, where it begins beside its place on the baseline, and its width."""

    cover: np.ndarray
    left: int
    top: int
    advance: float


@cache
def _glyph(font: Font, letter: str, bold: bool, slanted: bool, pitch: float = 0.0) -> _Glyph:
    """A drawn letter, narrowed to a pitch; drawing each but once makes text thirty times faster than Pillow's."""
    # a space that can be told from none
    advance = (
        font.getlength(letter) + bold + slanted
        if letter != " "
        else max(font.getlength(" "), 0.6 * font.getlength("n"))
    )
    pen = ImageDraw.Draw(Image.new("L", (1, 1)))
    left, top, right, bottom = (round(side) for side in pen.textbbox((0, 0), letter, font=font, anchor="ls"))
    if right <= left or bottom <= top:
        return _Glyph(np.zeros((0, 0), np.uint8), 0, 0, advance)
    image = Image.new("L", (right - left + 1, bottom - top))
    ImageDraw.Draw(image).text((-left, -top), letter, fill=255, font=font, anchor="ls")
    cover = np.array(image)
    if bold:
        cover[:, 1:] = np.maximum(cover[:, 1:], cover[:, :-1].copy())
    if slanted:
        rows = [math.floor(0.22 * (bottom - top - row)) for row in range(len(cover))]
        cover = np.stack([np.pad(line, (shift, rows[0] - shift)) for line, shift in zip(cover, rows, strict=True)])
    if pitch and advance > pitch:
        narrower = 0.9 * pitch / advance  # two of them do not touch
        cover = np.array(Image.fromarray(cover).resize((max(1, round(narrower * cover.shape[1])), len(cover))))
        left, advance = round(narrower * left), narrower * advance
    return _Glyph(cover, left, top, advance)


class Sheet:
    """A sheet being printed; it is turned and scanned when it is finished.

    Args:
        rng (`random.Random`): makes all random choices.
        size (`tuple[int, int]`): width and height of the picture.
        ink (`tuple[int, int, int]`): of what is printed.
        angle (`float`): degrees by which it is turned against the clock, at most `MOST_SKEW`.
    """

    def __init__(self, rng: random.Random, size: Size, ink: Colour, angle: float) -> None:
        self.rng, self.size, self.ink = rng, size, ink
        self.sine, self.cosine, self.angle = math.sin(math.radians(angle)), math.cos(math.radians(angle)), angle
        self.cover = np.zeros((size[1], size[0]), dtype=np.uint8)  # [H, W], how much ink
        self.inks: list[tuple[Box, Colour]] = []
        self.things: list[Thing] = []

    def imprint(self, cover: np.ndarray, x: int, y: int) -> None:
        """Print a cover `[h, w]` with its top left corner at (x, y); what leaves the sheet is cut off."""
        above, before = max(0, -y), max(0, -x)
        place = self.cover[y + above : y + cover.shape[0], x + before : x + cover.shape[1]]
        part = cover[above : above + place.shape[0], before : before + place.shape[1]]
        np.maximum(place, part, out=place)

    def colour(self, box: Box, ink: Colour) -> None:
        """Everything in a box has this ink."""
        self.inks.append((box, ink))

    def write(
        self,
        text: str,
        x: float,
        base: float,
        face: Face,
        words: tuple[str, ...] = ("text",),
        ink: Colour | None = None,
    ) -> Box:
        """Write a text that begins at x on a baseline; it, each capital, digit and other word become things."""
        places, highest, lowest = [x], 0, 0
        for letter in text:
            glyph = _glyph(face.font, letter, face.bold, face.slanted, face.pitch)
            beside = 0.5 * (face.pitch - glyph.advance) if face.pitch else 0.0
            off = self.rng.choice((-1, 0, 0, 1)) if face.shaky else 0
            self.imprint(glyph.cover, round(places[-1] + beside) + glyph.left, round(base) + glyph.top + off)
            places.append(places[-1] + (face.pitch or glyph.advance))
            highest, lowest = min(highest, glyph.top), max(lowest, glyph.top + len(glyph.cover))
        top, bottom = round(base) + highest, round(base) + lowest
        box = (x, top, places[-1], bottom)
        self.things.append(Thing(box, words))
        for piece in re.finditer(r"[A-Z0-9](?![a-z])|[A-Za-z]+", text):
            begin, end, name = places[piece.start()], places[piece.end()], piece.group()
            self.things.append(Thing((begin, top, end, bottom), (name if len(name) == 1 else name.lower(),)))
        if ink is not None:
            self.colour((x - 2, top - 2, places[-1] + 3, bottom + 2), ink)
        return box

    def rule(self, left: float, top: float, right: float, bottom: float) -> None:
        """Fill a box, or draw a line a pixel thick where it has no width or no height."""
        x, y = max(0, round(left)), max(0, round(top))
        self.cover[y : max(y + 1, round(bottom)), x : max(x + 1, round(right))] = 255

    def frame(self, box: Box, thick: int = 1) -> None:
        """Draw the four sides of a box."""
        left, top, right, bottom = box
        for side in ((left, top, right, top + thick), (left, bottom, right + thick, bottom + thick)):
            self.rule(*side)
        for side in ((left, top, left + thick, bottom), (right, top, right + thick, bottom)):
            self.rule(*side)

    def dots(self, left: float, right: float, base: float, step: int) -> None:
        """Dots on a baseline."""
        y = round(base)
        for x in (round(left), round(left) + 1):
            self.cover[y - 2 : y, x : max(x, round(right)) : step] = 255

    def turn_point(self, x: float, y: float) -> tuple[float, float]:
        """Where a point of the sheet is in the picture."""
        middle_x, middle_y = self.size[0] / 2, self.size[1] / 2
        x, y = x - middle_x, y - middle_y
        return middle_x + x * self.cosine + y * self.sine, middle_y - x * self.sine + y * self.cosine

    def turn(self, box: Box) -> Box:
        """The box, with sides along the picture's, around a box of the sheet."""
        x, y = self.turn_point((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        half_x, half_y, sine = (box[2] - box[0]) / 2, (box[3] - box[1]) / 2, abs(self.sine)
        across, down = half_x * self.cosine + half_y * sine, half_x * sine + half_y * self.cosine
        return x - across, y - down, x + across, y + down

    def finish(self, paper: Colour, edges: Box | None, bed: Colour) -> tuple[Image.Image, tuple[Thing, ...]]:
        """Turn and scan the sheet.

        Args:
            paper (`tuple[int, int, int]`): its colour.
            edges (`Box`, *optional*): of the paper, before it is turned; by default they lie outside the picture.
            bed (`tuple[int, int, int]`): what is seen beyond the edges.

        Returns:
            `tuple[PIL.Image.Image, tuple[Thing, ...]]`: the picture, and the things where they are in it.
        """
        rng = self.rng
        self._speckle()
        cover = Image.fromarray(self.cover)
        if self.angle:
            cover = cover.rotate(self.angle, Image.Resampling.BILINEAR)
        if rng.random() < 0.2:
            cover = cover.filter(ImageFilter.BoxBlur(rng.uniform(0.3, 0.7)))
        elif rng.random() < 0.12:
            limit = rng.randint(90, 130)
            cover = cover.point([255 if value > limit else 0 for value in range(256)])  # as by fax
        ground = Image.new("RGB", self.size, paper if edges is None else bed)
        if edges is not None:
            ImageDraw.Draw(ground).polygon(self._corners(edges), fill=paper)
        inks = Image.new("RGB", self.size, self.ink)
        pen = ImageDraw.Draw(inks)
        for box, ink in self.inks:
            pen.polygon(self._corners(box), fill=ink)
        picture = self._scan(Image.composite(inks, ground, cover))
        return picture, tuple(Thing(self.turn(thing.box), thing.words) for thing in self.things)

    def _corners(self, box: Box) -> list[tuple[float, float]]:
        left, top, right, bottom = box
        return [self.turn_point(*corner) for corner in ((left, top), (right, top), (right, bottom), (left, bottom))]

    def _speckle(self) -> None:
        """Specks of ink and of paper, and now and then the streak of a photocopier."""
        rng, (width, height) = self.rng, self.size
        generator = np.random.default_rng(rng.getrandbits(32))
        if rng.random() < 0.5:
            count = int(width * height * rng.uniform(0, 6e-4))
            down, across = generator.integers(0, height, count), generator.integers(0, width, count)
            self.cover[down, across] = generator.integers(0, 256, count)
        if rng.random() < 0.08:
            streak = self.cover[:, rng.randrange(width)]
            np.maximum(streak, rng.randint(30, 90), out=streak)

    def _scan(self, picture: Image.Image) -> Image.Image:
        """Uneven light, noise, perhaps a dark edge and JPEG artefacts."""
        rng, (width, height) = self.rng, self.size
        generator = np.random.default_rng(rng.getrandbits(32))
        shade = make_noise(generator, (height, width), 1)[..., 0]  # [H, W]
        shade *= rng.choice((rng.uniform(0.5, 3), rng.uniform(3, 9)))
        down, across = (np.linspace(-1, 1, side, dtype=np.float32) for side in (height, width))
        slopes = [rng.uniform(-14, 14) if rng.random() < 0.5 else 0.0 for _ in range(2)]
        hollow = rng.uniform(0, 10)
        down, across = slopes[0] * down - hollow * down**2, slopes[1] * across - hollow * across**2
        if rng.random() < 0.25:  # the lid was not shut
            reach = rng.uniform(1.0, 4.0) + 0.002 * min(self.size)
            dark = -rng.uniform(60, 200) * np.exp(-np.arange(max(self.size), dtype=np.float32) / reach)
            side = across if rng.random() < 0.5 else down
            side += dark[: len(side)] if rng.random() < 0.5 else dark[: len(side)][::-1]
        shade += (down + 128)[:, None]
        shade += across
        layer = Image.fromarray(shade.clip(0, 255, out=shade).astype(np.uint8))
        picture = ImageChops.add(picture, Image.merge("RGB", (layer, layer, layer)), 1, -128)
        if rng.random() < 0.4:
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=rng.randint(50, 92))
            picture = Image.open(file).convert("RGB")
        return picture


def make_paper(rng: random.Random) -> tuple[Colour, Colour]:
    """The colours of a paper and of what is printed on it."""
    tint = rng.choice(
        ((252, 252, 252), (246, 244, 240), (238, 234, 226), (244, 238, 214), (226, 234, 240), (246, 226, 226))
    )
    dark = rng.randint(15, 75)
    return jitter(rng, tint, 5), jitter(rng, (dark, dark, dark), 8)
