"""Which file of a folder was held out from training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_FOLDERS = ("validation", "val", "test")
_PARTS = ("val", "test", "")


def find_held_out(place: Path, patterns: Sequence[str]) -> Path:
    """The file of a folder that training did not see: one named val or test, or the only one not named train.

    Args:
        place (`Path`): a folder, or one whose subfolder `validation`, `val` or `test` has the file, or the file itself.
        patterns (`Sequence[str]`): of its name, such as `*.jsonl`.

    Returns:
        `Path`: the file.
    """
    if place.is_file():
        return place
    if not place.is_dir():
        raise ValueError(f"{place} is neither a folder nor a file")
    for folder in (place, *(place / name for name in _FOLDERS)):
        files = sorted(file for pattern in patterns for file in folder.glob(pattern) if "train" not in file.name)
        for part in _PARTS:
            fitting = [file for file in files if part in file.name]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                names = ", ".join(file.name for file in fitting)
                raise ValueError(f"{folder} has several files to measure on ({names}); name one of them")
    raise ValueError(f"{place} has no {' or '.join(patterns)} that is not for training; name a file to use it anyway")
