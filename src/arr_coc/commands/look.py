"""`arr-coc look`: where a question makes the system look."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.config import EMBEDDED, EMBEDDED_SELECTOR, ARRCOCConfig, Budget, Grid
from arr_coc.drawing.sheet import check_target, draw_sheet, save_image
from arr_coc.families.family import open_family
from arr_coc.inference.load import load_model, load_processor, quiet_loading
from arr_coc.pixels.files import open_picture
from arr_coc.realizing import ARRCOCLayer
from arr_coc.selectors.output import ARRCOCOutput


class Seen(NamedTuple):
    """What a model makes of a picture and a question.

    Args:
        tokens (`Tensor` of shape `[1, N, D]`), words (`Tensor` of shape `[1, Q, D]`): in one space.
        grid (`Grid`): of the tokens.
        picture (`Tensor` of shape `[1, 3, H, W]`), image (`PIL.Image.Image`): the picture as the model reads it.
        config (`ARRCOCConfig`): of a layer that fits.
        read (`list[str]`): the question as the model reads it.
    """

    tokens: Tensor
    words: Tensor
    grid: Grid
    picture: Tensor
    image: Image.Image
    config: ARRCOCConfig
    read: list[str]


def look(
    path: Path, question: str, channels: str, budget: Budget, out: Path | None, model: str | None = None
) -> dict[str, Any]:
    """Look at a picture and draw the sheet; returns what the command prints."""
    if not re.search(r"\w", question):
        raise ValueError("the question has no words; ask something, for instance 'what does the red text say?'")
    check_files(path, out, "--out")
    ARRCOCConfig(hidden_size=1, channels=channels)  # type: ignore[arg-type]  # refuses unknown channels early
    opened = open_picture(path)
    with torch.inference_mode():
        seen = see(opened.image, question, model or EMBEDDED)
        layer, name = _open_layer(seen.config, channels)
        output = layer(seen.tokens, seen.words, grid=seen.grid, picture=seen.picture, budget=budget, details=True)
    notes = [f"Tokens and words: {model or 'the embedded model'}. Selector: {name}."]
    notes += resized_note(opened.image.size, seen.image.size)
    notes += [f"The picture {note}." for note in opened.notes]
    if out is not None:
        save_image(draw_sheet(seen.image, question.strip(), output, channels, tuple(notes)), out)
    return {
        "image": str(path),
        "question": question,
        "grid": list(seen.grid[1:]),
        "budget": budget,
        "tokens": {"full": seen.tokens.shape[1], "used": int(output.num_kept[0])},
        "strategy": output.strategy[0],
        "reason": output.reason[0],
        **explain(output),
        "words": seen.read,
        "kept": output.positions[0, :, 1:].tolist(),
        "notes": notes,
        "sheet": None if out is None else str(out),
    }


def _open_layer(config: ARRCOCConfig, channels: str) -> tuple[ARRCOCLayer, str]:
    """The layer that was trained for the embedded model, or an untrained one, and what it is called."""
    if config.base_model_name_or_path == EMBEDDED:
        trained = ARRCOCLayer.from_pretrained(EMBEDDED_SELECTOR)
        if trained.config.channels == channels:
            return trained, "that of the embedded model"
    return ARRCOCLayer(replace(config, channels=channels)).eval(), "untrained layer"  # type: ignore[arg-type]


def see(image: Image.Image, question: str, directory: str) -> Seen:
    """Tokens of a model's own encoder, and its words."""
    quiet_loading()
    processor, model = load_processor(directory), load_model(directory, dtype=torch.float32)
    family = open_family(model)
    inputs = processor.image_processor(images=[image], return_tensors="pt")
    ids = processor.tokenizer(question, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    if not len(ids):
        raise ValueError(f"no word of {question!r} is known to {directory}; ask in other words")
    tokens, words = family.encode(inputs, "image").features, family.embed_words(ids)
    pictures = family.pictures(inputs, "image")
    if pictures is None:
        raise ValueError(f"{directory} does not show the picture it reads; use another model")
    pixels = (pictures[0][0].permute(1, 2, 0) * 255).round().to(torch.uint8)  # [H, W, 3]
    read = [processor.tokenizer.decode([token]).strip() for token in ids.tolist()]
    config = ARRCOCConfig.for_model(model)
    grid = family.grids(inputs, "image")[0]
    return Seen(tokens[None], words[None], grid, pictures[0], Image.fromarray(pixels.numpy()), config, read)


def check_files(path: Path, target: Path | None, option: str) -> None:
    """Refuse an address, and a target that cannot be written or is the picture itself."""
    if str(path).startswith(("http:", "https:")):
        raise ValueError(f"{path} is an address; only files are read, so download it first")
    if target is not None:
        check_target(target)
        if target.exists() and path.exists() and target.samefile(path):
            raise ValueError(f"{target} is the picture itself; give another {option}")


def resized_note(before: tuple[int, int], after: tuple[int, int]) -> list[str]:
    """What is said of a picture that the model reads at another size."""
    if before == after:
        return []
    was, now = f"{before[0]}x{before[1]}", f"{after[0]}x{after[1]}"
    return [f"The picture was resized from {was} to {now} pixels, whole tokens."]


def explain(output: ARRCOCOutput | None) -> dict[str, dict[str, float] | None]:
    """Weights and tensions of the first picture as they are printed; None where a selector has none."""
    if output is None:
        return {"weights": None, "tensions": None}
    return {
        "weights": dict(zip(SCORES, rounded(output.weights[0].tolist()), strict=True)),
        "tensions": dict(zip(TENSIONS, rounded(output.tensions[0].tolist()), strict=True)),
    }


def rounded(values: list[float]) -> list[float]:
    """Values as they are printed."""
    return [round(value, 4) for value in values]
