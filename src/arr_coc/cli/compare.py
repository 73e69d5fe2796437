"""`arr-coc compare`: two selectors on the same picture and question, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import (
    AsJson,
    ImageFile,
    OwnCompress,
    Question,
    SharedBudget,
    check_paths,
    parse_budget,
    parse_gaze,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from arr_coc.config import Budget
    from arr_coc.evaluation.contenders import Contender
    from arr_coc.gaze.plan import Gaze
    from arr_coc.inference.answer import Answer
    from arr_coc.inference.vlm import ARRCOCQwen

MODES = ("prune", "saccade", "auto", "weight")


def compare(
    selector_a: Annotated[
        str,
        typer.Argument(
            help="Name, directory or Hub id of a selector. NAME@saccade, and NAME@pool, @merge or @conv, have a mode "
            "of their own."
        ),
    ],
    selector_b: Annotated[str, typer.Argument(help="Another selector.")],
    image: ImageFile,
    question: Question,
    model: Annotated[
        str | None,
        typer.Option(help="Directory or Hub id of a supported model. [default: the one the selectors were made for]"),
    ] = None,
    budget: SharedBudget = "0.25",
    mode: Annotated[
        str, typer.Option(help="prune, saccade, auto or weight, as in ask; of auto, the last look reads the budget.")
    ] = "prune",
    compress: OwnCompress = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the drawing (PNG). [default: compare.png, none with --json]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw where two selectors look, side by side, with the answer from each."""
    with one_line_errors():
        tokens = parse_budget(budget)
        if mode not in MODES:
            raise ValueError(f"`--mode` must be one of {', '.join(MODES)}, got {mode!r}")
        gaze = parse_gaze(compress, mode)
        if out is None and not as_json:
            out = Path("compare.png")
        with Console(stderr=True, highlight=False).status("opening the model and asking twice"):
            facts = compare_selectors((selector_a, selector_b), image, question, model, tokens, mode, gaze, out)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for row in facts["selectors"]:
        weights = "" if row["weights"] is None else "  " + ", ".join(f"{n} {v:.2f}" for n, v in row["weights"].items())
        tokens_read = f"{row['tokens']['used']} of {row['tokens']['full']}"
        how = "" if row["mode"] == "prune" else f"{row['mode']}, "
        typer.echo(f"{row['selector']}: {row['answer']}  ({how}{tokens_read}){weights}")
    both = facts["kept_by_both"]
    typer.echo(f"kept by both: {'not counted, their cells differ in size' if both is None else both}")
    typer.echo(f"drawing   {out}")


def compare_selectors(
    selectors: tuple[str, str],
    path: Path,
    question: str,
    model: str | None,
    budget: Budget,
    mode: str,
    gaze: Gaze | None,
    out: Path | None,
) -> dict[str, Any]:
    """Ask one question through two selectors and draw what each of them read; returns what the command prints."""
    from arr_coc.cli.facts import describe_looks, round_labels
    from arr_coc.config import ARRCOCConfig
    from arr_coc.drawing.overlay import check_drawable, kept_cells
    from arr_coc.drawing.png_file import save_image
    from arr_coc.drawing.sheet import Column, draw_comparison
    from arr_coc.evaluation.contenders import open_contender, split_name
    from arr_coc.evaluation.wrong_question import WRONG
    from arr_coc.inference.load import find_names, quiet_loading
    from arr_coc.inference.messages import make_messages
    from arr_coc.inference.vlm import ARRCOCQwen
    from arr_coc.pixels.files import open_picture

    check_paths(path, out, "--out")
    parts = [split_name(name) for name in selectors]
    for plain, ending in parts:
        check_drawable(plain)
        if WRONG in ending:
            raise ValueError(f"both selectors are asked the same question, got {plain + ending!r}; use {plain}")
    picture = open_picture(path).image
    make_messages(picture, question)  # refuses an empty question before the model is opened
    quiet_loading()
    base = model or _find_base([plain for plain, _ in parts])
    plains = [find_names(base, plain)[1] for plain, _ in parts]
    vlm = ARRCOCQwen.from_pretrained(base, plains[0])
    columns, rows = [], []
    for plain, (_, ending) in zip(plains, parts, strict=True):
        contender = open_contender(plain + ending, vlm.model)
        answer = _ask(vlm, contender, picture, question, budget, mode, gaze)
        columns.append(Column(Path(plain).name + ending, answer))
        rows.append(
            {
                "selector": plain + ending,
                "answer": answer.text,
                "mode": answer.mode,
                "looks": describe_looks(answer.looks),
                "tokens": {"full": answer.tokens.full, "used": answer.tokens.used},
                "strategy": answer.strategy,
                **round_labels(answer.output),
            }
        )
    if out is not None:
        cell = ARRCOCConfig.for_model(vlm.model).cell_pixels
        save_image(draw_comparison(picture, question.strip(), columns, cell), out)
    first, second = (kept_cells(column.answer) for column in columns)
    both = int((first & second).sum()) if first.shape == second.shape else None
    return {"question": question, "budget": budget, "selectors": rows, "kept_by_both": both}


def _ask(
    vlm: ARRCOCQwen, contender: Contender, picture: Image, question: str, budget: Budget, mode: str, gaze: Gaze | None
) -> Answer:
    """The answer through one selector; an ending of its name goes before the mode of the call."""
    from arr_coc.inference.vlm import ARRCOCQwen

    chosen: Any = mode
    if contender.mode != "prune":
        chosen, gaze = "saccade", contender.gaze
    if chosen == "saccade" and not contender.selector.can_saccade:
        raise ValueError(f"{contender.name} has no saccade mode; use --mode prune or auto, or another selector")
    if gaze is not None and gaze.compress == "conv" and getattr(contender.selector, "compressor", None) is None:
        raise ValueError(f"{contender.name} has learned no compression by conv; use --compress pool or merge")
    asked = ARRCOCQwen(vlm.model, vlm.processor, contender.selector)
    return asked.answer(picture, question, budget=budget, mode=chosen, gaze=gaze, introspect=contender.introspect)


def _find_base(selectors: Sequence[str]) -> str:
    """The model that both selectors were made for; selectors that fit any model use the embedded one."""
    from arr_coc.config import EMBEDDED
    from arr_coc.inference.load import find_base, selector_names

    bases = {str(find_base(None, name)[0]) for name in selectors if name not in selector_names()}
    if len(bases) > 1:
        both = " and ".join(sorted(bases))
        raise ValueError(f"the selectors were made for different models, {both}; name one with --model")
    return bases.pop() if bases else EMBEDDED
