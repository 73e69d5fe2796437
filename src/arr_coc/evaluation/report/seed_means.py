"""The mean over the seeds of a row, question by question, and how far its seeds lie apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from arr_coc.evaluation.records import Record
from arr_coc.evaluation.seeds import Seeds, seed_names

Call = tuple[str, str]  # selector and budget
_AVERAGED = (
    *("tokens", "sharp", "encoded", "processed", "score"),
    *("precision", "coverage", "overlap", "pointing", "seen"),
)


def average_records(records: Sequence[Record], rows: Sequence[str], seeds: Seeds) -> list[Record]:
    """Records of rows: those of a row with seeds are their means, of the questions that all its seeds were asked.

    What is not a number, such as an answer, is that of the first seed.
    """
    owners = _find_owners(rows, seeds)
    averaged = [record for record in records if record.selector not in owners]
    each: dict[tuple[str, str, str, str], dict[str, Record]] = defaultdict(dict)
    for record in records:
        for row in owners.get(record.selector, ()):
            each[row, record.task, record.item, record.budget][record.selector] = record
    for (row, *_), found in each.items():
        own = [found[name] for name in seed_names(row, seeds) if name in found]
        if len(own) < len(seed_names(row, seeds)):
            continue
        means = {name: _mean([getattr(record, name) for record in own]) for name in _AVERAGED}
        averaged.append(replace(own[0], selector=row, **means))
    return averaged


def average_rows(
    measured: Iterable[Mapping[str, Any]], rows: Sequence[str], seeds: Seeds
) -> dict[Call, dict[str, Any]]:
    """Rows of times or of arithmetic, by selector and budget; those of a row with seeds are their means."""
    found = {(row["selector"], row["budget"]): dict(row) for row in measured}
    for row in rows:
        names = seed_names(row, seeds)
        if names == [row]:
            continue
        for budget in {budget for name, budget in found if name in names}:
            own = [found[name, budget] for name in names if (name, budget) in found]
            if len(own) == len(names):
                numbers = [name for name, value in own[0].items() if name not in ("selector", "budget", "samples")]
                means = {name: _mean([each.get(name) for each in own]) for name in numbers}
                found[row, budget] = {**own[0], **means, "selector": row}
    owners = _find_owners(rows, seeds)
    return {(name, budget): row for (name, budget), row in found.items() if name not in owners}


def first_seeds(records: Sequence[Record], rows: Sequence[str], seeds: Seeds) -> list[Record]:
    """Records of rows, where the first seed stands for a row: what it kept can be drawn, as no mean can."""
    owners = _find_owners(rows, seeds)
    stands = {seed_names(row, seeds)[0]: row for row in rows}
    return [
        replace(record, selector=stands.get(record.selector, record.selector))
        for record in records
        if record.selector not in owners or record.selector in stands
    ]


def seed_accuracies(
    records: Iterable[Record], asked: Mapping[str, Mapping[Call, Iterable[str]]], seeds: Seeds
) -> dict[Call, dict[str, list[float]]]:
    """Accuracy of each seed by task, of every row with several seeds at every budget.

    Args:
        records (`Iterable[Record]`): of the seeds.
        asked (`Mapping`): for each task and each row at a budget, the questions that count.
        seeds (`Mapping`): the seeds of each row.
    """
    scores = {record.key: record.score for record in records if record.score is not None}
    found: dict[Call, dict[str, list[float]]] = defaultdict(dict)
    for task, by in asked.items():
        for (row, budget), items in by.items():
            names = seed_names(row, seeds)
            if len(names) > 1:
                found[row, budget][task] = [
                    fmean(scores[task, item, name, budget] or 0.0 for item in items) for name in names
                ]
    return dict(found)


def _find_owners(rows: Sequence[str], seeds: Seeds) -> dict[str, list[str]]:
    """The rows of each contender that is a seed."""
    owners: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for name in seed_names(row, seeds):
            if name != row:
                owners[name].append(row)
    return dict(owners)


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers; None if one is missing."""
    return None if None in values else values[0] if len(values) == 1 else fmean(values)
