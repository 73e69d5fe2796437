"""The commands of the page: serving it, and making a Space of it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from arr_coc.cli_errors import one_line_errors


def demo(
    model: Annotated[
        str | None, typer.Option(help="Directory or Hub id of a supported model. [default: the embedded one]")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="A selector's name, directory or Hub id.")] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Also make a public address, through Gradio's servers.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="Where it listens. [default: the first free one from 7860]")] = None,
    host: Annotated[str, typer.Option(help="Who may come: 127.0.0.1 this machine, 0.0.0.0 everybody.")] = "127.0.0.1",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")] = None,
    votes: Annotated[Path, typer.Option(help="File to which votes of the tab Compare are added.")] = Path(
        "votes.jsonl"
    ),
) -> None:
    """Open a page in the browser that shows where and why it looks; Ctrl-C ends it."""
    with one_line_errors():
        status = Console(stderr=True, highlight=False).status("opening the model and the page")
        status.start()

        def say(address: str) -> None:
            status.stop()
            gc.enable()
            typer.echo(f"page      {address}")

        gc.disable()  # thousands of modules are imported, none of which is garbage
        try:
            from arr_coc.commands.demo import demo as run

            run(model, selector, host, port, share, votes, device, say)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
        finally:
            status.stop()
            gc.enable()


def export_space(
    folder: Annotated[Path, typer.Argument(help="A folder that is empty or does not exist.")],
) -> None:
    """Write a folder that can be pushed as a Hugging Face Space as it is."""
    with one_line_errors():
        from arr_coc.commands.export_space import export_space as run

        run(folder)
    typer.echo(f"space     {folder}")
