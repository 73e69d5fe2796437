"""Write files atomically: under a temporary name, then renamed, so that no half-written file is left."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def set_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is renamed to `path`, on failure it is removed."""
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_aside(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with set_aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
