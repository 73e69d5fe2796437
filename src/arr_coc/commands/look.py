"""`arr-coc look`: where a question makes the system look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from arr_coc import standin
from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.config import ARRCOCConfig, Budget
from arr_coc.layer import ARRCOCLayer
from arr_coc.pictures import fit_to_cells, open_picture, to_tensor
from arr_coc.sheet import check_target, draw_sheet, save_image
from arr_coc.texture import generate_texture_array


def look(path: Path, question: str, channels: str, budget: Budget, out: Path | None) -> dict[str, Any]:
    """Look at a picture and draw the sheet; returns what the command prints."""
    words = standin.split_words(question)
    if str(path).startswith(("http:", "https:")):
        raise ValueError(f"{path} is an address; only files are read, so download it first")
    if out is not None:
        check_target(out)
        if out.exists() and path.exists() and out.samefile(path):
            raise ValueError(f"{out} is the picture itself; give another --out")
    config = ARRCOCConfig(hidden_size=standin.WIDTH, channels=channels)  # type: ignore[arg-type]  # checked there
    opened = open_picture(path, config.max_image_pixels)
    fitted, grid = fit_to_cells(opened.image)
    picture = to_tensor(fitted)
    with torch.inference_mode():
        cells = standin.embed_cells(picture, generate_texture_array(picture, grid, "full"))
        output = ARRCOCLayer(config).eval()(
            cells, standin.embed_words(words)[None], grid=grid, picture=picture, budget=budget, details=True
        )
    notes = [f"Tokens and words: {standin.NAME}. Selector: untrained layer."]
    if fitted.size != opened.image.size:
        was, now = opened.image.size, fitted.size
        notes.append(f"The picture was resized from {was[0]}x{was[1]} to {now[0]}x{now[1]} pixels, whole tokens.")
    notes += [f"The picture {note}." for note in opened.notes]
    if out is not None:
        save_image(draw_sheet(fitted, question.strip(), output, channels, tuple(notes)), out)
    return {
        "image": str(path),
        "question": question,
        "grid": list(grid),
        "budget": budget,
        "tokens": {"full": grid[0] * grid[1], "used": int(output.num_kept[0])},
        "strategy": output.strategy[0],
        "reason": output.reason[0],
        "weights": dict(zip(SCORES, rounded(output.weights[0].tolist()), strict=True)),
        "tensions": dict(zip(TENSIONS, rounded(output.tensions[0].tolist()), strict=True)),
        "known_words": standin.known_words(words),
        "kept": output.positions[0, :, 1:].tolist(),
        "notes": notes,
        "sheet": None if out is None else str(out),
    }


def rounded(values: list[float]) -> list[float]:
    """Values as they are printed."""
    return [round(value, 4) for value in values]
