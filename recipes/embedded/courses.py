"""What is drawn while training: kinds of pictures, how often, and of which sizes, in tokens of 32 pixels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image, ImageEnhance, ImageOps

from arr_coc.data.boxes import Box
from arr_coc.data.coco import Photo

Grid = tuple[int, int]
Kind = tuple[str, str]


def one_frame(rng: random.Random) -> int:
    """A picture."""
    return 1


class Part(NamedTuple):
    """A share of the batches: its kinds with their weights, a grid for a batch as training goes on (0 to 1), frames."""

    share: float
    kinds: dict[Kind, int]
    grid: Callable[[random.Random, float], Grid]
    frames: Callable[[random.Random], int] = one_frame


def is_photos(part: Part) -> bool:
    """Whether a part needs photographs."""
    return any(world == "photos" for world, _ in part.kinds)


SCENES: dict[Kind, int] = {
    ("scenes", "color"): 7,
    ("scenes", "count_shape"): 11,
    ("scenes", "count_color"): 9,
    ("scenes", "relation"): 12,
    ("scenes", "read"): 18,
    ("scenes", "unusual"): 10,
    ("scenes", "overview"): 12,
    ("camouflage", "camouflage"): 12,
    ("void", "void_count"): 4,
    ("void", "void_read"): 8,
}
# What is forgotten first, or was least sure, is rehearsed most; a scene answers questions of its other kinds too.
REHEARSED = SCENES | {
    ("scenes", "color"): 4,
    ("scenes", "count_shape"): 14,
    ("scenes", "count_color"): 20,
    ("scenes", "relation"): 8,
    ("scenes", "unusual"): 7,
    ("scenes", "overview"): 8,
    ("void", "void_count"): 8,
    ("void", "void_read"): 16,
}
PAGES: dict[Kind, int] = {
    ("pages", "page_value"): 5,
    ("pages", "page_cell"): 4,
    ("pages", "page_title"): 2,
    ("pages", "page_footnote"): 3,
}
NEEDLES: dict[Kind, int] = {("needles", "needle"): 1}
PHOTOS: dict[Kind, int] = {
    ("photos", "presence"): 6,
    ("photos", "photo_count"): 2,
    ("photos", "photo_relation"): 1,
    ("photos", "presence_pope"): 0,  # measured alone; trained on as one of the wordings of presence
}
WAYS: dict[Kind, int] = {("ends", "two_ends"): 3, ("lines", "long_line"): 4, ("crowds", "any"): 2}
FORMS: dict[Kind, int] = {("forms", "form_value"): 1}
CLIPS: dict[Kind, int] = {
    ("clips", "clip_direction"): 2,
    ("clips", "clip_appears"): 3,
    ("clips", "clip_first"): 2,
    ("clips", "clip_blink"): 3,
    ("clips", "clip_pan"): 4,
    ("clips", "clip_cut"): 2,
}


def _sides(rng: random.Random, least: int, most: int, power: float) -> Grid:
    """Two sides, at most about twice as long as wide; the larger the power, the smaller they are."""
    while True:
        rows, columns = (min(most, least + int((most - least + 1) * rng.random() ** power)) for _ in range(2))
        if max(rows, columns) <= 2.25 * min(rows, columns):
            return rows, columns


def scene_grid(rng: random.Random, done: float) -> Grid:
    """128 to 512 pixels; half of them small: they show as much and cost less."""
    return _sides(rng, 4, 16, 2.2 if rng.random() < 0.5 else 0.8)


def page_grid(rng: random.Random, done: float) -> Grid:
    """192 to 512 pixels at first, up to 1024 in the end, mostly less."""
    return _sides(rng, 6, 16 + round(16 * min(1.0, 2 * done)), 1.4)


def needle_grid(rng: random.Random, done: float) -> Grid:
    """384 to 640 pixels at first, up to 1024 later; in the second half some of 1280 to 2048."""
    if done > 0.5 and rng.random() < 0.15:
        return _sides(rng, 40, 64, 0.5)
    return _sides(rng, 12, 20 + round(12 * min(1.0, 3 * done)), 0.7)


def photo_grid(rng: random.Random, done: float) -> Grid:
    """192 pixels, as the photographs are, or enlarged: to 320, now and then to 640, as people's own are larger."""
    side = rng.choices((6, rng.randint(7, 10), rng.randint(11, 20)), (50, 32, 18))[0]
    return side, side


def way_grid(rng: random.Random, done: float) -> Grid:
    """256 to 1024 pixels, mostly less."""
    return _sides(rng, 8, 32, 1.5)


def form_grid(rng: random.Random, done: float) -> Grid:
    """384 to 640 pixels high at first, up to 1216 later; upright."""
    rows = rng.randint(12, 20 + round(18 * min(1.0, 2 * done)))
    return rows, max(12, round(rows * rng.uniform(0.62, 0.85)))


def clip_grid(rng: random.Random, done: float) -> Grid:
    """128 to 256 pixels."""
    return _sides(rng, 4, 8, 1.0)


def clip_frames(rng: random.Random) -> int:
    """4 to 16, in pairs."""
    return rng.choice((4, 6, 8, 8, 10, 12, 14, 16))


COURSES: dict[str, tuple[Part, ...]] = {
    "first": (
        Part(0.58, SCENES, scene_grid),
        Part(0.14, WAYS, way_grid),
        Part(0.08, PAGES, page_grid),
        Part(0.10, PHOTOS, photo_grid),
        Part(0.10, CLIPS, clip_grid, clip_frames),
    ),
    "all": (
        Part(0.24, REHEARSED, scene_grid),
        Part(0.12, WAYS, way_grid),
        Part(0.15, PAGES, page_grid),
        Part(0.12, FORMS, form_grid),
        Part(0.06, NEEDLES, needle_grid),
        Part(0.17, PHOTOS, photo_grid),
        Part(0.14, CLIPS, clip_grid, clip_frames),
    ),
}


def augment(photo: Photo, rng: random.Random) -> tuple[Photo, Image.Image]:
    """A part of a photograph, perhaps mirrored, in other light; what was cut through is not asked for."""
    with Image.open(photo.path) as file:
        picture = file.convert("RGB")
    width, height = picture.size
    scale = 1.0 if rng.random() < 0.3 else rng.uniform(0.5, 1.0)
    across, down = (max(1, round(side * scale * rng.uniform(0.88, 1.0))) for side in (width, height))
    left, top = rng.randint(0, width - across), rng.randint(0, height - down)
    mirrored = rng.random() < 0.5
    things, cut = [], []
    crowds = len(photo.things)
    for number, (name, box) in enumerate((*photo.things, *photo.unclear)):
        shown = (max(0.0, box[0] - left), max(0.0, box[1] - top),
                 min(float(across), box[2] - left), min(float(down), box[3] - top))  # fmt: skip
        area = max(0.0, shown[2] - shown[0]) * max(0.0, shown[3] - shown[1])
        kept: Box = (across - shown[2], shown[1], across - shown[0], shown[3]) if mirrored else shown
        if number < crowds and area >= 0.5 * (box[2] - box[0]) * (box[3] - box[1]):
            things.append((name, kept))
        elif area:
            cut.append((name, kept))
    picture = picture.crop((left, top, left + across, top + down))
    picture = ImageOps.mirror(picture) if mirrored else picture
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        if rng.random() < 0.5:
            picture = change(picture).enhance(rng.uniform(0.6, 1.4))
    unclear = photo.crowds | {name for name, _ in cut}
    clear = tuple(thing for thing in things if thing[0] not in unclear or thing[0] in photo.crowds)
    doubtful = (*cut, *(thing for thing in things if thing not in clear))
    return Photo(photo.path, (across, down), clear, unclear, doubtful), picture


def mosaic(photos: list[Photo], rng: random.Random) -> tuple[Photo, Image.Image]:
    """Four photographs in one, each changed by itself: thousands of them become millions."""
    tile = 160
    middle = (rng.randint(120, 200), rng.randint(120, 200))
    whole = Image.new("RGB", (2 * tile, 2 * tile))
    things: list[tuple[str, Box]] = []
    unclear: list[tuple[str, Box]] = []
    crowds: set[str] = set()
    for place in range(4):
        part, picture = augment(rng.choice(photos), rng)
        left, top = middle[0] * (place % 2), middle[1] * (place // 2)
        size = (2 * tile - left if left else middle[0], 2 * tile - top if top else middle[1])
        whole.paste(picture.resize(size, Image.Resampling.BILINEAR), (left, top))
        across, down = size[0] / part.size[0], size[1] / part.size[1]
        for found, boxes in ((things, part.things), (unclear, part.unclear)):
            found += [
                (name, (left + box[0] * across, top + box[1] * down, left + box[2] * across, top + box[3] * down))
                for name, box in boxes
            ]
        crowds |= part.crowds
    return Photo(photos[0].path, whole.size, tuple(things), frozenset(crowds), tuple(unclear)), whole
