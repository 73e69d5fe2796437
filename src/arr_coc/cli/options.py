"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from arr_coc.config import Budget, Introspect
    from arr_coc.gaze.plan import Gaze

ImageFile = Annotated[Path, typer.Argument(help="Picture file.")]
Question = Annotated[str, typer.Argument(help="Question about the picture.")]
Model = Annotated[
    str | None, typer.Option(help="Directory or Hub id of a supported model. [default: the embedded model]")
]
SelectorName = Annotated[
    str | None,
    typer.Option(
        help="Name, directory or Hub id of a selector. arr-coc was trained for the embedded model; arr-coc-untrained "
        "is the layer before training, for any model. [default: arr-coc, for other models arr-coc-untrained]"
    ),
]
Selectors = Annotated[
    str,
    typer.Option(help="Names, directories or Hub ids, separated by commas; NAME@saccade uses that mode; or all."),
]
OwnBudget = Annotated[
    str | None,
    typer.Option(help="Tokens to keep: a number, a ratio in (0, 1], or auto. [default: the selector's; saccade: 529]"),
]
SharedBudget = Annotated[
    str, typer.Option(help="Tokens that each selector keeps: a number, a ratio in (0, 1], or auto.")
]
OwnIntrospect = Annotated[
    str | None,
    typer.Option(
        help="Whether the model is asked where it looks: on, off, auto (if few tokens stay), or a number of its layers "
        "to read. [default: the selector's]"
    ),
]
OwnCompress = Annotated[
    str | None,
    typer.Option(
        help="Of mode saccade: encode the small picture larger and compress it, by pool, merge or conv (which a "
        "selector must have learned). [default: neither]"
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
DType = Annotated[str, typer.Option(help="Data type of the model: float32, bfloat16 or float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def parse_budget(text: str) -> Budget:
    """Read a budget: `"64"` is a number of tokens, `"0.25"` a ratio, `"auto"` stays as it is.

    Example:

    ```python
    >>> from arr_coc.cli.options import parse_budget
    >>> parse_budget("64"), parse_budget("0.25"), parse_budget("auto")
    (64, 0.25, 'auto')

    ```
    """
    from arr_coc.config import check_budget

    for kind in (int, float):
        try:
            return check_budget(kind(text))
        except ValueError as error:
            if "`budget`" in str(error):
                raise
    return check_budget(text)


def parse_introspect(text: str | None) -> Introspect | None:
    """Read whether the model is asked where it looks: `"12"` is a number of layers.

    Example:

    ```python
    >>> from arr_coc.cli.options import parse_introspect
    >>> parse_introspect("12"), parse_introspect("auto")
    (12, 'auto')

    ```
    """
    from arr_coc.config import check_introspect

    if text is None:
        return None
    try:
        return check_introspect(int(text))
    except ValueError as error:
        if "`introspect`" in str(error):
            raise
    return check_introspect(text)


def parse_gaze(compress: str | None, mode: str) -> Gaze | None:
    """The gaze of a mode, if its small picture is to be compressed.

    Example:

    ```python
    >>> from arr_coc.cli.options import parse_gaze
    >>> parse_gaze("pool", "saccade").compress
    'pool'

    ```
    """
    from arr_coc.gaze.plan import Gaze

    if compress is None:
        return None
    if mode not in ("auto", "saccade"):
        raise ValueError(f"--compress belongs to mode saccade, got mode {mode}; drop it, or use --mode saccade")
    return Gaze(compress=compress)  # type: ignore[arg-type]  # checks it


def split_names(text: str, option: str) -> list[str]:
    """Read names that are separated by commas; `option` is what an error calls them."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ValueError(f"`--{option}` is empty; give at least one name")
    return names


def check_dtype(dtype: str) -> None:
    """Refuse data types that models are not measured in."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"`--dtype` must be float32, bfloat16 or float16, got {dtype!r}")


def check_paths(picture: Path, target: Path | None, option: str) -> None:
    """Refuse a web address as picture, and an output that cannot be written or would overwrite the picture."""
    if str(picture).startswith(("http:", "https:")):
        raise ValueError(f"{picture} is a web address; only files are read, so download it first")
    if target is not None:
        from arr_coc.drawing.png_file import check_target

        check_target(target)
        if target.exists() and picture.exists() and target.samefile(picture):
            raise ValueError(f"{target} is the picture itself; give another {option}")
