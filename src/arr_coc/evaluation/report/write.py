"""Write `report.html` (self-contained), `report.md` and `summary.json` from a directory of results."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from arr_coc.data.example import Example, MissingPicture
from arr_coc.drawing.charts import Points, line_chart
from arr_coc.drawing.frames import lay_frames
from arr_coc.drawing.origin import name_origin, stamp_figure
from arr_coc.evaluation.arithmetic import PARTS
from arr_coc.evaluation.contenders import FULL, find_ours
from arr_coc.evaluation.metrics import answer_coverage
from arr_coc.evaluation.records import Record, Store
from arr_coc.evaluation.report.sections import Section, make_sections, ours_in, write_budget
from arr_coc.evaluation.report.seed_means import first_seeds
from arr_coc.evaluation.report.summary import HOLDS, attribute, summarise
from arr_coc.evaluation.run import DRAWN, read_bits
from arr_coc.evaluation.seeds import Seeds
from arr_coc.evaluation.tasks import Task
from arr_coc.runtime.atomic_files import write_aside

WORST = 2  # wrong answers shown per task
LARGE, SMALL = 480, 160  # longest side in pixels of the original and of our picture, and of the others
_TAGS = ((r"\*\*(.+?)\*\*", "b"), (r"\*(.+?)\*", "i"), (r"`(.+?)`", "code"))


class Look(NamedTuple):
    """What a selector kept, as a picture (JPEG in base64), and its answer."""

    selector: str
    answer: str
    picture: str


@dataclass(frozen=True)
class WrongAnswer:
    """A question that our layer got wrong, the picture, and what every selector kept and answered, ours first."""

    task: str
    question: str
    wanted: str
    why: str
    original: str
    looks: list[Look]


def write_report(
    store: Store,
    tasks: Sequence[Task],
    selectors: Sequence[str],
    budgets: Sequence[str],
    about: Mapping[str, Any],
    seeds: Seeds | None = None,
) -> dict[str, Any]:
    """Write the three files next to the records and return the summary; an empty store is refused."""
    names = {task.name for task in tasks}
    records = [record for record in store.records.values() if record.task in names]
    named = {row: [hide_folders(place) for place in places] for row, places in (seeds or {}).items()}
    times, work = list(store.times.values()), list(store.work.values())
    summary = summarise(records, times, selectors, budgets, work, named)
    missing = {task: sum(name == task for name, _ in store.missing) for task in sorted(names)}
    plain = {
        name: hide_folders(value) if isinstance(value, str) else value
        for name, value in about.items()
        if name != "seeds"  # the summary names those that it shows
    }
    summary |= {"about": plain, "missing": {task: count for task, count in missing.items() if count}}
    write_tables(store.directory, summary, budgets)
    drawn = first_seeds(records, selectors, named)
    write_page(store.directory, summary, budgets, find_worst(drawn, tasks, budgets, ours_in(summary)))
    return summary


def write_tables(folder: Path, summary: Mapping[str, Any], budgets: Sequence[str]) -> None:
    """Write `summary.json`, and `report.md` with its digest."""
    write_aside(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    text = _markdown(summary, make_sections(summary, budgets))
    write_aside(folder / "report.md", stamp_figure(text, summary))


def write_page(
    folder: Path, summary: Mapping[str, Any], budgets: Sequence[str], worst: Sequence[WrongAnswer] = ()
) -> None:
    """Write `report.html`, with the digest of the summary."""
    page = _html(summary, make_sections(summary, budgets), draw_charts(summary), worst)
    write_aside(folder / "report.html", stamp_figure(page, summary))


def hide_folders(text: str) -> str:
    """A command or a setting without the folders of the machine it ran on: of absolute paths, the last part.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.write import hide_folders
    >>> hide_folders("arr-coc eval --tasks jsonl:/home/me/val.jsonl?metric=anls --out runs/eval")
    'arr-coc eval --tasks jsonl:val.jsonl?metric=anls --out runs/eval'

    ```
    """
    return re.sub(r"(?<![^\s:,='\"])~?/[^\s,?'\"]*", lambda found: PurePosixPath(found[0]).name, text)


def draw_charts(summary: Mapping[str, Any], ink: str = "currentColor") -> dict[str, str]:
    """Charts of accuracy over tokens, arithmetic and time, as SVG by caption.

    At their foot is the commit behind the results. What was not measured has no chart.
    """
    charted = [row for row in summary["rows"] if "accuracy" in row and row["selector"] != FULL]

    def collect(measure: Callable[[Mapping[str, Any]], float | None]) -> dict[str, list[tuple[float, float]]]:
        lines: dict[str, list[tuple[float, float]]] = {row["selector"]: [] for row in charted}
        for row in charted:
            if (value := measure(row)) is not None:
                lines[row["selector"]].append((value, row["accuracy"]))
        return lines

    tokens = collect(lambda row: 100 * row["share"])
    work = collect(lambda row: None if "encoder_gmacs" not in row else sum(row[f"{part}_gmacs"] for part in PARTS))
    times = collect(lambda row: row["times"].get("first_token_ms"))
    full = next((row["accuracy"] for row in summary["rows"] if row["selector"] == FULL and "accuracy" in row), None)
    if not tokens:
        return {}
    level = None if full is None else (HOLDS * full, f"{100 * HOLDS:.0f} % of {FULL}")
    note = name_origin(summary.get("about", {}))

    def draw(lines: Mapping[str, Points], x_label: str) -> str:
        return line_chart(lines, x_label, "accuracy", ours_in(summary), level, ink, note)

    charts = {"Accuracy over tokens": draw(tokens, "visual tokens, % of all")}
    if any(work.values()):
        charts["Accuracy over arithmetic"] = draw(work, "multiply-adds to the first token, billions")
    if any(times.values()):
        charts["Accuracy over time"] = draw(times, "time to the first token, ms")
    return charts


def find_worst(
    records: Sequence[Record], tasks: Sequence[Task], budgets: Sequence[str], ours: str | None = None
) -> list[WrongAnswer]:
    """Questions that our layer got wrong: the largest budget first, then those that most others got right.

    `ours` is the row that the report is about, by default that of [`find_ours`].
    """
    ours = ours or find_ours(record.selector for record in records)
    by_question: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        by_question.setdefault((record.task, record.budget, record.item), {})[record.selector] = record
    examples = []
    for task in tasks:
        # only these have their kept cells stored
        items = {task[number].id: number for number in range(min(len(task), DRAWN))}
        wrong = []
        for rank, budget in enumerate(budgets):
            for (name, at, item), rows in by_question.items():
                own = rows.get(ours)
                if name != task.name or at != budget or own is None or own.kept is None or own.score in (None, 1.0):
                    continue
                others = [row.score or 0.0 for selector, row in rows.items() if selector != ours]
                wrong.append((rank, -float(np.mean(others or [0.0])), item, budget))
        shown: set[str] = set()
        for _, _, item, budget in sorted(wrong):
            if item not in shown and item in items and len(shown) < WORST:
                shown.add(item)
                examples += _draw_wrong(task, items[item], budget, by_question[task.name, budget, item], ours)
    return examples


def _draw_wrong(task: Task, number: int, budget: str, rows: Mapping[str, Record], ours: str) -> list[WrongAnswer]:
    item = task[number]
    try:
        opened = item.open()
    except MissingPicture:
        return []
    looks = []
    for name in sorted(rows, key=lambda name: (name != ours, name)):
        row = rows[name]
        if row.kept is not None and row.grid is not None:
            side = LARGE if name == ours else SMALL
            looks.append(Look(name, row.answer or "", _draw(opened, read_bits(row.kept, row.grid), side)))
    title = f"{task.name}, {write_budget(budget)}"
    why = attribute(_add_seen(rows[ours], item))
    grid = rows[ours].grid or [1, 1]
    original = _draw(opened, np.ones(grid, dtype=bool), LARGE)
    return [WrongAnswer(title, item.question, " | ".join(sorted(set(item.answers))), why, original, looks)]


def _add_seen(record: Record, item: Example) -> Record:
    """The record with `seen`, from its kept cells if it was not recorded."""
    if record.seen is not None or record.kept is None or record.grid is None or not item.answer_boxes:
        return record
    kept = torch.from_numpy(read_bits(record.kept, record.grid))
    return replace(record, seen=answer_coverage(kept, item))


def _draw(opened: Image.Image | list[Image.Image], kept: np.ndarray, side: int) -> str:
    """A picture with the cells that were not kept darkened, as base64 JPEG; a clip has several."""
    if isinstance(opened, Image.Image):
        shown = _darken(opened, kept, side)
    else:
        kept = kept.reshape(-1, *kept.shape[-2:])  # [t, h, w]; a clip may have one group of frames only
        columns = math.ceil(len(kept) ** 0.5)
        firsts = opened[:: -(-len(opened) // len(kept))]  # of each group
        each = 2 * side // columns
        shown = lay_frames([_darken(*pair, each) for pair in zip(firsts, kept, strict=True)], columns)
    file = io.BytesIO()
    shown.save(file, "JPEG", quality=70)
    return base64.b64encode(file.getvalue()).decode()


def _darken(picture: Image.Image, kept: np.ndarray, side: int) -> Image.Image:
    """A thumbnail with the cells `[h, w]` that were not kept darkened."""
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    mask = Image.fromarray(np.where(kept, 255, 60).astype(np.uint8)).resize(small.size, Image.Resampling.NEAREST)
    return Image.composite(small, Image.new("RGB", small.size), mask)


def _facts(summary: Mapping[str, Any]) -> list[str]:
    about = summary["about"]
    tasks = ", ".join(f"{task} ({count})" for task, count in summary["items"].items())
    lines = [f"Questions that all selectors answered: {tasks}." if tasks else "No task has answers."]
    if summary["missing"]:
        gone = ", ".join(f"{task}: {count}" for task, count in summary["missing"].items())
        lines.append(f"Pictures that could not be read and are left out: {gone}.")
    if about.get("command"):
        lines.append(f"Command: `{about['command']}`")
    for row, places in summary.get("seeds", {}).items():
        several = f"the mean of {len(places)} seeds, " if len(places) > 1 else ""
        lines.append(f"`{row}` is {several}{' and '.join(f'`{place}`' for place in places)}.")
    lines.append(f"Made by {name_origin(about)}.")
    told = ("command", "revision", "arr_coc")
    known = [(name, value) for name, value in about.items() if value not in (None, "", []) and name not in told]
    if known:
        lines.append("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in known) + ".")
    return lines


def _markdown(summary: Mapping[str, Any], sections: Sequence[Section]) -> str:
    parts = ["# Where the tokens go", *_facts(summary)]
    for section in sections:
        parts += [f"## {section.title}", section.words, table_markdown(section)]
    return "\n\n".join(parts) + "\n"


def table_markdown(section: Section) -> str:
    """The table of a section in Markdown."""
    rows = [section.header, ["---"] * len(section.header), *section.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _html(
    summary: Mapping[str, Any], sections: Sequence[Section], charts: Mapping[str, str], worst: Sequence[WrongAnswer]
) -> str:
    anchors = name_anchors([section.title for section in sections])
    contents = [(anchor, section.title) for anchor, section in zip(anchors, sections, strict=True)]
    contents = [("charts", "Charts")] * bool(charts) + contents + [("worst-examples", "Worst examples")] * bool(worst)
    pages = Environment(loader=PackageLoader("arr_coc.evaluation.report"), autoescape=True, undefined=StrictUndefined)
    pages.filters["marked"] = mark_up
    return pages.get_template("report.html").render(
        facts=_facts(summary),
        ours=ours_in(summary),
        contents=contents,
        charts=charts,
        sections=list(zip(anchors, sections, strict=True)),
        worst=worst,
    )


def name_anchors(titles: Sequence[str]) -> list[str]:
    """Anchors of sections, made of the words of their titles, each used once.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.write import name_anchors
    >>> name_anchors(["At a glance", "Task a/b", "Task a-b"])
    ['at-a-glance', 'task-a-b', 'task-a-b-2']

    ```
    """
    anchors: list[str] = []
    for title in titles:
        words = "-".join(re.findall(r"\w+", title.lower()))
        counted = (words if number == 1 else f"{words}-{number}" for number in count(1))
        anchors.append(next(anchor for anchor in counted if anchor not in anchors))
    return anchors


def mark_up(text: str) -> Markup:
    """Render the Markdown that sections use: bold, italics and code; all else is escaped.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.write import mark_up
    >>> print(mark_up("**0.9** of `a<b`"))
    <b>0.9</b> of <code>a&lt;b</code>

    ```
    """
    marked = str(escape(text))
    for pattern, tag in _TAGS:
        marked = re.sub(pattern, rf"<{tag}>\1</{tag}>", marked)
    return Markup(marked)
