"""Bootstrap intervals of means and paired differences, what they show, and where a curve reaches a level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]

LEVEL = 0.95
MARGIN = 0.02  # a loss of accuracy that counts as none
FEWEST = 100  # questions below which nothing is claimed
Verdict = Literal["not worse", "falls short", "too few to tell"]
_MOST_DRAWS = 4_000_000  # per chunk, 32 MB of indices


class Interval(NamedTuple):
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: ArrayLike, resamples: int = 2000, seed: int = 0) -> Interval:
    """The mean of scores with its percentile bootstrap interval.

    Args:
        values (`ArrayLike`): scores `[n]`, one per item.
        resamples (`int`, *optional*, defaults to 2000): number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0): of the random draws.

    Example:

    ```python
    >>> from arr_coc.evaluation.statistics import mean_interval
    >>> mean_interval([1.0] * 90 + [0.0] * 10)
    Interval(mean=0.9, low=0.84, high=0.96)

    ```
    """
    return mean_over_tasks([values], resamples, seed)


def paired_difference(ours: ArrayLike, theirs: ArrayLike, resamples: int = 2000, seed: int = 0) -> Interval:
    """The mean difference between two scores of the same items, with its percentile bootstrap interval.

    Items are drawn in pairs, so that items that are hard for both sides do not widen the interval.

    Args:
        ours, theirs (`ArrayLike`): scores `[n]`, with the items in the same order.
        resamples, seed (`int`, *optional*): as in [`mean_interval`].

    Example:

    ```python
    >>> from arr_coc.evaluation.statistics import paired_difference
    >>> paired_difference([1, 1, 0, 1], [1, 1, 0, 1])
    Interval(mean=0.0, low=0.0, high=0.0)

    ```
    """
    return paired_difference_over_tasks([ours], [theirs], resamples, seed)


def judge_loss(difference: Interval, questions: int) -> Verdict:
    """Whether an accuracy is as good as another, up to a margin of 0.02 (non-inferiority).

    | the interval of the difference   | the verdict         |
    |----------------------------------|---------------------|
    | lies above the margin            | `"not worse"`       |
    | lies below the margin            | `"falls short"`     |
    | reaches from below to above it   | `"too few to tell"` |

    Of fewer than 100 questions, nothing can be told: an interval of so few is too narrow.

    Args:
        difference (`Interval`): from [`paired_difference`], below zero where accuracy is lost.
        questions (`int`): number of questions behind it.

    Example:

    ```python
    >>> from arr_coc.evaluation.statistics import Interval, judge_loss
    >>> judge_loss(Interval(-0.005, -0.012, 0.002), 500), judge_loss(Interval(-0.375, -0.75, -0.125), 8)
    ('not worse', 'too few to tell')

    ```
    """
    if questions < FEWEST:
        return "too few to tell"
    if difference.low > -MARGIN:
        return "not worse"
    return "falls short" if difference.high < -MARGIN else "too few to tell"


def mean_over_tasks(tasks: Sequence[ArrayLike], resamples: int = 2000, seed: int = 0) -> Interval:
    """The mean of the task means, every task with the same weight; items are resampled within each task.

    Args:
        tasks (`Sequence[ArrayLike]`): scores `[n]` of each task.
        resamples, seed (`int`, *optional*): as in [`mean_interval`].

    Example:

    ```python
    >>> from arr_coc.evaluation.statistics import mean_over_tasks
    >>> mean_over_tasks([[1.0, 1.0, 1.0], [0.0]]).mean
    0.5

    ```
    """
    if not tasks:
        raise ValueError("`tasks` is empty; give the scores of at least one task")
    if resamples < 1:
        raise ValueError(f"`resamples` must be at least 1, got {resamples}")
    rng = np.random.default_rng(seed)
    scores = [_check(values) for values in tasks]
    drawn = np.mean([_resampled_means(values, resamples, rng) for values in scores], axis=0)  # [tasks, r] -> [r]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.mean([values.mean() for values in scores])), float(low), float(high))


def paired_difference_over_tasks(
    ours: Sequence[ArrayLike], theirs: Sequence[ArrayLike], resamples: int = 2000, seed: int = 0
) -> Interval:
    """[`paired_difference`] over several tasks with the same weight; arguments as there, one entry per task."""
    if len(ours) != len(theirs):
        raise ValueError(f"a paired difference needs the same tasks on both sides, got {len(ours)} and {len(theirs)}")
    return mean_over_tasks([_difference(*pair) for pair in zip(ours, theirs, strict=True)], resamples, seed)


def _difference(ours: ArrayLike, theirs: ArrayLike) -> Values:
    first, second = _check(ours), _check(theirs)
    if first.shape != second.shape:
        raise ValueError(f"a paired difference needs the same items on both sides, got {len(first)} and {len(second)}")
    return first - second


def _check(values: ArrayLike) -> Values:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"scores must be one row of at least one number, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite; leave out items that could not be measured, on both sides")
    return scores


def _resampled_means(scores: Values, resamples: int, rng: np.random.Generator) -> Values:
    """Means `[resamples]` of bootstrap samples, in chunks that fit into memory."""
    step = max(1, _MOST_DRAWS // len(scores))
    means = np.empty(resamples)
    for first in range(0, resamples, step):
        part = means[first : first + step]
        part[:] = scores[rng.integers(len(scores), size=(len(part), len(scores)))].mean(axis=1)  # [part, n] -> [part]
    return means


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
    >>> from arr_coc.evaluation.statistics import budget_at
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
