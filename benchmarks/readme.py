"""All tables and figures in README and docs, from the committed results: the one command after results have changed.

    python benchmarks/readme.py

Writes the README's own tables, then runs `accuracy.py` and `speed.py`, which write those of the docs. The README's
example of `arr-coc eval` shows `benchmarks/results/example-cpu`: after other weights were shipped, run it again, and
put its `run.json` and the packed `records.jsonl` there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import accuracy
import speed
from marks import ROOT, fill_pages

from arr_coc.evaluation.contenders import FULL
from arr_coc.evaluation.report.sections import write_budget

EXAMPLE = ROOT / "benchmarks" / "results" / "example-cpu"


class Results(NamedTuple):
    """What the README shows."""

    accuracy: dict[str, Any]
    speed: speed.Speed
    example: list[dict[str, Any]]


def read_results() -> Results:
    """The committed results."""
    records = gzip.decompress((EXAMPLE / "records.jsonl.gz").read_bytes()).decode()
    return Results(accuracy.read_found(), speed.read_speed(), [json.loads(line) for line in records.splitlines()])


def show_example(results: Results) -> str:
    """What `arr-coc eval` prints, without its frame."""
    scores: dict[str, dict[str, list[float]]] = {}
    for row in results.example:
        scores.setdefault(row["selector"], {}).setdefault(row["budget"], []).append(row["score"])
    [budgets] = {tuple(by) for name, by in scores.items() if name != FULL}
    lines = [["accuracy", *map(write_budget, budgets)]]
    for name, by in scores.items():
        lines.append([name, *(f"{fmean(by.get(budget, by.get(FULL, []))):.3f}" for budget in budgets)])
    width = max(len(line[0]) for line in lines)
    return "".join(f"{line[0]:{width}}{''.join(f'{cell:>8}' for cell in line[1:])}\n" for line in lines)


PAGES: dict[str, dict[str, Callable[[Results], str]]] = {
    "README.md": {
        "accuracy": lambda results: accuracy.selectors_in_short(results.accuracy),
        "costs": lambda results: f"{speed.costs(results.speed)}\n{accuracy.signs(results.accuracy)}",
        "example": lambda results: f"```\n{show_example(results)}```\n",
    }
}


def main() -> None:
    """Write README and docs."""
    fill_pages(PAGES, read_results(), "readme")
    accuracy.main()
    speed.main()


if __name__ == "__main__":
    main()
