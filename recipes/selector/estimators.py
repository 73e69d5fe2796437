"""The five estimators, in stages 2 and 3, from the same start; `none`, which cannot learn, shows where that was.

python recipes/selector/estimators.py --start runs/short --out recipes/selector/results/estimators.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from arr_coc import ARRCOCLayer
from arr_coc.config import EMBEDDED
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.answers import answer_examples, exact_match
from arr_coc.inference.load import load_model, load_processor
from arr_coc.runtime.atomic_files import write_aside
from arr_coc.training.config import TrainConfig
from arr_coc.training.estimators import ESTIMATORS
from arr_coc.training.trainer import train

STAGES = {"answers": ("scenes", "camouflage"), "hard": ("camouflage", "crowded")}
BUDGETS = (0.125, 0.06)
PLAN = "0.06-0.25"


def main(
    start: Annotated[Path, typer.Option(help="The selector that all begin with.")],
    base: Annotated[str, typer.Option(help="Directory of the model.")] = EMBEDDED,
    steps: Annotated[int, typer.Option(help="Of the optimizer.")] = 100,
    batch: Annotated[int, typer.Option(help="Questions of a step.")] = 16,
    n: Annotated[int, typer.Option(help="Samples of a world to ask about.")] = 100,
    only: Annotated[str, typer.Option(help="Only this one, as answers/gate: several can run side by side.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    runs: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/estimators"),
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; rows already there are kept.")] = None,
) -> None:
    model, processor = load_model(base, dtype=torch.float32).to(device), load_processor(base)
    asked = {
        world: [make_example(world, split_seed("validation", index), None, (512, 512)) for index in range(n)]
        for world in ("scenes", "camouflage")
    }

    def measure(selector: Path) -> dict[str, float]:
        layer = ARRCOCLayer.from_pretrained(selector).to(device)
        return {
            f"{world} {budget}": round(exact_match(some, answer_examples(model, processor, some, layer, budget)), 4)
            for world, some in asked.items()
            for budget in BUDGETS
        }

    settings = {"steps": steps, "batch": batch, "budget": PLAN, "samples": n}
    found: dict[str, Any] = {**settings, "stages": {}}
    if out is not None and out.exists():
        found = json.loads(out.read_text())
    for stage, data in STAGES.items():
        rows = found["stages"].setdefault(stage, {})
        for estimator in ESTIMATORS:
            if estimator in rows or only not in ("", f"{stage}/{estimator}"):
                continue
            config = TrainConfig(
                data, runs / f"{stage}-{estimator}", stage, base, start=start, steps=steps, batch_size=batch,
                samples=steps * batch, estimator=estimator, budget=PLAN, device=device,
            )  # fmt: skip
            place = train(config)
            losses = [json.loads(line)["answer"] for line in (place / "log.jsonl").read_text().splitlines()]
            part = max(1, len(losses) // 4)
            rows[estimator] = {
                "first loss": round(sum(losses[:part]) / part, 4),
                "last loss": round(sum(losses[-part:]) / part, 4),
                **measure(place),
            }
            print(stage, estimator, rows[estimator], flush=True)
            if out is not None:
                write_aside(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
