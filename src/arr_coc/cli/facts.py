"""What several commands report in the same words: weights and tensions, and what was done to the picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arr_coc.gaze.loop import Look
    from arr_coc.pixels.files import Picture
    from arr_coc.selectors.output import ARRCOCOutput


def round_labels(output: ARRCOCOutput | None) -> dict[str, dict[str, float] | None]:
    """Weights and tensions of the first picture, rounded for printing; None for selectors that have none."""
    if output is None:
        return {"weights": None, "tensions": None}
    from arr_coc.drawing.labels import label_tensions, label_weights

    return {
        "weights": {name: round(value, 4) for name, value in label_weights(output).items()},
        "tensions": {name: round(value, 4) for name, value in label_tensions(output).items()},
    }


def describe_conversions(opened: Picture, read_size: tuple[int, int] | None) -> list[str]:
    """Say how a picture was converted, and that the model reads it at another size (width, height) if it does."""
    notes = [f"The picture {note}." for note in opened.notes]
    if read_size is not None and read_size != opened.image.size:
        before, after = (f"{width}x{height}" for width, height in (opened.image.size, read_size))
        notes.append(f"The picture was resized from {before} to {after} pixels, whole tokens.")
    return notes


def describe_looks(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Looks for JSON: what each read, how sure its answer was, and what followed."""
    return [{name: value for name, value in look._asdict().items() if name != "kept"} for look in looks]
