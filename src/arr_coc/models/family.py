"""How a vision-language model is opened: what every family has to say, and the registry of those that do.

A family is found by its config's `model_type`, also below wrappers such as PEFT's. To add one, subclass [`Family`] in
a file of its own and decorate it with `@register_family("model_type", ...)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from arr_coc.config import Grid

Inputs = Mapping[str, Any]


class Encoded(NamedTuple):
    """All pictures (or clips) of a call, encoded.

    Args:
        features (`Tensor` of shape `[N, D]`): merged tokens of all of them, one after the other.
        deepstack (`tuple[Tensor, ...]`): further levels `[N, D]`; empty where a family has none.
        grids (`tuple[Grid, ...]`): `(t, h, w)` of each.
    """

    features: Tensor
    deepstack: tuple[Tensor, ...]
    grids: tuple[Grid, ...]


class Family:
    """One family of models. `target` is the module with `generate`, `inner` the one below its head."""

    kinds: ClassVar[tuple[str, ...]] = ("image",)
    pixel_names: ClassVar[Mapping[str, str]] = {"image": "pixel_values", "video": "pixel_values_videos"}
    # whether decoding needs a cache: without one, transformers drops a mask without padding, and then reads gaps in
    # one-dimensional positions as the borders of packed sequences
    needs_cache: ClassVar[bool] = False
    # inputs that describe the full prompt and mean nothing for the shorter one
    consumed: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def __init__(self, target: nn.Module) -> None:
        self.target = target
        self.inner: Any = target.model
        self.config: Any = target.config

    def present(self, inputs: Inputs) -> list[str]:
        """Kinds of pictures that a call carries."""
        return [kind for kind in self.kinds if inputs.get(self.pixel_names[kind]) is not None]

    def token_id(self, kind: str) -> int:
        """Id of the placeholder of one visual token."""
        return int(getattr(self.config, f"{kind}_token_id"))

    def special_ids(self) -> set[int]:
        """Ids around pictures that are no words."""
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return {int(value) for name in names if (value := getattr(self.config, name, None)) is not None}

    def pad_id(self) -> int:
        """An id for padding that is never a placeholder."""
        for config in (self.config, self.config.get_text_config()):
            value = getattr(config, "pad_token_id", None)
            if value is not None and value not in self.special_ids():
                return int(value)
        return 0

    def encode(self, inputs: Inputs, kind: str) -> Encoded:
        """Encode all pictures of a kind once."""
        raise TypeError(f"{type(self).__name__} does not say how it encodes")

    def positions(self, inputs: Inputs, mask: Tensor) -> Tensor:
        """Positions `[P, B, L]` of the full prompt, `P` of them for each token."""
        raise TypeError(f"{type(self).__name__} does not say where its tokens stand")

    def place(self, mask: Tensor, positions: Tensor, next_position: Tensor) -> dict[str, Tensor]:
        """Position arguments of the shorter prompt, given its mask `[B, L']` and its tokens' positions `[P, B, L']`."""
        raise TypeError(f"{type(self).__name__} does not say how positions are passed")

    def pictures(self, inputs: Inputs, kind: str) -> list[Tensor] | None:
        """The pictures `[t, 3, H, W]` in [0, 1] behind the pixel values, if they can be had."""
        return None

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Encoder output with the rows of each picture, as the model takes it."""
        raise TypeError(f"{type(self).__name__} does not say how it takes features")


FamilyT = TypeVar("FamilyT", bound=type[Family])
_FAMILIES: dict[str, type[Family]] = {}


def register_family(*model_types: str) -> Callable[[FamilyT], FamilyT]:
    """Class decorator that makes a family known by the `model_type` of its config."""

    def register(cls: FamilyT) -> FamilyT:
        for name in model_types:
            if name in _FAMILIES:
                raise ValueError(f"a family for {name!r} is already registered ({_FAMILIES[name].__name__})")
            _FAMILIES[name] = cls
        return cls

    return register


def list_families() -> list[str]:
    """The `model_type`s that can be opened.

    Example:

    ```python
    >>> from arr_coc import list_families
    >>> {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"} <= set(list_families())
    True

    ```
    """
    return sorted(_FAMILIES)


def open_family(model: nn.Module) -> Family:
    """Find the family of a model, also below wrappers, and refuse what would go wrong before anything is touched."""
    prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if prompt_learning:
        raise ValueError(
            "prompt and prefix tuning move or drop positions, so that tokens would lose their places; use LoRA"
        )
    for module in model.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        # its own head, not one that a wrapper passes on
        if model_type in _FAMILIES and "lm_head" in dict(module.named_children()):
            if "mm_encoder_outputs" not in inspect.signature(type(module).forward).parameters:
                raise ValueError("this version of transformers does not take encoded pictures; install >= 5.19")
            return _FAMILIES[model_type](module)
    raise ValueError(
        f"{type(model).__name__} is not supported; supported are {', '.join(list_families())}. "
        "To add one, subclass `arr_coc.models.family.Family` and register it with `@register_family`"
    )


def flat(values: Any) -> Tensor:
    """Features of all pictures in one tensor `[N, D]`, however a family delivers them."""
    return torch.cat(list(values)) if isinstance(values, tuple | list) else values
