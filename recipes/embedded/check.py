"""Measure the embedded model on samples it never saw: every kind with all tokens and a quarter of them.

python recipes/embedded/check.py --n 500 --out recipes/embedded/figures.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image

from arr_coc import load_processor
from arr_coc.config import EMBEDDED
from arr_coc.evaluating import answer_samples, exact_match
from arr_coc.models.loading import load_model, load_selector
from arr_coc.worlds import Sample, list_worlds, make_sample, open_world, split_seed

# Least share of exact answers with all tokens.
BARS = {
    **dict.fromkeys(("color", "count_shape", "count_color"), 0.97),
    **dict.fromkeys(("relation", "unusual", "overview"), 0.93),
    "read": 0.95,
    "camouflage": 0.90,
    "void_count": 0.95,
    "void_read": 0.95,
}
STRANGERS = 0.85


def ask_strangers(model: Any, processor: Any) -> float:
    """Share of exact answers on pictures that another program drew."""
    folder = Path(__file__).parents[2] / "tests" / "strangers"
    samples = []
    for row in json.loads((folder / "answers.json").read_text()):
        with Image.open(folder / row["file"]) as image:
            picture = image.convert("RGB")
        samples.append(Sample(picture, row["question"], row["answer"], row["kind"], (), "strangers", 0))
    return round(exact_match(samples, answer_samples(model, processor, samples)), 4)


def main(
    model: Annotated[Path | None, typer.Option(help="Directory of a model. [default: the embedded one]")] = None,
    n: Annotated[int, typer.Option(help="Samples of a kind.")] = 500,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    kinds: Annotated[str, typer.Option(help="Only these kinds, with commas.")] = "",
) -> None:
    directory = EMBEDDED if model is None else str(model)
    processor = load_processor(directory)
    opened = load_model(directory, dtype=torch.float32).to(device)
    found: dict[str, dict[str, float]] = {}
    failed = False
    for world in list_worlds():
        for kind in open_world(world).kinds:
            if kind not in (kinds.split(",") if kinds else BARS):
                continue
            begin = time.time()
            samples = [make_sample(world, split_seed("test", index), kind) for index in range(n)]
            row = {"full": exact_match(samples, answer_samples(opened, processor, samples))}
            for name in ("arr-coc", *(("random", "oracle", "downsample") if kind in ("read", "color") else ())):
                answers = answer_samples(opened, processor, samples, load_selector(name, opened), 0.25)
                row[f"{name} 0.25"] = exact_match(samples, answers)
            found[kind] = {name: round(value, 4) for name, value in row.items()}
            failed |= row["full"] < BARS[kind]
            print(kind, found[kind], f"bar {BARS[kind]}", f"{time.time() - begin:.0f} s", flush=True)
    strangers = ask_strangers(opened, processor)
    print("strangers", strangers, f"bar {STRANGERS}", flush=True)
    failed |= strangers < STRANGERS
    if out is not None:
        out.write_text(json.dumps({"samples": n, "exact": found, "strangers": strangers}, indent=1) + "\n")
    if "read" in found:
        failed |= found["read"]["random 0.25"] >= 0.3 or found["read"]["oracle 0.25"] <= 0.9
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
