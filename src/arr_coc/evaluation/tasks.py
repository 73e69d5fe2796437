"""Opening a task by what names it.

| name                                             | items                                                 | metric   |
|--------------------------------------------------|-------------------------------------------------------|----------|
| `WORLD`, `WORLD/KIND`                            | drawn from test seeds: `scenes`, `pages/page_cell`    | `exact`  |
| `photos:DIR`                                     | classes of photographs in COCO format, with boxes     | none     |
| `refexp:DIR`                                     | referring expressions, each with its box              | none     |
| `jsonl:FILE`                                     | `image, question, answer or answers[, boxes][, id]`   | `exact`  |
| `vqav2:QUESTIONS.json,ANNOTATIONS.json,IMAGE_DIR` | VQAv2 as published                                   | `vqa`    |
| `pope:FILE,IMAGE_DIR`                            | POPE as published                                     | `yes-no` |

The grammar is `KIND[:PATH[,PATH...]][?OPTION=VALUE[&OPTION=VALUE]]`; paths have no commas. The options are `metric`,
for what has answers, and `name`, for tables: `jsonl:docvqa/val.jsonl?metric=anls&name=docvqa`. `refexp` and `photos`
take what was held out from training (`val`, `validation`, `test`) of a folder, or a file that is named itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from PIL import Image

from arr_coc.data.items import Item, Items, MissingPicture, Task
from arr_coc.data.readers import (
    read_class_items,
    read_expression_items,
    read_jsonl_items,
    read_pope_items,
    read_vqa_items,
)
from arr_coc.data.worlds import Sample, list_worlds, make_sample, split_seed
from arr_coc.data.worlds.world import check_kind
from arr_coc.evaluation.scoring import METRICS

__all__ = ["Item", "Items", "MissingPicture", "Task", "WorldItems", "list_tasks", "open_task"]

WORLD_COUNT = 500
WORLD_SIDE = 512
SHORTEST_SIDE = 128  # below, some worlds have no room for what they draw
_OPTIONS = ("metric", "name")


@dataclass(frozen=True)
class _Form:
    """A kind of files: the paths it needs, the metric of its answers, and what reads it."""

    paths: tuple[str, ...]
    metric: str | None
    read: Callable[..., list[Item]]


_FORMS = {
    "photos": _Form(("DIR",), None, read_class_items),
    "refexp": _Form(("DIR",), None, read_expression_items),
    "jsonl": _Form(("FILE",), "exact", read_jsonl_items),
    "vqav2": _Form(("QUESTIONS.json", "ANNOTATIONS.json", "IMAGE_DIR"), "vqa", read_vqa_items),
    "pope": _Form(("FILE", "IMAGE_DIR"), "yes-no", read_pope_items),
}


def list_tasks() -> list[str]:
    """What a task can be named by.

    Example:

    ```python
    >>> from arr_coc.evaluation.tasks import list_tasks
    >>> list_tasks()[-2:]
    ['vqav2:QUESTIONS.json,ANNOTATIONS.json,IMAGE_DIR', 'pope:FILE,IMAGE_DIR']

    ```
    """
    return [*list_worlds(), *(f"{kind}:{','.join(form.paths)}" for kind, form in _FORMS.items())]


def open_task(spec: str, limit: int | None = None, size: int | None = None) -> Task:
    """A task by what names it; the same items in the same order on every call.

    Args:
        spec (`str`): as in the table above.
        limit (`int`, *optional*): the first so many items; by default all of a file, 500 of a world.
        size (`int`, *optional*): pixels a side of a world's pictures, 512 by default. Files are given as they are.

    Example:

    ```python
    >>> from arr_coc.evaluation.tasks import open_task
    >>> task = open_task("scenes/color", limit=3)
    >>> task.name, task.metric, len(task), task[0].id
    ('scenes/color', 'exact', 3, 'scenes/color#0@512')
    >>> task[0].question, task[0].answers, task[0].open().size
    ('what color is the circle?', ('cyan',), (512, 512))

    ```
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}")
    kind, rest, options = _parse(spec)
    if kind.partition("/")[0] in list_worlds() and rest is None:
        items: Items = WorldItems(kind, WORLD_COUNT if limit is None else limit, WORLD_SIDE if size is None else size)
        return Task(options.get("name", kind), options.get("metric", "exact"), items)
    if kind not in _FORMS:
        raise ValueError(f"no task is named {spec!r}; there are {', '.join(list_tasks())}")
    form = _FORMS[kind]
    paths = [Path(path) for path in rest.split(",") if path] if rest else []
    if len(paths) != len(form.paths):
        raise ValueError(f"{kind} is named as {kind}:{','.join(form.paths)}, got {spec!r} with {len(paths)} paths")
    if form.metric is None and "metric" in options:
        raise ValueError(f"{kind} has no answers to score, got metric={options['metric']}; leave it out")
    name = options.get("name", f"{kind}:{paths[0].resolve().name.split('.')[0]}")
    return Task(name, options.get("metric", form.metric), tuple(form.read(*paths)[:limit]))


def _parse(spec: str) -> tuple[str, str | None, dict[str, str]]:
    """The kind, the paths (None without a colon) and the options of a spec."""
    head, mark, tail = spec.rpartition("?")
    if not mark or "=" not in tail:  # a question mark inside a path
        head, tail = spec, ""
    kind, colon, rest = head.partition(":")
    options: dict[str, str] = {}
    for option in filter(None, tail.split("&")):
        key, _, value = option.partition("=")
        if key not in _OPTIONS or not value:
            raise ValueError(
                f"options of a task are {' and '.join(f'{name}=...' for name in _OPTIONS)}, got {option!r}"
            )
        options[key] = value
    if options.get("metric", "exact") not in METRICS:
        raise ValueError(f"no metric is named {options['metric']!r}; there are {', '.join(METRICS)}")
    return kind, rest if colon else None, options


class WorldItems:
    """Items of a world, drawn from its test seeds when they are needed.

    Args:
        name (`str`): a world, or one kind of its questions.
        count (`int`): how many.
        side (`int`): pixels a side.
    """

    def __init__(self, name: str, count: int, side: int) -> None:
        self.name, self.count, self.side = name, count, side
        self.world, _, kind = name.partition("/")
        if kind:
            check_kind(self.world, kind)
        if side < SHORTEST_SIDE:
            raise ValueError(f"`size` must be at least {SHORTEST_SIDE} pixels a side, got {side}")
        split_seed("test", count - 1)  # refuses more than there are
        self.kind = kind or None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Item:
        index = range(self.count)[number]
        draw = partial(_draw, self.world, self.kind, index, self.side)
        sample = draw()
        name = f"{self.name}#{index}@{self.side}"
        return Item(name, sample.question, (sample.answer,), sample.boxes, partial(_show, draw))


@lru_cache(maxsize=4)  # an item is asked for its question, then for its picture; a list of items keeps no pictures
def _draw(world: str, kind: str | None, index: int, side: int) -> Sample:
    return make_sample(world, split_seed("test", index), kind, (side, side))


def _show(draw: Callable[[], Sample]) -> Image.Image:
    return draw().picture.copy()
