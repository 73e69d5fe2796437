"""Writing a picture as a PNG file."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from arr_coc.runtime.atomic_files import check_folder, set_aside


def check_target(path: str | Path) -> Path:
    """Refuse a path where no PNG can be written, before any work is done.

    Example:

    ```python
    >>> from arr_coc.drawing.png_file import check_target
    >>> check_target("sheet.png").name
    'sheet.png'

    ```
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"the output is a PNG file, so {path.name!r} should end in .png")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; give a file name")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    check_folder(path.parent)
    return path


def save_image(image: Image.Image, path: str | Path) -> None:
    """Write a PNG file; an interrupted run leaves no partial file."""
    with set_aside(check_target(path)) as aside:
        image.save(aside, format="PNG")
