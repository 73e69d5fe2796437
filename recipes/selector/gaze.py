"""Measure mode saccade on the embedded model: needles beside its rivals, and what each part of the gaze is worth.

python recipes/selector/gaze.py --out recipes/selector/results/gaze.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from arr_coc import ChatTokens, Gaze, create_selector, prepare
from arr_coc.config import EMBEDDED, TRAINED, UNTRAINED
from arr_coc.data.example import Example
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.evaluation.answers import answer_examples, exact_match
from arr_coc.inference.load import load_model, load_processor, load_selector
from arr_coc.inference.messages import make_inputs, make_messages, stand_in
from arr_coc.runtime.atomic_files import write_aside

BUDGET = 529
FIRST = 6_000_000  # of the test seeds used here
WORLDS = {
    "needles 2048": ("needles", 2048),
    "needles 1024": ("needles", 1024),
    "scenes 1024": ("scenes", 1024),
    "pages 1024": ("pages", 1024),
}
ALL = {**WORLDS, "camouflage 1024": ("camouflage", 1024), "void 1024": ("void", 1024)}
TIMED_SAMPLES = 15
SACCADES = (0, 68, 136, 273, 546, 1024)
Rows = dict[str, dict[str, Any]]


class Bench:
    """Answers samples in one way after the other, and keeps what was measured."""

    def __init__(self, base: str, selector: str, n: int, device: str, out: Path | None, only: list[str]) -> None:
        self.model = load_model(base, dtype=torch.float32).to(device).eval()
        self.processor = load_processor(base)
        # all tokens of the largest pictures are read too
        self.processor.image_processor.size = {"shortest_edge": 128**2, "longest_edge": 2048**2}
        self.selector = load_selector(selector, self.model).to(device)
        self.n, self.device, self.out = n, device, out
        self.found: dict[str, Any] = {"samples": n, "selector": selector, "tables": {}}
        if out is not None and out.exists():
            self.found = json.loads(out.read_text())
        self.samples: dict[str, list[Example]] = {}
        self.timing, self.only = False, only

    def draw(self, name: str) -> list[Example]:
        """Test samples of a world at a size."""
        if name not in self.samples:
            world, side = ALL[name]
            seeds = (split_seed("test", FIRST + index) for index in range(self.n))
            self.samples[name] = [make_example(world, seed, None, (side, side)) for seed in seeds]
        return self.samples[name]

    def row(self, table: str, row: str, world: str, selector: Any, budget: Any = BUDGET, **options: Any) -> None:
        """What is measured of one cell of a table, unless it is there: right answers, or in another pass the time."""
        rows: Rows = self.found["tables"].setdefault(table, {})
        cell = rows.setdefault(row, {}).setdefault(world, {})
        what = "first_token_ms" if self.timing else "right"
        if what in cell:
            return
        if self.timing:
            cell[what] = self.first_token(self.draw(world)[:TIMED_SAMPLES], selector, budget, **options)
        else:
            samples = self.draw(world)
            # all tokens of the largest pictures take gigabytes of attention
            batch = 2 if selector is None or options.get("mode") != "saccade" else 8
            answers = answer_examples(self.model, self.processor, samples, selector, budget, batch, **options)
            cell[what] = round(exact_match(samples, answers), 4)
        print(table, row, world, cell, flush=True)
        if self.out is not None:
            write_aside(self.out, json.dumps(self.found, indent=1) + "\n")

    def first_token(self, samples: list[Example], selector: Any, budget: Any, **options: Any) -> float:
        """Median milliseconds from a decoded picture on the device to the first logits, one picture at a time."""
        chat = ChatTokens.from_tokenizer(self.processor.tokenizer)
        times = []
        with torch.inference_mode():
            for sample in [samples[0], samples[0], *samples]:  # the first two warm up
                shown = stand_in(sample.picture) if options else sample.picture
                inputs = make_inputs(
                    self.processor, [make_messages(shown, sample.question)], self.model.device, self.model.dtype
                )
                picture = torch.from_numpy(np.array(sample.picture)).permute(2, 0, 1).contiguous().to(self.device)
                images = {"images": [picture]} if options else {}
                self.synchronise()
                begin = time.perf_counter()
                if selector is not None:
                    inputs = prepare(
                        self.model, inputs, selector, budget=budget, chat=chat, on_error="raise", **images, **options
                    )
                self.model(**inputs, use_cache=True, logits_to_keep=1)
                self.synchronise()
                times.append(1e3 * (time.perf_counter() - begin))
        return round(statistics.median(times[2:]), 2)

    def among(self, worlds: Iterable[str]) -> list[str]:
        """Those worlds of a table that are measured now."""
        return [world for world in worlds if not self.only or world in self.only]

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def gaze(
        self, table: str, row: str, worlds: list[str], selector: Any = None, budget: Any = BUDGET, **how: Any
    ) -> None:
        """A row of gazes."""
        for world in worlds:
            chosen = selector or self.selector
            self.row(table, row, world, chosen, budget, mode="saccade", gaze=Gaze(**how))


def rivals(bench: Bench) -> None:
    """Equal tokens, by all ways to spend them."""
    for world in bench.among(WORLDS):
        bench.row("rivals", "all tokens", world, None, None)
        bench.row("rivals", "downsample", world, create_selector("downsample"))
        bench.row("rivals", "half-and-half", world, create_selector("half-and-half", selector=bench.selector))
        bench.row("rivals", "prune", world, bench.selector)
        bench.gaze("rivals", "saccade", [world])
        bench.gaze("rivals", f"saccade, {UNTRAINED}", [world], load_selector(UNTRAINED, bench.model).to(bench.device))
        oracle = create_selector("oracle")
        bench.gaze("rivals", "saccade, oracle", [world], oracle)


def returns(bench: Bench) -> None:
    """How much each further saccade is worth."""
    for count in SACCADES:
        worlds = bench.among(("needles 2048", "pages 1024"))
        bench.gaze("saccades", str(count), worlds, None, 256 + count, gestalt=256)


def parts(bench: Bench) -> None:
    """Overlap, order, and context around a cell."""
    worlds = bench.among(WORLDS)
    bench.gaze("gaze", "default", worlds)
    bench.gaze("gaze", "keep covered tokens", worlds, overlap="keep")
    bench.gaze("gaze", "drop covered tokens", worlds, overlap="drop")
    bench.gaze("gaze", "single cells", worlds, fixation=1)
    bench.gaze("gaze", "windows of 4", worlds, fixation=4)
    bench.gaze("gaze", "most relevant first", worlds, order="relevance")
    bench.gaze("gaze", "hardly a gestalt (16 tokens)", worlds, gestalt=16)


def compression(bench: Bench) -> None:
    """ARR, COC and both, at equal tokens."""
    for world in bench.among(ALL):
        bench.row("coc", "ARR: prune to 256", world, bench.selector, 256)
        bench.gaze("coc", "downsampled gestalt of 256", [world], None, 256, gestalt=256)
        for compress in ("pool", "merge", "conv") if bench.selector.compressor is not None else ("pool", "merge"):
            bench.gaze("coc", f"COC: {compress} to 256", [world], None, 256, gestalt=256, compress=compress)
            bench.gaze(
                "coc", f"ARR-COC: {compress} to 128, 128 saccades", [world], None, 256, gestalt=128, compress=compress
            )
        bench.gaze("coc", "ARR: gestalt of 128, 128 saccades", [world], None, 256, gestalt=128)


TABLES: dict[str, Callable[[Bench], None]] = {
    "rivals": rivals,
    "saccades": returns,
    "gaze": parts,
    "coc": compression,
}


def main(
    selector: Annotated[str, typer.Option(help="Name or directory of the selector.")] = TRAINED,
    base: Annotated[str, typer.Option(help="Directory of the model.")] = EMBEDDED,
    n: Annotated[int, typer.Option(help="Samples of a world.")] = 100,
    tables: Annotated[str, typer.Option(help="Which tables, with commas.")] = ",".join(TABLES),
    worlds: Annotated[str, typer.Option(help="Only these worlds of them, with commas.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    times: Annotated[bool, typer.Option(help="Measure times of the table coc, on an idle machine.")] = True,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; cells already there are kept.")] = None,
) -> None:
    only = [world.strip() for world in worlds.split(",") if world.strip()]
    if set(only) - set(ALL):
        raise typer.BadParameter(f"worlds are {', '.join(ALL)}")
    bench = Bench(base, selector, n, device, out, only)
    wanted = tables.split(",")
    for name in wanted:
        TABLES[name](bench)
    if times and "coc" in wanted:
        bench.timing = True
        compression(bench)


if __name__ == "__main__":
    typer.run(main)
