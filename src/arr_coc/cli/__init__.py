"""The `arr-coc` command: one file a subcommand.

Heavy libraries are imported inside the commands, so that help and usage errors appear at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from arr_coc._version import __version__
from arr_coc.cli import ask, bench, compare, demo, evaluate, export_space, look, train, world
from arr_coc.runtime.freed_memory import keep_freed_memory

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Vision-language models that look where the question points.",
)  # fmt: skip


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


app.command()(look.look)
app.command()(ask.ask)
app.command()(world.world)
app.command()(compare.compare)
app.command()(train.train)
app.command("eval")(evaluate.evaluate)
app.command()(bench.bench)
app.command()(demo.demo)
app.command("export-space")(export_space.export_space)


def main() -> None:
    """Run the `arr-coc` command."""
    keep_freed_memory()
    app()
