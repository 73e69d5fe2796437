"""Write `report.html` (self-contained), `report.md` and `summary.json` from a directory of results."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image

from arr_coc.data.example import Example, MissingPicture
from arr_coc.drawing.charts import Points, line_chart
from arr_coc.drawing.frames import lay_frames
from arr_coc.drawing.origin import name_origin, stamp_figure
from arr_coc.evaluation.contenders import FULL, find_ours
from arr_coc.evaluation.metrics import answer_coverage
from arr_coc.evaluation.records import Record, Store
from arr_coc.evaluation.run import DRAWN, read_bits
from arr_coc.evaluation.sections import Section, make_sections, ours_in, write_budget
from arr_coc.evaluation.summary import HOLDS, attribute, summarise
from arr_coc.evaluation.tasks import Task
from arr_coc.runtime.atomic_files import write_aside

WORST = 2  # wrong answers shown per task
SHOWN = 160  # longest side in pixels of a picture in the report
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td:last-child { white-space: normal; } tbody tr:hover { background: var(--soft); }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } .charts > figure { flex: 1 1 26rem; margin: 0; }
.looks { display: flex; flex-wrap: wrap; gap: .6rem; } .looks figure { margin: 0; width: 160px; font-size: .8rem; }
.looks img { width: 160px; height: auto; border-radius: 4px; } code { background: var(--soft); padding: 0 .2em; }
"""


@dataclass(frozen=True)
class WrongAnswer:
    """A question that our layer got wrong, with the kept cells and the answer of every selector."""

    task: str
    question: str
    wanted: str
    why: str
    looks: list[tuple[str, str, str]]  # name, answer, picture as base64


def write_report(
    store: Store, tasks: Sequence[Task], selectors: Sequence[str], budgets: Sequence[str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the three files next to the records and return the summary; an empty store is refused."""
    names = {task.name for task in tasks}
    records = [record for record in store.records.values() if record.task in names]
    summary = summarise(records, list(store.times.values()), selectors, budgets)
    missing = {task: sum(name == task for name, _ in store.missing) for task in sorted(names)}
    plain = {name: hide_folders(value) if isinstance(value, str) else value for name, value in about.items()}
    summary |= {"about": plain, "missing": {task: count for task, count in missing.items() if count}}
    write_tables(store.directory, summary, budgets)
    write_page(store.directory, summary, budgets, find_worst(records, tasks, budgets))
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
    >>> from arr_coc.evaluation.report import hide_folders
    >>> hide_folders("arr-coc eval --tasks jsonl:/home/me/val.jsonl?metric=anls --out runs/eval")
    'arr-coc eval --tasks jsonl:val.jsonl?metric=anls --out runs/eval'

    ```
    """
    return re.sub(r"(?<![^\s:,='\"])~?/[^\s,?'\"]*", lambda found: PurePosixPath(found[0]).name, text)


def draw_charts(summary: Mapping[str, Any], ink: str = "currentColor") -> dict[str, str]:
    """Charts of accuracy over tokens and over time, as SVG by caption; at their foot, the commit behind the results."""
    tokens: dict[str, list[tuple[float, float]]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for row in summary["rows"]:
        if "accuracy" in row and row["selector"] != FULL:
            tokens.setdefault(row["selector"], []).append((100 * row["share"], row["accuracy"]))
            if row["times"]:
                times.setdefault(row["selector"], []).append((row["times"]["first_token_ms"], row["accuracy"]))
    full = next((row["accuracy"] for row in summary["rows"] if row["selector"] == FULL and "accuracy" in row), None)
    if not tokens:
        return {}
    level = None if full is None else (HOLDS * full, f"{100 * HOLDS:.0f} % of all tokens")
    note = name_origin(summary.get("about", {}))

    def draw(lines: Mapping[str, Points], x_label: str) -> str:
        return line_chart(lines, x_label, "accuracy", ours_in(summary), level, ink, note)

    charts = {"Accuracy over tokens": draw(tokens, "visual tokens, % of all")}
    if times:
        charts["Accuracy over time"] = draw(times, "time to the first token, ms")
    return charts


def find_worst(records: Sequence[Record], tasks: Sequence[Task], budgets: Sequence[str]) -> list[WrongAnswer]:
    """Questions that our layer got wrong: the largest budget first, then those that most others got right."""
    ours = find_ours(record.selector for record in records)
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
            looks.append((name, row.answer or "", _draw(opened, read_bits(row.kept, row.grid))))
    title = f"{task.name}, {write_budget(budget)}"
    why = attribute(_add_seen(rows[ours], item))
    return [WrongAnswer(title, item.question, " | ".join(sorted(set(item.answers))), why, looks)]


def _add_seen(record: Record, item: Example) -> Record:
    """The record with `seen`, from its kept cells if it was not recorded."""
    if record.seen is not None or record.kept is None or record.grid is None or not item.answer_boxes:
        return record
    kept = torch.from_numpy(read_bits(record.kept, record.grid))
    return replace(record, seen=answer_coverage(kept, item))


def _draw(opened: Image.Image | list[Image.Image], kept: np.ndarray) -> str:
    """A thumbnail with the cells that were not kept darkened, as base64 JPEG; a clip has several."""
    if isinstance(opened, Image.Image):
        shown = _darken(opened, kept, SHOWN)
    else:
        kept = kept.reshape(-1, *kept.shape[-2:])  # [t, h, w]; a clip may have one group of frames only
        columns = math.ceil(len(kept) ** 0.5)
        firsts = opened[:: -(-len(opened) // len(kept))]  # of each group
        side = 2 * SHOWN // columns
        shown = lay_frames([_darken(*pair, side) for pair in zip(firsts, kept, strict=True)], columns)
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
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>arr-coc eval</title>'
        f"<style>{_STYLE}</style></head><body><h1>Where the tokens go</h1>",
        "".join(f"<div>{_inline(line)}</div>" for line in _facts(summary)),
    ]
    drawn = "".join(f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in charts.items())
    for number, section in enumerate(sections):
        parts.append(f"<h2>{escape(section.title)}</h2><p>{_inline(section.words)}</p>{_table(section)}")
        if number == 0 and drawn:
            parts.append(f'<div class="charts">{drawn}</div>')
    if worst:
        parts.append("<h2>Worst examples</h2><p>The cells that each selector kept are bright; its answer is below.</p>")
    for example in worst:
        parts.append(
            f"<h3>{escape(example.task)}: {escape(example.question)}</h3>"
            f"<p>Correct: <b>{escape(example.wanted)}</b>. {escape(example.why.capitalize())}.</p><div class='looks'>"
        )
        parts += [
            f'<figure><img alt="cells kept by {escape(name)}" src="data:image/jpeg;base64,{data}">'
            f"<figcaption><b>{escape(name)}</b>: {escape(answer)}</figcaption></figure>"
            for name, answer, data in example.looks
        ]
        parts.append("</div>")
    return "".join([*parts, "</body></html>\n"])


def _table(section: Section) -> str:
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in section.header)
    body = "".join(f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _inline(text: str) -> str:
    """Render the Markdown that sections use: bold, italics and code."""
    text = escape(text, quote=False)
    for pattern, tag in ((r"\*\*(.+?)\*\*", "b"), (r"\*(.+?)\*", "i"), (r"`(.+?)`", "code")):
        text = re.sub(pattern, rf"<{tag}>\1</{tag}>", text)
    return text
