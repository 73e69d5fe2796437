"""`arr-coc bench`: how long each stage takes with each selector, all timed in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from arr_coc.cli.errors import one_line_errors
from arr_coc.cli.options import AsJson, Device, DType, Selectors, check_dtype, split_names

if TYPE_CHECKING:
    from arr_coc.evaluation.run import Opened

# Largest side of a token in pixels: pictures of noise are made of whole tokens.
CELL = 32


def bench(
    selectors: Selectors = "all",
    budget: Annotated[str, typer.Option(help="Tokens to keep: a number, or a ratio such as 0.25.")] = "0.25",
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory or Hub id of a supported model, or a shape with random weights: Qwen3-VL-2B, Qwen3-VL-4B, "
            "Qwen3-VL-8B, Qwen2.5-VL-7B. [default: the embedded model]"
        ),
    ] = None,
    size: Annotated[int, typer.Option(min=64, max=8192, help="Side of the picture in pixels.")] = 512,
    repeats: Annotated[int, typer.Option(min=2, help="Number of pictures to time.")] = 16,
    device: Device = "cpu",
    dtype: DType = "float32",
    out: Annotated[Path | None, typer.Option(help="Where to write the figures (JSON).")] = None,
    as_json: AsJson = False,
) -> None:
    """Time each stage with each selector in one run: encoder, selection, prefill, decoding."""
    with one_line_errors():
        check_dtype(dtype)
        names = split_names(selectors, "selectors")
        with Console(stderr=True, highlight=False).status("timing"):
            figures = time_stages(names, budget, model, size, repeats, device, dtype, out)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _print_figures(figures)


def time_stages(
    selectors: Sequence[str],
    budget: str,
    model: str | None,
    size: int,
    repeats: int,
    device: str,
    dtype: str,
    out: Path | None,
) -> dict[str, Any]:
    """Time selectors on pictures of noise: the number of tokens matters, not which ones are kept."""
    import torch

    from arr_coc.config import EMBEDDED
    from arr_coc.evaluation.contenders import open_contenders, parse_budgets
    from arr_coc.evaluation.run import Opened, open_model
    from arr_coc.evaluation.shapes import SHAPES, build_shape
    from arr_coc.evaluation.timing import time_contenders
    from arr_coc.inference.load import quiet_loading
    from arr_coc.runtime.atomic_files import check_folder, write_aside
    from arr_coc.runtime.machine import check_device, describe_machine

    if out is not None:
        if out.is_dir():
            raise IsADirectoryError(f"cannot write {out}: it is a folder; give a file name")
        check_folder(out.parent)
    if "oracle" in selectors:
        raise ValueError("oracle must be told where to look, so it is not timed; use another selector")
    quiet_loading()
    if len(parse_budgets(budget)) > 1:
        raise ValueError(f"`--budget` must be one number or ratio, got {budget!r}; `arr-coc eval` takes several")
    name = model or EMBEDDED
    if name in SHAPES:
        opened = Opened(build_shape(name, check_device(device), getattr(torch, dtype)), None)
    elif model is not None and "/" not in name and not Path(name).is_dir() and name != EMBEDDED:
        raise ValueError(
            f"{name!r} is neither a directory nor a Hub id, which has a slash, nor one of {', '.join(SHAPES)}"
        )
    else:
        opened = open_model(name, device, dtype, size + CELL)
    vision = opened.model.config.vision_config
    side = -(-size // (vision.patch_size * vision.spatial_merge_size))
    contenders = [contender for contender in open_contenders(selectors, opened.model) if contender.name != "oracle"]
    inputs = [_make_noise(opened, side, seed) for seed in range(repeats)]
    rows = time_contenders(opened, inputs, contenders, budget)
    figures = {"model": name, "tokens": side * side, "budget": budget, **describe_machine(opened.model), "rows": rows}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_aside(out, json.dumps(figures, indent=1) + "\n")
    return figures


def _make_noise(opened: Opened, side: int, seed: int) -> dict[str, Any]:
    """Inputs of a question about noise of `side` x `side` tokens."""
    import numpy as np
    from PIL import Image

    from arr_coc.evaluation.shapes import inputs_for_shape

    if opened.processor is None:  # a shape with random weights
        return inputs_for_shape(opened.model, (side, side), seed)
    vision = opened.model.config.vision_config
    pixels = side * vision.patch_size * vision.spatial_merge_size
    noise = np.random.default_rng(seed).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)
    return opened.ask(["what does the red text say?"], [Image.fromarray(noise)])


def _print_figures(figures: dict[str, Any]) -> None:
    typer.echo(", ".join([figures["model"], f"{figures['tokens']} tokens", figures["machine"], figures["dtype"],
                          figures["attention"]]))  # fmt: skip
    stages = ("encode", "select", "prefill", "first_token")
    table = Table(
        "ms (median ± half IQR)", *(name.replace("_", " ") for name in stages), "of full", "decode", "cache kB"
    )
    for row in figures["rows"]:
        cells = [f"{row[f'{name}_ms']:.2f} ± {row[f'{name}_ms_iqr'] / 2:.2f}" for name in stages]
        ratio = "" if row["of_full"] is None else f"{row['of_full']:.2f}"
        decode = "" if row["decode_ms"] is None else f"{row['decode_ms']:.2f}"
        table.add_row(row["selector"], *cells, ratio, decode, f"{row['kv_bytes'] / 1e3:.0f}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file has room for every column
    console.print(table)
