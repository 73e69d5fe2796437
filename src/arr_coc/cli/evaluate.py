"""`arr-coc eval`: every selector on every task at every budget, and a report. A stopped run can be continued."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import Device, DType, Model, check_dtype, split_names

if TYPE_CHECKING:
    from arr_coc.evaluation.contenders import Contender
    from arr_coc.evaluation.records import Store
    from arr_coc.evaluation.run import Opened
    from arr_coc.evaluation.tasks import Task

TIMED = 32  # pictures to time, or `limit` if that is fewer
NEEDS = ("scipy", "rapidfuzz", "matplotlib", "jinja2")  # of the extra `eval`


def evaluate(
    out: Annotated[Path, typer.Option(help="Directory of the results; a run that was stopped there is continued.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="May be given several times: a world or one kind of its questions (scenes, scenes/read), clips, "
            "photos:DIR, refexp:FILE, jsonl:FILE, vqav2:FILE or pope:FILE. [default: all worlds of pictures]"
        ),
    ] = None,
    selectors: Annotated[
        str,
        typer.Option(
            help="Names, directories or Hub ids, separated by commas; NAME@saccade and NAME@auto use these modes; "
            "ROW=A+B shows the mean of trained selectors, such as seeds; or all."
        ),
    ] = "all",
    budgets: Annotated[
        str, typer.Option(help="Ratios, numbers of tokens, or auto, separated by commas.")
    ] = "0.5,0.25,0.125,0.06",
    limit: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 100,
    model: Model = None,
    size: Annotated[
        int, typer.Option(min=64, max=4096, help="Side of drawn pictures in pixels; of clips at most 256.")
    ] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Batch size when accuracy is measured.")] = 16,
    device: Device = "cpu",
    dtype: DType = "float32",
    instruction: Annotated[str, typer.Option(help="Text added to every question, such as: Answer in one word.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 32,
    times: Annotated[bool, typer.Option(help="Also measure times, in a separate pass, one picture at a time.")] = True,
) -> None:
    """Compare selectors by accuracy, coverage, tokens and time; writes report.html and report.md."""
    with one_line_errors():
        check_dtype(dtype)
        names = split_names(selectors, "selectors")
        from arr_coc.data.worlds import list_worlds

        plan = Evaluation(
            tuple(tasks or list_worlds()), tuple(names), budgets, out, model, limit, size, batch, device, dtype,
            instruction, max_new_tokens, times,
        )  # fmt: skip
        try:
            summary = run_evaluation(plan)
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command continues from {out}", err=True)
            raise typer.Exit(130) from None
    _print_summary(summary)


@dataclass(frozen=True)
class Evaluation:
    """What to measure; see `arr-coc eval --help`."""

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
    max_new_tokens: int = 32
    times: bool = True


def run_evaluation(plan: Evaluation) -> dict[str, Any]:
    """Measure what is not measured yet, and write the report; returns its summary."""
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise ValueError(f'arr-coc eval needs {", ".join(missing)}; pip install "arr-coc[eval]"')
    from arr_coc.config import EMBEDDED
    from arr_coc.evaluation.contenders import open_contenders, parse_budgets
    from arr_coc.evaluation.records import Store
    from arr_coc.evaluation.report.write import write_report
    from arr_coc.evaluation.run import open_model, run_task
    from arr_coc.evaluation.seeds import read_seeds
    from arr_coc.evaluation.tasks import open_task
    from arr_coc.inference.load import quiet_loading
    from arr_coc.runtime.atomic_files import check_folder
    from arr_coc.runtime.machine import describe_machine, find_revision

    check_folder(plan.out)
    quiet_loading()
    budgets = parse_budgets(plan.budgets)
    selectors, seeds = read_seeds(plan.selectors)
    tasks = [open_task(spec, plan.limit, plan.size) for spec in plan.tasks]
    if len({task.name for task in tasks}) < len(tasks):
        raise ValueError("a task was named twice; name each task once")
    base = plan.model or EMBEDDED
    opened = open_model(base, plan.device, plan.dtype, plan.size)
    opened = replace(opened, instruction=plan.instruction, max_new_tokens=plan.max_new_tokens)
    contenders = open_contenders(selectors, opened.model, seeds)
    if any(task.moving for task in tasks):
        contenders = _leave_out_saccades(contenders, selectors)
    settings = {
        "model": base, "size": plan.size, "batch": plan.batch, "dtype": plan.dtype,
        "instruction": plan.instruction, "max_new_tokens": plan.max_new_tokens, "device": plan.device,
    }  # fmt: skip
    command = shlex.join(["arr-coc", *sys.argv[1:]])
    about = {"command": command, "revision": find_revision(), **describe_machine(opened.model)}
    store = Store(plan.out, settings, {**about, "seeds": seeds} if seeds else about)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        for task in tasks:
            calls = sum(len(contender.budgets(budgets)) for contender in contenders)
            row = bar.add_task(task.name, total=calls * len(task))
            run_task(opened, task, contenders, budgets, store, plan.batch, lambda n, row=row: bar.advance(row, n))  # type: ignore[misc]
        _count_work(opened, tasks, contenders, budgets, store, bar, plan.limit)
        if plan.times:
            _measure_times(opened, tasks, contenders, budgets, store, bar, min(TIMED, plan.limit or TIMED))
    if not store.records:
        raise ValueError("there is nothing to report: no picture of any task could be read")
    rows = list(dict.fromkeys(contender.row for contender in contenders))
    summary = write_report(store, tasks, rows, budgets, store.about, seeds)
    summary["out"] = str(plan.out)
    return summary


def _leave_out_saccades(contenders: Sequence[Contender], named: Sequence[str]) -> list[Contender]:
    """The contenders that read clips, as mode `saccade` does not; those that were named are refused."""
    still = list(dict.fromkeys(contender.row for contender in contenders if contender.mode == "saccade"))
    for name in still:
        if name in named:
            raise ValueError(f"{name} reads no clips; leave it out, or name no task of clips")
        typer.echo(f"{name} reads no clips and is left out", err=True)
    return [contender for contender in contenders if contender.row not in still]


def _count_work(
    opened: Opened,
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    budgets: Sequence[str],
    store: Store,
    bar: Progress,
    limit: int | None,
) -> None:
    """Count the multiply-adds that are not counted yet, on a few pictures taken from all tasks in turn."""
    from arr_coc.evaluation.arithmetic import COUNTED, count_work
    from arr_coc.evaluation.run import take_samples

    calls = [(contender, budget) for contender in contenders for budget in contender.budgets(budgets)]
    missing = [call for call in calls if (call[0].name, call[1]) not in store.work]
    samples = take_samples(opened, tasks, min(COUNTED, limit or COUNTED)) if missing else []
    if not samples:
        return
    row = bar.add_task("arithmetic", total=len(missing))
    for counted in count_work(opened, samples, missing):
        store.add_work(counted)
        bar.advance(row)


def _measure_times(
    opened: Opened,
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    budgets: Sequence[str],
    store: Store,
    bar: Progress,
    count: int,
) -> None:
    """Measure the times that are missing, on `count` pictures taken from all tasks in turn."""
    from arr_coc.evaluation.run import take_samples
    from arr_coc.evaluation.timing import time_contenders

    timed = [contender for contender in contenders if contender.name != "oracle"]  # it must be told where to look
    missing = [
        budget
        for budget in budgets
        if any((contender.name, contender.budgets([budget])[0]) not in store.times for contender in timed)
    ]
    if not missing:
        return
    inputs = [sample.inputs for sample in take_samples(opened, tasks, count)]
    if not inputs:
        return
    row = bar.add_task("times", total=len(missing))
    for budget in missing:
        for times in time_contenders(opened, inputs, timed, budget):
            if (times["selector"], times["budget"]) not in store.times:
                store.add_times(times)
        bar.advance(row)


def _print_summary(summary: dict[str, Any]) -> None:
    rows = summary["rows"]
    budgets = list(dict.fromkeys(row["budget"] for row in rows if row["budget"] != "full"))
    table = Table("accuracy", *(f"{100 * float(budget):g} %" if "." in budget else budget for budget in budgets))
    accuracies: dict[str, dict[str, Any]] = {}
    for row in rows:
        accuracies.setdefault(row["selector"], {})[row["budget"]] = row.get("accuracy")
    for name, by_budget in accuracies.items():
        values = [by_budget.get(budget, by_budget.get("full")) for budget in budgets]
        table.add_row(name, *("" if value is None else f"{value:.3f}" for value in values))
    Console(highlight=False).print(table)
    for task, count in summary["missing"].items():
        typer.echo(f"{task}: {count} pictures could not be read and are left out", err=True)
    typer.echo(f"report    {Path(summary['out']) / 'report.html'}")
