"""Open questions about noise and splattered paint: how often the even grid is taken, and why not; and that it is not
taken where a text is asked for that stands on the noise.

python recipes/selector/open_questions.py --out recipes/selector/results/open_questions.json
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from arr_coc import ARRCOCQwen
from arr_coc.data.worlds import draw_scene, make_example, split_seed
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.runtime.machine import find_revision

WORDINGS = (
    "what is in the picture?", "describe the picture", "what can you see?", "what is this?", "what is shown here?",
    "tell me about this image", "what does this picture show?", "is there anything interesting?",
    "what do you see in the image?", "give a short description of the picture",
)  # fmt: skip
FIRST = 7 * 10**6  # of the seeds, which nothing else uses
ASKED = ("off", "on")
FLAT = 4.0  # deviation of the pixels of a flat field


def draw_empty(split: str) -> Iterator[Image.Image]:
    """Noise and splattered paint with nothing on it."""
    for number in count():
        scene = draw_scene("void", split_seed(split, FIRST + number), "void_count", (512, 384))
        if not scene.things and np.asarray(scene.picture.convert("L")).std() > FLAT:
            yield scene.picture


def main(
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    split: Annotated[str, typer.Option(help="Seeds: validation or test.")] = "test",
    pictures: Annotated[int, typer.Option(help="How many get ten open questions each.")] = 10,
) -> None:
    vlm = ARRCOCQwen.from_pretrained()
    found = {}
    for introspect in ASKED:
        taken: Counter[str] = Counter()
        for picture in islice(draw_empty(split), pictures):
            for question in WORDINGS:
                seen = vlm.inspect(picture, question, budget=0.25, introspect=introspect)
                taken[question] += seen.strategy == "grid"
        texts = 0
        for number in range(10 * pictures):
            example = make_example("void", split_seed(split, FIRST + number), "void_read")
            seen = vlm.inspect(example.picture, example.question, budget=0.25, introspect=introspect)
            texts += seen.strategy == "grid"
        found[introspect] = {
            "pictures": pictures, "open": dict(taken), "grid": taken.total(), "of": pictures * len(WORDINGS),
            "texts": 10 * pictures, "texts_grid": texts,
        }  # fmt: skip
        print(f"introspect {introspect}: the even grid {taken.total()} of {pictures * len(WORDINGS)} times; "
              f"where a text is asked for {texts} of {10 * pictures}", flush=True)  # fmt: skip
    if out is not None:
        write_aside(out, json.dumps({"revision": find_revision(), "introspect": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
