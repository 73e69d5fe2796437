"""Everything that picks tokens: the contract, the registry, simple rules, and one file per paper."""

from arr_coc.selectors import linear, own_attention, papers, rules, smaller_picture  # noqa: F401  (they register themselves)
from arr_coc.selectors.contract import (
    Glance,
    GlanceSelector,
    LanguageSelector,
    PictureSelector,
    PixelQuery,
    PixelSelector,
    Reading,
    Selection,
    Selector,
    TokenSelector,
    VisualQuery,
)
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.selectors.registry import create_selector, list_selectors, register_selector

__all__ = [
    "ARRCOCOutput",
    "Glance",
    "GlanceSelector",
    "LanguageSelector",
    "PictureSelector",
    "PixelQuery",
    "PixelSelector",
    "Reading",
    "Selection",
    "Selector",
    "TokenSelector",
    "VisualQuery",
    "create_selector",
    "list_selectors",
    "register_selector",
]
