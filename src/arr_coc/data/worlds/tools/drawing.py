"""Drawing tools of the worlds: colours, shapes, fonts, backgrounds, and a canvas that avoids overlaps."""

from __future__ import annotations

import importlib.util
import io
import math
import random
import re
import string
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.world import Size, Thing

Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

COLOURS: dict[str, Colour] = {
    "red": (215, 35, 35),
    "green": (35, 160, 55),
    "blue": (45, 75, 220),
    "yellow": (235, 215, 40),
    "purple": (144, 42, 186),
    "orange": (242, 135, 25),
    "cyan": (40, 200, 215),
    "pink": (245, 130, 185),
    "gray": (130, 130, 130),
    "white": (245, 245, 245),
    "black": (18, 18, 18),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond")
CHARACTERS = string.ascii_uppercase + string.digits
# Fonts of matplotlib that varied pictures may use; its other fonts are held out for tests with unseen fonts.
_EXTRA_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "DejaVuSans-Oblique")


@cache
def extra_fonts() -> tuple[str, ...]:
    """Paths of the extra fonts; empty without matplotlib."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return ()
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    return tuple(str(path) for name in _EXTRA_FONTS if (path := folder / f"{name}.ttf").exists())


@cache
def _load_font(name: str, size: int) -> Font:
    return ImageFont.truetype(name, size) if name else ImageFont.load_default(size)


def choose_font(rng: random.Random, size: int, varied: bool) -> Font:
    """Pillow's default font; if `varied`, half of the time an extra font if matplotlib is installed."""
    extra = extra_fonts() if varied else ()
    return _load_font(rng.choice(extra) if extra and rng.random() < 0.5 else "", size)


def jitter(rng: random.Random, colour: Colour, amount: int = 16) -> Colour:
    """A colour near another."""
    red, green, blue = (min(255, max(0, value + rng.randint(-amount, amount))) for value in colour)
    return red, green, blue


def jitter_named(rng: random.Random, name: str, ground: Colour | None = None) -> Colour:
    """A shade clearly closest to its named colour and visible on a ground; gray, white and black stay neutral."""
    for _ in range(40):
        if name in ("gray", "white", "black"):
            low, high = {"gray": (-28, 28), "white": (-22, 10), "black": (-18, 28)}[name]
            shift = rng.randint(low, high)
            red, green, blue = (min(255, max(0, value + shift)) for value in COLOURS[name])
            shade: Colour = (red, green, blue)
        else:
            shade = jitter(rng, COLOURS[name], 36)
        nearest = min(distance(shade, colour) for other, colour in COLOURS.items() if other != name)
        clear = distance(shade, COLOURS[name]) < 0.5 * nearest
        if clear and (ground is None or distance(shade, ground) > 65):
            return shade
    return COLOURS[name]


def lightness(colour: Colour) -> float:
    """How bright a colour looks, 0 to 255."""
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def distance(first: Colour, second: Colour) -> float:
    """How different two colours look, roughly."""
    return math.dist(first, second)


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corners of a polygon shape."""
    if shape == "square":
        return [(x - radius, y - radius), (x + radius, y - radius), (x + radius, y + radius), (x - radius, y + radius)]
    if shape == "diamond":
        return [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
    if shape == "triangle":
        return [(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)]
    if shape == "star":
        corners = []
        for corner in range(10):
            angle, far = -math.pi / 2 + corner * math.pi / 5, radius if corner % 2 == 0 else radius * 0.42
            corners.append((x + far * math.cos(angle), y + far * math.sin(angle)))
        return corners
    arm = radius / 2.7  # a cross
    return [
        *[(x - arm, y - radius), (x + arm, y - radius), (x + arm, y - arm), (x + radius, y - arm)],
        *[(x + radius, y + arm), (x + arm, y + arm), (x + arm, y + radius), (x - arm, y + radius)],
        *[(x - arm, y + arm), (x - radius, y + arm), (x - radius, y - arm), (x - arm, y - arm)],
    ]


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, colour: Colour) -> None:
    """Draw a filled shape centred at (x, y)."""
    around = [x - radius, y - radius, x + radius, y + radius]
    if shape == "circle":
        pen.ellipse(around, fill=colour)
    elif shape == "ring":
        pen.ellipse(around, outline=colour, width=max(2, round(radius * 0.32)))
    else:
        pen.polygon(outline(shape, x, y, radius), fill=colour)


class Canvas:
    """A picture being drawn; it remembers occupied boxes, so that nothing overlaps.

    Args:
        rng (`random.Random`): makes all random choices.
        size (`tuple[int, int]`): width and height.
        ground (`PIL.Image.Image`): the background.
        ground_colour (`tuple[int, int, int]`): its main colour, from which things stand out.
        varied (`bool`, *optional*, defaults to `False`): also use the extra fonts, not only Pillow's default.
        scale (`int`, *optional*): draw this many times larger and shrink at the end, for soft edges; by default 1 or 2.
    """

    def __init__(
        self,
        rng: random.Random,
        size: Size,
        ground: Image.Image,
        ground_colour: Colour,
        varied: bool = False,
        scale: int | None = None,
    ) -> None:
        self.rng, self.size, self.ground_colour, self.varied = rng, size, ground_colour, varied
        self.scale = rng.choice((1, 2, 2)) if scale is None else scale
        large = (size[0] * self.scale, size[1] * self.scale)
        self.image = ground.resize(large, Image.Resampling.NEAREST) if self.scale > 1 else ground
        self.pen = ImageDraw.Draw(self.image)
        self.taken: list[Box] = []
        self.things: list[Thing] = []
        self._measured: dict[tuple[str, int], Box] = {}

    def place(self, width: float, height: float, gap: float = 5, tries: int = 60) -> tuple[float, float] | None:
        """Occupy a free box and give its top left corner, or None if there is no room."""
        room_x, room_y = self.size[0] - width - 2, self.size[1] - height - 2
        if room_x < 2 or room_y < 2:
            return None
        for _ in range(tries):
            x, y = self.rng.uniform(2, room_x), self.rng.uniform(2, room_y)
            if all(
                x + width + gap < left or right + gap < x or y + height + gap < top or bottom + gap < y
                for left, top, right, bottom in self.taken
            ):
                self.taken.append((x, y, x + width, y + height))
                return x, y
        return None

    def add_shape(self, shape: str, colour: str, radius: float) -> Box | None:
        """Draw a shape of a named colour at a free place."""
        corner = self.place(2 * radius, 2 * radius)
        if corner is None:
            return None
        x, y = corner[0] + radius, corner[1] + radius
        ink = jitter_named(self.rng, colour, self.ground_colour)
        draw_shape(self.pen, shape, x * self.scale, y * self.scale, radius * self.scale, ink)
        box = self.taken[-1]
        self.things.append(Thing(box, (shape, colour)))
        return box

    def add_text(self, text: str, colour: str, ink: Colour, height: int) -> Box | None:
        """Write a text at a free place."""
        font = choose_font(self.rng, height * self.scale, self.varied)
        width, height_drawn = self.measure(text, font)
        corner = self.place(width, height_drawn)
        return None if corner is None else self.write(text, *corner, ink, font, ("text", colour))

    def measure(self, text: str, font: Font) -> tuple[float, float]:
        """Width and height of a text."""
        left, top, right, bottom = self._bounds(text, font)
        return right - left, bottom - top

    def _bounds(self, text: str, font: Font) -> Box:
        """Where a text at (0, 0) would lie; remembered, as texts are measured before they are written."""
        known = self._measured.get((text, id(font)))
        if known is None:
            left, top, right, bottom = self.pen.textbbox((0, 0), text, font=font)
            known = (left / self.scale, top / self.scale, right / self.scale, bottom / self.scale)
            self._measured[text, id(font)] = known
        return known

    def write(
        self,
        text: str,
        x: float,
        y: float,
        ink: Colour,
        font: Font,
        words: tuple[str, ...] = ("text",),
        line: bool = False,
    ) -> Box:
        """Write a text with its top left corner at (x, y); each capital, digit and other word also becomes a thing.

        With `line`, y is the top of the line, not of this text, so that texts side by side share a baseline.
        """
        left, top, right, bottom = self._bounds(text, font)
        y = y if line else y - top
        x -= left
        box = (x + left, y + top, x + right, y + bottom)
        self.pen.text((x * self.scale, y * self.scale), text, fill=ink, font=font)
        self.things.append(Thing(box, words))

        @cache  # where a character ends, the next begins
        def along(index: int) -> float:
            return x + font.getlength(text[:index]) / self.scale

        for piece in re.finditer(r"[A-Z0-9](?![a-z])|[A-Za-z]+", text):
            begin, end = piece.span()
            self.things.append(Thing((along(begin), box[1], along(end), box[3]), (_name_of(piece.group()),)))
        return box

    def finish(self) -> Image.Image:
        """The picture at its final size, sometimes with JPEG artefacts."""
        picture = self.image
        if self.scale > 1:
            soft = self.rng.random() < (0.15 if self.varied else 0.5)  # soft edges take longest of all
            picture = picture.resize(self.size, Image.Resampling.BICUBIC) if soft else picture.reduce(self.scale)
        if self.rng.random() < 0.25:
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=self.rng.randint(55, 95))
            picture = Image.open(file).convert("RGB")
        return picture


@cache
def _noise_table() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)


def make_noise(generator: np.random.Generator, size: tuple[int, int], channels: int) -> np.ndarray:
    """Normal noise `[H, W, channels]`, cut from a table, because fresh noise would take most of a picture's time."""
    count = size[0] * size[1] * channels
    table = _noise_table()
    found = table[int(generator.integers(0, len(table))) :]
    if count > len(found):
        found = np.concatenate((found, np.resize(table, count - len(found))))
    return found[:count].reshape(*size, channels).copy()  # the table stays as it is


def make_ground(rng: random.Random, size: Size, colour: Colour | None = None) -> tuple[Image.Image, Colour]:
    """A flat, graded or noisy background and its main colour."""
    free = colour is None
    if colour is None:
        base = rng.choice((rng.randint(0, 60), rng.randint(60, 200), rng.randint(200, 255)))
        colour = jitter(rng, (base, base, base), rng.choice((4, 30)))
        if rng.random() < 0.25:
            colour = (255, 255, 255)
    width, height = size
    kind = rng.choice(("flat", "flat", "graded", "noisy"))
    if kind == "flat":
        return Image.new("RGB", size, colour), colour
    generator = np.random.default_rng(rng.getrandbits(32))
    paint = np.empty((height, width, 3), dtype=np.float32)
    paint[:] = colour
    if kind == "graded":
        steep = 20 if free else 6
        slope = generator.uniform(-steep, steep, size=(2, 3)).astype(np.float32)
        down, across = (np.linspace(-1, 1, side, dtype=np.float32) for side in (height, width))
        paint += down[:, None, None] * slope[0] + across[None, :, None] * slope[1]
    else:
        paint += make_noise(generator, (height, width), rng.choice((1, 3))) * rng.uniform(3, 11)
    return Image.fromarray(paint.clip(0, 255).astype(np.uint8)), colour


def _name_of(piece: str) -> str:
    """The name of a piece of text: a single character as it is, a word in lower case."""
    return piece if len(piece) == 1 else piece.lower()


def random_text(rng: random.Random, most: int = 6) -> str:
    """Two to `most` capitals or digits."""
    letters = string.ascii_uppercase if rng.random() < 0.6 else CHARACTERS
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, most)))
