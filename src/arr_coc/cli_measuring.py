"""The commands that measure: `arr-coc eval` and `arr-coc bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from arr_coc.cli_errors import one_line_errors

Model = Annotated[
    str | None, typer.Option(help="Directory or Hub id of a supported model. [default: the embedded one]")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
DType = Annotated[str, typer.Option(help="Of the model: float32, bfloat16 or float16.")]
Selectors = Annotated[
    str,
    typer.Option(help="Names, directories or Hub ids with commas, NAME@saccade for that mode, or all."),
]


def _split(text: str, what: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ValueError(f"`--{what}` is empty; name at least one")
    return found


def _check_dtype(dtype: str) -> None:
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"`--dtype` must be float32, bfloat16 or float16, got {dtype!r}")


def evaluate(
    out: Annotated[Path, typer.Option(help="Directory of the results; a run that was begun there goes on.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="May be repeated: a world or a kind of its questions (scenes, scenes/read), photos:DIR, refexp:FILE, "
            "jsonl:FILE, vqav2:FILE or pope:FILE. [default: all worlds]"
        ),
    ] = None,
    selectors: Selectors = "all",
    budgets: Annotated[str, typer.Option(help="Shares or numbers of tokens, with commas.")] = "0.5,0.25,0.125,0.06",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 100,
    model: Model = None,
    size: Annotated[int, typer.Option(min=64, max=4096, help="Pixels a side of drawn worlds.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Questions at once, for accuracy.")] = 16,
    device: Device = "cpu",
    dtype: DType = "float32",
    instruction: Annotated[str, typer.Option(help="Said after every question, as: Answer in one word.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 16,
    times: Annotated[bool, typer.Option(help="Measure times too, apart, one picture at a time.")] = True,
) -> None:
    """Measure selectors against each other: accuracy, looking, tokens, time; writes report.html and report.md."""
    with one_line_errors():
        _check_dtype(dtype)
        chosen = _split(selectors, "selectors")
        from arr_coc.commands.evaluate import Evaluation
        from arr_coc.commands.evaluate import evaluate as run
        from arr_coc.data.worlds import list_worlds

        given = Evaluation(
            tuple(tasks or list_worlds()), tuple(chosen), budgets, out, model, limit, size, batch, device, dtype,
            instruction, max_new_tokens, times,
        )  # fmt: skip
        try:
            summary = run(given)
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command goes on from {out}", err=True)
            raise typer.Exit(130) from None
    _print_summary(summary)


def _print_summary(summary: dict[str, Any]) -> None:
    rows = summary["rows"]
    budgets = list(dict.fromkeys(row["budget"] for row in rows if row["budget"] != "full"))
    table = Table("accuracy", *(f"{100 * float(one):g} %" if "." in one else one for one in budgets))
    by: dict[str, dict[str, Any]] = {}
    for row in rows:
        by.setdefault(row["selector"], {})[row["budget"]] = row.get("accuracy")
    for name, found in by.items():
        values = [found.get(budget, found.get("full")) for budget in budgets]
        table.add_row(name, *("" if value is None else f"{value:.3f}" for value in values))
    Console(highlight=False).print(table)
    for task, count in summary["missing"].items():
        typer.echo(f"{task}: {count} pictures could not be read and are left out", err=True)
    typer.echo(f"report    {Path(summary['out']) / 'report.html'}")


def bench(
    selectors: Selectors = "all",
    budget: Annotated[str, typer.Option(help="Tokens to keep: a number, or a share such as 0.25.")] = "0.25",
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory or Hub id of a supported model, or a shape with random weights: Qwen3-VL-2B, Qwen3-VL-4B, "
            "Qwen3-VL-8B, Qwen2.5-VL-7B. [default: the embedded one]"
        ),
    ] = None,
    size: Annotated[int, typer.Option(min=64, max=8192, help="Pixels a side of the picture.")] = 512,
    repeats: Annotated[int, typer.Option(min=2, help="Pictures that are timed.")] = 16,
    device: Device = "cpu",
    dtype: DType = "float32",
    out: Annotated[Path | None, typer.Option(help="Where the figures go (JSON).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time every stage with each selector, all in turn in one run: encoder, selection, prefill, decoding."""
    with one_line_errors():
        _check_dtype(dtype)
        chosen = _split(selectors, "selectors")
        with Console(stderr=True, highlight=False).status("timing"):
            from arr_coc.commands.bench import bench as run

            found = run(chosen, budget, model, size, repeats, device, dtype, out)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(
        f"{found['model']}, {found['tokens']} tokens, {found['machine']}, {found['dtype']}, {found['attention']}"
    )
    stages = ("encode", "select", "prefill", "first_token")
    table = Table(
        "ms (median ± half IQR)", *(name.replace("_", " ") for name in stages), "of full", "decode", "cache kB"
    )
    for row in found["rows"]:
        cells = [f"{row[f'{name}_ms']:.2f} ± {row[f'{name}_ms_iqr'] / 2:.2f}" for name in stages]
        ratio = "" if row["of_full"] is None else f"{row['of_full']:.2f}"
        table.add_row(row["selector"], *cells, ratio, f"{row['decode_ms']:.2f}", f"{row['kv_bytes'] / 1e3:.0f}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file has room for every column
    console.print(table)
