"""`arr-coc look`: where a question makes the model look, and why, without answering it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import (
    AsJson,
    ImageFile,
    Model,
    OwnBudget,
    OwnCompress,
    OwnIntrospect,
    Question,
    SelectorName,
    check_paths,
    parse_budget,
    parse_gaze,
    parse_introspect,
)

if TYPE_CHECKING:
    from arr_coc.config import Budget, Introspect
    from arr_coc.gaze.plan import Gaze
    from arr_coc.inference.vlm import ARRCOCQwen

MODES = ("prune", "saccade", "weight")


def look(
    image: ImageFile,
    question: Question,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the sheet (PNG). [default: sheet.png, none with --json]")
    ] = None,
    channels: Annotated[
        str | None,
        typer.Option(
            help="Texture channels, core (13) or full (40); other channels than the selector's use an untrained layer. "
            "[default: the selector's]"
        ),
    ] = None,
    budget: OwnBudget = None,
    model: Model = None,
    selector: SelectorName = None,
    mode: Annotated[str, typer.Option(help="prune, saccade or weight, as in ask.")] = "prune",
    introspect: OwnIntrospect = None,
    compress: OwnCompress = None,
    as_json: AsJson = False,
) -> None:
    """Draw where a question makes the model look: what ask would read, relevance, scores and channels."""
    with one_line_errors():
        tokens = None if budget is None else parse_budget(budget)
        asked, gaze = parse_introspect(introspect), parse_gaze(compress, mode)
        if out is None and not as_json:
            out = Path("sheet.png")
        with Console(stderr=True, highlight=False).status("opening the model and looking"):
            facts = look_at(image, question, channels, tokens, asked, gaze, out, model, selector, mode)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print_look(facts)


def look_at(
    path: Path,
    question: str,
    channels: str | None,
    budget: Budget | None,
    introspect: Introspect | None,
    gaze: Gaze | None,
    out: Path | None,
    model: str | None,
    selector: str | None,
    mode: str,
) -> dict[str, Any]:
    """Look at a picture as `ask` does, but without an answer, and draw the sheet; returns what the command prints."""
    from arr_coc.cli.facts import describe_conversions, round_labels
    from arr_coc.config import EMBEDDED, ARRCOCConfig
    from arr_coc.drawing.overlay import check_drawable, fit_to_cells
    from arr_coc.drawing.png_file import save_image
    from arr_coc.drawing.sheet import draw_sheet
    from arr_coc.inference.load import find_names, quiet_loading
    from arr_coc.inference.vlm import ARRCOCQwen
    from arr_coc.pixels.files import open_picture

    if not re.search(r"\w", question):
        raise ValueError("the question has no words; ask something, for instance 'what does the red text say?'")
    if mode not in MODES:
        raise ValueError(f"`--mode` must be one of {', '.join(MODES)}, got {mode!r}")
    check_paths(path, out, "--out")
    if selector is not None:
        check_drawable(selector)
    if channels is not None:
        ARRCOCConfig(hidden_size=1, channels=channels)  # type: ignore[arg-type]  # refuses unknown channels early
    opened = open_picture(path)
    quiet_loading()
    base, chosen = find_names(model, selector)
    vlm = ARRCOCQwen.from_pretrained(base, chosen)
    if channels is not None:
        chosen = _use_channels(vlm, channels, chosen, named=selector is not None)
    seen = vlm.inspect(
        opened.image, question, budget=budget, mode=mode, introspect=introspect, gaze=gaze  # type: ignore[arg-type]
    )  # fmt: skip
    (_, rows, columns), cells = seen.kept[0]
    cell = ARRCOCConfig.for_model(vlm.model).cell_pixels
    name = "the embedded model" if base == EMBEDDED else base
    notes = [
        f"Tokens and words: {name}. Selector: {chosen}.",
        # saccades are cut from the picture as it is
        *describe_conversions(opened, None if mode == "saccade" else (columns * cell, rows * cell)),
    ]
    if out is not None:
        save_image(draw_sheet(fit_to_cells(opened.image, seen, cell), question.strip(), seen, tuple(notes)), out)
    return {
        "image": str(path),
        "question": question,
        "grid": [rows, columns],
        "budget": seen.budget if mode != "weight" else None,
        "tokens": {"full": seen.tokens.full, "used": seen.tokens.used},
        "strategy": seen.strategy,
        "reason": seen.reason,
        **round_labels(seen.output),
        "words": list(seen.words),
        "kept": [[index // columns, index % columns] for index in cells.tolist()],
        "notes": notes,
        "sheet": None if out is None else str(out),
    }


def _use_channels(vlm: ARRCOCQwen, channels: str, chosen: str, named: bool) -> str:
    """Make the selector read these channels, by an untrained layer if it reads others; returns what it is called."""
    from dataclasses import replace

    from arr_coc.config import TRAINED, UNTRAINED, ARRCOCConfig
    from arr_coc.inference.load import load_selector
    from arr_coc.realizing import ARRCOCLayer

    if isinstance(vlm.selector, ARRCOCLayer) and vlm.selector.config.channels == channels:
        return chosen
    if chosen != UNTRAINED and (named or chosen != TRAINED):
        raise ValueError(f"{chosen} does not read the channels {channels!r}; leave out --channels, or use {UNTRAINED}")
    config = replace(ARRCOCConfig.for_model(vlm.model), channels=channels)  # type: ignore[arg-type]
    vlm.selector = load_selector(ARRCOCLayer(config).eval(), vlm.model)
    return UNTRAINED


def _print_look(facts: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    budget = "" if facts["budget"] is None else f" (budget {facts['budget']})"
    table.add_row("tokens", f"{facts['tokens']['used']} of {facts['tokens']['full']}{budget}")
    table.add_row("strategy", f"{facts['strategy']}: {facts['reason']}")
    for name in ("weights", "tensions"):
        if facts[name] is not None:
            table.add_row(name, ", ".join(f"{label} {value:.2f}" for label, value in facts[name].items()))
    if facts["weights"] is None:
        everything = len(facts["kept"]) == facts["tokens"]["full"]
        why = "all tokens were read, without a choice" if everything else "this selector gives no relevance"
        table.add_row("weights", f"none: {why}")
    if facts["words"]:  # selectors inside the language model read the whole prompt
        table.add_row("words", " ".join(facts["words"]))
    for note in facts["notes"]:
        table.add_row("note", note)
    console.print(table)
    if facts["sheet"]:
        typer.echo(f"sheet     {facts['sheet']}")  # not in the table: a path must never be wrapped
