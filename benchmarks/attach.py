"""Time to the first token, memory and cache of a model with selected tokens, beside the plain model in the same run.

    python benchmarks/attach.py --device cuda --out benchmarks/results/attach-h200.json

Real shapes, random weights, bf16: times are real, answers are not. `--tiny` runs the same on small shapes anywhere.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import FunctionType, MethodType
from typing import Annotated

import torch
import typer
from timing import Clock, machine, summary, write_json

from arr_coc import ARRCOCConfig, ARRCOCLayer, create_selector, prepare
from arr_coc.evaluation.shapes import build_shape, inputs_for_shape
from arr_coc.evaluation.timing import cache_bytes
from arr_coc.families.family import open_family
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.runtime.stopwatch import OFF, Stopwatch

KEPT = (1024, 400, 200, 64)
GRIDS = ((32, 32), (64, 64), (94, 126))
TIMED = ("Qwen3-VL-2B", "Qwen3-VL-8B", "Qwen2.5-VL-7B")
TINY = ("tiny Qwen3-VL",)


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


def measure(model: torch.nn.Module, name: str, grid: tuple[int, int], clock: Clock, repeats: int) -> list[dict]:
    data = inputs_for_shape(model, grid)
    total = grid[0] * grid[1]
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).to(data["input_ids"].device).eval()
    family = open_family(model)

    def first_token(arguments):
        return model(**arguments, use_cache=True, logits_to_keep=1)

    def select(kept, watch=OFF):
        selector, budget = (create_selector("full"), None) if kept == "full" else (layer, kept)
        settings = Settings(budget=budget, on_error="raise")
        return Session(family, selector, settings).prepare(data, watch).inputs

    kinds = ["full", *[count for count in KEPT if count < total]]
    whole = {"plain": lambda: first_token(data)}
    whole |= {kept: lambda kept=kept: first_token(select(kept)) for kept in kinds}
    ready = {kept: select(kept) for kept in kinds}
    prefill = {kept: lambda kept=kept: first_token(ready[kept]) for kept in kinds}
    peaks = {kept: clock.peak(call) for kept, call in whole.items()}
    caches = {kept: cache_bytes(call().past_key_values) for kept, call in whole.items()}
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
    data = inputs_for_shape(model, (16, 16))
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
    shapes = [name for name in (TINY if tiny else TIMED) if model_name in name]
    grids = [grid for grid in (((6, 8), (32, 33)) if tiny else GRIDS) if tokens in (0, grid[0] * grid[1])]
    with torch.inference_mode():
        for name in shapes:
            model = build_shape(name, target, dtype)
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
