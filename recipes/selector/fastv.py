"""FastV after each number of layers: the best one for a base is found on validation samples, and recorded.

    python recipes/selector/fastv.py --out recipes/selector/results/fastv.json

`arr-coc eval --selectors fastv:LAYER` then compares FastV at its best.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from arr_coc import create_selector
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.answers import answer_examples
from arr_coc.inference.load import load_model, load_processor, quiet_loading
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.runtime.machine import find_revision

WORLDS = ("scenes", "camouflage", "void", "pages", "needles")
BUDGETS = (0.25, 0.125, 0.06)


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    model: Annotated[str, typer.Option(help="Directory or Hub id of the base.")] = "embedded",
    questions: Annotated[int, typer.Option(help="Of each world.")] = 60,
    size: Annotated[int, typer.Option(help="Pixels a side.")] = 512,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    quiet_loading()
    opened = load_model(model, dtype=torch.float32).to(device)
    processor = load_processor(model)
    depth = opened.config.get_text_config().num_hidden_layers
    found: dict[str, dict[str, float]] = {}
    for layer in range(1, depth):
        row: dict[str, float] = {}
        for budget in BUDGETS:
            right = []
            for world in WORLDS:
                seeds = (split_seed("validation", number) for number in range(questions))
                examples = [make_example(world, seed, None, (size, size)) for seed in seeds]
                answers = answer_examples(opened, processor, examples, create_selector("fastv", layer=layer), budget)
                right += [answer in example.answers for answer, example in zip(answers, examples, strict=True)]
            row[str(budget)] = round(sum(right) / len(right), 4)
        found[str(layer)] = row
        print(layer, row, flush=True)
    best = max(found, key=lambda layer: sum(found[layer].values()))
    about = {"model": model, "worlds": WORLDS, "questions": questions, "size": size, "split": "validation"}
    content = {**about, "revision": find_revision(), "accuracy": found, "best": int(best)}
    write_aside(out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
