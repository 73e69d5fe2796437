"""A user's mistake is one line on the error stream and exit code 2, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


def _describe(error: Exception) -> str:
    """What an error says, without the number that the system gives it."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror.lower()}"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line for every error that a user can cause."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        typer.echo("error: " + " ".join(_describe(error).split()), err=True)
        raise typer.Exit(2) from None
    except MemoryError:
        typer.echo("error: not enough memory for this picture; downsample it", err=True)
        raise typer.Exit(2) from None
    except RuntimeError as error:  # torch has no name for it on the CPU, and torch is not imported here
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        typer.echo("error: not enough memory; use a smaller picture, batch or model", err=True)
        raise typer.Exit(2) from None
