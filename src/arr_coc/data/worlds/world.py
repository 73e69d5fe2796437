"""The base class and registry of worlds, and the scene or example that a seed gives."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

from PIL import Image

from arr_coc.data.boxes import Box, clip_box
from arr_coc.data.example import Example, copy_frames

Size = tuple[int, int]
Split = Literal["train", "validation", "test"]

# First seeds of the splits, whose ranges never overlap.
_FIRST = {"test": 0, "validation": 10**8, "train": 10**9}


@dataclass(frozen=True)
class Thing:
    """Something in a picture: its box `(left, top, right, bottom)` in pixels, and the words that name it."""

    box: Box
    words: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question, its answer, its kind, and the boxes (in pixels) that the answer depends on.

    The first `clues` boxes only lead to the answer, the others are its own; `any_box` says whether one of those is
    enough, see [`~arr_coc.data.example.Example`].
    """

    kind: str
    text: str
    answer: str
    boxes: tuple[Box, ...] = ()
    clues: int = 0
    any_box: bool = False


@dataclass(frozen=True, eq=False)
class Scene:
    """A drawn picture, the questions about it, and everything in it.

    Args:
        picture (`PIL.Image.Image`): RGB.
        questions (`tuple[Question, ...]`): all questions with exactly one true answer.
        things (`tuple[Thing, ...]`): shapes, texts and single characters, for the dense loss of training.
    """

    picture: Image.Image
    questions: tuple[Question, ...]
    things: tuple[Thing, ...] = field(default=(), repr=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class Clip(Scene):
    """A drawn clip; its `picture` and `things` are those of its middle frame.

    Args:
        frames (`tuple[PIL.Image.Image, ...]`): RGB, all of one size, an even number.
        frame_things (`tuple[tuple[Thing, ...], ...]`): everything in each frame.
        fps (`float`, *optional*, defaults to 2.0): frames a second.
    """

    frames: tuple[Image.Image, ...] = field(repr=False)
    frame_things: tuple[tuple[Thing, ...], ...] = field(repr=False)
    fps: float = 2.0

    def copy_frames(self) -> list[Image.Image]:
        """All frames, copied."""
        return copy_frames(self.frames)


class World(ABC):
    """A deterministic generator of scenes.

    Attributes:
        kinds (`tuple[str, ...]`): the kinds of questions it asks.
        sides (`tuple[int, int]`): shortest and longest side in pixels, if the seed decides the size.
        least (`int`): shortest side in pixels of any size that is given.
        distracting (`bool`): whether all things in the picture become distractors of an example.
        moving (`bool`): whether it draws clips, not pictures.
    """

    kinds: ClassVar[tuple[str, ...]]
    sides: ClassVar[tuple[int, int]] = (128, 512)
    least: ClassVar[int] = 32
    distracting: ClassVar[bool] = True
    moving: ClassVar[bool] = False

    @abstractmethod
    def draw(self, rng: random.Random, size: Size, kind: str, varied: bool = False) -> Scene:
        """Draw a scene of a size (width, height) with at least one question of a kind."""


WorldT = TypeVar("WorldT", bound=type[World])
_WORLDS: dict[str, World] = {}


def register_world(name: str) -> Callable[[WorldT], WorldT]:
    """Class decorator that registers a world under a name."""

    def register(cls: WorldT) -> WorldT:
        if name in _WORLDS:
            raise ValueError(f"a world named {name!r} is already registered; choose another name")
        _WORLDS[name] = cls()
        return cls

    return register


def list_worlds(moving: bool = False) -> list[str]:
    """Names of all worlds of pictures; with `moving`, of those that draw clips instead.

    Example:

    ```python
    >>> from arr_coc.data.worlds import list_worlds
    >>> list_worlds()
    ['camouflage', 'crowds', 'ends', 'forms', 'lines', 'needles', 'pages', 'scenes', 'void']

    ```
    """
    return sorted(name for name, world in _WORLDS.items() if world.moving == moving)


def open_world(name: str) -> World:
    """Look up a world by its name."""
    if name not in _WORLDS:
        known = [*list_worlds(), *list_worlds(moving=True)]
        raise ValueError(f"no world is named {name!r}; there are {', '.join(known)}")
    return _WORLDS[name]


def check_kind(world: str, kind: str) -> None:
    """Raise an error if a world does not ask a kind of question."""
    kinds = open_world(world).kinds
    if kind not in kinds:
        raise ValueError(f"{world} asks no {kind!r}; it asks {', '.join(kinds)}")


def split_seed(split: Split, index: int) -> int:
    """The seed of an example in a split; no two splits share a seed.

    Example:

    ```python
    >>> from arr_coc.data.worlds import split_seed
    >>> split_seed("validation", 7)
    100000007

    ```
    """
    if split not in _FIRST:
        raise ValueError(f"`split` must be one of {', '.join(_FIRST)}, got {split!r}")
    last = {"test": 10**8, "validation": 9 * 10**8, "train": 10**15}[split]
    if not 0 <= index < last:
        raise ValueError(f"`index` must be at least 0 and below {last} for {split!r}, got {index}")
    return _FIRST[split] + index


def draw_scene(world: str, seed: int, kind: str | None = None, size: Size | None = None, varied: bool = False) -> Scene:
    """Draw the scene of a seed with all its questions; arguments as in [`make_example`]."""
    rng, size, wanted = begin_scene(world, seed, kind, size)
    return open_world(world).draw(rng, size, wanted, varied)


def begin_scene(world: str, seed: int, kind: str | None, size: Size | None) -> tuple[random.Random, Size, str]:
    """What a scene is drawn from: its random numbers, its size, and its kind."""
    chosen = open_world(world)
    rng = random.Random(f"{world} {seed}")
    drawn = (rng.randint(*chosen.sides), rng.randint(*chosen.sides))
    width, height = drawn if size is None else size
    # neither side more than twice the other
    width, height = max(width, (height + 1) // 2), max(height, (width + 1) // 2)
    if min(width, height) < chosen.least:
        raise ValueError(f"{world} must have sides of at least {chosen.least} pixels, got {width}x{height}")
    wanted = rng.choice(chosen.kinds)
    if kind is not None:
        check_kind(world, kind)
        wanted = kind
    return rng, (width, height), wanted


def make_example(
    world: str, seed: int, kind: str | None = None, size: Size | None = None, varied: bool = False
) -> Example:
    """Make the example of a seed: the same picture, question and answer on every call. It keeps its picture in memory.

    Args:
        world (`str`): see [`list_worlds`]; `"clips"` gives clips.
        seed (`int`): see [`split_seed`].
        kind (`str`, *optional*): one kind of questions; by default the seed decides.
        size (`tuple[int, int]`, *optional*): width and height in pixels; by default the seed decides, within
            the world's `sides`.
        varied (`bool`, *optional*, defaults to `False`): also use DejaVu fonts if matplotlib is installed; the example
            then depends on the installed fonts.

    Returns:
        [`~arr_coc.data.example.Example`]: in a `distracting` world its `distractors` are the boxes of all things.

    Example:

    ```python
    >>> from arr_coc.data.worlds import make_example
    >>> example = make_example("scenes", 1, kind="color")
    >>> example.question, example.answer, example.id
    ('what color is the circle?', 'orange', 'scenes#1')

    ```
    """
    scene = draw_scene(world, seed, kind, size, varied)
    rng = random.Random(f"{world} {seed} question")
    wanted = [question for question in scene.questions if kind in (None, question.kind)]
    kinds = sorted({question.kind for question in wanted})
    asked_kind = rng.choice(kinds)
    question = rng.choice([question for question in wanted if question.kind == asked_kind])
    example = ask_scene(scene, question, f"{world}#{seed}")
    if not open_world(world).distracting:
        return example
    width, height = scene.picture.size
    boxes = (
        clip_box((left / width, top / height, right / width, bottom / height))
        for left, top, right, bottom in (thing.box for thing in scene.things)
    )
    return replace(example, distractors=tuple(box for box in boxes if box is not None))


def ask_scene(scene: Scene, question: Question, name: str) -> Example:
    """An example of one question about a scene or a clip; boxes become shares of the picture's sides."""
    width, height = scene.picture.size
    boxes = tuple(
        (max(0.0, left / width), max(0.0, top / height), min(1.0, right / width), min(1.0, bottom / height))
        for left, top, right, bottom in question.boxes
    )
    example = Example(
        question.text, scene.picture.copy, name, (question.answer,), boxes,
        kind=question.kind, clues=question.clues, any_box=question.any_box,
    )  # fmt: skip
    return replace(example, open=scene.copy_frames, fps=scene.fps) if isinstance(scene, Clip) else example
