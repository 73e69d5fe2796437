"""ARR-COC: vision-language models that look where the question points.

The data path is the file list: `texture` -> `knowing` -> `balancing` -> `attending` -> `layer`.
"""

from typing import TYPE_CHECKING

from arr_coc._version import __version__

if TYPE_CHECKING:
    from arr_coc._exports import (
        CHANNELS,
        ARRCOCConfig,
        ARRCOCLayer,
        ARRCOCOutput,
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


def __getattr__(name: str) -> object:
    # torch takes seconds to import: `arr-coc --help` and usage errors should not wait for it
    if name not in __all__:
        raise AttributeError(f"module 'arr_coc' has no attribute {name!r}")
    from arr_coc import _exports

    return getattr(_exports, name)


def __dir__() -> list[str]:
    return sorted(__all__)
