"""What a stage gives the loop, and the layer that every stage trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from arr_coc.config import EMBEDDED, TRAINED, UNTRAINED, ARRCOCConfig, Introspect
from arr_coc.inference.load import find_trained
from arr_coc.realizing import ARRCOCLayer


def save_nothing(directory: Path, finished: bool) -> None:
    """Where only the selector is learned, the loop saves all there is."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage that is ready to be trained.

    Args:
        task (`nn.Module`): from a batch to its losses and measures.
        layer (`ARRCOCLayer`): the part of it that is kept.
        batch_at (`Callable`): the batch of a step, for this process.
        save (`Callable`, *optional*): saves what is learned beside the selector, into the directory of a checkpoint or,
            once the run is finished, into that of the run; told which of the two.
    """

    task: nn.Module
    layer: ARRCOCLayer
    batch_at: Callable[[int], Any]
    save: Callable[[Path, bool], None] = save_nothing


def open_layer(model: Any, start: str | Path | None, introspect: Introspect | None = None) -> ARRCOCLayer:
    """The layer that learns: untrained, or one to start from, which must fit the model; with this `introspect`."""
    config = ARRCOCConfig.for_model(model)
    if start is None or str(start) == UNTRAINED:
        return ARRCOCLayer(config if introspect is None else replace(config, introspect=introspect))
    place = find_trained(model) if str(start) in (TRAINED, EMBEDDED) else start
    layer = ARRCOCLayer.from_pretrained(place)
    layer.config.check_edition(model.config, f"the selector {start}")
    for name in ("hidden_size", "cell_pixels"):
        given, wanted = getattr(layer.config, name), getattr(config, name)
        if given != wanted:
            raise ValueError(f"{start} was made for a model with {name} {given}, this one has {wanted}")
    layer.config = layer.config.for_base(config)
    if introspect is not None:
        layer.config = replace(layer.config, introspect=introspect)
    return layer.train()
