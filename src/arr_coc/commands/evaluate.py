"""`arr-coc eval`: every selector on every task at every budget, and a report; can be killed and goes on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arr_coc.config import EMBEDDED
from arr_coc.evaluation.contenders import Contender, open_contenders, parse_budgets
from arr_coc.evaluation.records import Store
from arr_coc.evaluation.report import write_report
from arr_coc.evaluation.run import Opened, open_model, run_task
from arr_coc.evaluation.tasks import MissingPicture, Task, open_task
from arr_coc.evaluation.timing import describe_machine, time_contenders
from arr_coc.inference.load import quiet_loading
from arr_coc.training.trainer import find_revision

TIMED = 32  # samples, or as many as `limit`


@dataclass(frozen=True)
class Evaluation:
    """What is measured; see `arr-coc eval --help`."""

    tasks: Sequence[str]
    selectors: Sequence[str]
    budgets: str
    out: Path
    model: str | None = None
    limit: int | None = None
    size: int = 512
    batch: int = 16
    device: str = "cpu"
    dtype: str = "float32"
    instruction: str = ""
    max_new_tokens: int = 16
    times: bool = True


def evaluate(given: Evaluation) -> dict[str, Any]:
    """Measure what is not measured yet, and write the report."""
    quiet_loading()
    budgets = parse_budgets(given.budgets)
    tasks = [open_task(spec, given.limit, given.size) for spec in given.tasks]
    if len({task.name for task in tasks}) < len(tasks):
        raise ValueError("a task was named twice; name each once")
    base = given.model or EMBEDDED
    opened = open_model(base, given.device, given.dtype, given.size)
    opened = replace(opened, instruction=given.instruction, max_new_tokens=given.max_new_tokens)
    contenders = open_contenders(given.selectors, opened.model)
    settings = {
        "model": base, "size": given.size, "batch": given.batch, "dtype": given.dtype,
        "instruction": given.instruction, "max_new_tokens": given.max_new_tokens, "device": given.device,
    }  # fmt: skip
    about = {"command": _command(), "revision": find_revision(), **describe_machine(opened.model)}
    store = Store(given.out, settings, about)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        for task in tasks:
            calls = sum(len(one.budgets(budgets)) for one in contenders)
            row = bar.add_task(task.name, total=calls * len(task))
            run_task(opened, task, contenders, budgets, store, given.batch, lambda n, row=row: bar.advance(row, n))  # type: ignore[misc]
        if given.times:
            count = min(TIMED, given.limit or TIMED)
            _time(opened, tasks, contenders, budgets, store, bar, count)
    if not store.records:
        raise ValueError("there is nothing to report: no picture of any task could be read")
    names = [one.name for one in contenders]
    summary = write_report(store, tasks, names, budgets, {**about, **settings})
    summary["out"] = str(given.out)
    return summary


def _time(
    opened: Opened,
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    budgets: Sequence[str],
    store: Store,
    bar: Progress,
    count: int,
) -> None:
    """Times of every budget at which some are missing, on pictures of all tasks in turn."""
    todo = [
        budget
        for budget in budgets
        if any((one.name, one.budgets([budget])[0]) not in store.times for one in contenders if one.name != "oracle")
    ]
    if not todo:
        return
    numbered = zip_longest(*([(task, number) for number in range(len(task))] for task in tasks))
    asked = []
    for task, number in islice((one for one in chain.from_iterable(numbered) if one is not None), 2 * count):
        item = task[number]
        try:
            asked.append(opened.ask([item.question], [item.open()]))
        except MissingPicture:
            continue
        if len(asked) == count:
            break
    if not asked:
        return
    timed = [one for one in contenders if one.name != "oracle"]  # it would have to be told where to look
    row = bar.add_task("times", total=len(todo))
    for budget in todo:
        for found in time_contenders(opened, asked, timed, budget):
            if (found["selector"], found["budget"]) not in store.times:
                store.add_times(found)
        bar.advance(row)


def _command() -> str:
    return shlex.join(["arr-coc", *sys.argv[1:]])
