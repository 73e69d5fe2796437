"""`forward` and `generate` of a model with selected tokens, for whoever calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arr_coc.models.family import Family
from arr_coc.models.preparing import Settings, prepare_with_outputs
from arr_coc.selecting import ARRCOCOutput, Selector


class SelectingCalls:
    """The usual calls, with the visual tokens selected on the way.

    Args:
        family (`Family`): the opened model.
        selector (`TokenSelector` or `PictureSelector`): decides which visual tokens stay.
        settings (`Settings`): see [`prepare`].
        forward, generate (`Callable`): of the plain model.
    """

    def __init__(
        self,
        family: Family,
        selector: Selector,
        settings: Settings,
        forward: Callable[..., Any],
        generate: Callable[..., Any],
    ) -> None:
        self.family = family
        self.selector = selector
        self.settings = settings
        self.output: list[ARRCOCOutput | None] = []
        self._forward, self._generate = forward, generate

    def prepare(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the shorter prompt; remembers what the selector saw."""
        prepared = prepare_with_outputs(self.family, inputs, self.selector, self.settings)
        self.output = prepared.outputs
        return prepared.inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; a call without pictures passes untouched."""
        if args:
            kwargs["input_ids"], args = args[0], args[1:]
        if not self.family.present(kwargs):
            return self._forward(*args, **kwargs)
        return self._forward(*args, **self.prepare(kwargs))

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """As the model's own, with the full prompt in front of what was generated."""
        if inputs is not None:
            kwargs["input_ids"] = inputs
        if not self.family.present(kwargs):
            return self._generate(**kwargs)
        check_cache(self.family, kwargs)
        full = kwargs["input_ids"]
        with torch.no_grad():
            prepared = self.prepare(kwargs)
        short = prepared["input_ids"].shape[1]
        for name in ("max_length", "min_length"):  # these count the prompt
            if prepared.get(name) is not None:
                prepared[name] += short - full.shape[1]
        result = self._generate(**prepared)
        sequences = result if isinstance(result, Tensor) else result.sequences
        # callers cut their own prompt off again: out[:, input_ids.shape[1]:]
        glued = torch.cat([full.repeat_interleave(len(sequences) // len(full), dim=0), sequences[:, short:]], dim=1)
        if isinstance(result, Tensor):
            return glued
        result.sequences = glued
        return result


def check_cache(family: Family, kwargs: dict[str, Any]) -> None:
    """Refuse to decode without a cache where that would lose the true positions."""
    if family.needs_cache and kwargs.get("use_cache") is False:
        raise ValueError(f"{type(family).__name__} keeps true positions only with a cache; drop use_cache=False")
