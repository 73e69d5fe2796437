"""The world `clips`: short clips in which things move, come, go and blink, cameras pan, and scenes are cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from arr_coc.data.boxes import Box
from arr_coc.data.worlds.pages import Pages
from arr_coc.data.worlds.tools.drawing import SHAPES, random_text
from arr_coc.data.worlds.tools.moving import Actor, Corner, Reel, finish_clip, shift
from arr_coc.data.worlds.tools.wording import put
from arr_coc.data.worlds.world import Clip, Question, Size, Thing, World, begin_scene, register_world

# way -> (axis, sign)
WAYS = {"left": (0, -1), "right": (0, 1), "up": (1, -1), "down": (1, 1)}
LEAST_FRAMES, MOST_FRAMES = 4, 16
_MOST_QUESTIONS = 5
_MOST_BLINKS = 4
_ORDER = ("first", "second", "third")


@register_world("clips")
class Clips(World):
    """Clips of 4 to 16 frames, always an even number: Qwen reads frames in pairs."""

    kinds = ("clip_direction", "clip_appears", "clip_first", "clip_blink", "clip_pan", "clip_cut")
    sides = (128, 256)
    least = 96
    distracting = False  # what distracts in one frame may be what is asked for in the next
    moving = True

    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False, frames: int | None = None) -> Clip:
        """Draw a clip of a number of frames; by default the random numbers decide."""
        count = 2 * rng.randint(LEAST_FRAMES // 2, MOST_FRAMES // 2)
        count = count if frames is None else frames
        while True:
            clip = _DRAW[kind](rng, size, count, varied)
            if clip is not None:
                return clip


def draw_clip(
    seed: int, kind: str | None = None, size: Size | None = None, frames: int | None = None, varied: bool = False
) -> Clip:
    """Draw the clip of a seed, with a given number of frames.

    Args:
        seed (`int`): see [`~arr_coc.data.worlds.split_seed`].
        kind (`str`, *optional*): of at least one of its questions; by default the seed decides.
        size (`tuple[int, int]`, *optional*): width and height in pixels; by default the seed decides.
        frames (`int`, *optional*): an even number from 4 to 16; by default the seed decides.
        varied (`bool`, *optional*, defaults to `False`): also use DejaVu fonts if matplotlib is installed.

    Example:

    ```python
    >>> from arr_coc.data.worlds import draw_clip
    >>> clip = draw_clip(1, "clip_direction", (192, 128), frames=8)
    >>> len(clip.frames), clip.picture.size, clip.fps
    (8, (192, 128), 2.0)

    ```
    """
    if frames is not None and (frames % 2 or not LEAST_FRAMES <= frames <= MOST_FRAMES):
        raise ValueError(f"`frames` must be even and from {LEAST_FRAMES} to {MOST_FRAMES}, got {frames}")
    rng, size, kind = begin_scene("clips", seed, kind, size)
    return Clips().draw(rng, size, kind, varied, frames)


def _names(rng: random.Random, reel: Reel, count: int) -> list[tuple[str, str]]:
    """Different shapes, each with any colour."""
    return [(shape, rng.choice(reel.colours)) for shape in rng.sample(SHAPES, count)]


def _name(actor: Actor) -> str:
    return f"{actor.color} {actor.name}"


def _all_boxes(actors: Sequence[Actor]) -> tuple[Box, ...]:
    return tuple(box for actor in actors for box in actor.boxes)


def _ask_colors(rng: random.Random, actors: Sequence[Actor]) -> list[Question]:
    return [
        Question("color", put(rng, "color", shape=actor.name), actor.color, actor.boxes, any_box=True)
        for actor in actors
    ]


def _finish(rng: random.Random, reel: Reel, asked: Sequence[Question], others: Sequence[Question]) -> Clip:
    """The clip of one scene, with some of its questions."""
    frames, things = reel.shoot()
    return finish_clip(rng, frames, things, _choose(rng, asked, others))


def _choose(rng: random.Random, asked: Sequence[Question], others: Sequence[Question]) -> list[Question]:
    """At most five questions: up to four of those asked for, and what else there is room for."""
    kept = rng.sample(asked, min(len(asked), _MOST_QUESTIONS - bool(others)))
    return kept + rng.sample(others, min(len(others), _MOST_QUESTIONS - len(kept)))


def _move(rng: random.Random, way: str, size: Size, count: int) -> list[Corner]:
    """Steps of a thing that moves one way; it may begin later, or end sooner, than the clip."""
    axis, sign = WAYS[way]
    travel = size[axis] * rng.uniform(0.3 if count < 8 else 0.2, 0.5)
    begin, end = rng.choice((0.0, 0.0, 0.25)), rng.choice((1.0, 1.0, 0.75))
    steps: list[Corner] = []
    for number in range(count):
        done = min(1.0, max(0.0, (number / (count - 1) - begin) / (end - begin)))
        along = sign * round(done * travel)
        steps.append((along, 0) if axis == 0 else (0, along))
    return steps


def _draw_direction(rng: random.Random, size: Size, count: int, varied: bool) -> Clip | None:
    """One to three things, of which at least one moves, each its own way."""
    reel = Reel(rng, size, count, varied)
    names = _names(rng, reel, rng.choice((1, 2, 2, 3, 3)))
    ways = rng.sample(list(WAYS), rng.randint(1, len(names)))
    moved: dict[str, str] = {}
    for place, (shape, color) in enumerate(names):
        way = ways[place] if place < len(ways) else ""
        path = _move(rng, way, size, count) if way else [(0, 0)] * count
        if reel.add_shape(shape, color, path):
            moved[shape] = way
        elif not place:
            return None
    asked, still = [], []
    for actor in reel.actors:
        way = moved[actor.name]
        if way:
            asked.append(Question("clip_direction", put(rng, "clip_direction", shape=actor.name), way, actor.boxes))
            asked.append(Question("clip_direction", put(rng, "clip_mover", way=way), _name(actor), actor.boxes))
        else:
            still.append(actor)
    if len(still) == 1:
        asked.append(Question("clip_direction", put(rng, "clip_still"), _name(still[0]), still[0].boxes))
    return _finish(rng, reel, asked, _ask_colors(rng, reel.actors))


def _draw_appears(rng: random.Random, size: Size, count: int, varied: bool) -> Clip | None:
    """Signs of which one appears, or one disappears, or both; others are always there."""
    reel = Reel(rng, size, count, varied)
    roles = rng.choice((["appears"], ["appears"], ["disappears"], ["appears", "disappears"]))
    stay = rng.randint(2 - len(roles), 2)
    roles = roles + ["stays"] * stay
    if len(reel.colours) < len(roles):
        return None
    plate, most = rng.random() < 0.5, 5 if min(size) > 150 else 4
    played: dict[str, list[Actor]] = {"appears": [], "disappears": [], "stays": []}
    for role, color in zip(roles, rng.sample(reel.colours, len(roles)), strict=True):
        turn = rng.randint(2, count - 2)  # before and after it, two frames at least
        there = [role == "stays" or (number >= turn) == (role == "appears") for number in range(count)]
        text = random_text(rng, most)
        if all(actor.name != text for actor in reel.actors) and reel.add_sign(
            text, color, [(0, 0) if here else None for here in there], plate
        ):
            played[role].append(reel.actors[-1])
    asked = [
        Question("clip_appears", put(rng, f"clip_{role}"), actors[0].name, actors[0].boxes, any_box=True)
        for role, actors in played.items()
        if len(actors) == 1
    ]
    if len(reel.actors) < 2 or len(played["stays"]) == len(reel.actors):
        return None
    others = [
        Question("read", put(rng, "read", color=actor.color), actor.name, actor.boxes, any_box=True)
        for actor in reel.actors
    ]
    return _finish(rng, reel, asked, others)


def _draw_first(rng: random.Random, size: Size, count: int, varied: bool) -> Clip | None:
    """Things that come one after the other, each in another pair of frames, and stay."""
    reel = Reel(rng, size, count, varied)
    wanted = rng.randint(2, min(4, count // 2))
    turns = [min(count - 2, 2 * pair + rng.randint(0, 1)) for pair in sorted(rng.sample(range(count // 2), wanted))]
    for (shape, color), turn in zip(_names(rng, reel, wanted), turns, strict=True):
        reel.add_shape(shape, color, [(0, 0) if number >= turn else None for number in range(count)])
    if len(reel.actors) < 2:
        return None
    actors, boxes = reel.actors, _all_boxes(reel.actors)
    before = rng.randrange(len(actors) - 1)
    told = {"color": actors[before].color, "shape": actors[before].name}
    answers = [
        (put(rng, "clip_first"), actors[0]),
        (put(rng, "clip_last"), actors[-1]),
        (put(rng, "clip_next", **told), actors[before + 1]),
    ]
    if len(actors) > 2:
        answers.append((put(rng, "clip_second"), actors[1]))
    asked = [Question("clip_first", text, _name(actor), boxes) for text, actor in answers]
    return _finish(rng, reel, asked, _ask_colors(rng, actors))


def _blinking(rng: random.Random, count: int, blinks: int) -> list[bool]:
    """In which frames a thing shows that is gone `blinks` times; often it changes only between pairs of frames."""
    phases = 2 * blinks + 1
    unit = 2 if count // 2 >= phases and rng.random() < 0.5 else 1
    cuts = sorted(rng.sample(range(1, count // unit), phases - 1))
    return [sum(number // unit >= cut for cut in cuts) % 2 == 0 for number in range(count)]


def _draw_blink(rng: random.Random, size: Size, count: int, varied: bool) -> Clip | None:
    """One to three shapes that are gone for a while 0 to 4 times, as often as fits."""
    reel = Reel(rng, size, count, varied)
    most = min(_MOST_BLINKS, (count - 1) // 2)
    asked = []
    for shape, color in _names(rng, reel, rng.choice((1, 2, 2, 3, 3))):
        blinks = rng.randint(0, most)
        path = [(0, 0) if shown else None for shown in _blinking(rng, count, blinks)]
        if reel.add_shape(shape, color, path):
            text = put(rng, "clip_blink", shape=shape)
            asked.append(Question("clip_blink", text, str(blinks), reel.actors[-1].boxes))
    return _finish(rng, reel, asked, _ask_colors(rng, reel.actors)) if asked else None


def _draw_pan(rng: random.Random, size: Size, count: int, varied: bool) -> Clip | None:
    """A camera that moves over a page two or three times as long, or as wide, as the frame."""
    width, height = size
    ratio = rng.uniform(2, max(2.0, min(3.0, 1 + (count - 1) / 3)))  # so slow that all is seen for two frames
    down = rng.random() < 0.75
    whole = (width, round(height * ratio)) if down else (round(width * ratio), height)
    page = Pages().draw(rng, whole, rng.choice(Pages.kinds), varied)
    written = max(thing.box[2 + down] for thing in page.things)
    room = round(min(whole[down], max(1.5 * size[down], written + 8))) - size[down]
    rest = rng.randint(0, 1) if count >= 8 else 0  # the camera may rest at both ends
    stops = [round(room * min(1.0, max(0.0, (number - rest) / (count - 1 - 2 * rest)))) for number in range(count)]
    if rng.random() < 0.3:
        stops.reverse()
    windows = [(0, stop, width, stop + height) if down else (stop, 0, stop + width, height) for stop in stops]
    asked = []
    for question in page.questions:
        seen = [
            [shift(box, -window[0], -window[1]) for window in windows if _inside(box, window)] for box in question.boxes
        ]
        if all(len(boxes) >= 2 for boxes in seen):
            own = dict.fromkeys(seen[-1])  # where the answer is in the course of the clip
            clues = [box for box in dict.fromkeys(box for boxes in seen for box in boxes) if box not in own]
            boxes = (*clues, *own)
            asked.append(Question("clip_pan", question.text, question.answer, boxes, len(clues), any_box=True))
    if len(asked) < 2:
        return None
    frames = [page.picture.crop(window) for window in windows]
    things = [_things_within(page.things, window) for window in windows]
    return finish_clip(rng, frames, things, _choose(rng, asked, ()))


def _inside(box: Box, window: tuple[int, int, int, int]) -> bool:
    return window[0] <= box[0] and window[1] <= box[1] and box[2] <= window[2] and box[3] <= window[3]


def _things_within(things: Sequence[Thing], window: tuple[int, int, int, int]) -> tuple[Thing, ...]:
    """The things of which at least half is within a window, cut to it."""
    found = []
    for thing in things:
        left, top, right, bottom = thing.box
        cut = (max(left, window[0]), max(top, window[1]), min(right, window[2]), min(bottom, window[3]))
        wide, high = cut[2] - cut[0], cut[3] - cut[1]
        if wide > 0 and high > 0 and 2 * wide * high >= (right - left) * (bottom - top):
            found.append(Thing(shift(cut, -window[0], -window[1]), thing.words))
    return tuple(found)


def _draw_cut(rng: random.Random, size: Size, count: int, varied: bool) -> Clip | None:
    """One to three scenes, one after the other; a shape may be in several of them, in other colours."""
    number = min(count // 2, rng.choices((1, 2, 3), (2, 5, 3))[0])
    edges = [0, *_cut_places(rng, count, number), count]
    shared = rng.choice(SHAPES)
    reels: list[Reel] = []
    for begin, end in pairwise(edges):
        reel = Reel(rng, size, end - begin, varied, reels[-1].colour if reels else None)
        names = _names(rng, reel, rng.randint(1, 3))
        if rng.random() < 0.7 and all(shape != shared for shape, _ in names):
            names[0] = (shared, rng.choice(reel.colours))
        moving = rng.random() < 0.4
        for place, (shape, color) in enumerate(names):
            way = rng.choice(list(WAYS)) if moving and not place else ""
            path = _move(rng, way, size, end - begin) if way else [(0, 0)] * (end - begin)
            reel.add_shape(shape, color, path)
        if not reel.actors:
            return None
        reels.append(reel)
    everything = tuple(dict.fromkeys(box for reel in reels for box in _all_boxes(reel.actors)))
    asked = [Question("clip_cut", put(rng, "clip_scenes"), str(number), everything)]
    others = []
    for place, reel in enumerate(reels):
        for actor in reel.actors:
            if number == 1:
                others += _ask_colors(rng, [actor])
                continue
            kind = ("clip_before", "clip_after")[place] if number == 2 else "clip_scene"
            text = put(rng, kind, shape=actor.name, place=_ORDER[place])
            asked.append(Question("clip_cut", text, actor.color, actor.boxes, any_box=True))
    shot = [reel.shoot() for reel in reels]
    frames = [frame for frames, _ in shot for frame in frames]
    things = [found for _, things in shot for found in things]
    return finish_clip(rng, frames, things, _choose(rng, asked, others))


def _cut_places(rng: random.Random, count: int, scenes: int) -> list[int]:
    """The first frames of the second and third scene; each scene has two frames at least."""
    spare = sorted(rng.randint(0, count - 2 * scenes) for _ in range(scenes - 1))
    return [2 * (place + 1) + extra for place, extra in enumerate(spare)]


_DRAW: dict[str, Callable[[random.Random, Size, int, bool], Clip | None]] = {
    "clip_direction": _draw_direction,
    "clip_appears": _draw_appears,
    "clip_first": _draw_first,
    "clip_blink": _draw_blink,
    "clip_pan": _draw_pan,
    "clip_cut": _draw_cut,
}
