"""`arr-coc export-space`: a folder that can be pushed as a Hugging Face Space, with the package inside."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from arr_coc.cli.errors import one_line_errors
from arr_coc.runtime.atomic_files import check_folder

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "space")


def export_space(
    folder: Annotated[Path, typer.Argument(help="A folder that is empty or does not exist yet.")],
) -> None:
    """Write a folder that can be pushed as a Hugging Face Space."""
    with one_line_errors():
        write_space(folder)
    typer.echo(f"space     {folder}")


def write_space(folder: Path) -> None:
    """Copy app, requirements, README and the package into a new folder; an interrupted run leaves nothing behind."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; give another")
    parent = folder.resolve().parent
    if not parent.is_dir():
        raise ValueError(f"there is no folder {parent}; create it first")
    check_folder(parent)
    package = Path(str(files("arr_coc")))
    with tempfile.TemporaryDirectory(dir=parent, prefix=".space-") as temporary:
        space = Path(temporary) / "space"
        shutil.copytree(package / "assets" / "space", space)
        # a template in the package: tools that import every module would start it
        (space / "app.py.template").rename(space / "app.py")
        shutil.copytree(package, space / "arr_coc", ignore=_LEFT_OUT)
        os.chmod(space, 0o755)
        if folder.exists():
            folder.rmdir()
        space.rename(folder)
