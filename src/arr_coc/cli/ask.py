"""`arr-coc ask`: an answer, what it cost, and what was read for it; with `--batch`, the answers to a whole file."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import (
    AsJson,
    Device,
    Model,
    OwnBudget,
    OwnCompress,
    OwnIntrospect,
    SelectorName,
    check_paths,
    parse_budget,
    parse_gaze,
    parse_introspect,
)
from arr_coc.cli.questions import BATCH_SIZE, answer_file

if TYPE_CHECKING:
    from arr_coc.config import Budget, Introspect
    from arr_coc.gaze.loop import Looks
    from arr_coc.gaze.plan import Gaze


def ask(
    image: Annotated[Path | None, typer.Argument(help="Picture file.")] = None,
    question: Annotated[str | None, typer.Argument(help="Question about the picture.")] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            help='Instead of IMAGE and QUESTION, a file with a line {"image": path or list of paths, "question": text} '
            "for each question, perhaps with an id. Paths are relative to the file."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Of --batch: where the answers go, a JSON line each; a run that was stopped is continued. "
            "[default: the output]"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"Of --batch: questions at a time. [default: {BATCH_SIZE}]")
    ] = None,
    model: Model = None,
    selector: SelectorName = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="auto: one of the next two, and again with more tokens until the answer is sure; prune: read only the "
            "tokens that matter; saccade: the whole picture small, details where they matter; weight: all tokens, "
            "scaled by relevance; full: the plain model. [default: auto; with --budget prune]"
        ),
    ] = None,
    budget: OwnBudget = None,
    introspect: OwnIntrospect = None,
    compress: OwnCompress = None,
    sure: Annotated[
        float | None,
        typer.Option(help="Of mode auto: how sure an answer must be, in (0, 1], to stop looking. [default: 0.99]"),
    ] = None,
    overlay: Annotated[
        Path | None,
        typer.Option(
            help="Where to write a picture of what was read (PNG); after several looks, each cell has the "
            "number of the first that saw it."
        ),
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also say what the model can be asked.")] = False,
) -> None:
    """Answer a question about a picture, reading only the tokens that matter."""
    with one_line_errors():
        tokens = None if budget is None else parse_budget(budget)
        usual = mode or ("auto" if tokens is None else "prune")
        asked = parse_introspect(introspect)
        gaze, looks = parse_gaze(compress, usual), _parse_looks(sure, usual)
        if gaze is not None or looks is not None:
            mode = usual
        if selector == "oracle":
            raise ValueError(
                "oracle must be told where to look, which the command line cannot do; use another selector"
            )
        if batch is not None:
            unused = {"IMAGE": image, "--overlay": overlay, "--json": as_json, "--verbose": verbose}
            wrong = [name for name, value in unused.items() if value]
            if wrong:
                raise ValueError(f"--batch asks what is in {batch} and writes JSON lines; drop {wrong[0]}")
            size = batch_size or BATCH_SIZE
            settings = (model, selector, mode, tokens, asked, gaze, looks, device)
            _answer_batch(partial(answer_file, batch, out, size, *settings), out)
            return
        if image is None or question is None:
            missing = "IMAGE" if image is None else "QUESTION"
            raise ValueError(f"{missing} is missing; give a picture file and a question, or --batch and a file of both")
        if out is not None or batch_size is not None:
            raise ValueError(f"{'--out' if out is not None else '--batch-size'} belongs to --batch; drop it")
        with Console(stderr=True, highlight=False).status("opening the model and answering"):
            facts = answer_question(image, question, model, selector, mode, tokens, asked, gaze, looks, overlay, device)
    scope, notes = facts.pop("scope"), facts.pop("notes")
    for line in [*notes, *([scope] if verbose else [])]:
        typer.echo(line, err=True)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print_answer(facts, overlay)


def _parse_looks(sure: float | None, mode: str) -> Looks | None:
    from arr_coc.gaze.loop import Looks

    if sure is None:
        return None
    if mode != "auto":
        raise ValueError(f"--sure belongs to mode auto, got mode {mode}; drop it, or use --mode auto")
    return Looks(sure=sure)


def _answer_batch(answer: Callable[[], tuple[int, int]], out: Path | None) -> None:
    """Answer a file of questions, and say how it ended."""
    try:
        total, failed = answer()
    except KeyboardInterrupt:
        how = "give --out to be able to continue" if out is None else f"the same command continues {out}"
        typer.echo(f"stopped; {how}", err=True)
        raise typer.Exit(130) from None
    if out is not None:
        typer.echo(f"answers   {out} ({total - failed} of {total} questions)")
    if failed:
        where = "their lines have an error" + ("" if out is None else "; to ask them again, remove these lines")
        typer.echo(f"{failed} of {total} questions could not be asked: {where}", err=True)
        raise typer.Exit(1)


def answer_question(
    path: Path,
    question: str,
    model: str | None,
    selector: str | None,
    mode: str | None,
    budget: Budget | None,
    introspect: Introspect | None,
    gaze: Gaze | None,
    looks: Looks | None,
    overlay: Path | None,
    device: str,
) -> dict[str, Any]:
    """Open the model, ask, and draw the overlay; returns what the command prints."""
    from arr_coc.cli.facts import describe_conversions, describe_looks, round_labels
    from arr_coc.config import EMBEDDED, ARRCOCConfig
    from arr_coc.drawing.looks import draw_looks
    from arr_coc.drawing.overlay import draw_gaze, draw_overlay
    from arr_coc.drawing.png_file import save_image
    from arr_coc.inference.load import SCOPE, find_names, quiet_loading
    from arr_coc.inference.messages import make_messages
    from arr_coc.inference.vlm import ARRCOCQwen
    from arr_coc.pixels.files import open_picture
    from arr_coc.runtime.freed_memory import take_memory_meanwhile
    from arr_coc.runtime.machine import check_device

    check_paths(path, overlay, "--overlay")
    place = check_device(device)
    opened = open_picture(path)
    make_messages(opened.image, question)  # refuses an empty question before the model is opened
    quiet_loading()
    base, chosen = find_names(model, selector)
    with take_memory_meanwhile():
        vlm = ARRCOCQwen.from_pretrained(base, chosen).to(place)
    answer = vlm.answer(
        opened.image, question, budget=budget, mode=mode, introspect=introspect, gaze=gaze, looks=looks,  # type: ignore[arg-type]
    )  # fmt: skip
    name = EMBEDDED if base == EMBEDDED else vlm.config.name_or_path
    cell = ARRCOCConfig.for_model(vlm.model).cell_pixels
    if overlay is not None:
        draw = draw_gaze if answer.mode == "saccade" else draw_overlay
        if len(answer.looks) > 1:
            draw = draw_looks
        save_image(draw(opened.image, answer, cell), overlay)
    (_, rows, columns), _ = answer.kept[0]
    # some selectors resize the picture themselves, and saccades are cut from the picture as it is
    whole = answer.mode != "saccade" and chosen not in ("downsample", "half-and-half")
    return {
        "answer": answer.text,
        "mode": answer.mode,
        "looks": describe_looks(answer.looks),
        "tokens": {"full": answer.tokens.full, "used": answer.tokens.used},
        # of several looks sureness decides, and where everything is read nothing has to
        "budget": None if answer.looks or answer.tokens.used == answer.tokens.full else answer.budget,
        "strategy": answer.strategy,
        "reason": answer.reason,
        **round_labels(answer.output),
        "timings_ms": answer.timings_ms,
        "model": name,
        "selector": None if mode == "full" else chosen,
        "notes": describe_conversions(opened, (columns * cell, rows * cell) if whole else None),
        "scope": SCOPE if base == EMBEDDED else f"what {name} can be asked is in its own model card",
    }


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
    chosen = "no selector" if facts["selector"] is None else f"selector {facts['selector']}"
    table.add_row("model", f"{facts['model']}, {chosen}")
    console.print(table)
    if overlay is not None:
        typer.echo(f"overlay   {overlay}")
