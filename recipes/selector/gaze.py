"""Measure mode saccade on the embedded model: needles beside its rivals, and what each part of the gaze is worth.

python recipes/selector/gaze.py --out recipes/selector/gaze.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from arr_coc import ChatTokens, Gaze, create_selector, prepare
from arr_coc.config import EMBEDDED
from arr_coc.evaluating import answer_samples, exact_match, make_inputs
from arr_coc.models.loading import load_model, load_processor, load_selector
from arr_coc.models.messages import stand_in
from arr_coc.saving import write_aside
from arr_coc.worlds import Sample, make_sample, split_seed

BUDGET = 529
FIRST = 6_000_000  # of the test seeds used here
WORLDS = {
    "needles 2048": ("needles", 2048),
    "needles 1024": ("needles", 1024),
    "scenes 1024": ("scenes", 1024),
    "pages 1024": ("pages", 1024),
}
TIMED, TIMED_SAMPLES = ("coc",), 15  # tables with milliseconds
SACCADES = (0, 68, 136, 273, 546, 1024)
Rows = dict[str, dict[str, Any]]


class Bench:
    """Answers samples in one way after the other, and keeps what was measured."""

    def __init__(self, base: str, selector: str, n: int, device: str, out: Path | None) -> None:
        self.model = load_model(base, dtype=torch.float32).to(device).eval()
        self.processor = load_processor(base)
        # all tokens of the largest pictures are read too
        self.processor.image_processor.size = {"shortest_edge": 128**2, "longest_edge": 2048**2}
        self.selector = load_selector(selector, self.model).to(device)
        self.n, self.device, self.out = n, device, out
        self.found: dict[str, Any] = {"samples": n, "selector": selector, "tables": {}}
        if out is not None and out.exists():
            self.found = json.loads(out.read_text())
        self.samples: dict[str, list[Sample]] = {}

    def draw(self, name: str) -> list[Sample]:
        """Test samples of a world at a size."""
        if name not in self.samples:
            world, side = WORLDS[name]
            seeds = (split_seed("test", FIRST + index) for index in range(self.n))
            self.samples[name] = [make_sample(world, seed, None, (side, side)) for seed in seeds]
        return self.samples[name]

    def row(self, table: str, row: str, world: str, selector: Any, budget: Any = BUDGET, **options: Any) -> None:
        """One cell of a table, unless it is there."""
        rows: Rows = self.found["tables"].setdefault(table, {})
        cells = rows.setdefault(row, {})
        if world in cells:
            return
        samples = self.draw(world)
        begin = time.perf_counter()
        # all tokens of the largest pictures take gigabytes of attention
        batch = 2 if selector is None or options.get("mode") != "saccade" else 8
        answers = answer_samples(self.model, self.processor, samples, selector, budget, batch, **options)
        cells[world] = {"right": round(exact_match(samples, answers), 4)}
        if table in TIMED:
            cells[world]["first_token_ms"] = self.first_token(samples[:TIMED_SAMPLES], selector, budget, **options)
        taken = 1e3 * (time.perf_counter() - begin) / len(samples)
        print(table, row, world, cells[world], f"{taken:.0f} ms a sample", flush=True)
        if self.out is not None:
            write_aside(self.out, json.dumps(self.found, indent=1) + "\n")

    def first_token(self, samples: list[Sample], selector: Any, budget: Any, **options: Any) -> float:
        """Median milliseconds from a decoded picture on the device to the first logits, one picture at a time."""
        chat = ChatTokens.from_tokenizer(self.processor.tokenizer)
        times = []
        with torch.inference_mode():
            for sample in [samples[0], samples[0], *samples]:  # the first two warm up
                shown = stand_in(sample.picture) if options else sample.picture
                inputs = make_inputs(self.model, self.processor, [shown], [sample.question])
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
    for world in WORLDS:
        bench.row("rivals", "all tokens", world, None, None)
        bench.row("rivals", "downsample", world, create_selector("downsample"))
        bench.row("rivals", "half-and-half", world, create_selector("half-and-half", selector=bench.selector))
        bench.row("rivals", "prune", world, bench.selector)
        bench.gaze("rivals", "saccade", [world])
        bench.gaze("rivals", "saccade, untrained", [world], load_selector("arr-coc", bench.model).to(bench.device))
        oracle = create_selector("oracle")
        bench.gaze("rivals", "saccade, oracle", [world], oracle)


def returns(bench: Bench) -> None:
    """How much each further saccade is worth."""
    for count in SACCADES:
        bench.gaze("saccades", str(count), ["needles 2048", "pages 1024"], None, 256 + count, gestalt=256)


def parts(bench: Bench) -> None:
    """Overlap, order, and context around a cell."""
    worlds = list(WORLDS)
    bench.gaze("gaze", "default", worlds)
    bench.gaze("gaze", "keep covered tokens", worlds, overlap="keep")
    bench.gaze("gaze", "drop covered tokens", worlds, overlap="drop")
    bench.gaze("gaze", "single cells", worlds, fixation=1)
    bench.gaze("gaze", "windows of 4", worlds, fixation=4)
    bench.gaze("gaze", "most relevant first", worlds, order="relevance")
    bench.gaze("gaze", "hardly a gestalt (16 tokens)", worlds, gestalt=16)


def compression(bench: Bench) -> None:
    """ARR, COC and both, at equal tokens."""
    for world in WORLDS:
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
    selector: Annotated[str, typer.Option(help="Name or directory of the selector.")] = EMBEDDED,
    base: Annotated[str, typer.Option(help="Directory of the model.")] = EMBEDDED,
    n: Annotated[int, typer.Option(help="Samples of a world.")] = 100,
    tables: Annotated[str, typer.Option(help="Which tables, with commas.")] = ",".join(TABLES),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; cells already there are kept.")] = None,
) -> None:
    bench = Bench(base, selector, n, device, out)
    for name in tables.split(","):
        TABLES[name](bench)


if __name__ == "__main__":
    typer.run(main)
