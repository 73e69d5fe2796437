"""ARR-COC: vision-language models that look where the question points.

The data path is the file list: `texture` -> `knowing` -> `balancing` -> `attending` -> `realizing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from arr_coc._version import __version__

if TYPE_CHECKING:
    from arr_coc.config import ARRCOCConfig
    from arr_coc.families import list_families
    from arr_coc.gaze.loop import Look, Looks
    from arr_coc.gaze.plan import Gaze
    from arr_coc.inference.answer import Answer
    from arr_coc.inference.attach import Attachment, attach, detach
    from arr_coc.inference.collating import collate_prepared
    from arr_coc.inference.load import load_processor
    from arr_coc.inference.prepared import Prepared, encode, prepare
    from arr_coc.inference.vlm import ARRCOCQwen
    from arr_coc.pixels.patches import patches_from_picture, picture_from_patches
    from arr_coc.pixels.previous_frame import PreviousFrame
    from arr_coc.prompting.picture_cache import EncodingCache
    from arr_coc.prompting.question import ChatTokens
    from arr_coc.realizing import ARRCOCLayer
    from arr_coc.selectors import (
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
    from arr_coc.texture import CHANNELS, generate_texture_array

__all__ = [
    "CHANNELS",
    "ARRCOCConfig",
    "ARRCOCLayer",
    "ARRCOCOutput",
    "ARRCOCQwen",
    "Answer",
    "Attachment",
    "ChatTokens",
    "EncodingCache",
    "Gaze",
    "LanguageSelector",
    "Look",
    "Looks",
    "PictureSelector",
    "Prepared",
    "PreviousFrame",
    "Selection",
    "TokenSelector",
    "VisualQuery",
    "__version__",
    "attach",
    "collate_prepared",
    "create_selector",
    "detach",
    "encode",
    "generate_texture_array",
    "list_families",
    "list_selectors",
    "load_processor",
    "patches_from_picture",
    "picture_from_patches",
    "prepare",
    "register_selector",
]

_HOMES = {
    "config": ("ARRCOCConfig",),
    "families": ("list_families",),
    "gaze.loop": ("Look", "Looks"),
    "gaze.plan": ("Gaze",),
    "inference.answer": ("Answer",),
    "inference.vlm": ("ARRCOCQwen",),
    "inference.attach": ("Attachment", "attach", "detach"),
    "inference.collating": ("collate_prepared",),
    "inference.load": ("load_processor",),
    "inference.prepared": ("Prepared", "encode", "prepare"),
    "pixels.patches": ("patches_from_picture", "picture_from_patches"),
    "pixels.previous_frame": ("PreviousFrame",),
    "prompting.picture_cache": ("EncodingCache",),
    "prompting.question": ("ChatTokens",),
    "realizing": ("ARRCOCLayer",),
    "selectors": (
        *("ARRCOCOutput", "LanguageSelector", "PictureSelector", "Selection", "TokenSelector", "VisualQuery"),
        *("create_selector", "list_selectors", "register_selector"),
    ),
    "texture": ("CHANNELS", "generate_texture_array"),
}
_HOME = {name: f"arr_coc.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    # torch and transformers take seconds to import: `arr-coc --help` and usage errors should not wait for them
    if name not in _HOME:
        raise AttributeError(f"module 'arr_coc' has no attribute {name!r}")
    import_module("arr_coc.realizing")  # the layer is a selector too: whoever lists selectors finds it
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
