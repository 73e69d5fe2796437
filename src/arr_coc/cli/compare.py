"""`arr-coc compare`: two selectors on the same picture and question, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import AsJson, ImageFile, Question, SharedBudget, check_paths, parse_budget

if TYPE_CHECKING:
    from arr_coc.config import Budget


def compare(
    selector_a: Annotated[str, typer.Argument(help="Name, directory or Hub id of a selector.")],
    selector_b: Annotated[str, typer.Argument(help="Another selector.")],
    image: ImageFile,
    question: Question,
    model: Annotated[
        str | None,
        typer.Option(help="Directory or Hub id of a supported model. [default: the one the selectors were made for]"),
    ] = None,
    budget: SharedBudget = "0.25",
    out: Annotated[
        Path | None, typer.Option(help="Where to write the drawing (PNG). [default: compare.png, none with --json]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw where two selectors look, side by side, with the answer from each."""
    with one_line_errors():
        tokens = parse_budget(budget)
        if out is None and not as_json:
            out = Path("compare.png")
        with Console(stderr=True, highlight=False).status("opening the model and asking twice"):
            facts = compare_selectors((selector_a, selector_b), image, question, model, tokens, out)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for row in facts["selectors"]:
        weights = "" if row["weights"] is None else "  " + ", ".join(f"{n} {v:.2f}" for n, v in row["weights"].items())
        typer.echo(f"{row['selector']}: {row['answer']}  ({row['tokens']['used']} of {row['tokens']['full']}){weights}")
    typer.echo(f"kept by both: {facts['kept_by_both']}")
    typer.echo(f"drawing   {out}")


def compare_selectors(
    selectors: tuple[str, str], path: Path, question: str, model: str | None, budget: Budget, out: Path | None
) -> dict[str, Any]:
    """Ask one question through two selectors and draw what each of them kept; returns what the command prints."""
    from arr_coc.cli.facts import round_labels
    from arr_coc.drawing.overlay import check_drawable, kept_cells
    from arr_coc.drawing.png_file import save_image
    from arr_coc.drawing.sheet import Column, draw_comparison
    from arr_coc.inference.load import find_names, load_selector, quiet_loading
    from arr_coc.inference.messages import make_messages
    from arr_coc.inference.vlm import ARRCOCQwen
    from arr_coc.pixels.files import open_picture

    check_paths(path, out, "--out")
    for name in selectors:
        check_drawable(name)
    picture = open_picture(path).image
    make_messages(picture, question)  # refuses an empty question before the model is opened
    quiet_loading()
    base = model or _find_base(selectors)
    names = [find_names(base, name)[1] for name in selectors]
    vlm = ARRCOCQwen.from_pretrained(base, names[0])
    other = ARRCOCQwen(vlm.model, vlm.processor, load_selector(names[1], vlm.model))
    columns, rows = [], []
    for name, asked in zip(names, (vlm, other), strict=True):
        answer = asked.answer(picture, question, budget=budget)
        columns.append(Column(Path(name).name, answer.output, kept_cells(answer), answer.text))
        rows.append(
            {
                "selector": name,
                "answer": answer.text,
                "tokens": {"full": answer.tokens.full, "used": answer.tokens.used},
                "strategy": answer.strategy,
                **round_labels(answer.output),
            }
        )
    if out is not None:
        save_image(draw_comparison(picture, question.strip(), columns), out)
    both = columns[0].kept & columns[1].kept
    return {"question": question, "budget": budget, "selectors": rows, "kept_by_both": int(both.sum())}


def _find_base(selectors: tuple[str, str]) -> str:
    """The model that both selectors were made for; selectors that fit any model use the embedded one."""
    from arr_coc.config import EMBEDDED
    from arr_coc.inference.load import find_base, selector_names

    bases = {str(find_base(None, name)[0]) for name in selectors if name not in selector_names()}
    if len(bases) > 1:
        both = " and ".join(sorted(bases))
        raise ValueError(f"the selectors were made for different models, {both}; name one with --model")
    return bases.pop() if bases else EMBEDDED
