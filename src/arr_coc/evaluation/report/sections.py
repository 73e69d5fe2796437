"""The sections of a report, as text and tables that are rendered both as HTML and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arr_coc.evaluation.arithmetic import PARTS
from arr_coc.evaluation.contenders import FULL, find_ours
from arr_coc.evaluation.report.statistics import FEWEST, MARGIN
from arr_coc.evaluation.report.summary import HOLDS, OPPONENT, find_best, write_accuracy


@dataclass(frozen=True)
class Section:
    """A heading, some sentences, and a table.

    Args:
        title (`str`), words (`str`): heading, and how to read the table.
        header (`list[str]`), rows (`list[list[str]]`): the table; bold cells begin and end with `**`.
    """

    title: str
    words: str = ""
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def make_sections(summary: Mapping[str, Any], budgets: Sequence[str]) -> list[Section]:
    """All sections of a report; empty ones are left out."""
    sections = [_glance(summary, budgets), _against(summary, budgets), _read(summary, budgets)]
    spread = _explain_spread(summary)
    sections += [_by_task(task, facts, budgets, spread) for task, facts in summary["tasks"].items()]
    sections += [_looking(task, by, budgets) for task, by in summary["looking"].items()]
    sections += [_work(summary), _cost(summary), _failing(summary)]
    return [section for section in sections if section.rows]


def ours_in(summary: Mapping[str, Any]) -> str:
    """The contender that a report is about; see [`find_ours`]."""
    return find_ours((row["selector"] for row in summary["rows"]), summary.get("seeds", ()))


def write_budget(budget: str) -> str:
    """A budget as tables show it: a share in percent, a number as it is."""
    return f"{100 * float(budget):g} %" if "." in budget else budget


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _interval(interval: Sequence[float]) -> str:
    return f"{interval[0]:+.3f} ({interval[1]:+.3f} to {interval[2]:+.3f})"


def _rows_by(summary: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    by_selector: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in summary["rows"]:
        by_selector.setdefault(row["selector"], {})[row["budget"]] = row
    return by_selector


def _glance(summary: Mapping[str, Any], budgets: Sequence[str]) -> Section:
    ours = ours_in(summary)
    by_selector = _rows_by(summary)
    best = {
        budget: find_best({name: rows.get(budget, {}).get("accuracy") for name, rows in by_selector.items()})
        for budget in budgets
    }
    body = []
    for name, rows in sorted(by_selector.items(), key=lambda item: -_mean(item[1])):
        cells = []
        for budget in budgets:
            row = rows.get(budget, rows.get(FULL, {}))
            value = _number(row.get("accuracy"))
            cells.append((f"**{value}**" if name in best[budget] else value) + _write_spread(row))
        holds = summary["gives_in"].get(name)
        holds_at = "" if name == FULL else "none" if holds is None else f"{100 * holds:.0f} %"
        achieved: dict[str, list[str]] = {}
        for budget in budgets:
            row = rows.get(budget, {})
            for said in (*row.get("successes", ()), row.get("verdict")):
                if said not in (None, "not worse"):
                    achieved.setdefault(said, []).append(write_budget(budget))
        successes = "; ".join(
            f"{said}: {'all' if len(at) == len(budgets) else ', '.join(at)}" for said, at in achieved.items()
        )
        shown = f"**{name}**" if name == ours else name
        body.append([shown, *cells, holds_at, successes])
    words = (
        "Mean accuracy over the tasks with answers, by the share (or number) of visual tokens that are read. The best "
        "at each budget is bold, and so is all that ties with it as shown; `oracle` is told where the answer is and "
        "does not compete. *Holds to*: the smallest share of tokens with at least "
        f"{100 * HOLDS:.0f} % of the accuracy of all tokens, interpolated linearly. The three successes, claimed from "
        f"{FEWEST} questions on: *fewer tokens* at the same accuracy (at most {MARGIN} below all tokens, and the 95 % "
        "interval says so), *faster* at the same accuracy (and at least 5 % less time to the first token), *better* "
        f"with the same tokens (significantly above `{OPPONENT}`). *Falls short*: more than {MARGIN} below all tokens, "
        f"and the interval says so. *Too few to tell*: fewer than {FEWEST} questions, or an interval on both sides of "
        f"{MARGIN}."
    )
    words += _explain_spread(summary)
    header = ["selector", *map(write_budget, budgets), "holds to", "successes"]
    return Section("At a glance", words, header, body if any(row[1] for row in body) else [])


def _write_spread(entry: Mapping[str, Any]) -> str:
    """The lowest and the highest of several seeds, to stand behind their mean."""
    return f" [{entry['spread'][0]:.3f} to {entry['spread'][1]:.3f}]" if "spread" in entry else ""


def _explain_spread(summary: Mapping[str, Any]) -> str:
    if not any("spread" in row for row in summary["rows"]):
        return ""
    return " A row with several seeds shows their mean, and in brackets the lowest and the highest of them."


def _mean(rows: Mapping[str, Mapping[str, Any]]) -> float:
    values = [row["accuracy"] for row in rows.values() if "accuracy" in row]
    return sum(values) / len(values) if values else -1.0


def _against(summary: Mapping[str, Any], budgets: Sequence[str]) -> Section:
    ours = ours_in(summary)
    by_selector = _rows_by(summary)
    body = []
    for name, rows in sorted(by_selector.items(), key=lambda item: -_mean(item[1])):
        differences = [rows.get(budget, {}).get(f"minus_{ours}") for budget in budgets]
        if any(differences):
            body.append([name, *("" if each is None else _interval(each) for each in differences)])
    words = (
        f"Accuracy minus that of `{ours}` on the same questions, mean over the tasks, with 95 % intervals of a paired "
        f"bootstrap. Below zero, `{ours}` is better."
    )
    return Section(f"Against {ours}", words, ["selector", *map(write_budget, budgets)], body)


def _read(summary: Mapping[str, Any], budgets: Sequence[str]) -> Section:
    """What each selector read."""
    body = []
    for name, rows in _rows_by(summary).items():
        counts = [(row["tokens"], row.get("sharp")) for budget in budgets if (row := rows.get(budget)) is not None]
        if any(sharp is not None for _, sharp in counts):
            body.append([name, *(f"{tokens:.0f} / {_number(sharp, 0)}" for tokens, sharp in counts)])
    words = (
        "Mean number of visual tokens / of cells that were read at full resolution. In mode `saccade` some of the "
        "tokens are the gestalt, the whole picture made small, less what saccades cover of it. Selectors that put "
        "cells in an order spend these tokens on more saccades. The others cannot: at the same budget they read fewer "
        "sharp cells."
    )
    return Section("Tokens and sharp cells", words, ["selector", *map(write_budget, budgets)], body)


def _by_task(task: str, facts: Mapping[str, Any], budgets: Sequence[str], spread: str) -> Section:
    body = []
    for name, means in facts["means"].items():
        cells = []
        for budget in budgets:
            entry = means.get(budget, means.get(FULL))
            if entry is None:
                cells.append("")
                continue
            mean, low, high = entry["mean"]
            text = f"{write_accuracy(mean)} ({low:.2f} to {high:.2f})"
            cells.append((f"**{text}**" if name in facts["best"].get(budget, ()) else text) + _write_spread(entry))
        body.append([name, *cells])
    body.sort(key=lambda row: row[1].strip("*"), reverse=True)
    words = "Accuracy with 95 % intervals; the best at each budget is bold, and all that tie with it as shown."
    words += spread
    return Section(f"Task {task}", words, ["selector", *map(write_budget, budgets)], body)


def _looking(task: str, by_selector: Mapping[str, Any], budgets: Sequence[str]) -> Section:
    body = []
    for name, rows in by_selector.items():
        cells = [
            " / ".join(
                "" if measure not in rows.get(budget, {}) else f"{rows[budget][measure]:.2f}"
                for measure in ("coverage", "precision")
            )
            for budget in budgets
        ]
        first = next(iter(rows.values()))
        body.append([name, *cells, _number(first.get("overlap"), 2), _number(first.get("pointing"), 2)])
    body.sort(key=lambda row: row[1], reverse=True)
    words = (
        "Coverage (share of the boxes' cells that were kept) / precision (share of the kept cells inside the boxes); "
        "for selectors with a relevance map, also its overlap and pointing."
    )
    header = ["selector", *map(write_budget, budgets), "overlap", "pointing"]
    return Section(f"Looking, {task}", words, header, body)


def _work(summary: Mapping[str, Any]) -> Section:
    """What went through the model."""
    body = []
    for row in summary["rows"]:
        if not {"encoded", "encoder_gmacs"} & row.keys():
            continue  # of an earlier version
        shown = "all" if row["budget"] == FULL else write_budget(row["budget"])
        counts = [_number(row.get(name), 0) for name in ("tokens", "sharp", "encoded", "processed")]
        body.append([row["selector"], shown, *counts, *(write_gmacs(row.get(f"{part}_gmacs")) for part in PARTS)])
    words = (
        "What a question costs, on any machine. *Read*: visual tokens of the prompt that is answered. *Encoded*: those "
        "that the vision encoder made, read or not. *Processed*: those that went through a layer of the language "
        "model, mean over its layers; looks that were read and thrown away count. The last three are billions of "
        "multiply-adds (GMAC) to the first token, text included: of the encoder, of the language model, and of all "
        "else, which is choosing. What a selector computes inside the language model, as `fastv` does, counts there."
    )
    counts = ["tokens read", "sharp cells", "tokens encoded", "tokens processed"]
    return Section(
        "Work", words, ["selector", "budget", *counts, "encoder GMAC", "language GMAC", "choosing GMAC"], body
    )


def write_gmacs(value: float | None) -> str:
    """Billions of multiply-adds with three digits or so; what is not zero does not look so.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.sections import write_gmacs
    >>> [write_gmacs(value) for value in (1234.5, 8.724, 0.0239, 0.00052, 0.0, None)]
    ['1234', '8.72', '0.024', '0.0005', '0', '']

    ```
    """
    if not value:
        return "" if value is None else "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value))) if value >= 1 else 3 if value >= 0.01 else 4}f}"


def _cost(summary: Mapping[str, Any]) -> Section:
    ours = ours_in(summary)
    body = []
    for row in summary["rows"]:
        times = row["times"]
        if not times:
            continue
        names = ("encode", "select", "prefill", "first_token", "decode")
        stages = [_number(times[f"{name}_ms"] or None, 2) for name in names]
        stages[1] += f" ± {times['select_ms_iqr'] / 2:.2f}"
        peak = "" if times["peak_mb"] is None else f"{times['peak_mb']:.0f}"
        shown = "all" if row["budget"] == FULL else write_budget(row["budget"])
        counts = [_number(row["tokens"], 0), _number(row.get("sharp"), 0)]
        body.append([row["selector"], shown, *counts, *stages, f"{times['kv_bytes'] / 1e3:.0f}", peak])
    faster = "; ".join(
        f"{write_budget(budget)}: {100 * share:.0f} %"
        for budget, share in summary["select_percentile"].items()
        if share is not None
    )
    words = (
        "Median milliseconds, one picture at a time, with the device synchronised around every stage. `select` is "
        "everything from the encoder's tokens to the shorter prompt (± half the interquartile range); FastV selects "
        "inside `prefill`. `decode` is one further token; it is blank where it cannot be told from the noise."
    )
    if faster:
        words += f" Share of the comparable selectors that select faster than `{ours}`: {faster}."
    stages = ["encode ms", "select ms", "prefill ms", "first token ms", "decode ms/token"]
    return Section("Cost", words, ["selector", "budget", "tokens", "sharp cells", *stages, "cache kB", "peak MB"], body)


def _failing(summary: Mapping[str, Any]) -> Section:
    ours = ours_in(summary)
    body = [
        [write_budget(budget), task, kind, str(count)]
        for budget, by in summary["failures"].items()
        for task, kinds in by.items()
        for kind, count in sorted(kinds.items(), key=lambda item: -item[1])
    ]
    words = (
        f"Why `{ours}` was wrong: *not seen* if less than half of the answer's own box was kept (the box of a value, "
        "not of its label; every one of the boxes if all are needed, as to count), with the scorer that most preferred "
        "other places; otherwise *seen but misread*."
    )
    if len(summary.get("seeds", {}).get(ours, ())) > 1:
        words += " Answers of all its seeds count."
    return Section("Failures", words, ["budget", "task", "why", "answers"], body)
