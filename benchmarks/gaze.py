"""Time to the first token, to an answer of 32, and peak memory, from a decoded picture on the device.

    python benchmarks/gaze.py --device cuda --out benchmarks/results/gaze-h200.json

Real shapes, random weights, bf16: times are real, answers are not. Every method starts from the same bytes `[3, H, W]`
on the device; cutting, resizing, texture and selection are part of it. All tokens are read by plain transformers, as
people run it; the others, a smaller picture too, by a session, with CUDA graphs unless the row says otherwise. `--tiny`
runs the same on small shapes anywhere.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from attach import TIMED, TINY, compile_layers
from timing import Clock, machine, write_json

from arr_coc import ARRCOCConfig, ARRCOCLayer, patches_from_picture
from arr_coc.evaluation.shapes import IDS, build_shape
from arr_coc.families.family import open_family
from arr_coc.families.language_graph import replayed_passes
from arr_coc.gaze.plan import DEFAULT_BUDGET, Gaze, plan_gaze
from arr_coc.gaze.source import NativeSource
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.runtime.cuda_graphs import GraphCache, may_replay
from arr_coc.runtime.stopwatch import Stopwatch
from arr_coc.selectors.smaller_picture import shrink_grid

SIZES = {1: (1024, 1024), 4: (2048, 2048), 12: (3008, 4032), 50: (6144, 8192), 200: (12288, 16384)}
MOST_FULL = 13  # megapixels above which all tokens are not tried: the encoder's attention alone takes minutes
WORDS = 40
RECORDED = 4  # calls after which everything is recorded that will be
PAUSE = 0.1  # seconds of rest before each call
LENGTHS = (32, 1, 8, 128, 512)  # tokens of an answer
FIRST: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}


class Texture(NamedTuple):
    """What is replayed."""

    channels: torch.Tensor


class Methods:
    """Ways from bytes to the first logits, or to an answer."""

    def __init__(self, model: Any, picture: torch.Tensor) -> None:
        self.model, self.picture = model, picture
        self.family = open_family(model)
        self.layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).to(picture.device).eval()
        self.graphs = GraphCache()
        self.cut = self.family.cut()
        self.cell = self.cut["patch_size"] * self.cut["merge_size"]
        self.grid = NativeSource(picture, self.cut, picture.device).grid
        words = torch.randint(100, 5000, (WORDS,), generator=torch.Generator().manual_seed(0)).tolist()
        self.before, self.after = words[:8], words[8:]

    def inputs(self, picture: torch.Tensor | None, grid: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        """What a processor would deliver: a picture of floats, or nothing but its place."""
        device, count = self.picture.device, grid[1] * grid[2]
        image, start, end = (IDS[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end"))
        ids = torch.tensor([[*self.before, start, *[image] * count, end, *self.after]]).to(device)
        dtype = self.model.dtype
        if picture is None:
            rows = torch.zeros(4 * count, 6 * self.cut["patch_size"] ** 2, dtype=dtype, device=device)
        else:
            rows = patches_from_picture(picture.to(dtype), **self.cut)[0]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == image).int(),
            "pixel_values": rows,
            "image_grid_thw": torch.tensor([[1, 2 * grid[1], 2 * grid[2]]]).to(device),
        }

    def resized(self, grid: tuple[int, int, int]) -> torch.Tensor:
        size = (grid[1] * self.cell, grid[2] * self.cell)
        picture = self.picture[None] / 255
        if picture.shape[2:] != size:
            picture = F.interpolate(picture, size, mode="bicubic", antialias=True).clamp_(0, 1)
        return picture

    def _run(self, inputs: dict[str, Any], answer: int, **settings: Any) -> Any:
        """One call of a session: to the first logits, or to an answer of so many tokens."""
        session = Session(self.family, self.layer, Settings(on_error="raise", **settings))
        if answer:
            return session.generate({**inputs, **_exactly(answer)}).result
        return session.forward({**inputs, **FIRST}).result

    def full(self, answer: int = 0) -> Any:
        inputs = self.inputs(self.resized(self.grid), self.grid)
        if answer:
            return self.model.generate(**inputs, **_exactly(answer))
        return self.model(**inputs, **FIRST)

    def downsample(self, answer: int = 0) -> Any:
        small = self.resized(shrink_grid(self.grid, DEFAULT_BUDGET))[0]
        return self._run(self.inputs(None, (1, 4, 4)), answer, mode="saccade", images=[small])

    def prune(self, answer: int = 0) -> Any:
        inputs = self.inputs(self.resized(self.grid), self.grid)
        return self._run(inputs, answer, budget=DEFAULT_BUDGET)

    def saccade(self, answer: int = 0, graphs: bool = True) -> Any:
        inputs = self.inputs(None, (1, 4, 4))
        return self._run(inputs, answer, mode="saccade", images=[self.picture], graphs=graphs)

    def append(self, cache: Any, ids: torch.Tensor, graphs: bool = True) -> None:
        """Add tokens to a cache, as a further turn would, and take them away again."""
        before, count = cache.get_seq_length(), ids.shape[1]
        places = torch.arange(before, before + count, device=ids.device).expand(3, 1, -1)
        arguments = {"input_ids": ids, "position_ids": places, "past_key_values": cache, **FIRST}
        with replayed_passes(self.family, True) if graphs else nullcontext():
            self.model(**arguments)
        cache.crop(-count)

    def stages(self) -> dict[str, float]:
        """Milliseconds of one gaze by stage, which wait for each other here; texture alone beside them."""
        watch = Stopwatch(self.picture.device)
        settings = Settings(mode="saccade", images=[self.picture], on_error="raise")
        inputs = {**self.inputs(None, (1, 4, 4)), **FIRST}
        run = Session(self.family, self.layer, settings).forward(inputs, watch)
        return {"tokens": run.used, **{name: round(value, 2) for name, value in watch.milliseconds.items()}}

    def texture(self) -> Any:
        """One pass over the pixels, then all channels, which are replayed as they are inside the layer."""
        sight = NativeSource(self.picture, self.cut, self.picture.device)
        plan = plan_gaze(sight.grid, None, Gaze())
        tokens = torch.zeros(1, plan.gestalt[1] * plan.gestalt[2], self.layer.config.hidden_size, device=sight.device)
        maps = sight.measure(plan)

        def describe(tokens: torch.Tensor, *measured: torch.Tensor) -> Texture:
            seen = maps.with_tensors(measured)
            return Texture(self.layer.read_texture(tokens, plan.gestalt, plan.windows, seen))

        if not may_replay(tokens):
            return describe(tokens, *maps.tensors)
        return self.graphs(describe, (tokens, *maps.tensors), ())


def _exactly(count: int) -> dict[str, Any]:
    """Options of `generate` for an answer of so many tokens."""
    return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}


def measure(model: Any, name: str, pixels: int, picture: torch.Tensor, clock: Clock, repeats: int) -> list[dict]:
    methods = Methods(model, picture)
    calls: dict[str, Callable[[], Any]] = {
        "saccade": methods.saccade,
        "saccade, no graphs": partial(methods.saccade, graphs=False),
        "downsample": methods.downsample,
    }
    if pixels <= MOST_FULL:
        calls["full"] = methods.full
    for call in (methods.saccade, methods.downsample, methods.texture) * RECORDED:
        call()
    times = clock.compare(calls, repeats, 1, PAUSE)
    if pixels <= MOST_FULL:
        calls["prune"] = methods.prune
        times |= clock.compare({"prune": methods.prune}, 5, RECORDED)
    peaks = {kind: clock.peak(call) for kind, call in calls.items()}
    texture = clock.compare({"texture": methods.texture}, repeats, 1)["texture"]
    stages = methods.stages()
    rows = []
    for kind, seen in times.items():
        row = {"model": name, "megapixels": pixels, "method": kind, "first_token": seen, "peak_mb": peaks[kind]}
        row["times_downsample"] = round(seen["median_ms"] / times["downsample"]["median_ms"], 3)
        if "full" in times:
            row["share_of_full"] = round(seen["median_ms"] / times["full"]["median_ms"], 4)
        if kind == "saccade":
            row |= {"texture": texture, "stages_ms": stages}
        rows.append(row)
        print(f"{name} {pixels:4} MP {kind:10} {json.dumps(row)}", flush=True)
    return rows


def measure_answers(
    model: Any, name: str, pixels: int, picture: torch.Tensor, clock: Clock, repeats: int, lengths: Sequence[int]
) -> list[dict]:
    """Whole answers of several lengths; the first of them also in other ways."""
    methods, rows = Methods(model, picture), []
    model.generation_config.eos_token_id = None  # answers of random weights end anywhere
    for length in lengths:
        calls: dict[str, Callable[[], Any]] = {"saccade": partial(methods.saccade, length)}
        if length == lengths[0]:
            calls |= {
                "saccade, no graphs": partial(methods.saccade, length, graphs=False),
                "downsample": partial(methods.downsample, length),
                "full": partial(methods.full, length),
            }
        for kind, seen in clock.compare(calls, repeats if length == lengths[0] else 3, 1, PAUSE).items():
            row = {"model": name, "megapixels": pixels, "method": kind, "tokens": length, "answer": seen}
            rows.append(row)
            print(f"{name} {length:4} tokens {kind:10} {json.dumps(row)}", flush=True)
    return rows


def measure_append(model: Any, name: str, picture: torch.Tensor, clock: Clock, repeats: int) -> dict:
    """100 tokens added to a cache of 600."""
    methods = Methods(model, picture)
    ids = torch.randint(100, 5000, (1, 700)).to(picture.device)
    cache = model(input_ids=ids[:, :600], **FIRST).past_key_values
    calls = {
        "graphs": partial(methods.append, cache, ids[:, 600:]),
        "no graphs": partial(methods.append, cache, ids[:, 600:], False),
    }
    row = {"model": name, "cache": 600, "appended": 100, **clock.compare(calls, repeats, RECORDED)}
    print(json.dumps(row), flush=True)
    return row


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; rows already there are replaced.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each row.")] = 15,
    pixels_only: Annotated[str, typer.Option("--megapixels", help="Only these sizes, separated by commas.")] = "",
    tiny: Annotated[bool, typer.Option(help="Small shapes, to try the script.")] = False,
    model_name: Annotated[str, typer.Option("--model", help="Only models whose name contains this.")] = "",
    whole_answers: Annotated[bool, typer.Option("--answers/--no-answers", help="Whole answers, too.")] = True,
    tokens_only: Annotated[int, typer.Option("--tokens", help="Only answers of so many tokens.")] = 0,
    append_only: Annotated[bool, typer.Option("--append-only", help="Nothing but appended tokens.")] = False,
    compiled: Annotated[bool, typer.Option(help="Compile the language model's layers.")] = False,
) -> None:
    target = torch.device(device)
    dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    clock = Clock(target)
    found = json.loads(out.read_text()) if out is not None and out.exists() else {}
    rows, answers, appended = (found.get(name, []) for name in ("rows", "answers", "append"))
    sizes = {1: (1024, 1024), 2: (1100, 1900)} if tiny else SIZES
    if pixels_only:
        sizes = {int(pixels): sizes[int(pixels)] for pixels in pixels_only.split(",")}
    lengths = (4, 8) if tiny else LENGTHS
    if tokens_only:
        lengths = (tokens_only,)
    with torch.inference_mode():
        for name in TINY if tiny else TIMED:
            if model_name not in name:
                continue
            torch.manual_seed(0)
            model = build_shape(name, target, dtype)
            if compiled:
                name += ", layers compiled"
                compile_layers(model)
            for pixels, size in sizes.items():
                picture = torch.randint(0, 256, (3, *size), dtype=torch.uint8, device=target)
                usual = pixels == (2 if tiny else 12)
                if not append_only:
                    block = measure(model, name, pixels, picture, clock, repeats)
                    rows = [row for row in rows if (row["model"], row["megapixels"]) != (name, pixels)] + block
                if usual and whole_answers and not append_only:
                    block = measure_answers(model, name, pixels, picture, clock, repeats, lengths)
                    measured = {(row["model"], row["tokens"]) for row in block}
                    answers = [row for row in answers if (row["model"], row["tokens"]) not in measured] + block
                if usual and (whole_answers or append_only):
                    append = measure_append(model, name, picture, clock, repeats)
                    appended = [row for row in appended if row["model"] != name] + [append]
                if out is not None:
                    content = {"machine": machine(target, dtype), "attention": model.config._attn_implementation}
                    write_json(out, {**content, "rows": rows, "answers": answers, "append": appended})
            del model
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
