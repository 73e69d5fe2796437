"""Files that are there whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def set_aside(path: Path) -> Iterator[Path]:
    """Another name to write a file under; it takes its own at the end: it is there whole, or not at all."""
    aside = path.with_name(f".{uuid.uuid4().hex}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_aside(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    with set_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")
