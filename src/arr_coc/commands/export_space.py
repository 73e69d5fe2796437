"""`arr-coc export-space`: a folder that can be pushed as a Hugging Face Space as it is, this package included."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "space")


def export_space(folder: Path) -> None:
    """Write app, requirements, header and the package into a new folder; an interrupted run leaves none."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; give another")
    if not folder.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {folder.resolve().parent}; make it first")
    package = Path(str(files("arr_coc")))
    with tempfile.TemporaryDirectory(dir=folder.resolve().parent, prefix=".space-") as aside:
        whole = Path(aside) / "space"
        shutil.copytree(package / "assets" / "space", whole)
        (whole / "app.py.template").rename(whole / "app.py")  # nothing that imports all of the package should run it
        shutil.copytree(package, whole / "arr_coc", ignore=_LEFT_OUT)
        os.chmod(whole, 0o755)
        if folder.exists():
            folder.rmdir()
        whole.rename(folder)
