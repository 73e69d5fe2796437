"""From records to what they say: means with intervals, differences, where each method gives in, what each row is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arr_coc.evaluation.contenders import FULL, OURS
from arr_coc.evaluation.metrics import LOOKED
from arr_coc.evaluation.records import Record
from arr_coc.evaluation.statistics import (
    budget_at,
    mean_interval,
    paired_difference,
    paired_difference_over_tasks,
)

# A method holds as long as it answers this share of what all tokens answer.
HOLDS = 0.95
# Faster is at most this share of the time to the first token that all tokens take.
FASTER = 0.95
OPPONENT = "downsample"
LOOKING = ("precision", "coverage", "overlap", "pointing")
SUCCESSES = ("fewer tokens", "faster", "better")
Scores = dict[str, dict[tuple[str, str], dict[str, float]]]


def summarise(
    records: Sequence[Record], times: Sequence[Mapping[str, Any]], selectors: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """All that a report shows, as plain values.

    Only items that every selector answered at every budget count, so that all rows stand on the same questions.
    """
    scores = _scores(records, "score", selectors, budgets)
    spent = {(row["selector"], row["budget"]): row for row in times}
    calls = [(name, budget) for name in selectors for budget in ([FULL] if name == FULL else budgets)]
    by: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for one in records:
        by[one.selector, one.budget].append(one)
    made = (_row(name, budget, scores, spent, by[name, budget]) for name, budget in calls)
    rows = [row for row in made if row is not None]
    if not rows:
        raise ValueError("there is nothing to report: no record was made")
    return {
        "items": {task: len(next(iter(by.values()))) for task, by in scores.items()},
        "rows": rows,
        "tasks": {task: _task(by) for task, by in scores.items()},
        "looking": _looking(records, selectors, budgets),
        "gives_in": {name: _gives_in(rows, name) for name in selectors if name != FULL},
        "failures": _failures(records, budgets),
        "select_percentile": {budget: _percentile(spent, budget) for budget in budgets},
    }


def _scores(records: Sequence[Record], field: str, selectors: Sequence[str], budgets: Sequence[str]) -> Scores:
    """task -> (selector, budget) -> item -> value, on the items that all have."""
    found: Scores = defaultdict(lambda: defaultdict(dict))
    wanted = {(name, budget) for name in selectors for budget in ([FULL] if name == FULL else budgets)}
    for one in records:
        value = getattr(one, field)
        if value is not None and (one.selector, one.budget) in wanted:
            found[one.task][one.selector, one.budget][one.item] = value
    for task, by in found.items():
        common = set.intersection(*(set(items) for items in by.values()))
        found[task] = {key: {item: items[item] for item in sorted(common)} for key, items in by.items()}
    return {task: dict(by) for task, by in found.items() if next(iter(by.values()))}


def _values(scores: Scores, name: str, budget: str) -> dict[str, np.ndarray]:
    return {
        task: np.array(list(by[name, budget].values())) for task, by in sorted(scores.items()) if (name, budget) in by
    }


def _row(
    name: str,
    budget: str,
    scores: Scores,
    spent: Mapping[tuple[str, str], Mapping[str, Any]],
    own: Sequence[Record],
) -> dict[str, Any] | None:
    """One selector at one budget over all tasks with answers."""
    if not own:
        return None
    row: dict[str, Any] = {
        "selector": name,
        "budget": budget,
        "tokens": round(float(np.mean([one.tokens for one in own])), 1),
        "share": round(float(np.mean([one.tokens / one.full for one in own])), 4),
        "times": dict(spent.get((name, budget), {})),
    }
    answered = _values(scores, name, budget)
    if not answered:
        return row
    row["accuracy"] = round(float(np.mean([values.mean() for values in answered.values()])), 4)
    row["by_task"] = {task: round(float(values.mean()), 4) for task, values in answered.items()}
    for other, against in ((OURS, budget), (FULL, FULL), (OPPONENT, budget)):
        theirs = _values(scores, other, against)
        if other != name and set(theirs) == set(answered):
            row[f"minus_{other}"] = _rounded(
                paired_difference_over_tasks(list(answered.values()), list(theirs.values()))
            )
    row["successes"] = _successes(row)
    return row


def _rounded(found: tuple[float, float, float]) -> list[float]:
    return [round(value, 4) for value in found]


def _successes(row: Mapping[str, Any]) -> list[str]:
    """Which of the three successes a row is.

    The same accuracy is one whose difference from all tokens is not below zero for certain; faster is at least a
    twentieth less time to the first token; better is above the picture made smaller, for certain.
    """
    found = []
    loss = row.get("minus_full")
    same = loss is not None and loss[2] >= 0
    if same and row["share"] < 1:
        found.append(SUCCESSES[0])
    of_full = row["times"].get("of_full")
    if same and of_full is not None and of_full <= FASTER:
        found.append(SUCCESSES[1])
    gain = row.get(f"minus_{OPPONENT}")
    if gain is not None and gain[1] > 0:
        found.append(SUCCESSES[2])
    return found


def _task(by: Mapping[tuple[str, str], Mapping[str, float]]) -> dict[str, Any]:
    """Means of a task with intervals, differences from ours, and who is best at each budget."""
    means: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, budget), items in by.items():
        values = np.array(list(items.values()))
        means[name][budget] = {"mean": _rounded(mean_interval(values))}
        ours = by.get((OURS, budget))
        if name not in (OURS, FULL) and ours is not None:
            means[name][budget]["minus_ours"] = _rounded(paired_difference(values, np.array(list(ours.values()))))
    best: dict[str, str] = {}
    for budget in dict.fromkeys(budget for _, budget in by if budget != FULL):
        # what is told the answer's place does not compete
        rivals = {
            name: means[name][budget]["mean"][0]
            for name in means
            if budget in means[name] and name not in (FULL, "oracle")
        }
        best[budget] = max(rivals, key=lambda name: rivals[name])
    return {"means": dict(means), "best": best}


def _looking(records: Sequence[Record], selectors: Sequence[str], budgets: Sequence[str]) -> dict[str, Any]:
    """Means of how well each looked, by task."""
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    for measure in LOOKING:
        values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for one in records:
            value = getattr(one, measure)
            if value is not None and one.selector in selectors and one.budget in budgets:
                values[one.task, one.selector, one.budget].append(value)
        for (task, name, budget), each in values.items():
            found[task][name].setdefault(budget, {})[measure] = round(float(np.mean(each)), 4)
    return {task: dict(by) for task, by in found.items()}


def _gives_in(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The smallest share of tokens at which a method still holds; None if it does at no budget."""
    full = next((row["accuracy"] for row in rows if row["selector"] == FULL and "accuracy" in row), None)
    points = {row["share"]: row["accuracy"] for row in rows if row["selector"] == name and "accuracy" in row}
    if full is None or not points:
        return None
    found = budget_at(sorted(points.items()), HOLDS * full)
    return None if found is None else round(found, 4)


def _failures(records: Sequence[Record], budgets: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Of our wrong answers, by budget and task: what was not looked at, by the scorer that misled, or was misread."""
    found: dict[str, dict[str, Counter[str]]] = {budget: defaultdict(Counter) for budget in budgets}
    for one in records:
        if one.selector == OURS and one.budget in found and one.score is not None and one.score < 1:
            found[one.budget][one.task][attribute(one)] += 1
    return {budget: {task: dict(kinds) for task, kinds in by.items()} for budget, by in found.items()}


def attribute(one: Record) -> str:
    """Why an answer was wrong, in words."""
    if one.coverage is None:
        return "no boxes to tell by"
    if one.coverage < LOOKED:
        return f"not looked at, misled by {one.misled}" if one.misled else "not looked at"
    return "seen but misread"


def _percentile(spent: Mapping[tuple[str, str], Mapping[str, Any]], budget: str) -> float | None:
    """Share of the peers that select in less time than ours; blind rules are no peers."""
    blind = ("random", "grid", "centre", "oracle", "downsample", "half-and-half")
    others = {OURS, f"{OURS}@saccade", "untrained", FULL, "fastv", *blind}
    peers: list[float] = [row["select_ms"] for (name, at), row in spent.items() if at == budget and name not in others]
    own = spent.get((OURS, budget), {}).get("select_ms")
    if own is None or not peers:
        return None
    faster = sum(peer < float(own) for peer in peers)
    return round(faster / len(peers), 4)
