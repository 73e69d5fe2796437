"""What `--data` names: worlds, folders in COCO format, JSON lines of expressions or of gaze."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from arr_coc.data.training_examples import (
    Shown,
    coco_examples,
    expression_examples,
    gaze_examples,
    open_lines,
    world_examples,
)
from arr_coc.data.worlds import list_worlds
from arr_coc.data.worlds.world import Split, check_kind

# Few sizes make full batches; in pixels, whole tokens of 32.
_SCENE_SIZES = ((384, 384), (512, 512), (512, 384), (384, 512), (448, 320), (320, 448), (512, 256), (256, 256))
_PAGE_SIZES = ((768, 768), (768, 576), (576, 768), (512, 640))
_NEEDLE_SIZES = ((1024, 1024), (1024, 768), (512, 512), (768, 512))
WORLD_SIZES = {"pages": _PAGE_SIZES, "needles": _NEEDLE_SIZES}
# More tokens than are read in mode "saccade".
GAZE_SIZES = ((1024, 1024), (1024, 768), (768, 1024), (1280, 960))
_GAZE_NEEDLE_SIZES = ((2048, 2048), (2048, 1536), (1024, 1024))
GAZE = "gaze:"


def world_size(world: str, number: int) -> tuple[int, int]:
    """The size of a numbered sample, one of a few."""
    sizes = sizes_of(world)
    return sizes[number % len(sizes)]


def sizes_of(name: str) -> Sequence[tuple[int, int]]:
    """The sizes in which a world is drawn for a source of this name; those of files are their own."""
    world = name.removeprefix(GAZE).partition("/")[0]
    if world not in list_worlds():
        return ()
    if name.startswith(GAZE):
        return _GAZE_NEEDLE_SIZES if world == "needles" else GAZE_SIZES
    return WORLD_SIZES.get(world, _SCENE_SIZES)


def open_source(name: str, count: int, seed: int = 0, split: Split = "train") -> Iterator[Shown]:
    """The examples of a source.

    Args:
        name (`str`): a world or one kind of its questions (`scenes`, `scenes/read`), a folder in COCO format, or a
            file of JSON lines, perhaps gzipped. With `gaze:` before it, for mode `"saccade"`: worlds are larger.
        count (`int`): how many samples of a world; files and folders are read to their end.
        seed (`int`, *optional*, defaults to 0): of a world's first sample, and of what is asked about photographs.
        split (`str`, *optional*, defaults to `"train"`): of worlds.

    Example:

    ```python
    >>> from arr_coc.data.sources import open_source
    >>> [shown] = open_source("scenes/color", 1)
    >>> shown.asks[0].kind
    'color'

    ```
    """
    sizes, name = sizes_of(name), name.removeprefix(GAZE)
    world, _, kind = name.partition("/")
    path = Path(name)
    if world in list_worlds() and not path.exists():
        if kind:
            check_kind(world, kind)
        return world_examples([name], count, split, seed, sizes)
    if path.is_dir():
        return coco_examples(path, seed)
    if path.is_file():
        fields = _first_fields(path)
        if {"image", "expression", "box"} <= fields:
            return expression_examples(path)
        if {"image", "question", "map"} <= fields:
            return gaze_examples(path)
        wanted = "image, expression, box, or image, question, map"
        raise ValueError(f"{path} has lines of {', '.join(sorted(fields)) or 'nothing'}; needed are {wanted}")
    raise ValueError(f"{name!r} is neither a world ({', '.join(list_worlds())}) nor a folder nor a file")


def _first_fields(path: Path) -> set[str]:
    """Names in the first line of a file of JSON lines."""
    try:
        with open_lines(path) as lines:
            row = json.loads(next(lines, ""))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not JSON lines: {error}") from None
    return set(row) if isinstance(row, dict) else set()
