"""Fit the selector `linear`: logistic regression on cells inside and outside of the worlds' boxes.

python recipes/selector/linear.py --out src/arr_coc/assets/linear
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file

from arr_coc import VisualQuery
from arr_coc.data.boxes import cells_inside
from arr_coc.data.sources import world_size
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.run import Opened
from arr_coc.families.family import open_family
from arr_coc.inference.load import load_model, load_processor
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.selectors.contract import Selection, TokenSelector
from arr_coc.selectors.linear import describe_cells

WORLDS = ("scenes", "camouflage", "pages", "needles")


class Collecting(TokenSelector):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[VisualQuery] = []

    def select(self, queries: Any, budget: Any = None) -> list[Selection]:
        self.seen = list(queries)
        return [Selection(indices=torch.arange(len(query.tokens))) for query in queries]


def collect(opened: Opened, samples: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features `[n, F]`, whether each cell lies inside, and how much it counts: both sides of a picture alike."""
    family, selector = open_family(opened.model), Collecting()
    features, inside, weights = [], [], []
    for world in WORLDS:
        for number in range(samples):
            sample = make_example(world, split_seed("train", number), None, world_size(world, number))
            if not sample.boxes:
                continue
            inputs = opened.ask([sample.question], [sample.picture])
            Session(family, selector, Settings(chat=opened.chat, on_error="raise")).prepare(inputs)
            [query] = selector.seen
            own = cells_inside(sample.boxes, *query.grid[1:]).flatten()
            if own.all():
                continue
            features.append(describe_cells(query))
            inside.append(own.float())
            weights.append(torch.where(own, 1 / own.sum(), 1 / (~own).sum()))
        print(world, sum(map(len, features)), "cells", flush=True)
    return torch.cat(features), torch.cat(inside), torch.cat(weights)


def fit(features: torch.Tensor, inside: torch.Tensor, weights: torch.Tensor, decay: float) -> torch.Tensor:
    """A weight for each feature, and the bias."""
    mean, spread = features.mean(dim=0), features.std(dim=0).clamp(min=1e-3)
    scaled = (features - mean) / spread
    weight = torch.zeros(scaled.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logits = scaled @ weight[:-1] + weight[-1]
        loss = F.binary_cross_entropy_with_logits(logits, inside, weights / weights.sum(), reduction="sum")
        loss = loss + decay * weight[:-1].square().sum()
        loss.backward()
        return loss

    print("loss", float(optimizer.step(closure).detach()))
    found = weight.detach()
    plain = found[:-1] / spread
    return torch.cat([plain, (found[-1] - plain @ mean)[None]])


def main(
    out: Annotated[Path, typer.Option(help="Directory of the weights.")],
    samples: Annotated[int, typer.Option(help="Samples of each world, from the training seeds.")] = 150,
    decay: Annotated[float, typer.Option(help="How much large weights cost.")] = 1e-4,
) -> None:
    opened = Opened(load_model("embedded", dtype=torch.float32), load_processor("embedded"))
    with torch.no_grad():
        data = collect(opened, samples)
    weight = fit(*data, decay)
    out.mkdir(parents=True, exist_ok=True)
    save_file({"weight": weight}, out / "model.safetensors")
    print(len(weight), "numbers")


if __name__ == "__main__":
    typer.run(main)
