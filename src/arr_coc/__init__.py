"""ARR-COC: vision-language models that look where the question points.

The data path is the file list: `texture` -> `knowing` -> `balancing` -> `attending` -> `layer`.
"""

from arr_coc._version import __version__
from arr_coc.config import ARRCOCConfig
from arr_coc.layer import ARRCOCLayer
from arr_coc.patches import patches_from_picture, picture_from_patches
from arr_coc.selecting import (
    ARRCOCOutput,
    Selection,
    TokenSelector,
    VisualQuery,
    create_selector,
    list_selectors,
    register_selector,
)
from arr_coc.texture import CHANNELS, PreviousFrame, generate_texture_array

__all__ = [
    "CHANNELS",
    "ARRCOCConfig",
    "ARRCOCLayer",
    "ARRCOCOutput",
    "PreviousFrame",
    "Selection",
    "TokenSelector",
    "VisualQuery",
    "__version__",
    "create_selector",
    "generate_texture_array",
    "list_selectors",
    "patches_from_picture",
    "picture_from_patches",
    "register_selector",
]
