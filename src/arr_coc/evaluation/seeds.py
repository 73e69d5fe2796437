"""Several seeds of one row: `ours=runs/a+runs/b` names a row and the trained selectors whose mean it shows.

Each seed is a contender of its own, `ours#1`, `ours#2`, so that a run with more seeds asks only the new ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from arr_coc.evaluation.contenders import FULL, known_contenders, split_name

Seeds = Mapping[str, Sequence[str]]  # the selectors behind each row that has several


def read_seeds(names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The rows that names ask for, and the seeds that they define.

    Args:
        names (`Sequence[str]`): names of selectors; `ROW=A+B` defines a row, which others, such as `ROW@wrong`, may
            name. A row may have the name of a selector if that is its first seed.

    Example:

    ```python
    >>> from arr_coc.evaluation.seeds import read_seeds
    >>> read_seeds(["grid", "ours=runs/a+runs/b", "ours@wrong"])
    (['grid', 'ours', 'ours@wrong'], {'ours': ['runs/a', 'runs/b']})

    ```
    """
    rows: list[str] = []
    seeds: dict[str, list[str]] = {}
    for name in names:
        if "=" not in name or Path(name).is_dir():
            rows.append(name)
            continue
        plain, suffix = split_name(name)
        row, _, listed = plain.partition("=")
        places = [place.strip() for place in listed.split("+")]
        if not re.fullmatch(r"[\w.-]+", row) or not all(places):
            raise ValueError(f"seeds are given as ROW=A+B, a name and trained selectors, got {name!r}")
        if len(set(places)) < len(places):
            raise ValueError(f"each seed of a row must be another selector, got {name!r}")
        if row in (*known_contenders(), FULL, "all", "wrong", "untrained", "embedded") and row != places[0]:
            raise ValueError(
                f"{row} is a selector's name, got {name!r}; name the row otherwise, or begin with it: {row}={row}+..."
            )
        if seeds.get(row, places) != places:
            raise ValueError(f"the row {row} has other seeds already, got {name!r}; give each row its seeds once")
        seeds[row] = places
        rows.append(row + suffix)
    return rows, seeds


def seed_names(row: str, seeds: Seeds) -> list[str]:
    """The contenders behind a row; the row itself if it has no seeds.

    Example:

    ```python
    >>> from arr_coc.evaluation.seeds import seed_names
    >>> seed_names("ours@wrong", {"ours": ["runs/a", "runs/b"]}), seed_names("grid", {})
    (['ours#1@wrong', 'ours#2@wrong'], ['grid'])

    ```
    """
    plain, suffix = split_name(row)
    return [f"{plain}#{number}{suffix}" for number in range(1, 1 + len(seeds.get(plain, ())))] or [row]


def join_seeds(place: Path, started: Seeds, given: Seeds) -> dict[str, list[str]]:
    """The seeds of results that are continued; a row may get further seeds, but those that it had must stay."""
    joined = {row: list(places) for row, places in started.items()}
    for row, places in given.items():
        old = joined.get(row, [])
        if any(one != other for one, other in zip(old, places, strict=False)):
            raise ValueError(
                f"{place} was started with {row}={'+'.join(old)}, got {row}={'+'.join(places)}; "
                "add seeds at the end, name the row otherwise, or give another --out"
            )
        joined[row] = max(old, list(places), key=len)
    return joined
