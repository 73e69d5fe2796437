"""Time to the first token, memory and cache of a model with selected tokens, beside the plain model in the same run.

    python benchmarks/attach.py --device cuda --out benchmarks/results/attach-h200.json

Real shapes, random weights, bf16: times are real, answers are not. `--tiny` runs the same on small shapes anywhere.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Annotated

import torch
import transformers
import typer
from timing import Clock, machine, summary, write_json

from arr_coc import ARRCOCConfig, ARRCOCLayer, create_selector, prepare
from arr_coc.models.family import open_family
from arr_coc.models.preparing import Settings, prepare_with_outputs
from arr_coc.models.stages import OFF, Stopwatch

KEPT = (1024, 400, 200, 64)
GRIDS = ((32, 32), (64, 64), (94, 126))
QUESTION = 40  # words around the picture
IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}


def _rope(head: int, section: list[int], **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section, **more}


def qwen3(text: dict, vision: dict) -> torch.nn.Module:
    rope = _rope(128, [24, 20, 20], mrope_interleaved=True)
    common = {"vocab_size": 151936, "max_position_embeddings": 262144, "head_dim": 128, "rope_parameters": rope}
    encoder = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
    config = transformers.Qwen3VLConfig(text_config=common | text, vision_config=encoder | vision, **IDS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen25(text: dict, vision: dict) -> torch.nn.Module:
    common = {"vocab_size": 152064, "max_position_embeddings": 128000, "rope_parameters": _rope(128, [16, 24, 24])}
    encoder = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    config = transformers.Qwen2_5_VLConfig(text_config=common | text, vision_config=encoder | vision, **IDS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _text(width: int, inner: int, layers: int, heads: int, kv: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (width, inner, layers, heads, kv), strict=True))


SHAPES = {
    "Qwen3-VL-2B": lambda: qwen3(
        _text(2048, 6144, 28, 16, 8),
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
         "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "Qwen3-VL-4B": lambda: qwen3(
        _text(2560, 9728, 36, 32, 8),
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
         "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "Qwen3-VL-8B": lambda: qwen3(
        _text(4096, 12288, 36, 32, 8),
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
         "deepstack_visual_indexes": [8, 16, 24]},
    ),
    "Qwen2.5-VL-7B": lambda: qwen25(
        _text(3584, 18944, 28, 28, 4),
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
         "fullatt_block_indexes": [7, 15, 23, 31]},
    ),
}  # fmt: skip
TIMED = ("Qwen3-VL-2B", "Qwen3-VL-8B", "Qwen2.5-VL-7B")
TINY = {
    "tiny Qwen3-VL": lambda: qwen3(
        _text(256, 256, 2, 2, 1),
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256,
         "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip


def inputs_for(model: torch.nn.Module, grid: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A picture in the middle of a short prompt, as a processor would deliver it."""
    weight = next(model.parameters())
    patch = model.config.vision_config.patch_size
    tokens = grid[0] * grid[1]
    words = torch.randint(100, 5000, (QUESTION,)).tolist()
    ids = torch.tensor([[*words[:8], 3, *[5] * tokens, 4, *words[8:]]], device=weight.device)
    rows = 4 * tokens
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 5).int(),
        "pixel_values": (2 * torch.rand(rows, 3 * 2 * patch**2, device=weight.device) - 1).to(weight.dtype),
        "image_grid_thw": torch.tensor([[1, 2 * grid[0], 2 * grid[1]]]).to(weight.device),
    }


def build_model(make: Callable[[], torch.nn.Module], target: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A model of random weights, made where and as it is measured."""
    torch.set_default_dtype(dtype)
    with target:
        model = make().eval()
    torch.set_default_dtype(torch.float32)
    return model


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the language model's layers, each once for all lengths: a short prompt is bound by launching kernels."""
    for layer in model.model.language_model.layers:
        # With a code object of its own a layer need not pass the guards of all the others.
        shared = type(layer).forward
        own = FunctionType(
            shared.__code__.replace(), shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__
        )
        own.__kwdefaults__ = shared.__kwdefaults__
        layer.forward = torch.compile(MethodType(own, layer), dynamic=True)


def cache_bytes(output: object) -> int:
    layers = output.past_key_values.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def measure(model: torch.nn.Module, name: str, grid: tuple[int, int], clock: Clock, repeats: int) -> list[dict]:
    data = inputs_for(model, grid)
    total = grid[0] * grid[1]
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).to(data["input_ids"].device).eval()
    family = open_family(model)

    def first_token(arguments):
        return model(**arguments, use_cache=True, logits_to_keep=1)

    def select(kept, watch=OFF):
        selector, budget = (create_selector("full"), None) if kept == "full" else (layer, kept)
        settings = Settings(budget=budget, on_error="raise")
        return prepare_with_outputs(family, data, selector, settings, watch).inputs

    kinds = ["full", *[count for count in KEPT if count < total]]
    whole = {"plain": lambda: first_token(data)}
    whole |= {kept: lambda kept=kept: first_token(select(kept)) for kept in kinds}
    ready = {kept: select(kept) for kept in kinds}
    prefill = {kept: lambda kept=kept: first_token(ready[kept]) for kept in kinds}
    peaks = {kept: clock.peak(call) for kept, call in whole.items()}
    caches = {kept: cache_bytes(call()) for kept, call in whole.items()}
    firsts = clock.compare(whole, repeats, 0)  # warm by now
    prefills = clock.compare(prefill, 5 * repeats, 2)
    plain, full = firsts["plain"]["median_ms"], prefills["full"]["median_ms"]
    print(f"\n{name}, {total} tokens: plain {plain:.1f} ms to the first token, prefill {full:.1f} ms")
    rows = [{"model": name, "tokens": total, "kept": "plain", "peak_mb": peaks["plain"], "first_token": firsts["plain"],
             "cache_bytes": caches["plain"]}]  # fmt: skip
    for kept in kinds:
        stages = []
        for _ in range(3):
            watch = Stopwatch(data["input_ids"].device)
            select(kept, watch)
            stages.append(watch.milliseconds)
        entry = {
            "model": name, "tokens": total, "kept": kept, "peak_mb": peaks[kept], "first_token": firsts[kept],
            "prefill": prefills[kept], "cache_bytes": caches[kept],
            "select": summary([stage["select"] for stage in stages]),
            "encode": summary([stage["encode"] for stage in stages]),
            "first_token_ratio": round(firsts[kept]["median_ms"] / plain, 4),
            "prefill_ratio": round(prefills[kept]["median_ms"] / full, 4),
        }  # fmt: skip
        rows.append(entry)
        print(
            f"  keep {kept!s:>5}: first token {entry['first_token']['median_ms']:8.1f} ms "
            f"({entry['first_token_ratio']:.3f}), prefill {entry['prefill']['median_ms']:8.1f} ms "
            f"({entry['prefill_ratio']:.3f}), select {entry['select']['median_ms']:5.1f} ms, "
            f"cache {entry['cache_bytes'] / 1e6:8.1f} MB, peak {entry['peak_mb']} MB",
            flush=True,
        )
    return rows


def memory_growth(model: torch.nn.Module, calls: int) -> int | None:
    """Bytes that stay allocated after many calls."""
    if not torch.cuda.is_available():
        return None
    data = inputs_for(model, (16, 16))
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=model.config.text_config.hidden_size)).cuda().eval()
    for place in range(calls + 10):
        model(**prepare(model, data, layer, budget=64, on_error="raise"), use_cache=True, logits_to_keep=1)
        if place == 9:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; blocks already there are replaced.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each row.")] = 5,
    tiny: Annotated[bool, typer.Option(help="Small shapes, to try the script.")] = False,
    calls: Annotated[int, typer.Option(help="Calls of the memory check, 0 for none.")] = 1000,
    model_name: Annotated[str, typer.Option("--model", help="Only models whose name contains this.")] = "",
    tokens: Annotated[int, typer.Option(help="Only this number of tokens; 0 is all.")] = 0,
    compiled: Annotated[bool, typer.Option(help="Compile the language model's layers.")] = False,
) -> None:
    target = torch.device(device)
    dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    clock = Clock(target)
    torch.manual_seed(0)
    before = json.loads(out.read_text()) if out is not None and out.exists() else {}
    rows: list[dict] = before.get("rows", [])
    growth = before.get("memory_growth_bytes", {})
    known = TINY if tiny else {name: SHAPES[name] for name in TIMED}
    shapes = {name: make for name, make in known.items() if model_name in name}
    grids = [grid for grid in (((6, 8), (32, 33)) if tiny else GRIDS) if tokens in (0, grid[0] * grid[1])]
    with torch.inference_mode():
        for name, make in shapes.items():
            model = build_model(make, target, dtype)
            if compiled:
                name += ", layers compiled"
                compile_layers(model)
            for grid in grids:
                block = measure(model, name, grid, clock, repeats)
                rows = [row for row in rows if (row["model"], row["tokens"]) != (name, grid[0] * grid[1])] + block
                save(out, target, dtype, model, rows, growth)
            if calls:
                growth[name] = memory_growth(model, calls)
                print(f"  memory left behind by {calls} calls: {growth[name]} bytes", flush=True)
                save(out, target, dtype, model, rows, growth)
                calls = 0
            del model
            gc.collect()
            torch.cuda.empty_cache()


def save(out, target, dtype, model, rows, growth) -> None:
    if out is not None:
        content = {"machine": machine(target, dtype), "attention": model.config._attn_implementation}
        write_json(out, {**content, "memory_growth_bytes": growth, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
