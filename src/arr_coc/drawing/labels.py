"""Names for the values of an output: weights, tensions and texture channels, as drawings and commands show them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.texture import CHANNELS


def label_weights(output: ARRCOCOutput) -> dict[str, float]:
    """Weights of the three scores of the first picture, by name."""
    return dict(zip(SCORES, output.weights[0].tolist(), strict=True))


def label_tensions(output: ARRCOCOutput) -> dict[str, float]:
    """The three tensions of the first picture, by name."""
    return dict(zip(TENSIONS, output.tensions[0].tolist(), strict=True))


def label_channels(texture: Tensor) -> dict[str, Tensor]:
    """Channels `[h, w]` of a texture `[C, h, w]` by name.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.drawing.labels import label_channels
    >>> list(label_channels(torch.zeros(13, 4, 4)))[:3]
    ['red', 'green', 'blue']

    ```
    """
    for table in CHANNELS.values():
        if len(table) == len(texture):
            return {name: texture[index] for name, index in table.items()}
    known = " or ".join(str(len(table)) for table in CHANNELS.values())
    raise ValueError(f"a texture has {known} channels, got {len(texture)}")


def write_values(values: Mapping[str, float]) -> str:
    """Named values as one line of text.

    Example:

    ```python
    >>> from arr_coc.drawing.labels import write_values
    >>> write_values({"detail": 0.5, "explore": 0.123})
    'detail 0.50, explore 0.12'

    ```
    """
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())
