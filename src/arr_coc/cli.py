"""The command line. A user's mistake is one line on the error stream and exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from arr_coc._version import __version__
from arr_coc.cli_demo import demo, export_space
from arr_coc.cli_errors import one_line_errors
from arr_coc.cli_measuring import bench, evaluate

if TYPE_CHECKING:
    from arr_coc.config import Budget

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Vision-language models that look where the question points.",
)  # fmt: skip

ImageFile = Annotated[Path, typer.Argument(help="A picture file.")]
Question = Annotated[str, typer.Argument(help="What to ask about it.")]
Tokens = Annotated[str, typer.Option(help="Tokens to keep: a number, a ratio in (0, 1], or auto.")]


def _parse_budget(text: str) -> Budget:
    from arr_coc.config import check_budget

    for kind in (int, float):
        try:
            return check_budget(kind(text))
        except ValueError as error:
            if "`budget`" in str(error):
                raise
    return check_budget(text)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"arr-coc {__version__}")
        raise typer.Exit


@app.callback()
def _callback(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Vision-language models that look where the question points."""


@app.command()
def look(
    image: ImageFile,
    question: Question,
    out: Annotated[
        Path | None, typer.Option(help="Where the sheet goes (PNG). [default: sheet.png, none with --json]")
    ] = None,
    channels: Annotated[str, typer.Option(help="Texture channels: core (13) or full (40).")] = "full",
    budget: Tokens = "0.25",
    model: Annotated[
        str | None, typer.Option(help="Directory or Hub id of a supported model. [default: the embedded one]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Draw where a question makes the system look: channels, scores, relevance and the kept tokens."""
    with one_line_errors():
        wanted = _parse_budget(budget)
        if out is None and not as_json:
            out = Path("sheet.png")
        # torch is imported only now, so that help and usage errors come at once
        with Console(stderr=True, highlight=False).status("opening the model and looking"):
            from arr_coc.commands.look import look as run

            facts = run(image, question, channels, wanted, out, model)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print_look(facts)


@app.command()
def ask(
    image: ImageFile,
    question: Question,
    model: Annotated[
        str | None, typer.Option(help="Directory or Hub id of a supported model. [default: the embedded one]")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="A selector's name, directory or Hub id.")] = None,
    mode: Annotated[
        str, typer.Option(help="prune, weight, full, or saccade: the whole picture small, details where it matters.")
    ] = "prune",
    budget: Annotated[
        str | None,
        typer.Option(help="Tokens to keep: a number, a ratio in (0, 1], or auto. [default: 0.25; of saccade 529]"),
    ] = None,
    overlay: Annotated[Path | None, typer.Option(help="Where a picture of what was looked at goes (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what the model can be asked.")] = False,
) -> None:
    """Answer a question about a picture from the tokens that matter."""
    with one_line_errors():
        wanted = _parse_budget(budget or ("529" if mode == "saccade" else "0.25"))
        errors = Console(stderr=True, highlight=False)
        with errors.status("opening the model and answering"):
            from arr_coc.commands.ask import ask as run

            facts = run(image, question, model, selector, mode, wanted, overlay)
    scope, notes = facts.pop("scope"), facts.pop("notes")
    for line in [*notes, *([scope] if verbose else [])]:
        typer.echo(line, err=True)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print_answer(facts, overlay)


@app.command()
def world(
    name: Annotated[str, typer.Argument(help="camouflage, needles, pages, scenes or void.")],
    n: Annotated[int, typer.Option("--n", min=1, max=400, help="How many samples.")] = 8,
    out: Annotated[Path, typer.Option(help="Where the sheet goes (PNG).")] = Path("world.png"),
    kind: Annotated[str | None, typer.Option(help="One kind of questions.")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    first: Annotated[int, typer.Option(min=0, help="Number of the first sample.")] = 0,
) -> None:
    """Draw samples of a world with their questions, answers, and boxes of what must be looked at."""
    with one_line_errors():
        from arr_coc.commands.world import world as run

        run(name, n, out, kind, split, first)
    typer.echo(f"sheet     {out}")


@app.command()
def compare(
    selector_a: Annotated[str, typer.Argument(help="A selector's name, directory or Hub id.")],
    selector_b: Annotated[str, typer.Argument(help="Another one.")],
    image: ImageFile,
    question: Question,
    model: Annotated[
        str | None, typer.Option(help="Directory or Hub id of a supported model. [default: that of the selectors]")
    ] = None,
    budget: Tokens = "0.25",
    out: Annotated[
        Path | None, typer.Option(help="Where the drawing goes (PNG). [default: compare.png, none with --json]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Draw where two selectors look, side by side, and what is answered from it."""
    with one_line_errors():
        wanted = _parse_budget(budget)
        if out is None and not as_json:
            out = Path("compare.png")
        with Console(stderr=True, highlight=False).status("opening the model and looking twice"):
            from arr_coc.commands.compare import compare as run

            facts = run((selector_a, selector_b), image, question, model, wanted, out)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for one in facts["selectors"]:
        weights = "" if one["weights"] is None else "  " + ", ".join(f"{n} {v:.2f}" for n, v in one["weights"].items())
        typer.echo(f"{one['selector']}: {one['answer']}  ({one['tokens']['used']} of {one['tokens']['full']}){weights}")
    typer.echo(f"kept by both: {facts['kept_by_both']}")
    typer.echo(f"drawing   {out}")


@app.command()
def train(
    data: Annotated[
        list[str],
        typer.Option(
            help="What to learn from; may be repeated: a world or a kind of its questions (scenes, scenes/read). For "
            "proxy also a folder in COCO format, JSON lines of expressions (image, expression, box) or of gaze (image, "
            "question, map); for answers and hard also crowded, and a file of VQAv2's questions."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the run.")],
    stage: Annotated[str, typer.Option(help="proxy (boxes and maps), answers, or hard.")] = "proxy",
    base: Annotated[
        str | None, typer.Option(help="Directory or Hub id of a supported model. [default: the embedded one]")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A selector to go on from. [default: an untrained layer]")] = None,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 1000,
    batch: Annotated[int, typer.Option(help="Questions of a step, in each process.")] = 32,
    rate: Annotated[
        float | None, typer.Option(help="Highest learning rate. [default: 3e-3 for proxy, 1e-3 otherwise]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order, and of the worlds' first sample.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each world.")] = 2000,
    estimator: Annotated[str, typer.Option(help="answers, hard: gate, gumbel, reinforce, soft or none.")] = "gate",
    budget: Annotated[
        str, typer.Option(help="answers, hard: 0.25, falling 1.0>0.25, drawn for each step 0.06-0.5, or auto.")
    ] = "0.25",
    reward: Annotated[str, typer.Option(help="Of reinforce: likelihood or accuracy.")] = "likelihood",
    thrift: Annotated[float, typer.Option(min=0, help="What the tokens of budget auto cost in the loss.")] = 0.0,
    lora: Annotated[int, typer.Option(min=0, help="answers, hard: rank of LoRA on the base; 0 leaves it frozen.")] = 0,
    last_layers: Annotated[int, typer.Option(min=0, help="answers, hard: layers of the base that learn too.")] = 0,
    query_layers: Annotated[int, typer.Option(min=0, help="Layers that read the question first.")] = 0,
    mode: Annotated[str, typer.Option(help="answers, hard: prune, or saccade.")] = "prune",
    compress: Annotated[str | None, typer.Option(help="saccade: of the gestalt, pool, merge or conv, learned.")] = None,
    dtype: Annotated[str, typer.Option(help="answers, hard: of the base, float32 or bfloat16.")] = "float32",
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 200,
    cache: Annotated[
        Path | None, typer.Option(help="proxy: where features are kept. [default: ~/.cache/arr-coc]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of --out.")] = False,
) -> None:
    """Train a selector for a frozen model; Ctrl-C saves a checkpoint, --resume goes on from it."""
    with one_line_errors():
        if stage not in ("proxy", "answers", "hard"):
            raise ValueError(f"`--stage` must be proxy, answers or hard, got {stage!r}")
        from arr_coc.commands.train import train as run
        from arr_coc.training.trainer import LoopConfig

        peak = rate if rate is not None else 3e-3 if stage == "proxy" else 1e-3
        config = LoopConfig(steps=steps, batch_size=batch, rate=peak, seed=seed, save_every=save_every)
        options: dict[str, Any] = {"start": start, "samples": samples, "query_layers": query_layers}
        if stage == "proxy":
            options["cache"] = cache
        else:
            options |= {"estimator": estimator, "budget": budget, "reward": reward, "thrift": thrift, "lora": lora}
            options |= {"last_layers": last_layers, "dtype": dtype, "mode": mode, "compress": compress}
        try:
            run(stage, data, out, base, config, device=device, resume=resume, **options)
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command with --resume goes on from {out}", err=True)
            raise typer.Exit(130) from None
    if os.environ.get("RANK", "0") == "0":  # one of several processes speaks
        typer.echo(f"selector  {out}")


def _print_answer(facts: dict[str, Any], overlay: Path | None) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(facts["answer"] or "(no answer)", style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    budget = "" if facts["budget"] is None else f" (budget {facts['budget']})"
    table.add_row("tokens", f"{facts['tokens']['used']} of {facts['tokens']['full']}{budget}")
    table.add_row("strategy", f"{facts['strategy']}: {facts['reason']}")
    table.add_row("time", ", ".join(f"{name} {value:.0f} ms" for name, value in facts["timings_ms"].items()))
    name = facts["selector"]
    known = {None: "no selector", "arr-coc": "selector arr-coc (untrained)", "embedded": "selector embedded (trained)"}
    chosen = known.get(name, f"selector {name}")  # others have a place of their own
    table.add_row("model", f"{facts['model']}, {chosen}")
    console.print(table)
    if overlay is not None:
        typer.echo(f"overlay   {overlay}")


def _print_look(facts: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("tokens", f"{facts['tokens']['used']} of {facts['tokens']['full']} (budget {facts['budget']})")
    table.add_row("strategy", f"{facts['strategy']}: {facts['reason']}")
    table.add_row("weights", ", ".join(f"{name} {value:.2f}" for name, value in facts["weights"].items()))
    table.add_row("tensions", ", ".join(f"{name} {value:.2f}" for name, value in facts["tensions"].items()))
    table.add_row("words", " ".join(facts["words"]))
    for note in facts["notes"]:
        table.add_row("note", note)
    console.print(table)
    if facts["sheet"]:
        typer.echo(f"sheet     {facts['sheet']}")  # not in the table: a path must never be wrapped


app.command("eval")(evaluate)
app.command()(bench)
app.command()(demo)
app.command("export-space")(export_space)


def main() -> None:
    """Entry point of the `arr-coc` command."""
    app()
