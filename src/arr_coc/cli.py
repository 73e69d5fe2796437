"""The command line. A user's mistake is one line on the error stream and exit code 2, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from arr_coc._version import __version__

if TYPE_CHECKING:
    from arr_coc.config import Budget

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Vision-language models that look where the question points.",
)  # fmt: skip


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    except MemoryError:
        typer.echo("error: not enough memory for this picture; downsample it", err=True)
        raise typer.Exit(2) from None


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
    image: Annotated[Path, typer.Argument(help="A picture file.")],
    question: Annotated[str, typer.Argument(help="What to ask about it.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the sheet goes (PNG). [default: sheet.png, none with --json]")
    ] = None,
    channels: Annotated[str, typer.Option(help="Texture channels: core (13) or full (40).")] = "full",
    budget: Annotated[str, typer.Option(help="Tokens to keep: a number, a ratio in (0, 1], or auto.")] = "0.25",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Draw where a question makes the system look: channels, scores, relevance and the kept tokens."""
    with _one_line_errors():
        wanted = _parse_budget(budget)
        if out is None and not as_json:
            out = Path("sheet.png")
        facts = _look(image, question, channels, wanted, out)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print(facts)


def _look(path: Path, question: str, channels: str, budget: Budget, out: Path | None) -> dict[str, Any]:
    # torch is imported only now, so that help and usage errors come at once
    import torch

    from arr_coc import standin
    from arr_coc.balancing import SCORES, TENSIONS
    from arr_coc.config import ARRCOCConfig
    from arr_coc.layer import ARRCOCLayer
    from arr_coc.pictures import fit_to_cells, open_picture, to_tensor
    from arr_coc.sheet import check_target, draw_sheet, save_image
    from arr_coc.texture import generate_texture_array

    words = standin.split_words(question)
    if str(path).startswith(("http:", "https:")):
        raise ValueError(f"{path} is an address; only files are read, so download it first")
    if out is not None:
        check_target(out)
        if out.exists() and path.exists() and out.samefile(path):
            raise ValueError(f"{out} is the picture itself; give another --out")
    config = ARRCOCConfig(hidden_size=standin.WIDTH, channels=channels)  # type: ignore[arg-type]  # checked there
    opened = open_picture(path, config.max_image_pixels)
    fitted, grid = fit_to_cells(opened.image)
    picture = to_tensor(fitted)
    with torch.inference_mode():
        cells = standin.embed_cells(picture, generate_texture_array(picture, grid, "full"))
        output = ARRCOCLayer(config).eval()(
            cells, standin.embed_words(words)[None], grid=grid, picture=picture, budget=budget, details=True
        )
    notes = [f"Tokens and words: {standin.NAME}. Selector: untrained layer."]
    if fitted.size != opened.image.size:
        was, now = opened.image.size, fitted.size
        notes.append(f"The picture was resized from {was[0]}x{was[1]} to {now[0]}x{now[1]} pixels, whole tokens.")
    notes += [f"The picture {note}." for note in opened.notes]
    if out is not None:
        save_image(draw_sheet(fitted, question.strip(), output, channels, tuple(notes)), out)
    return {
        "image": str(path),
        "question": question,
        "grid": list(grid),
        "budget": budget,
        "tokens": {"full": grid[0] * grid[1], "used": int(output.num_kept[0])},
        "strategy": output.strategy[0],
        "reason": output.reason[0],
        "weights": dict(zip(SCORES, _rounded(output.weights[0].tolist()), strict=True)),
        "tensions": dict(zip(TENSIONS, _rounded(output.tensions[0].tolist()), strict=True)),
        "known_words": standin.known_words(words),
        "kept": output.positions[0, :, 1:].tolist(),
        "notes": notes,
        "sheet": None if out is None else str(out),
    }


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _print(facts: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("tokens", f"{facts['tokens']['used']} of {facts['tokens']['full']} (budget {facts['budget']})")
    table.add_row("strategy", f"{facts['strategy']}: {facts['reason']}")
    table.add_row("weights", ", ".join(f"{name} {value:.2f}" for name, value in facts["weights"].items()))
    table.add_row("tensions", ", ".join(f"{name} {value:.2f}" for name, value in facts["tensions"].items()))
    known = ", ".join(facts["known_words"]) or "none: nothing pulls"
    table.add_row("words", f"{known} (those the stand-in knows)")
    for note in facts["notes"]:
        table.add_row("note", note)
    console.print(table)
    if facts["sheet"]:
        typer.echo(f"sheet     {facts['sheet']}")  # not in the table: a path must never be wrapped


def main() -> None:
    """Entry point of the `arr-coc` command."""
    app()
