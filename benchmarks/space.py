"""Whether a model fits the GPU of a small Space: weights by arithmetic, and the most that was reserved by a limit.

    python benchmarks/space.py --device cuda --out benchmarks/results/space-h200.json

The shape of Qwen3-VL-2B in float16 with random weights, in a process that may reserve 16 GB and no more; what does
not fit is said to not fit.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import torch
import typer
from gaze import SIZES, Methods
from timing import machine, write_json

from arr_coc.evaluation.shapes import build_shape

LIMIT_GB = 16


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    shape: Annotated[str, typer.Option(help="Of the model.")] = "Qwen3-VL-2B",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    target, dtype = torch.device(device), torch.float16
    if target.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMIT_GB * 1e9 / total)
    model = build_shape(shape, target, dtype)
    parameters = sum(weight.numel() for weight in model.parameters())
    found = {"machine": machine(target, dtype), "shape": shape, "limit_gb": LIMIT_GB, "parameters": parameters}
    found |= {"weights_gb": round(2 * parameters / 1e9, 2), "rows": []}
    print(found, flush=True)
    with torch.inference_mode():
        for pixels in (1, 4, 12):
            picture = torch.randint(0, 256, (3, *SIZES[pixels]), dtype=torch.uint8, device=target)
            methods = Methods(model, picture)
            for kind in ("full", "prune", "saccade"):
                row = {"megapixels": pixels, "mode": kind}
                gc.collect()
                if target.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                try:
                    for _ in range(3):  # the third call replays graphs, whose memory stays
                        getattr(methods, kind)()
                    fits = True
                except torch.OutOfMemoryError:
                    fits = False
                peak = torch.cuda.max_memory_reserved() if target.type == "cuda" else None
                row |= {"fits": fits, "reserved_gb": None if peak is None else round(peak / 1e9, 2)}
                found["rows"].append(row)
                print(row, flush=True)
    if out is not None:
        write_json(out, found)


if __name__ == "__main__":
    typer.run(main)
