"""What each part of the layer is worth: train stage 1 without it, on the same data, and measure.

python recipes/selector/ablate.py --expressions refexp --out recipes/selector/results/ablation.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from check import SIZES, look

from arr_coc import ARRCOCConfig, ARRCOCLayer
from arr_coc.config import EMBEDDED
from arr_coc.data.example import Example, group_by_picture
from arr_coc.data.expressions import read_expressions
from arr_coc.data.sources import mix_worlds, open_places
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.answers import answer_examples, exact_match
from arr_coc.inference.load import load_model, load_processor
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.training.config import TrainConfig
from arr_coc.training.feature_cache import INDEX, Features, features_key, weights_key, write_features
from arr_coc.training.proxy import ProxyTask
from arr_coc.training.schedule import Schedule, Source
from arr_coc.training.stage import Stage
from arr_coc.training.trainer import open_accelerator, run_steps

BUDGET = 0.125
Change = Callable[[ARRCOCLayer], None]


def only(place: int) -> Change:
    """One scorer alone: the maps of the others are flat."""

    def change(layer: ARRCOCLayer) -> None:
        weigh = layer.balancer.forward

        def forward(information: Any, perspectival: Any, participation: Any) -> Any:
            flat = [0 * information, 0 * perspectival, participation._replace(score=0 * participation.score)]
            flat[place] = (information, perspectival, participation)[place]
            return weigh(*flat)

        layer.balancer.forward = forward  # type: ignore[method-assign]

    return change


def equal_weights(layer: ARRCOCLayer) -> None:
    """Neither question nor picture moves the three weights."""
    balancer = layer.balancer
    with torch.no_grad():
        balancer.gain.zero_()
    balancer.gain.requires_grad_(False)
    keep = torch.tensor([0.0] * 3 + [1.0] * 3, device=balancer.gain.device)
    balancer.neutral.register_hook(lambda gradient: gradient * keep)
    balancer.correction[-1].weight.register_hook(lambda gradient: gradient * keep[:, None])


def no_gestalt(layer: ARRCOCLayer) -> None:
    """The balancer does not see the mean token."""
    weigh = layer.balancer.forward

    def forward(information: Any, perspectival: Any, participation: Any) -> Any:
        return weigh(information, perspectival, participation._replace(gestalt=0 * participation.gestalt))

    layer.balancer.forward = forward  # type: ignore[method-assign]


def mean_query(layer: ARRCOCLayer) -> None:
    """Cells meet the mean of the words, not each of them."""
    score = layer.participatory.forward

    def forward(texture: Any, tokens: Any, words: Any, grid: Any, word_mask: Any = None) -> Any:
        mask = torch.ones(words.shape[:2], device=words.device) if word_mask is None else word_mask.to(words.dtype)
        mean = (words * mask[..., None]).sum(dim=1, keepdim=True) / mask.sum(dim=1)[:, None, None].clamp(min=1)
        return score(texture, tokens, mean, grid, None)

    layer.participatory.forward = forward  # type: ignore[method-assign]


def no_leaning(layer: ARRCOCLayer) -> None:
    """Words are for a cell or say nothing; none is against it."""
    layer.participatory.leaning.requires_grad_(False)


def no_light(layer: ARRCOCLayer) -> None:
    """Neither do words light up their rows and columns, nor relevance the next cells."""
    layer.participatory.aligned.requires_grad_(False)
    layer.balancer.spread.requires_grad_(False)


def everything(layer: ARRCOCLayer) -> None:
    """Nothing is changed."""


# name: how the layer is changed, its channels, layers that read the question first
VARIANTS: dict[str, tuple[Change, str, int]] = {
    "everything": (everything, "full", 0),
    "information alone": (only(0), "full", 0),
    "perspectival alone": (only(1), "full", 0),
    "participatory alone": (only(2), "full", 0),
    "fixed equal weights": (equal_weights, "full", 0),
    "no gestalt context": (no_gestalt, "full", 0),
    "mean query": (mean_query, "full", 0),
    "words speak for cells only": (no_leaning, "full", 0),
    "no light on rows, columns, next cells": (no_light, "full", 0),
    "core channels": (everything, "core", 0),
    "query_layers 2": (everything, "full", 2),
}


def of_pictures(path: Path, count: int) -> Iterator[Example]:
    """The expressions of the first so many pictures."""
    return chain.from_iterable(islice(group_by_picture(read_expressions(path)), count))


def sources(expressions: Path) -> dict[str, Iterator[Example]]:
    """What is learned from, and what is measured on."""
    worlds = ["scenes", "camouflage"]
    return {
        "scenes": open_places("scenes", 800),
        "camouflage": open_places("camouflage", 300),
        "pages": open_places("pages", 160),
        "expressions": of_pictures(expressions / "train.jsonl.gz", 1500),
        "held worlds": mix_worlds(worlds, 160, "validation", 0, [(512, 512)]),
        "held pages": mix_worlds(["pages"], 40, "validation", 0, [(768, 768)]),
        "held expressions": of_pictures(expressions / "val.jsonl.gz", 100),
    }


def main(
    expressions: Annotated[Path, typer.Option(help="Folder with train.jsonl.gz and val.jsonl.gz, and pictures.")],
    base: Annotated[str, typer.Option(help="Directory of the model.")] = EMBEDDED,
    steps: Annotated[int, typer.Option(help="Of the optimizer.")] = 400,
    n: Annotated[int, typer.Option(help="Samples of a world to ask about.")] = 40,
    cache: Annotated[Path, typer.Option(help="Where features are kept.")] = Path("runs/features"),
    runs: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/ablation"),
    only_row: Annotated[str | None, typer.Option("--only", help="One row instead of all.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; rows already there are kept.")] = None,
) -> None:
    model, processor = load_model(base, dtype=torch.float32).to(device), load_processor(base)
    key = weights_key(model)
    asked = {
        world: [make_example(world, split_seed("validation", index), None, size) for index in range(n)]
        for world, size in SIZES.items()
    }
    found: dict[str, Any] = {"steps": steps, "samples": n, "budget": BUDGET, "rows": {}}
    if out is not None and out.exists():
        found = json.loads(out.read_text())
    for name, (change, channels, layers) in VARIANTS.items():
        if name in found["rows"] or only_row not in (None, name):
            continue
        layer = ARRCOCLayer(ARRCOCConfig.for_model(model, channels=channels)).to(device)
        opened = {}
        for source, shown in sources(expressions).items():
            folder = cache / features_key(key, processor, layer, f"ablation {source}", layers)
            if not (folder / INDEX).exists():
                write_features(folder, model, processor, layer, shown, query_layers=layers)
            opened[source] = Features(folder)
        change(layer)
        place = runs / name.replace(" ", "-").replace(",", "")
        learned_from = [source for source in opened if "held" not in source]
        config = TrainConfig(
            learned_from, place, base=base, steps=steps, batch_size=24, query_layers=layers, device=device
        )
        learned = [Source(opened[source], config.batch_size, 0) for source in learned_from]
        schedule = Schedule(learned, [1.0] * len(learned), steps, 0)

        def batch_at(step: int, schedule: Schedule = schedule) -> Any:
            features, numbers = schedule.at(step)
            return features.batch(numbers, device)

        run_steps(Stage(ProxyTask(layer), layer, batch_at), config, open_accelerator(device))
        layer.eval()
        row = {source[5:]: look({"it": layer}, one)["it"] for source, one in opened.items() if "held" in source}
        for world, samples in asked.items():
            answers = answer_examples(model, processor, samples, layer, BUDGET, query_layers=layers)
            row[f"{world} answered"] = round(exact_match(samples, answers), 4)
        found["rows"][name] = row
        print(name, row, flush=True)
        if out is not None:
            write_aside(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
