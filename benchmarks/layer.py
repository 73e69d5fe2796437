"""Times of the relevance layer, stage by stage, against one pass of a Qwen3-VL-2B-shaped vision encoder.

    python benchmarks/layer.py [--device cuda] [--out benchmarks/results/layer-cuda.json]

Median and interquartile range after warm-up, synchronised; the encoder has random weights and runs in the same
process, so that the ratio is the figure to look at. Pictures have 32 pixels a cell, as Qwen3-VL does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from timing import Clock, machine
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from arr_coc import ARRCOCConfig, ARRCOCLayer, generate_texture_array
from arr_coc.attending import finish_plan
from arr_coc.knowing import Participation
from arr_coc.pixels.saliency import picture_structure
from arr_coc.realizing import MOST_REPLAYED_PIXELS
from arr_coc.runtime.cuda_graphs import GraphCache

WIDTH = 2048  # of the 2B language model
WORDS = 16
CELL = 32
GRIDS = {"cpu": [(16, 16), (32, 32)], "cuda": [(16, 16), (32, 32), (64, 64), (94, 126)]}
VISION_2B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": WIDTH,
    "deepstack_visual_indexes": [5, 11, 17],
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}


class Scored(NamedTuple):
    """The three scores, the last one spread out."""

    information: torch.Tensor
    perspectival: torch.Tensor
    score: torch.Tensor
    pull: torch.Tensor
    match: torch.Tensor
    gestalt: torch.Tensor
    question: torch.Tensor


def stages(
    layer: ARRCOCLayer, grid: tuple[int, int], batch: int, device: torch.device, dtype: torch.dtype, replay: bool
) -> dict[str, Callable[[], object]]:
    """The calls to be timed, by name; each runs as it does inside the layer, as a CUDA graph where that uses one."""
    height, width = grid[0] * CELL, grid[1] * CELL
    generator = torch.Generator(device).manual_seed(0)
    picture = torch.rand(batch, 3, height, width, device=device, generator=generator)
    tokens = torch.randn(batch, grid[0] * grid[1], WIDTH, device=device, generator=generator).to(dtype)
    words = torch.randn(batch, WORDS, WIDTH, device=device, generator=generator).to(dtype)
    cells = (1, *grid)
    texture = layer.read_texture(tokens, cells, cells, picture, None)

    def score(texture, tokens, words):
        information = layer.information(texture).view(batch, *cells)
        perspectival = layer.perspectival(texture).view(batch, *cells)
        return Scored(information, perspectival, *layer.participatory(texture, tokens, words, cells))

    def balance(*scored):
        return layer.balancer(scored[0], scored[1], Participation(*scored[2:]))

    def allocate(texture, tokens, relevance, tensions, match):
        seen = texture.index_select(1, layer.structure_channels)
        structure = picture_structure(seen).view(batch, -1).amax(dim=1)
        return layer.allocator.plan(relevance, tokens, tensions, 0.25, structure, match)

    def score_to_allocation(texture, tokens, words):
        scored = score(texture, tokens, words)
        balanced = balance(*scored)
        return allocate(texture, tokens, balanced.relevance, balanced.tensions, scored.match)

    def finished(plan):
        return finish_plan(plan, plan.report.tolist(), grid[0] * grid[1])

    graphs: dict[str, GraphCache] = defaultdict(GraphCache)
    replay = replay and device.type == "cuda" and batch * height * width <= MOST_REPLAYED_PIXELS

    def run(function, *tensors):
        return graphs[function.__name__](function, tensors, ()) if replay else function(*tensors)

    class Wrapped(NamedTuple):
        texture: torch.Tensor

    def core(picture):
        return Wrapped(generate_texture_array(picture, grid, "core", check_values=False))

    def full(picture):
        return Wrapped(generate_texture_array(picture, grid, "full", check_values=False))

    scored = score(texture, tokens, words)
    balanced = balance(*scored)
    allocated = (texture, tokens, balanced.relevance, balanced.tensions, scored.match)
    return {
        "texture_core": lambda: run(core, picture),
        "texture_full": lambda: run(full, picture),
        "scoring": lambda: run(score, texture, tokens, words),
        "balancing": lambda: run(balance, *scored),
        "allocation": lambda: finished(run(allocate, *allocated)),
        "scoring_to_allocation": lambda: finished(run(score_to_allocation, texture, tokens, words)),
        "layer": lambda: layer(tokens, words, grid=grid, picture=picture),
    }


def encoder_call(encoder: Qwen3VLVisionModel, grid: tuple[int, int], batch: int) -> Callable[[], object]:
    weight = next(encoder.parameters())
    rows = batch * 4 * grid[0] * grid[1]
    pixels = torch.randn(rows, 3 * 2 * 16 * 16, device=weight.device, dtype=weight.dtype)
    shape = torch.tensor([[1, 2 * grid[0], 2 * grid[1]]] * batch, device=weight.device)
    return lambda: encoder(pixels, grid_thw=shape)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each stage.")] = 0,
    encoder: Annotated[bool, typer.Option(help="Time the encoder too.")] = True,
    graphs: Annotated[bool, typer.Option(help="Let the layer replay CUDA graphs, as it does by default.")] = True,
) -> None:
    target = torch.device(device)
    cuda = target.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    repeats = repeats or (50 if cuda else 9)
    clock = Clock(target)
    torch.manual_seed(0)
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=WIDTH)).to(target).eval()
    vision = None
    if encoder:
        with torch.device(target):
            vision = Qwen3VLVisionModel(Qwen3VLVisionConfig(**VISION_2B)).to(dtype).eval()
    rows = []
    with torch.inference_mode():
        for grid in GRIDS[target.type]:
            for batch in (1, 8):
                reference = None
                # on two cores the encoder takes most of a minute: once, at batch 1, is enough for the ratio
                if vision is not None and (cuda or batch == 1):
                    runs = (7, 2) if cuda else (1, 0)
                    reference = clock.measure(encoder_call(vision, grid, batch), *runs)
                print(f"\ngrid {grid[0]}x{grid[1]}, {grid[1] * CELL}x{grid[0] * CELL} pixels, batch {batch}")
                layer.use_graphs = False
                plain = stages(layer, grid, batch, target, dtype, replay=False)
                peaks = {name: clock.peak(call) for name, call in plain.items()}
                del plain
                layer.use_graphs = graphs
                for name, call in stages(layer, grid, batch, target, dtype, replay=graphs).items():
                    row = {"stage": name, "grid": list(grid), "batch": batch, **clock.measure(call, repeats, 3)}
                    row["peak_mb"] = peaks[name]
                    share = None
                    if reference is not None:
                        share = round(row["median_ms"] / reference["median_ms"], 4)
                    row["share_of_encoder"] = share
                    rows.append(row)
                    memory = "" if row["peak_mb"] is None else f"  {row['peak_mb']:9.1f} MB"
                    part = "" if share is None else f"  {share:8.2%} of the encoder"
                    print(
                        f"  {name:22s} {row['median_ms']:9.3f} ms  IQR {row['iqr_ms']:7.3f}{memory}{part}", flush=True
                    )
                if reference is not None:
                    rows.append({"stage": "encoder", "grid": list(grid), "batch": batch, **reference})
                    print(f"  {'encoder':22s} {reference['median_ms']:9.3f} ms  IQR {reference['iqr_ms']:7.3f}")
    print_growth(rows)
    if out is not None:
        aside = out.with_name(f".{out.name}")
        aside.write_text(
            json.dumps({"machine": machine(target, dtype), "cuda_graphs": cuda and graphs, "rows": rows}, indent=1)
            + "\n"
        )
        aside.replace(out)
        print(f"\nwritten to {out}")


def print_growth(rows: list[dict]) -> None:
    """How much dearer the largest picture is than the smallest, beside how many more pixels it has."""
    print("\ngrowth from the smallest to the largest picture, batch 1 (cost should grow no faster than pixels)")
    for name in ("texture_core", "texture_full", "layer"):
        own = [row for row in rows if row["stage"] == name and row["batch"] == 1]
        pixels = [row["grid"][0] * row["grid"][1] for row in own]
        print(f"  {name:22s} {own[-1]['median_ms'] / own[0]['median_ms']:6.2f}x the time for "
              f"{pixels[-1] / pixels[0]:.1f}x the pixels")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
