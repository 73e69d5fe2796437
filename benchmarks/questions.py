"""Ten questions about one picture of 12 megapixels against one question, and the price of an attachment that keeps all.

python benchmarks/questions.py --device cuda --model Qwen3-VL-8B --out benchmarks/results/questions-h200.json

Real shapes, random weights; milliseconds to the first token of every question, summed. The language model is replayed
as CUDA graphs, except where all tokens are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gaze import PAUSE
from timing import Clock, machine, write_json

from arr_coc import ARRCOCConfig, ARRCOCLayer, attach, create_selector
from arr_coc.evaluation.shapes import IDS, SHAPES, build_shape, inputs_for_shape
from arr_coc.families.family import open_family
from arr_coc.inference.session import Session
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.prefix import Prefix
from arr_coc.prompting.settings import Settings

QUESTIONS = 10
PRUNED = 529


def ask_about(inputs: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """The prompt with another question after its picture."""
    ids = inputs["input_ids"].clone()
    generator = torch.Generator().manual_seed(number)
    after = int((ids[0] == IDS["vision_end_token_id"]).nonzero()[-1]) + 1
    ids[0, after:] = torch.randint(100, 5000, (ids.shape[1] - after,), generator=generator).to(ids.device)
    return {**inputs, "input_ids": ids}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "tiny Qwen3-VL",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rows: Annotated[int, typer.Option(help="Rows of tokens of the picture.")] = 94,
    columns: Annotated[int, typer.Option(help="Columns of tokens of the picture.")] = 126,
    repeats: Annotated[int, typer.Option(help="Of each measurement, in turn.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    place = torch.device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    opened = build_shape(model, place, dtype)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(opened)).to(place).eval()
    clock = Clock(place)
    full = inputs_for_shape(opened, (rows, columns))
    small = inputs_for_shape(opened, (4, 4))
    cell = opened.config.vision_config.patch_size * 2
    picture = torch.randint(0, 256, (3, rows * cell, columns * cell), dtype=torch.uint8).to(place)
    counts: dict[str, int] = {}

    def run(name: str, questions: int, inputs: dict[str, torch.Tensor], **options: Any) -> Callable[[], None]:
        @torch.inference_mode()
        def call() -> None:
            encoded = Encodings()
            encoded.prefix = Prefix()  # as a conversation has it
            session = Session(open_family(opened), layer, Settings(on_error="raise", encoded=encoded, **options))
            for number in range(questions):
                session.generate({**ask_about(inputs, number), "max_new_tokens": 1, "do_sample": False})
            counts[name] = encoded.calls

        return call

    modes: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
        "prune": (full, {"budget": PRUNED}),
        "saccade": (small, {"mode": "saccade", "images": [picture]}),
    }
    calls = {
        f"{mode} {questions}": run(f"{mode} {questions}", questions, inputs, **options)
        for mode, (inputs, options) in modes.items()
        for questions in (1, QUESTIONS)
    }
    found = clock.compare(calls, repeats, 4, PAUSE)  # graphs are recorded by then
    ratios = {
        mode: round(found[f"{mode} {QUESTIONS}"]["median_ms"] / found[f"{mode} 1"]["median_ms"], 3) for mode in modes
    }
    print(found, ratios, counts, flush=True)

    middle = inputs_for_shape(opened, (64, 64) if device == "cuda" else (8, 8))
    keep_all = create_selector("full")

    @torch.inference_mode()
    def plain() -> None:
        opened(**middle, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def attached() -> None:
        with attach(opened, keep_all, on_error="raise"):
            opened(**middle, use_cache=True, logits_to_keep=1)

    kept = clock.compare({"plain": plain, "attached, all kept": attached}, 30, 3, PAUSE)
    share = round(kept["attached, all kept"]["median_ms"] / kept["plain"]["median_ms"], 4)
    print(kept, share, flush=True)
    if out is not None:
        write_json(
            out,
            {
                "model": model, "tokens": rows * columns, "questions": QUESTIONS, **machine(place, dtype),
                "times": found, "ten questions over one": ratios, "encoder calls": counts,
                "attach, all kept": kept, "attached over plain": share,
            },
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
