"""Files that survive a killed process: written under a temporary name and renamed, or grown by whole lines."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def set_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is renamed to `path`, on failure it is removed."""
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if error.filename is not None and str(error.filename) == str(temporary):
            error.filename, error.filename2 = str(path), None  # the name that its user knows
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raise `OSError` unless files can be written into a folder, which may still have to be created; none is left.

    Example:

    ```python
    >>> from pathlib import Path
    >>> from arr_coc.runtime.atomic_files import check_folder
    >>> check_folder(Path("/dev/null/results"))
    Traceback (most recent call last):
    NotADirectoryError: /dev/null is no folder, so nothing can be written into /dev/null/results; give another

    ```
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        where = "" if place == folder.absolute() else f", so nothing can be written into {folder}"
        raise NotADirectoryError(f"{place if where else folder} is no folder{where}; give another")
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"nothing can be written into {folder}: {reason}; give another folder") from None


def write_aside(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with set_aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines to a file; when this returns, they are on the disk."""
    if lines:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())


def recover_rows(path: Path, remedy: str) -> list[dict[str, Any]]:
    """Read all rows of a file of JSON lines; a last line cut short by a killed process is removed from the file.

    A file of another kind is refused and left as it is.

    Args:
        path (`Path`): the file; it may be missing.
        remedy (`str`): what its user can do about a damaged one, to end the error's line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    cut = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
    try:
        rows = [json.loads(line) for line in lines]
        if not all(isinstance(row, dict) for row in rows) or (cut and not cut.startswith(b"{")):
            raise ValueError("a line is no JSON object")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from None
    if cut:
        write_aside(path, b"".join(lines).decode())
    return rows
