"""Tasks: named sets of examples, opened from a short description such as `scenes/color` or `jsonl:FILE`.

| description                                      | examples                                              | metric   |
|--------------------------------------------------|-------------------------------------------------------|----------|
| `WORLD`, `WORLD/KIND`                            | drawn from test seeds: `scenes`, `pages/page_cell`    | `exact`  |
| `clips`, `clips/KIND`                            | clips, drawn from test seeds                          | `exact`  |
| `photos:DIR`                                     | classes of photographs in COCO format, with boxes     | none     |
| `refexp:DIR`                                     | referring expressions, each with its box              | none     |
| `jsonl:FILE`                                     | `image, question, answer or answers[, boxes][, id]`   | `exact`  |
| `vqav2:QUESTIONS.json,ANNOTATIONS.json,IMAGE_DIR` | VQAv2 as published                                   | `vqa`    |
| `pope:FILE,IMAGE_DIR`                            | POPE as published                                     | `yes-no` |

The grammar is `KIND[:PATH[,PATH...]][?OPTION=VALUE[&OPTION=VALUE]]`; paths have no commas. The options are `metric`,
for tasks with answers, and `name`, for tables: `jsonl:docvqa/val.jsonl?metric=anls&name=docvqa`. `refexp` and `photos`
read the splits of a folder that are held out from training (`val`, `validation`, `test`), or a single file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from arr_coc.data.coco import read_held_out_classes
from arr_coc.data.example import Example, Examples
from arr_coc.data.expressions import read_held_out_expressions
from arr_coc.data.json_lines import read_questions
from arr_coc.data.pope import read_pope
from arr_coc.data.vqa import read_vqa
from arr_coc.data.worlds import list_worlds, open_world
from arr_coc.data.worlds.numbered import WorldExamples
from arr_coc.evaluation.scoring import METRICS

WORLD_COUNT = 500
WORLD_SIDE = 512
SHORTEST_SIDE = 128  # smaller pictures have no room for what some worlds draw
_OPTIONS = ("metric", "name")


@dataclass(frozen=True)
class Task:
    """A named set of examples.

    Args:
        name (`str`): for tables.
        metric (`str`, *optional*): how answers are scored, a name of [`~arr_coc.evaluation.scoring.METRICS`]; None
            where the examples have no answers.
        examples (`Examples`): in a fixed order.
        moving (`bool`, *optional*, defaults to `False`): whether they are about clips.
    """

    name: str
    metric: str | None
    examples: Examples = field(repr=False)
    moving: bool = False

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        return self.examples[number]

    def __iter__(self) -> Iterator[Example]:
        return (self.examples[number] for number in range(len(self.examples)))


@dataclass(frozen=True)
class _Form:
    """A file format: the paths it needs, the metric of its answers, and its reader."""

    paths: tuple[str, ...]
    metric: str | None
    read: Callable[..., list[Example]]


_FORMS = {
    "photos": _Form(("DIR",), None, read_held_out_classes),
    "refexp": _Form(("DIR",), None, read_held_out_expressions),
    "jsonl": _Form(("FILE",), "exact", read_questions),
    "vqav2": _Form(("QUESTIONS.json", "ANNOTATIONS.json", "IMAGE_DIR"), "vqa", read_vqa),
    "pope": _Form(("FILE", "IMAGE_DIR"), "yes-no", read_pope),
}


def list_tasks() -> list[str]:
    """Descriptions that [`open_task`] accepts.

    Example:

    ```python
    >>> from arr_coc.evaluation.tasks import list_tasks
    >>> list_tasks()[-2:]
    ['vqav2:QUESTIONS.json,ANNOTATIONS.json,IMAGE_DIR', 'pope:FILE,IMAGE_DIR']

    ```
    """
    return [
        *list_worlds(),
        *list_worlds(moving=True),
        *(f"{kind}:{','.join(form.paths)}" for kind, form in _FORMS.items()),
    ]


def open_task(spec: str, limit: int | None = None, size: int | None = None) -> Task:
    """Open a task; it has the same examples in the same order on every call.

    Args:
        spec (`str`): as in the table above.
        limit (`int`, *optional*): number of examples; by default all of a file, 500 of a world.
        size (`int`, *optional*): pixels a side of a world's pictures, 512 by default, or at most 256 of its clips;
            files keep their size.

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
    name = kind.partition("/")[0]
    if name in [*list_worlds(), *list_worlds(moving=True)] and rest is None:
        side, world = WORLD_SIDE if size is None else size, open_world(name)
        if side < SHORTEST_SIDE:
            raise ValueError(f"`size` must be at least {SHORTEST_SIDE} pixels a side, got {side}")
        side = min(side, world.sides[1]) if world.moving else side
        examples = WorldExamples(kind, WORLD_COUNT if limit is None else limit, "test", (side, side))
        return Task(options.get("name", kind), options.get("metric", "exact"), examples, world.moving)
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
