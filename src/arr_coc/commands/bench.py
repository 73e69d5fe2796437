"""`arr-coc bench`: how long each stage takes with each selector, in turn, in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from arr_coc.config import EMBEDDED
from arr_coc.evaluation.contenders import open_contenders, parse_budgets
from arr_coc.evaluation.run import Opened, check_device, open_model
from arr_coc.evaluation.shapes import SHAPES, build_shape, inputs_for_shape
from arr_coc.evaluation.timing import describe_machine, time_contenders
from arr_coc.inference.load import quiet_loading
from arr_coc.runtime.atomic_files import write_aside

# Pixels a side of the largest cell: pictures of noise have whole ones.
CELL = 32


def bench(
    selectors: Sequence[str],
    budget: str,
    model: str | None,
    size: int,
    repeats: int,
    device: str,
    dtype: str,
    out: Path | None,
) -> dict[str, Any]:
    """Time selectors on pictures of noise; what is chosen does not matter, how many tokens are does."""
    quiet_loading()
    if len(parse_budgets(budget)) > 1:
        raise ValueError(f"`--budget` must be one number or share, got {budget!r}; `arr-coc eval` takes several")
    name = model or EMBEDDED
    if name in SHAPES:
        opened = Opened(build_shape(name, check_device(device), getattr(torch, dtype)), None)
    else:
        opened = open_model(name, device, dtype, size + CELL)
    vision = opened.model.config.vision_config
    side = -(-size // (vision.patch_size * vision.spatial_merge_size))
    wanted = [one for one in open_contenders(selectors, opened.model) if one.name != "oracle"]
    asked = [inputs_for_model(opened, (side, side), seed) for seed in range(repeats)]
    rows = time_contenders(opened, asked, wanted, budget)
    found = {"model": name, "tokens": side * side, "budget": budget, **describe_machine(opened.model), "rows": rows}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_aside(out, json.dumps(found, indent=1) + "\n")
    return found


def inputs_for_model(opened: Opened, grid: tuple[int, int], seed: int) -> dict[str, Any]:
    """Noise of a grid, by the ids of a shape or by the processor of a model."""
    if opened.processor is None:
        return inputs_for_shape(opened.model, grid, seed)
    vision = opened.model.config.vision_config
    cell = vision.patch_size * vision.spatial_merge_size
    noise = np.random.default_rng(seed).integers(0, 256, (grid[0] * cell, grid[1] * cell, 3), dtype=np.uint8)
    return opened.ask(["what does the red text say?"], [Image.fromarray(noise)])
