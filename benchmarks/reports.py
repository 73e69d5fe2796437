"""Make the committed reports again from their records, as after a change of how they are summed up or written.

    python benchmarks/reports.py

Reads `records.jsonl.gz`, `run.json` and, where they are, `times.jsonl` and `work.jsonl` of each folder
`benchmarks/results/eval-*`, and writes `summary.json`, `report.md` and, where there is one, `report.html`. Afterwards
run `python benchmarks/readme.py`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arr_coc.data.worlds import list_worlds
from arr_coc.evaluation.contenders import FULL
from arr_coc.evaluation.records import RECORDS, RUN, TIMES, WORK, Record, name_today
from arr_coc.evaluation.report.sections import ours_in
from arr_coc.evaluation.report.seed_means import first_seeds
from arr_coc.evaluation.report.summary import summarise
from arr_coc.evaluation.report.write import find_worst, write_page, write_tables
from arr_coc.evaluation.run import DRAWN
from arr_coc.evaluation.scoring import METRICS
from arr_coc.evaluation.tasks import Task, open_task

RESULTS = Path(__file__).parent / "results"


def read_lines(text: str) -> list[dict[str, Any]]:
    """Lines of JSON."""
    return [json.loads(line) for line in text.splitlines()]


def read_records(folder: Path) -> list[Record]:
    """The records of a committed run, with the names of today."""
    model = json.loads((folder / RUN).read_text(encoding="utf-8"))["model"]
    rows = read_lines(gzip.decompress((folder / f"{RECORDS}.gz").read_bytes()).decode())
    return [Record(**{**row, "selector": name_today(row["selector"], model)}) for row in rows]


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary as it is, which has the order of selectors and budgets."""
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def read_budgets(folder: Path) -> list[str]:
    """The budgets of a committed run."""
    return list(dict.fromkeys(row["budget"] for row in read_summary(folder)["rows"] if row["budget"] != FULL))


def make_summary(folder: Path, records: Sequence[Record]) -> dict[str, Any]:
    """The summary of a committed run."""
    times, work = (
        read_lines(path.read_text(encoding="utf-8")) if path.exists() else []
        for path in (folder / TIMES, folder / WORK)
    )
    before = read_summary(folder)
    selectors = list(dict.fromkeys(row["selector"] for row in before["rows"]))
    summary = summarise(records, times, selectors, read_budgets(folder), work, before.get("seeds"))
    about = json.loads((folder / RUN).read_text(encoding="utf-8"))
    return {**summary, "about": about, "missing": before["missing"]}


def open_worlds(summary: dict[str, Any], records: Sequence[Record]) -> list[Task]:
    """The drawn tasks of a run, but those whose pictures are no longer drawn as they were asked about."""
    tasks = []
    for name, count in summary["items"].items():
        if name.partition("/")[0] not in list_worlds():
            continue
        task = open_task(name, count, summary["about"]["size"])
        answers = {task[number].id: task[number].answers for number in range(min(count, DRAWN))}
        asked = [record for record in records if record.task == name and record.item in answers]
        score = METRICS[task.metric or "exact"]
        if all(round(score(record.answer or "", answers[record.item]), 4) == record.score for record in asked):
            tasks.append(task)
        else:
            print(f"{name} is drawn otherwise by now; its wrong answers are left out")
    return tasks


def main() -> None:
    """Write all summaries and reports."""
    for folder in sorted(RESULTS.glob("eval-*")):
        records, budgets = read_records(folder), read_budgets(folder)
        summary = make_summary(folder, records)
        write_tables(folder, summary, budgets)
        if (folder / "report.html").exists():
            drawn = first_seeds(records, [row["selector"] for row in summary["rows"]], summary.get("seeds", {}))
            worst = find_worst(drawn, open_worlds(summary, records), budgets, ours_in(summary))
            write_page(folder, summary, budgets, worst)


if __name__ == "__main__":
    main()
