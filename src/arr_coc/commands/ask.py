"""`arr-coc ask`: an answer, what it cost, and what was looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from arr_coc.commands.look import check_files, explain, resized_note
from arr_coc.config import EMBEDDED, ARRCOCConfig, Budget
from arr_coc.drawing.sheet import save_image, show_gaze, show_kept
from arr_coc.inference.answer import Answer, ARRCOCQwen
from arr_coc.inference.load import SCOPE, find_names, quiet_loading
from arr_coc.inference.messages import make_messages
from arr_coc.pixels.files import open_picture
from arr_coc.selectors.output import spread_windows


def ask(
    path: Path,
    question: str,
    model: str | None,
    selector: str | None,
    mode: str,
    budget: Budget,
    overlay: Path | None,
) -> dict[str, Any]:
    """Open the model, ask, and draw the overlay; returns what the command prints."""
    check_files(path, overlay, "--overlay")
    if selector == "oracle":
        raise ValueError("oracle must be told where to look, which the command line cannot; use another selector")
    opened = open_picture(path)
    picture = opened.image
    make_messages(picture, question)  # refuses an empty one before anything is opened
    quiet_loading()
    base, chosen = find_names(model, selector)
    embedded = base == EMBEDDED
    vlm = ARRCOCQwen.from_pretrained(base, chosen)
    answer = vlm.answer(picture, question, budget=budget, mode=mode)  # type: ignore[arg-type]  # checked there
    name = EMBEDDED if embedded else vlm.config.name_or_path
    cell = ARRCOCConfig.for_model(vlm.model).cell_pixels
    (_, rows, columns), _ = answer.kept[0]
    if overlay is not None:
        drawn = draw_gaze(picture, answer, cell) if mode == "saccade" else draw_overlay(picture, answer, cell)
        save_image(drawn, overlay)
    notes = [f"The picture {note}." for note in opened.notes]
    # some change its size themselves, and saccades are cut from the picture as it is
    if mode != "saccade" and chosen not in ("downsample", "half-and-half"):
        notes += resized_note(picture.size, (columns * cell, rows * cell))
    return {
        "answer": answer.text,
        "mode": mode,
        "tokens": {"full": answer.tokens.full, "used": answer.tokens.used},
        "budget": budget if mode in ("prune", "saccade") else None,
        "strategy": answer.strategy,
        "reason": answer.reason,
        **explain(answer.output),
        "timings_ms": answer.timings_ms,
        "model": name,
        "selector": None if mode == "full" else chosen,
        "notes": notes,
        "scope": SCOPE if embedded else f"what {name} can be asked is in its own model card",
    }


def draw_overlay(picture: Image.Image, answer: Answer, cell: int = 32) -> Image.Image:
    """The (first) picture as sharp as it was read, in tokens of `cell` pixels, with what was not read faded."""
    (_, rows, columns), _ = answer.kept[0]
    if rows * columns * cell**2 < 0.9 * picture.width * picture.height:
        picture = picture.resize((columns * cell, rows * cell)).resize(picture.size)
    return show_kept(picture, kept_cells(answer))


def draw_gaze(picture: Image.Image, answer: Answer, cell: int = 32) -> Image.Image:
    """The (first) picture as a gaze of saccades saw it: blurred, and sharp where it looked, in order."""
    (_, rows, columns), cells = answer.kept[0]
    if len(cells) == rows * columns:
        return picture
    scale = max(1, round((rows * columns / max(1, answer.tokens.used - len(cells))) ** 0.5))
    if answer.output is not None and len(cells):
        worth = spread_windows(answer.output.relevance[0, 0], (rows, columns)).cpu().numpy().flatten()
        cells = cells[(-worth[cells]).argsort(kind="stable")]
    return show_gaze(picture, (rows, columns), cells, cell, scale)


def kept_cells(answer: Answer) -> np.ndarray:
    """Which cells `[h, w]` of the (first) picture were read, in any of its frames."""
    (_, rows, columns), cells = answer.kept[0]
    kept = np.zeros(rows * columns, dtype=bool)
    kept[cells % (rows * columns)] = True
    return kept.reshape(rows, columns)
