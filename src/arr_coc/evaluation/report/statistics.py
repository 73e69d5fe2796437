"""Bootstrap intervals of means and paired differences, what they show, and where a curve reaches a level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import bootstrap

Values = NDArray[np.float64]

LEVEL = 0.95
MARGIN = 0.02  # a loss of accuracy that counts as none
FEWEST = 100  # questions below which nothing is claimed
Verdict = Literal["not worse", "falls short", "too few to tell"]
_MOST_DRAWS = 8_000_000  # items drawn at a time, 64 MB of numbers


class Interval(NamedTuple):
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def mean_intervals(tasks: Sequence[ArrayLike], resamples: int = 2000, seed: int = 0) -> list[Interval]:
    """Means of scores with their percentile bootstrap intervals, one for each row.

    The mean is that of the task means, every task with the same weight. Items are resampled within each task by
    `scipy.stats.bootstrap`, for all rows alike, so that a row has the same interval whatever stands beside it.

    Args:
        tasks (`Sequence[ArrayLike]`): scores `[rows, n]` of each task, or `[n]` for a single row.
        resamples (`int`, *optional*, defaults to 2000): number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0): of the random draws.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.statistics import mean_intervals
    >>> mean_intervals([[1.0] * 90 + [0.0] * 10])
    [Interval(mean=0.9, low=0.84, high=0.96)]
    >>> [row.mean for row in mean_intervals([[[1.0, 1.0, 1.0], [0.0, 0.0, 3.0]], [[0.0], [1.0]]])]
    [0.5, 1.0]

    ```
    """
    if not tasks:
        raise ValueError("`tasks` is empty; give the scores of at least one task")
    if resamples < 1:
        raise ValueError(f"`resamples` must be at least 1, got {resamples}")
    scores = [_check(values) for values in tasks]
    if len({len(values) for values in scores}) > 1:
        raise ValueError(f"every task must have the same rows, got {[len(values) for values in scores]}")

    def resampled_means(*drawn: NDArray[np.int64], axis: int) -> Values:
        """Means `[rows, r]` of samples `[r, n]` of each task."""
        means = [
            values @ _count(items, values.shape[1]).T / items.shape[1]
            for values, items in zip(scores, drawn, strict=True)
        ]
        return np.asarray(np.mean(means, axis=0))

    # what is resampled are the numbers of the items; scipy wants at least two of them
    items = [np.arange(max(2, values.shape[1])) % values.shape[1] for values in scores]
    found = bootstrap(
        items, resampled_means, n_resamples=resamples, batch=max(1, _MOST_DRAWS // sum(map(len, items))),
        vectorized=True, axis=-1, confidence_level=LEVEL, method="percentile", random_state=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    means = np.mean([values.mean(axis=1) for values in scores], axis=0)  # [tasks, rows] -> [rows]
    # quantiles often lie just between two digits of a table; which one it shows must not depend on the last bits
    rows = np.round([means, found.low, found.high], 10).T.tolist()  # [3, rows] -> [rows, 3]
    return [Interval(*row) for row in rows]


def paired_differences(
    ours: Sequence[ArrayLike], theirs: Sequence[ArrayLike], resamples: int = 2000, seed: int = 0
) -> list[Interval]:
    """Mean differences between two scores of the same items, with their intervals; see [`mean_intervals`].

    Items are drawn in pairs, so that items that are hard for both sides do not widen the interval.

    Args:
        ours, theirs (`Sequence[ArrayLike]`): scores of each task, with rows and items in the same order.
        resamples, seed (`int`, *optional*): as in [`mean_intervals`].

    Example:

    ```python
    >>> from arr_coc.evaluation.report.statistics import paired_differences
    >>> paired_differences([[1, 1, 0, 1]], [[1, 1, 0, 1]])
    [Interval(mean=0.0, low=0.0, high=0.0)]

    ```
    """
    if len(ours) != len(theirs):
        raise ValueError(f"a paired difference needs the same tasks on both sides, got {len(ours)} and {len(theirs)}")
    return mean_intervals([_subtract(*pair) for pair in zip(ours, theirs, strict=True)], resamples, seed)


def _subtract(ours: ArrayLike, theirs: ArrayLike) -> Values:
    first, second = _check(ours), _check(theirs)
    if first.shape != second.shape:
        raise ValueError(f"a paired difference needs the same items on both sides, got {first.shape}, {second.shape}")
    return first - second


def _check(values: ArrayLike) -> Values:
    """Scores as `[rows, n]`."""
    scores = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if scores.ndim != 2 or not scores.size:
        raise ValueError(f"scores must be rows of at least one number, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite; leave out items that could not be measured, on both sides")
    return scores


def _count(drawn: NDArray[np.int64], items: int) -> Values:
    """How often each sample `[r, n]` has each item: `[r, items]`."""
    places = drawn + items * np.arange(len(drawn))[:, None]  # [r, n]
    return np.bincount(places.ravel(), minlength=items * len(drawn)).reshape(-1, items).astype(np.float64)


def judge_loss(difference: Interval, questions: int) -> Verdict:
    """Whether an accuracy is as good as another, up to a margin of 0.02 (non-inferiority).

    | the interval of the difference   | the verdict         |
    |----------------------------------|---------------------|
    | lies above the margin            | `"not worse"`       |
    | lies below the margin            | `"falls short"`     |
    | reaches from below to above it   | `"too few to tell"` |

    Of fewer than 100 questions, nothing can be told: an interval of so few is too narrow.

    Args:
        difference (`Interval`): from [`paired_differences`], below zero where accuracy is lost.
        questions (`int`): number of questions behind it.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.statistics import Interval, judge_loss
    >>> judge_loss(Interval(-0.005, -0.012, 0.002), 500), judge_loss(Interval(-0.375, -0.75, -0.125), 8)
    ('not worse', 'too few to tell')

    ```
    """
    if questions < FEWEST:
        return "too few to tell"
    if difference.low > -MARGIN:
        return "not worse"
    return "falls short" if difference.high < -MARGIN else "too few to tell"


def budget_at(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """The smallest budget down to which a curve stays at or above a level, interpolated linearly.

    The curve is followed from its largest budget down to where it first falls below the level; a rise further down does
    not count. There is no extrapolation:

    | the curve                           | gives                |
    |-------------------------------------|----------------------|
    | is below at its largest budget      | None                 |
    | never falls below                   | its smallest budget  |

    Args:
        points (`Sequence[tuple[float, float]]`): budgets and scores, in any order.
        level (`float`): such as 0.99 of the full model's score.

    Example:

    ```python
    >>> from arr_coc.evaluation.report.statistics import budget_at
    >>> budget_at([(64, 0.5), (128, 0.7), (256, 0.8)], 0.6)
    96.0

    ```
    """
    falling = sorted(points, reverse=True)
    if not falling:
        raise ValueError("a curve needs at least one point, got none")
    if not np.isfinite(falling).all():
        raise ValueError(f"budgets and scores must be finite, got {list(points)}")
    if len({budget for budget, _ in falling}) < len(falling):
        raise ValueError(f"each budget must be measured once, got {[budget for budget, _ in falling]}")
    if falling[0][1] < level:
        return None
    for (high, above), (low, below) in pairwise(falling):
        if below < level:
            return float(low + (level - below) / (above - below) * (high - low))
    return float(falling[-1][0])
