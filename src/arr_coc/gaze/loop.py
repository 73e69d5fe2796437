"""Look, read, and if the answer is not sure look again: how much each look may read, how sure an answer is, when to
stop.

This needs no model: `inference/looking.py` asks it what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arr_coc.config import Grid

Then = Literal["again", "sure", "whole", "last"]

# A look before the last one reads this share of what the next one may read.
GROWTH = 1 / 4
# A look before the last one may read so many times more or fewer tokens, in mode `prune`, if the selector has learned
# what questions need.
LEEWAY = 4.0
# What the last look may read unless a caller says otherwise: of a small picture a share, of a large one so many tokens.
LAST_OF_SMALL, LAST_OF_LARGE = 0.5, 1024
# Only so many first tokens of an answer tell how sure it is: a long one can be worded in many ways.
COUNTED = 16
# Pictures of at most so many cells are read whole in one look: choosing takes as long as reading.
WHOLE = 64
# Pictures of more cells are looked at through a gaze: encoding all cells would take longer than all the rest.
LARGE = 1024


@dataclass(frozen=True, kw_only=True)
class Looks:
    """How often to look at a picture, and when an answer is sure enough.

    Args:
        rounds (`int`, *optional*, defaults to 2): most looks. Each reads about four times as much as the one before;
            the last one reads the budget of the call.
        sure (`float`, *optional*, defaults to 0.99): the least sureness of an answer, in (0, 1], after which nothing
            more is read: the probability that the model gives to its first sixteen tokens together.

    Example:

    ```python
    >>> from arr_coc import Looks
    >>> Looks(rounds=3)
    Looks(rounds=3, sure=0.99)

    ```
    """

    rounds: int = 2
    sure: float = 0.99

    def __post_init__(self) -> None:
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ValueError(f"`rounds` must be a whole number of at least 1, got {self.rounds!r}")
        if isinstance(self.sure, bool) or not isinstance(self.sure, int | float) or not 0 < self.sure <= 1:
            raise ValueError(f"`sure` must be in (0, 1], got {self.sure!r}")


class Look(NamedTuple):
    """One look at the pictures of a question.

    Args:
        tokens (`int`): visual tokens that the language model read in this look; what it had read before is not counted.
        seen (`int`): visual tokens that the answer of this look could use.
        sure (`float`): how sure its answer is, between 0 and 1.
        then (`str`): what followed: `"again"`, another look; or why there was none: `"sure"`, the answer was;
            `"whole"`, there was nothing more to see; `"last"`, no further look was allowed.
        kept (`Sequence[tuple[Grid, ndarray]]`): for each picture, its grid and the cells that this look could use at
            full resolution.
    """

    tokens: int
    seen: int
    sure: float
    then: Then = "last"
    kept: Sequence[tuple[Grid, NDArray[np.int64]]] = ()


# What followed a look, in words.
FOLLOWED = {
    "again": "not sure enough, so it looked again",
    "sure": "sure enough",
    "whole": "everything was read",
    "last": "no further look was allowed",
}


def explain_looks(looks: Sequence[Look]) -> str:
    """How sure an answer is, after how many looks, and why there was no further one, in words.

    Example:

    ```python
    >>> from arr_coc.gaze.loop import Look, explain_looks
    >>> explain_looks([Look(17, 17, 0.4, "again"), Look(70, 70, 0.998, "sure")])
    '1.00 sure after 2 looks (17 + 70 tokens), sure enough'

    ```
    """
    count = "one look" if len(looks) == 1 else f"{len(looks)} looks"
    read = " + ".join(str(look.tokens) for look in looks)
    return f"{looks[-1].sure:.2f} sure after {count} ({read} tokens), {FOLLOWED[looks[-1].then]}"


def list_shares(rounds: int) -> list[float]:
    """What each look may read, as a share of what the last one may.

    Example:

    ```python
    >>> from arr_coc.gaze.loop import list_shares
    >>> list_shares(3)
    [0.0625, 0.25, 1.0]

    ```
    """
    return [GROWTH ** (rounds - 1 - look) for look in range(rounds)]


def choose_mode(cells: int, still: bool, can_gaze: bool) -> tuple[str, str]:
    """The mode that fits a picture with so many cells, and why, in words.

    Args:
        cells (`int`): cells of the largest picture at its own resolution.
        still (`bool`): whether all pictures are still ones.
        can_gaze (`bool`): whether model and selector can choose before the whole picture is encoded.

    Example:

    ```python
    >>> from arr_coc.gaze.loop import choose_mode
    >>> choose_mode(11844, still=True, can_gaze=True)
    ('saccade', 'a large picture (11844 cells)')

    ```
    """
    if cells <= WHOLE:
        return "full", f"a picture of {cells} cells is read whole"
    if cells <= LARGE or not still or not can_gaze:
        return "prune", f"a picture of {cells} cells" if still else "a clip"
    return "saccade", f"a large picture ({cells} cells)"


def sureness(log_probability: float) -> float:
    """How sure an answer is: the probability that the model gives to its first tokens together.

    Example:

    ```python
    >>> import math
    >>> from arr_coc.gaze.loop import sureness
    >>> round(sureness(math.log(0.9) + math.log(0.8)), 2)
    0.72

    ```
    """
    return math.exp(log_probability)


def least_log_probability(sure: float) -> float:
    """Below this an answer is not that sure any more, whatever follows.

    Example:

    ```python
    >>> from arr_coc.gaze.loop import least_log_probability, sureness
    >>> round(sureness(least_log_probability(0.9)), 6)
    0.9

    ```
    """
    return math.log(sure)
