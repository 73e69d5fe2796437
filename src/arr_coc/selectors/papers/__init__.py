"""Methods of papers, one a file. To add one: a file here, and its name in the line below."""

from arr_coc.selectors.papers import (  # noqa: F401  (they register themselves)
    cdpruner,
    divprune,
    fastv,
    hiprune,
    mmtok,
    prumerge,
    scope,
    tome,
    visionzip,
)
