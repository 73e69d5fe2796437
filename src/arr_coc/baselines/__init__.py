"""What to measure against: selectors that need no paper, and the methods of papers, one a file."""

from arr_coc.baselines import (  # noqa: F401  (they register themselves)
    cdpruner,
    divprune,
    fastv,
    hiprune,
    linear,
    mmtok,
    prumerge,
    scope,
    tome,
    visionzip,
)
from arr_coc.baselines.simple import (
    CentreSelector,
    DownsampleSelector,
    FullSelector,
    GridSelector,
    HalfAndHalfSelector,
    OracleSelector,
    RandomSelector,
    shrink_grid,
)

__all__ = [
    "CentreSelector",
    "DownsampleSelector",
    "FullSelector",
    "GridSelector",
    "HalfAndHalfSelector",
    "OracleSelector",
    "RandomSelector",
    "shrink_grid",
]
