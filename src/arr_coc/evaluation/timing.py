"""Times: one picture at a time, after a warm-up, waiting for the device around every stage; apart from accuracy."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from arr_coc.evaluation.contenders import FULL, Contender
from arr_coc.evaluation.run import Opened
from arr_coc.families.family import open_family
from arr_coc.runtime.stopwatch import Stopwatch

STAGES = ("encode", "select", "prefill")
WARM_UP = 3
DECODED = 8  # tokens whose time is divided by their number


@torch.inference_mode()
def time_contenders(
    opened: Opened, asked: Sequence[dict[str, Any]], contenders: Sequence[Contender], budget: str
) -> list[dict[str, Any]]:
    """Median milliseconds of each stage and their spread, cache and memory, over inputs of one picture each.

    All take turns on every picture, so that a slow spell of the machine falls on all of them, with all tokens among
    them: `of_full` is the ratio to those in the same run. `encode` is the vision encoder, `select` everything from its
    tokens to the shorter prompt, `prefill` the language model up to the first logits. What chooses inside the language
    model has its choice in `prefill`.
    """
    calls = [(one, FULL if one.name == FULL else budget) for one in contenders]
    rows: dict[str, list[dict[str, float]]] = {one.name: [] for one in contenders}
    for one, at in calls:
        for _ in range(WARM_UP):
            _once(opened, asked[0], one, at)
    gc.collect()
    gc.disable()  # as `timeit` does: a collection falls on whichever call it meets
    try:
        for inputs in asked:
            for one, at in calls:
                rows[one.name].append(_once(opened, inputs, one, at))
    finally:
        gc.enable()
    full = statistics.median(row["first_token_ms"] for row in rows[FULL]) if FULL in rows else None
    found = []
    for one, at in calls:
        row: dict[str, Any] = {"selector": one.name, "budget": at, "samples": len(asked)}
        for name in rows[one.name][0]:
            values = [each[name] for each in rows[one.name]]
            row[name] = round(statistics.median(values), 3)
            if name.endswith("_ms"):
                low, high = statistics.quantiles(values, n=4)[::2] if len(values) > 1 else (values[0], values[0])
                row[f"{name}_iqr"] = round(high - low, 3)
        row["of_full"] = None if full is None else round(row["first_token_ms"] / full, 4)
        row["decode_ms"] = round(_decode(opened, asked[0], one, at), 3)
        row["peak_mb"] = _peak(opened, asked[0], one, at)
        found.append(row)
    return found


def _once(opened: Opened, inputs: dict[str, Any], contender: Contender, budget: str) -> dict[str, float]:
    session = opened.session(open_family(opened.model), contender, budget)
    run = session.forward({**inputs, "use_cache": True, "logits_to_keep": 1}, Stopwatch(opened.model.device))
    row = {f"{name}_ms": run.milliseconds.get(name, 0.0) for name in STAGES}
    row["first_token_ms"] = sum(row.values())
    row["kv_bytes"] = cache_bytes(run.result.past_key_values)
    return row


def _decode(opened: Opened, inputs: dict[str, Any], contender: Contender, budget: str) -> float:
    """Milliseconds of one further token."""
    watch = Stopwatch(opened.model.device)
    session = opened.session(open_family(opened.model), contender, budget)
    for name, count in (("warm", 2), ("one", 1), ("many", 1 + DECODED)):
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count, "min_new_tokens": count}
        with watch.stage(name):
            session.generate({**inputs, **options})
    return max(0.0, watch.milliseconds["many"] - watch.milliseconds["one"]) / DECODED


def _peak(opened: Opened, inputs: dict[str, Any], contender: Contender, budget: str) -> float | None:
    """Megabytes on the device that a call takes beyond its inputs."""
    if opened.model.device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _once(opened, inputs, contender, budget)
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def cache_bytes(cache: Any) -> int:
    """What keys and values of all layers take."""
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values) if part is not None)
