"""ARR-COC: vision-language models that look where the question points.

The data path is the file list: `texture` -> `knowing` -> `balancing` -> `attending` -> `layer`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from arr_coc._version import __version__

if TYPE_CHECKING:
    from arr_coc._exports import (
        CHANNELS,
        ARRCOCConfig,
        ARRCOCLayer,
        ARRCOCOutput,
        Gaze,
        LanguageSelector,
        PictureSelector,
        PreviousFrame,
        Selection,
        TokenSelector,
        VisualQuery,
        create_selector,
        generate_texture_array,
        list_selectors,
        patches_from_picture,
        picture_from_patches,
        register_selector,
    )
    from arr_coc.models import (
        Answer,
        ARRCOCQwen,
        Attachment,
        ChatTokens,
        attach,
        list_families,
        load_processor,
        prepare,
    )

__all__ = [
    "CHANNELS",
    "ARRCOCConfig",
    "ARRCOCLayer",
    "ARRCOCOutput",
    "ARRCOCQwen",
    "Answer",
    "Attachment",
    "ChatTokens",
    "Gaze",
    "LanguageSelector",
    "PictureSelector",
    "PreviousFrame",
    "Selection",
    "TokenSelector",
    "VisualQuery",
    "__version__",
    "attach",
    "create_selector",
    "generate_texture_array",
    "list_families",
    "list_selectors",
    "load_processor",
    "patches_from_picture",
    "picture_from_patches",
    "prepare",
    "register_selector",
]


_OF_MODELS = {
    *("ARRCOCQwen", "Answer", "Attachment", "ChatTokens"),
    *("attach", "list_families", "load_processor", "prepare"),
}


def __getattr__(name: str) -> object:
    # torch and transformers take seconds to import: `arr-coc --help` and usage errors should not wait for them
    if name not in __all__:
        raise AttributeError(f"module 'arr_coc' has no attribute {name!r}")
    return getattr(import_module("arr_coc.models" if name in _OF_MODELS else "arr_coc._exports"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
