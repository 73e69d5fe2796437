"""Where the time of a gaze goes, stage by stage, and how far each stage is from what the machine allows.

    python benchmarks/limits.py --device cuda --out benchmarks/results/limits-h200.json

Real shapes, random weights, bf16, one picture of 12 megapixels, 529 tokens. For each stage: milliseconds alone, those
of its kernels, kernels, launches, floating point operations, bytes that must be moved at least (weights once, the
picture once), and the least time that both allow at the machine's peak. `--tiny` runs the same on small shapes
anywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gaze import FIRST, RECORDED, SIZES, Methods
from timing import Clock, machine, write_json
from torch.profiler import ProfilerActivity, profile

from arr_coc.evaluation.arithmetic import count_operations
from arr_coc.evaluation.shapes import build_shape
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings

# An H200's dense bf16 operations and bytes of memory a second, by its data sheet.
PEAK = {"operations": 989e12, "bytes": 4.8e12}
STEPS = 10  # decoded tokens that are profiled


def weights(*modules: torch.nn.Module) -> int:
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


def profile_call(call: Callable[[], Any], cuda: bool) -> dict[str, float]:
    """Kernels of a call, their milliseconds, and how often the host launched something."""
    if not cuda:
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.events()
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "kernels": len(kernels),
        "kernels_ms": round(sum(event.self_device_time_total for event in kernels) / 1e3, 3),
        "launches": sum("LaunchKernel" in event.name or "GraphLaunch" in event.name for event in events),
    }


def measure(methods: Methods, name: str, clock: Clock, repeats: int, length: int) -> list[dict]:
    model, picture, family = methods.model, methods.picture, methods.family
    session = Session(family, methods.layer, Settings(mode="saccade", images=[picture], on_error="raise"))
    inputs = {**methods.inputs(None, (1, 4, 4)), **FIRST}
    for _ in range(RECORDED):
        run = session.forward(inputs)
    steps: Any = session._make_steps(inputs, None)
    for step in (steps.read, steps.encode, steps.choose, steps.encode_chosen, steps.build):
        step()
    language, visual = family.inner.language_model, family.inner.visual
    reading = weights(language) - weights(language.embed_tokens) + weights(model.lm_head)
    run = session.prepare(inputs)
    stages: dict[str, tuple[Callable[[], Any], int]] = {
        "measure": (steps.read, picture.nbytes),
        "gestalt": (steps.encode, weights(visual)),
        "choose": (steps.choose, weights(methods.layer)),
        "cells": (steps.encode_chosen, weights(visual)),
        "build": (steps.build, 0),
        "first pass": (partial(session._call, session._forward, run), reading),
        "the whole gaze": (partial(session.forward, inputs), picture.nbytes + 2 * weights(visual) + reading),
    }
    rows = []
    for stage, (call, moved) in stages.items():
        for _ in range(RECORDED):
            call()
        row = {"model": name, "stage": stage, **clock.measure(call, repeats, 1), **profile_call(call, clock.cuda)}
        rows.append(row | _least(count_operations(call), moved))
        print(rows[-1], flush=True)
    model.generation_config.eos_token_id = None
    one, many = (partial(methods.saccade, count) for count in (1, 1 + length))
    times = clock.compare({"one": one, "many": many}, repeats, 1)
    row = {"model": name, "stage": "a decoded token"}
    row["median_ms"] = round((times["many"]["median_ms"] - times["one"]["median_ms"]) / length, 3)
    few, more = (profile_call(partial(methods.saccade, count), clock.cuda) for count in (1, 1 + STEPS))
    row |= {key: round((more[key] - few[key]) / STEPS, 3) for key in few}
    rows.append(row | _least(2 * reading / model.lm_head.weight.element_size(), reading))
    print(rows[-1], flush=True)
    return rows


def _least(operations: float, moved: int) -> dict[str, float]:
    """The least milliseconds for so many operations and bytes."""
    least = max(operations / PEAK["operations"], moved / PEAK["bytes"])
    return {"gflop": round(operations / 1e9, 1), "megabytes": round(moved / 1e6, 1), "least_ms": round(1e3 * least, 3)}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    models: Annotated[str, typer.Option(help="Names of shapes, separated by commas.")] = "Qwen3-VL-8B,Qwen3-VL-2B",
    repeats: Annotated[int, typer.Option(help="Timed runs of each stage.")] = 15,
    tiny: Annotated[bool, typer.Option(help="Small shapes, to try the script.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    clock, rows = Clock(place), []
    with torch.no_grad():
        for name in ["tiny Qwen3-VL"] if tiny else models.split(","):
            torch.manual_seed(0)
            model = build_shape(name, place, dtype)
            size = (1024, 1024) if tiny else SIZES[12]
            picture = torch.randint(0, 256, (3, *size), dtype=torch.uint8, device=place)
            rows += measure(Methods(model, picture), name, clock, repeats, 2 if tiny else 32)
            del model
            gc.collect()
            torch.cuda.empty_cache()
    if out is not None:
        write_json(out, {"machine": machine(place, dtype), "peak": PEAK, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
