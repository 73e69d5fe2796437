"""What `arr_coc` exports. Imported at the first use of a name, so that `arr-coc --help` does not wait for torch."""

from arr_coc import baselines  # noqa: F401  (they register themselves)
from arr_coc.config import ARRCOCConfig
from arr_coc.gaze import Gaze
from arr_coc.layer import ARRCOCLayer
from arr_coc.patches import patches_from_picture, picture_from_patches
from arr_coc.selecting import (
    ARRCOCOutput,
    LanguageSelector,
    PictureSelector,
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
    "Gaze",
    "LanguageSelector",
    "PictureSelector",
    "PreviousFrame",
    "Selection",
    "TokenSelector",
    "VisualQuery",
    "create_selector",
    "generate_texture_array",
    "list_selectors",
    "patches_from_picture",
    "picture_from_patches",
    "register_selector",
]
