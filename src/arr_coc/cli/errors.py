"""A user's mistake is one line on the error stream and exit code 2, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line for every error that a user can cause."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    except MemoryError:
        typer.echo("error: not enough memory for this picture; downsample it", err=True)
        raise typer.Exit(2) from None
