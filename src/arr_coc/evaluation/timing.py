"""Measure times: one picture at a time, after a warm-up, with the device synchronised around every stage."""

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
DECODED = 8  # tokens over which decoding is timed
DECODINGS = 5  # answers of one token, and of so many more, from which the time of one is told


@torch.inference_mode()
def time_contenders(
    opened: Opened, batches: Sequence[dict[str, Any]], contenders: Sequence[Contender], budget: str
) -> list[dict[str, Any]]:
    """Median milliseconds of each stage and their spread, cache size and memory, over inputs of one picture each.

    Contenders take turns on every picture, so that a slow spell of the machine affects all of them. `of_full` is the
    ratio to all tokens in the same run. `encode` is the vision encoder, `select` everything from its tokens to the
    shorter prompt, `prefill` the language model up to the first logits. A selector that works inside the language
    model is timed in `prefill`. `decode_ms` is the time of one further token, None where it cannot be told.
    """
    calls = [(contender, FULL if contender.name == FULL else budget) for contender in contenders]
    runs: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    for contender, at in calls:
        for _ in range(WARM_UP):
            _once(opened, batches[0], contender, at)
    gc.collect()
    gc.disable()  # as `timeit` does: a collection would slow down whichever call it hits
    try:
        for inputs in batches:
            for contender, at in calls:
                runs[contender.name].append(_once(opened, inputs, contender, at))
    finally:
        gc.enable()
    full = statistics.median(run["first_token_ms"] for run in runs[FULL]) if FULL in runs else None
    rows = []
    for contender, at in calls:
        row: dict[str, Any] = {"selector": contender.name, "budget": at, "samples": len(batches)}
        for name in runs[contender.name][0]:
            values = [run[name] for run in runs[contender.name]]
            row[name] = round(statistics.median(values), 3)
            if name.endswith("_ms"):
                low, high = statistics.quantiles(values, n=4)[::2] if len(values) > 1 else (values[0], values[0])
                row[f"{name}_iqr"] = round(high - low, 3)
        row["of_full"] = None if full is None else round(row["first_token_ms"] / full, 4)
        row["decode_ms"] = _decode(opened, batches[0], contender, at)
        row["peak_mb"] = _peak(opened, batches[0], contender, at)
        rows.append(row)
    return rows


def _once(opened: Opened, inputs: dict[str, Any], contender: Contender, budget: str) -> dict[str, float]:
    session = opened.session(open_family(opened.model), contender, budget)
    run = session.forward({**inputs, "use_cache": True, "logits_to_keep": 1}, Stopwatch(opened.model.device))
    row = {f"{name}_ms": run.milliseconds.get(name, 0.0) for name in STAGES}
    row["first_token_ms"] = sum(row.values())
    row["kv_bytes"] = cache_bytes(run.result.past_key_values)
    return row


def _decode(opened: Opened, inputs: dict[str, Any], contender: Contender, budget: str) -> float | None:
    """Milliseconds per generated token after the first, from short and longer answers in turn; None if unclear."""
    session = opened.session(open_family(opened.model), contender, budget)

    def answer(count: int) -> tuple[float, int]:
        """The time of an answer of `count` tokens, and how many it has."""
        watch = Stopwatch(opened.model.device)
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count, "min_new_tokens": count}
        with watch.stage("answer"):
            run = session.generate({**inputs, **options})
        return watch.milliseconds["answer"], 0 if run.generated is None else run.generated.shape[1]

    answer(1 + DECODED)  # warm-up
    pairs = [(answer(1), answer(1 + DECODED)) for _ in range(DECODINGS)]
    return time_per_token([short for short, _ in pairs], [long for _, long in pairs])


def time_per_token(short: Sequence[tuple[float, int]], long: Sequence[tuple[float, int]]) -> float | None:
    """Median milliseconds of one further token, from pairs of answers of different lengths.

    None if a longer answer has no more tokens than its shorter one, or took no longer in a quarter of the pairs: then
    the difference is within the noise.

    Args:
        short, long (`Sequence[tuple[float, int]]`): milliseconds and tokens of each answer.

    Example:

    ```python
    >>> from arr_coc.evaluation.timing import time_per_token
    >>> time_per_token([(50.0, 1), (51.0, 1), (90.0, 1)], [(90.0, 9), (92.0, 9), (131.0, 9)])
    5.125
    >>> time_per_token([(50.0, 1), (51.0, 1), (90.0, 1)], [(49.0, 9), (92.0, 9), (40.0, 9)]) is None
    True

    ```
    """
    more = [longer - shorter for (_, shorter), (_, longer) in zip(short, long, strict=True)]
    if min(more) < 1:
        return None
    pairs = zip(short, long, more, strict=True)
    each = [(slower - faster) / count for (faster, _), (slower, _), count in pairs]
    lowest = statistics.quantiles(each, n=4)[0] if len(each) > 1 else each[0]
    return None if lowest <= 0 else round(statistics.median(each), 3)


def _peak(opened: Opened, inputs: dict[str, Any], contender: Contender, budget: str) -> float | None:
    """Peak device memory in megabytes that a call adds; None on the CPU."""
    if opened.model.device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _once(opened, inputs, contender, budget)
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values of all layers."""
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values) if part is not None)
