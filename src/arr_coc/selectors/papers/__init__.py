"""Methods of papers, one file each. To add one, add a file here and its name to the import below."""

from arr_coc.selectors.papers import (  # noqa: F401  (they register themselves)
    cdpruner,
    crop,
    divprune,
    fastv,
    hiprune,
    idpruner,
    mmtok,
    pixelprune,
    prumerge,
    scope,
    tome,
    visionzip,
)
