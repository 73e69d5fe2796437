"""What training a selector on answers costs: peak memory and time of a step, by model and estimator.

    python benchmarks/training.py --device cuda --out benchmarks/results/training-h200.json

Real shapes, random weights, base in bf16, selector in float32; pictures of 1024x1024 pixels, a quarter of the tokens.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import torch
import typer
from attach import TINY
from timing import Clock, machine, write_json

from arr_coc import ARRCOCConfig, ARRCOCLayer
from arr_coc.evaluation.shapes import build_shape, inputs_for_shape
from arr_coc.training.answers import AnswerBatch, AnswersTask
from arr_coc.training.config import TrainConfig
from arr_coc.training.estimators import ESTIMATORS
from arr_coc.training.losses import total

NAMES = ("Qwen3-VL-2B", "Qwen3-VL-4B")
ANSWER = 8  # tokens


def batch_for(model: torch.nn.Module, size: int, grid: tuple[int, int]) -> AnswerBatch:
    """Pictures with questions, whose last tokens are the answers."""
    rows = [inputs_for_shape(model, grid) for _ in range(size)]
    inputs = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    labels = inputs["input_ids"].clone()
    labels[:, :-ANSWER] = -100
    return AnswerBatch({**inputs, "labels": labels}, torch.ones(size, device=labels.device), 0, 0)


def measure(model: torch.nn.Module, name: str, estimator: str, size: int, grid: tuple[int, int], clock: Clock) -> dict:
    target = next(model.parameters()).device
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).to(target)
    config = TrainConfig(["scenes"], "runs", "answers", estimator=estimator, steps=100)
    task = AnswersTask(layer, model, None, config).to(target)
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3)
    batch = batch_for(model, size, grid)

    def step() -> None:
        loss = total(task(batch)[0])
        optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()

    before = torch.cuda.memory_allocated() if clock.cuda else 0
    peak = clock.peak(step)
    return {
        "model": name, "estimator": estimator, "batch": size, "tokens": grid[0] * grid[1], "budget": 0.25,
        "base_mb": round(before / 1e6, 1), "peak_mb": None if peak is None else round(before / 1e6 + peak, 1),
        "step": clock.measure(step, 3, 1),
    }  # fmt: skip


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    tiny: Annotated[bool, typer.Option(help="Small shapes, to try the script.")] = False,
    batch: Annotated[int, typer.Option(help="Questions of a step.")] = 8,
) -> None:
    target = torch.device(device)
    dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    clock = Clock(target)
    torch.manual_seed(0)
    rows = []
    for name in TINY if tiny else NAMES:
        model = build_shape(name, target, dtype).requires_grad_(False)
        for estimator in ESTIMATORS:
            rows.append(measure(model, name, estimator, batch, (6, 8) if tiny else (32, 32), clock))
            gc.collect()
            row = rows[-1]
            print(f"{name} {estimator:>9}: peak {row['peak_mb']} MB, {row['step']['median_ms']:.0f} ms", flush=True)
        if out is not None:
            attention = model.config._attn_implementation
            write_json(out, {"machine": machine(target, dtype), "attention": attention, "rows": rows})
        del model
        gc.collect()
        if clock.cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
