"""Summarise records: means with intervals, paired differences, the budget each selector holds to, and failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arr_coc.config import TRAINED, UNTRAINED
from arr_coc.evaluation.arithmetic import PARTS
from arr_coc.evaluation.contenders import FULL, find_ours, split_name
from arr_coc.evaluation.metrics import LOOKED
from arr_coc.evaluation.records import Record
from arr_coc.evaluation.report.seed_means import Call, average_records, average_rows, seed_accuracies
from arr_coc.evaluation.report.statistics import (
    FEWEST,
    Interval,
    budget_at,
    judge_loss,
    mean_intervals,
    paired_differences,
)
from arr_coc.evaluation.seeds import Seeds, seed_names
from arr_coc.evaluation.wrong_question import WRONG

# A selector holds as long as it reaches this share of the accuracy of all tokens.
HOLDS = 0.95
# Faster means at most this share of the time to the first token with all tokens.
FASTER = 0.95
OPPONENT = "downsample"
LOOKING = ("precision", "coverage", "overlap", "pointing")
SUCCESSES = ("fewer tokens", "faster", "better")
Scores = dict[str, dict[Call, dict[str, float]]]


def summarise(
    records: Sequence[Record],
    times: Sequence[Mapping[str, Any]],
    selectors: Sequence[str],
    budgets: Sequence[str],
    work: Sequence[Mapping[str, Any]] = (),
    seeds: Seeds | None = None,
) -> dict[str, Any]:
    """Everything that a report shows, as plain values.

    Only items that every selector answered at every budget count, so that all rows compare the same questions.

    Args:
        records (`Sequence[Record]`), times, work (`Sequence[Mapping]`): rows of the files of results.
        selectors, budgets (`Sequence[str]`): the rows that the report shows, in this order.
        seeds (`Mapping`, *optional*): the selectors behind rows that have several, whose mean such a row is.
    """
    shown = {row: places for row, places in (seeds or {}).items() if any(split_name(n)[0] == row for n in selectors)}
    ours, each_seed = find_ours(selectors, shown), records
    records = average_records(records, selectors, shown)
    scores = _scores(records, "score", selectors, budgets)
    spent, counted = (average_rows(measured, selectors, shown) for measured in (times, work))
    calls = [(name, budget) for name in selectors for budget in ([FULL] if name == FULL else budgets)]
    by_call: dict[Call, list[Record]] = defaultdict(list)
    for record in records:
        by_call[record.selector, record.budget].append(record)
    values = {call: _values(scores, call) for call in calls}
    differences = _differences(values, ours)
    rows = [
        _row(call, values[call], differences[call], spent.get(call, {}), counted.get(call, {}), by_call[call])
        for call in calls
        if by_call[call]
    ]
    if not rows:
        raise ValueError("there is nothing to report: no record has these tasks, selectors and budgets")
    tasks = {task: _task(by, ours) for task, by in scores.items()}
    _add_spread(rows, tasks, seed_accuracies(each_seed, scores, shown))
    summary = {
        "items": {task: len(next(iter(by.values()))) for task, by in scores.items()},
        "rows": rows,
        "tasks": tasks,
        "looking": _looking(records, selectors, budgets),
        "gives_in": {name: _gives_in(rows, name) for name in selectors if name != FULL},
        "failures": _failures(each_seed, budgets, seed_names(ours, shown)),
        "select_percentile": {budget: _percentile(spent, budget, ours) for budget in budgets},
    }
    return summary | ({"seeds": {row: list(places) for row, places in shown.items()}} if shown else {})


def _scores(records: Sequence[Record], field: str, selectors: Sequence[str], budgets: Sequence[str]) -> Scores:
    """task -> (selector, budget) -> item -> value, on the items common to all."""
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    wanted = {(name, budget) for name in selectors for budget in ([FULL] if name == FULL else budgets)}
    for record in records:
        value = getattr(record, field)
        if value is not None and (record.selector, record.budget) in wanted:
            scores[record.task][record.selector, record.budget][record.item] = value
    for task, by in scores.items():
        common = set.intersection(*(set(items) for items in by.values()))
        scores[task] = {key: {item: items[item] for item in sorted(common)} for key, items in by.items()}
    return {task: dict(by) for task, by in scores.items() if next(iter(by.values()))}


def _values(scores: Scores, call: Call) -> dict[str, np.ndarray]:
    return {task: np.array(list(by[call].values())) for task, by in sorted(scores.items()) if call in by}


def _differences(values: Mapping[Call, Mapping[str, np.ndarray]], ours: str) -> dict[Call, dict[str, Interval]]:
    """Differences of each call from ours, from all tokens and from the smaller picture, where the tasks are the same.

    All with the same tasks are resampled together.
    """
    groups: dict[tuple[str, ...], list[tuple[Call, Call]]] = defaultdict(list)
    for call, answered in values.items():
        for other in ((ours, call[1]), (FULL, FULL), (OPPONENT, call[1])):
            if answered and other[0] != call[0] and set(values.get(other, ())) == set(answered):
                groups[tuple(answered)].append((call, other))
    found: dict[Call, dict[str, Interval]] = {call: {} for call in values}
    for tasks, pairs in groups.items():
        first = [[values[call][task] for call, _ in pairs] for task in tasks]
        second = [[values[other][task] for _, other in pairs] for task in tasks]
        for (call, other), difference in zip(pairs, paired_differences(first, second), strict=True):
            found[call][other[0]] = difference
    return found


def _row(
    call: Call,
    answered: Mapping[str, np.ndarray],
    differences: Mapping[str, Interval],
    spent: Mapping[str, Any],
    counted: Mapping[str, Any],
    records: Sequence[Record],
) -> dict[str, Any]:
    """One selector at one budget over all tasks with answers."""
    row: dict[str, Any] = {
        "selector": call[0],
        "budget": call[1],
        "tokens": round(float(np.mean([record.tokens for record in records])), 1),
        "sharp": _mean_count(records, "sharp"),
        "share": round(float(np.mean([record.tokens / record.full for record in records])), 4),
        "times": dict(spent),
    }
    # results of an earlier version have neither of these
    counts = {name: _mean_count(records, name) for name in ("encoded", "processed")}
    row |= {name: count for name, count in counts.items() if count is not None}
    row |= {name: counted[name] for part in PARTS if (name := f"{part}_gmacs") in counted}
    if not answered:
        return row
    row["accuracy"] = round(float(np.mean([values.mean() for values in answered.values()])), 4)
    row["by_task"] = {task: round(float(values.mean()), 4) for task, values in answered.items()}
    row["questions"] = sum(map(len, answered.values()))
    row |= {f"minus_{other}": _rounded(difference) for other, difference in differences.items()}
    if FULL in differences:
        row["verdict"] = judge_loss(differences[FULL], row["questions"])
    row["successes"] = _successes(row)
    return row


def _add_spread(
    rows: Sequence[dict[str, Any]], tasks: Mapping[str, Any], accuracies: Mapping[Call, Mapping[str, Sequence[float]]]
) -> None:
    """Add the lowest and the highest accuracy of the seeds (`spread`), over all tasks and in each of them."""
    for row in rows:
        by_task = accuracies.get((row["selector"], row["budget"]))
        if not by_task:
            continue
        each = np.mean(list(by_task.values()), axis=0)  # [tasks, seeds] -> [seeds]
        row["each_seed"] = [round(float(accuracy), 4) for accuracy in each]
        row["spread"] = [min(row["each_seed"]), max(row["each_seed"])]
        for task, values in by_task.items():
            entry = tasks[task]["means"][row["selector"]][row["budget"]]
            entry["spread"] = [round(min(values), 4), round(max(values), 4)]


def _mean_count(records: Sequence[Record], name: str) -> float | None:
    """Mean of a count of tokens or cells; None unless every record has it."""
    counts = [count for record in records if (count := getattr(record, name)) is not None]
    return round(float(np.mean(counts)), 1) if len(counts) == len(records) else None


def _rounded(interval: tuple[float, float, float]) -> list[float]:
    return [round(value, 4) for value in interval]


def _successes(row: Mapping[str, Any]) -> list[str]:
    """Which of the three successes a row achieves.

    The accuracy is the same if it is not worse than that of all tokens, see [`judge_loss`]. Faster means at least 5 %
    less time to the first token; better means significantly above the downsampled picture, of enough questions.
    """
    successes = []
    same = row.get("verdict") == "not worse"
    if same and row["share"] < 1:
        successes.append(SUCCESSES[0])
    of_full = row["times"].get("of_full")
    if same and of_full is not None and of_full <= FASTER:
        successes.append(SUCCESSES[1])
    gain = row.get(f"minus_{OPPONENT}")
    if gain is not None and gain[1] > 0 and row["questions"] >= FEWEST:
        successes.append(SUCCESSES[2])
    return successes


def _task(by: Mapping[Call, Mapping[str, float]], ours: str) -> dict[str, Any]:
    """Means of a task with intervals, differences from our layer, and the best selectors at each budget."""
    values = {call: list(items.values()) for call, items in by.items()}
    means: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, budget), interval in zip(values, mean_intervals([list(values.values())]), strict=True):
        means[name][budget] = {"mean": _rounded(interval)}
    rivals = [call for call in values if call[0] not in (ours, FULL) and (ours, call[1]) in values]
    if rivals:
        theirs, own = [values[call] for call in rivals], [values[ours, budget] for _, budget in rivals]
        for (name, budget), difference in zip(rivals, paired_differences([theirs], [own]), strict=True):
            means[name][budget]["minus_ours"] = _rounded(difference)
    best: dict[str, list[str]] = {}
    for budget in dict.fromkeys(budget for _, budget in by if budget != FULL):
        best[budget] = find_best({name: at[budget]["mean"][0] for name, at in means.items() if budget in at})
    return {"means": dict(means), "best": best}


def find_best(accuracies: Mapping[str, float | None]) -> list[str]:
    """The selectors with the highest accuracy, all that tie as tables show it, with three digits.

    `full` reads all tokens and `oracle` is told where the answer is: they do not compete.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.summary import find_best
    >>> find_best({"full": 0.99, "arr-coc": 0.9001, "grid": 0.8999, "random": 0.7})
    ['arr-coc', 'grid']

    ```
    """
    shown = {
        name: write_accuracy(value)
        for name, value in accuracies.items()
        if value is not None and name not in (FULL, "oracle")
    }
    most = max(shown.values(), key=float, default=None)
    return [name for name, text in shown.items() if text == most]


def write_accuracy(value: float) -> str:
    """An accuracy as tables show it."""
    return f"{value:.3f}"


def _looking(records: Sequence[Record], selectors: Sequence[str], budgets: Sequence[str]) -> dict[str, Any]:
    """Mean looking measures by task, selector and budget."""
    means: dict[str, dict[str, dict[str, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    for measure in LOOKING:
        values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for record in records:
            value = getattr(record, measure)
            if value is not None and record.selector in selectors and record.budget in budgets:
                values[record.task, record.selector, record.budget].append(value)
        for (task, name, budget), each in values.items():
            means[task][name].setdefault(budget, {})[measure] = round(float(np.mean(each)), 4)
    return {task: dict(by) for task, by in means.items()}


def _gives_in(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The smallest share of tokens at which a selector still holds; None if it holds at no budget."""
    full = next((row["accuracy"] for row in rows if row["selector"] == FULL and "accuracy" in row), None)
    points = {row["share"]: row["accuracy"] for row in rows if row["selector"] == name and "accuracy" in row}
    if full is None or not points:
        return None
    share = budget_at(sorted(points.items()), HOLDS * full)
    return None if share is None else round(share, 4)


def _failures(
    records: Sequence[Record], budgets: Sequence[str], ours: Sequence[str]
) -> dict[str, dict[str, dict[str, int]]]:
    """Count why answers of our layer, of all its seeds, were wrong, by budget and task."""
    counts: dict[str, dict[str, Counter[str]]] = {budget: defaultdict(Counter) for budget in budgets}
    for record in records:
        if record.selector in ours and record.budget in counts and record.score is not None and record.score < 1:
            counts[record.budget][record.task][attribute(record)] += 1
    return {budget: {task: dict(kinds) for task, kinds in by.items()} for budget, by in counts.items()}


def attribute(record: Record) -> str:
    """Why an answer was wrong, in words."""
    if record.coverage is None:
        return "no boxes to tell by"
    if record.seen is None:
        return "not recorded"
    if record.seen < LOOKED:
        return f"not seen, misled by {record.misled}" if record.misled else "not seen"
    return "seen but misread"


def _percentile(spent: Mapping[tuple[str, str], Mapping[str, Any]], budget: str, ours: str) -> float | None:
    """Share of the comparable selectors that select faster than our layer; plain rules do not count."""
    blind = ("random", "grid", "centre", "oracle", "downsample", "half-and-half")
    no_peers = {TRAINED, UNTRAINED, ours, FULL, "fastv", *blind}
    peers: list[float] = [
        row["select_ms"]
        for (name, at), row in spent.items()
        # neither our layer in another form, nor a rival once more as a control
        if at == budget and split_name(name)[0] not in no_peers and not name.endswith(WRONG)
    ]
    own = spent.get((ours, budget), {}).get("select_ms")
    if own is None or not peers:
        return None
    faster = sum(peer < float(own) for peer in peers)
    return round(faster / len(peers), 4)
