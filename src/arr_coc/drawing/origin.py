"""Where a figure comes from: the commit behind its results, and a digest of them that shows when it is out of date."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

_STAMP = "<!-- results {} -->"
_COMMIT = re.compile(r"([0-9a-f]{7})[0-9a-f]{0,33}(\+changes)?")


def name_origin(facts: Mapping[str, Any]) -> str:
    """Version and commit of the package that made some results, as figures and reports say them.

    Args:
        facts (`Mapping`): with `arr_coc`, the version, `revision`, one commit or several, and `times_revision` if times
            were measured at another; each may be missing.

    Example:

    ```python
    >>> from arr_coc.drawing.origin import name_origin
    >>> name_origin({"arr_coc": "0.1.0", "revision": "bcf0fd46b1c1711a401f925458ee6ff01abf20d9"})
    'arr-coc 0.1.0, commit bcf0fd4'
    >>> name_origin({"arr_coc": "0.1.0"})
    'arr-coc 0.1.0, commit not recorded'

    ```
    """
    made = f"arr-coc {facts.get('arr_coc', '')}".rstrip() + f", commit {_shorten(facts.get('revision'))}"
    timed = facts.get("times_revision")
    return made if timed is None else f"{made}; times: commit {_shorten(timed)}"


def _shorten(revision: str | None) -> str:
    """The first letters of each commit."""
    commits = (f"{start}{changes}" for start, changes in _COMMIT.findall(revision or ""))
    return " and ".join(dict.fromkeys(commits)) or "not recorded"


def digest_results(results: Any) -> str:
    """A digest of results, the same before they are written as JSON and after they are read again.

    Example:

    ```python
    >>> from arr_coc.drawing.origin import digest_results
    >>> digest_results({"rows": (1, 2), "items": 3}) == digest_results({"items": 3, "rows": [1, 2]})
    True

    ```
    """
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


def stamp_figure(figure: str, results: Any) -> str:
    """Add a comment with the digest of the results to the end of an SVG, a page or a Markdown text.

    Example:

    ```python
    >>> from arr_coc.drawing.origin import is_current, stamp_figure
    >>> drawn = stamp_figure("<svg></svg>", {"accuracy": 0.9})
    >>> is_current(drawn, {"accuracy": 0.9}), is_current(drawn, {"accuracy": 0.8})
    (True, False)

    ```
    """
    return f"{figure.rstrip()}\n{_STAMP.format(digest_results(results))}\n"


def is_current(figure: str, results: Any) -> bool:
    """Whether a figure was drawn from just these results; False if it does not say."""
    return _STAMP.format(digest_results(results)) in figure
