"""Pictures a second to the first token in batches of questions, mode saccade, and what a batch takes in memory.

    python benchmarks/batches.py --device cuda --out benchmarks/results/batches-h200.json

Real shapes, random weights, bf16: times are real, answers are not. Pictures of 12 megapixels start as bytes `[3, H, W]`
on the device, or decoded in the memory of the host as `answer_many` has them, and end with the first logits of the
whole batch. `--tiny` runs the same on small shapes anywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from timing import Clock, machine, write_json

from arr_coc import ARRCOCConfig, ARRCOCLayer
from arr_coc.evaluation.shapes import build_shape, inputs_for_shape
from arr_coc.families.family import open_family
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings

SIZE = (3008, 4032)
BATCHES = (1, 8, 32)
WARM_UP = 3  # graphs are recorded by then


def make_prompts(model: Any, count: int) -> dict[str, torch.Tensor]:
    """Prompts with a small picture each, which holds the place of a large one; every question is another."""
    rows = [inputs_for_shape(model, (4, 4), seed) for seed in range(count)]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def ask(
    model: Any, layer: ARRCOCLayer, pictures: Sequence[Image.Image | torch.Tensor], counts: dict[int, int]
) -> Callable[[], None]:
    """A call that brings a batch to its first logits."""
    family, inputs = open_family(model), make_prompts(model, len(pictures))
    session = Session(family, layer, Settings(mode="saccade", images=pictures, on_error="raise"))

    @torch.inference_mode()
    def call() -> None:
        counts[len(pictures)] = session.forward({**inputs, "use_cache": True, "logits_to_keep": 1}).used

    return call


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    models: Annotated[str, typer.Option(help="Names of shapes, separated by commas.")] = "Qwen3-VL-2B,Qwen3-VL-8B",
    repeats: Annotated[int, typer.Option(help="Timed runs of each row.")] = 7,
    from_host: Annotated[bool, typer.Option("--host/--no-host", help="Also from the memory of the host.")] = True,
    tiny: Annotated[bool, typer.Option(help="Small shapes, to try the script.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    clock, rows, attention = Clock(place), [], ""
    height, width = (1024, 1024) if tiny else SIZE
    for name in ["tiny Qwen3-VL"] if tiny else models.split(","):
        torch.manual_seed(0)
        model = build_shape(name, place, dtype)
        attention = model.config._attn_implementation
        layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).to(place).eval()
        chance = np.random.default_rng(0)
        for count in (1, 2) if tiny else BATCHES:
            arrays = [chance.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]
            used: dict[int, int] = {}
            calls = {
                "device": ask(
                    model, layer, [torch.from_numpy(array).permute(2, 0, 1).to(place) for array in arrays], used
                ),
            }
            if from_host:
                calls["host"] = ask(model, layer, [Image.fromarray(array) for array in arrays], used)
            peaks = {start: clock.peak(call) for start, call in calls.items()}
            for start, times in clock.compare(calls, repeats, WARM_UP).items():
                row = {"model": name, "megapixels": round(height * width / 1e6, 1), "pictures": count, "from": start}
                row |= {"first_token": times, "pictures_per_second": round(1e3 * count / times["median_ms"], 2)}
                row |= {"tokens_per_picture": used[count] / count, "peak_mb": peaks[start]}
                one = next((other for other in rows if other["from"] == start and other["model"] == name), row)
                row["over_batches_of_one"] = round(row["pictures_per_second"] / one["pictures_per_second"], 2)
                rows.append(row)
                print(row, flush=True)
            del calls
        del model, layer
        gc.collect()
        torch.cuda.empty_cache()
    if out is not None:
        write_json(out, {"machine": machine(place, dtype), "attention": attention, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
