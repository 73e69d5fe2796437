"""What the benchmarks share: a clock that synchronises, the machine's data, and files written aside."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import arr_coc
from arr_coc.runtime.machine import find_revision


class Clock:
    """Times a call on one device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, call: Callable[[], object]) -> float:
        self.synchronise()
        start = time.perf_counter()
        call()
        self.synchronise()
        return 1e3 * (time.perf_counter() - start)

    def peak(self, call: Callable[[], object]) -> float | None:
        """Megabytes that a plain call takes beyond its inputs; a replayed graph holds about as much for good."""
        if not self.cuda:
            return None
        call()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)

    def measure(self, call: Callable[[], object], repeats: int, warm_up: int) -> dict[str, float | int]:
        [found] = self.compare({"": call}, repeats, warm_up).values()
        return found

    def compare(
        self, calls: dict[str, Callable[[], object]], repeats: int, warm_up: int, pause: float = 0.0
    ) -> dict[str, dict[str, float | int]]:
        """Time several calls in turn, so that a slow spell of the machine falls on all of them.

        Before each, the machine rests for `pause` seconds: after a second of full load a GPU's clock is lower.
        """
        for call in calls.values():
            for _ in range(warm_up):
                call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()  # as `timeit` does: a collection falls on whichever call it meets
        try:
            for _ in range(repeats):
                for name, call in calls.items():
                    time.sleep(pause)
                    times[name].append(self.once(call))
        finally:
            gc.enable()
        return {name: summary(found) for name, found in times.items()}


def summary(times: list[float]) -> dict[str, float | int]:
    low, high = statistics.quantiles(times, n=4)[::2] if len(times) > 1 else (times[0], times[0])
    return {
        "median_ms": round(statistics.median(times), 3),
        "iqr_ms": round(high - low, 3),
        "min_ms": round(min(times), 3),
        "repeats": len(times),
    }


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "encoder_dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "arr_coc": arr_coc.__version__,
        "revision": find_revision(),
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write aside, then rename."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.replace(path)
    print(f"\nwritten to {path}")
