"""The interface to one family of vision-language models, and the registry of families.

A family is found by its config's `model_type`, also inside wrappers such as PEFT's. To add one, subclass [`Family`] in
a new file and decorate it with `@register_family("model_type", ...)`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from arr_coc.config import CellBox, EncoderLayer, Grid
from arr_coc.families.encoder_attention import EncoderReader, LayerInput, find_layer, keep_inputs

Inputs = Mapping[str, Any]


class Encoded(NamedTuple):
    """All pictures (or clips) of a call, encoded.

    Args:
        features (`Tensor` of shape `[N, D]`): merged tokens of all pictures, one after the other.
        deepstack (`tuple[Tensor, ...]`): DeepStack levels `[N, D]`; empty if the family has none.
        reader (`EncoderReader`, *optional*): reads the encoder layers that were recorded, if any.
    """

    features: Tensor
    deepstack: tuple[Tensor, ...]
    reader: EncoderReader | None = None


class IncompleteFamilyError(TypeError):
    """A family lacks a method that a call needs."""


class Family:
    """One family of models. `target` is the module with `generate`, `inner` the one inside it, without the head.

    A model without a head, such as an embedder, is both: it has no `generate`, and its `forward` returns hidden states.

    A subclass must define `grids`, `run_encoder`, `positions`, `place` and `wrap`. What else it defines adds to what it
    can do: `pictures` gives the layer a texture, `encoder_attention` and `read_layer` serve selectors that read the
    encoder, `resize` those that change the picture, and `cut`, `encode_cells` and `state_grids` serve mode `saccade`.
    The model has its head, if any, in `lm_head`, and its `forward` takes `mm_encoder_outputs`.
    """

    processor_class: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    pixel_names: ClassVar[Mapping[str, str]] = {"image": "pixel_values", "video": "pixel_values_videos"}
    # whether decoding needs a cache: without one, transformers drops a mask that has no padding, and then takes gaps in
    # one-dimensional positions for borders of packed sequences
    needs_cache: ClassVar[bool] = False
    # whether passes of the language model can be recorded as CUDA graphs: it never waits for the device
    graphs_language: ClassVar[bool] = False
    # inputs that describe the full prompt and mean nothing for the shorter one
    consumed: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def __init__(self, target: nn.Module) -> None:
        self._target = target
        self.headless = not _has_head(target)
        self.inner: Any = target if self.headless else target.model
        self.config: Any = target.config

    @property
    def target(self) -> Any:
        """The module with `generate`, or the model without a head."""
        return self._target

    def present(self, inputs: Inputs) -> list[str]:
        """Kinds of pictures in a call."""
        return [kind for kind in self.kinds if inputs.get(self.pixel_names[kind]) is not None]

    def needs(self, inputs: Inputs) -> list[str]:
        """Names of the inputs needed to read the pictures of a call, besides their pixels."""
        return []

    def token_id(self, kind: str) -> int:
        """Id of a visual token's placeholder."""
        return int(getattr(self.config, f"{kind}_token_id"))

    def special_ids(self) -> set[int]:
        """Ids of placeholders and picture markers, which are not words."""
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return {int(value) for name in names if (value := getattr(self.config, name, None)) is not None}

    def pad_id(self) -> int:
        """An id for padding that is never a placeholder."""
        for config in (self.config, self.config.get_text_config()):
            value = getattr(config, "pad_token_id", None)
            if value is not None and value not in self.special_ids():
                return int(value)
        return 0

    def grids(self, inputs: Inputs, kind: str) -> list[Grid]:
        """Token grid `(t, h, w)` of each picture of a kind, before anything is encoded."""
        raise self._not_implemented("grids")

    def encode(self, inputs: Inputs, kind: str, layers: Sequence[EncoderLayer] = ()) -> Encoded:
        """Encode all pictures of a kind once, and record the named encoder layers."""
        if not layers:
            return Encoded(*self.run_encoder(inputs, kind))
        modules = self.encoder_attention()
        attending = self.attending_layers(len(modules))
        with keep_inputs(modules, [find_layer(layer, len(modules), attending) for layer in layers]) as kept:
            features, deepstack = self.run_encoder(inputs, kind)

        described = {name: inputs[name] for name in self.needs(inputs)}  # without the pixels, which may be large

        def read(layer: int) -> LayerInput:
            return self.read_layer(modules[layer], kept[layer], described, kind)

        return Encoded(features, deepstack, EncoderReader(read, layers, len(modules), attending, kept))

    def encode_cells(
        self, patches: Tensor, cells: Sequence[Tensor], grids: Sequence[Grid], replay: bool = False
    ) -> Encoded:
        """Encode only the chosen cells of still pictures, each at its true place, all pictures in one call.

        Args:
            patches (`Tensor` of shape `[n, F]`): rows of pixel values of all cells, picture by picture.
            cells (`Sequence[Tensor]`): for each picture, its chosen cells `[k]`, in the order of `patches`.
            grids (`Sequence[Grid]`): token grid of each whole picture.
            replay (`bool`, *optional*, defaults to `False`): whether calls with as many cells will be repeated, so
                that a CUDA graph pays off.
        """
        raise ValueError(
            f"{self.config.model_type} encodes whole pictures of one size only, not single cells; use mode 'prune'"
        )

    def run_encoder(self, inputs: Inputs, kind: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Merged tokens `[N, D]` of all pictures of a kind, and their DeepStack levels."""
        raise self._not_implemented("run_encoder")

    def encoder_attention(self) -> list[nn.Module]:
        """The attention module of each encoder layer."""
        raise self._not_implemented("encoder_attention")

    def attending_layers(self, depth: int) -> Sequence[int]:
        """Encoder layers in which every patch attends to its whole picture or frame."""
        return range(depth)

    def read_layer(self, module: nn.Module, called: dict[str, Any], inputs: Inputs, kind: str) -> LayerInput:
        """Queries and keys of a layer, from the recorded arguments of its attention module."""
        raise self._not_implemented("read_layer")

    def completed(self, inputs: Inputs) -> dict[str, Tensor]:
        """Inputs that the model needs but the caller left out."""
        return {}

    def positions(self, inputs: Inputs) -> Tensor:
        """Positions `[P, B, L]` of the full prompt, `P` of them for each token."""
        raise self._not_implemented("positions")

    def place(self, mask: Tensor, positions: Tensor, next_position: Tensor) -> dict[str, Tensor]:
        """Position arguments of the shorter prompt.

        Args:
            mask (`Tensor` of shape `[B, L']`): 0 where padded.
            positions (`Tensor` of shape `[P, B, L']`): of its tokens.
            next_position (`Tensor` of shape `[B]`): of the first generated token.
        """
        raise self._not_implemented("place")

    def pictures(self, inputs: Inputs, kind: str) -> list[Tensor] | None:
        """The pictures `[t, 3, H, W]` in [0, 1], rebuilt from the pixel values; None if that is not possible."""
        return None

    def resize(
        self, inputs: Inputs, kind: str, grids: Sequence[Grid], boxes: Sequence[CellBox] | None = None
    ) -> dict[str, Tensor]:
        """The inputs that change when the pictures of a kind, or parts of them, are resized to these token grids."""
        raise ValueError(f"{self.config.model_type} reads every picture at one size; use a selector that picks tokens")

    def cut(self) -> dict[str, Any]:
        """How pictures are cut into patches, as in [`~arr_coc.patches_from_picture`]."""
        raise ValueError(f"{self.config.model_type} does not cut pictures into cells; use mode 'prune', picking tokens")

    def state_grids(self, kind: str, grids: Sequence[Grid], device: torch.device) -> dict[str, Tensor]:
        """The inputs that state the token grids of the pictures."""
        return {}

    def embed_words(self, ids: Tensor, layers: int = 0) -> Tensor:
        """Embeddings `[Q, D]` of words, or their hidden states after some layers of the language model."""
        words: Tensor = self.target.get_input_embeddings()(ids)
        if layers == 0:
            return words
        language: Any = self.inner.language_model
        if layers > len(language.layers):
            raise ValueError(f"`query_layers` must be at most {len(language.layers)} for this model, got {layers}")
        # a shallow copy shares every weight and leaves the model untouched
        short = copy.copy(language)
        short._modules = {**language._modules, "layers": language.layers[:layers], "norm": nn.Identity()}
        output = type(language).forward(short, inputs_embeds=words[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """The features of each picture in the form of the model's encoder output."""
        raise self._not_implemented("wrap")

    def join(self, pictures: Sequence[Encoded]) -> Any:
        """Pictures, one after the other, in the form of the model's encoder output; see [`split_pictures`]."""
        levels = [list(level) for level in zip(*(picture.deepstack for picture in pictures), strict=True)]
        return self.wrap([picture.features for picture in pictures], levels)

    def option(self, arguments: Inputs, name: str) -> Any:
        """An option of a call of `generate`: as it was passed, otherwise that of the generation config."""
        if arguments.get(name) is not None:
            return arguments[name]
        return getattr(arguments.get("generation_config") or self.target.generation_config, name, None)

    def _not_implemented(self, method: str) -> IncompleteFamilyError:
        return IncompleteFamilyError(
            f"{type(self).__name__} does not implement `{method}`; define it in the subclass of `Family`"
        )


FamilyT = TypeVar("FamilyT", bound=type[Family])
_FAMILIES: dict[str, type[Family]] = {}


def register_family(*model_types: str) -> Callable[[FamilyT], FamilyT]:
    """Class decorator that registers a family for one or more `model_type`s."""

    def register(cls: FamilyT) -> FamilyT:
        for name in model_types:
            if name in _FAMILIES:
                raise ValueError(f"a family for {name!r} is already registered ({_FAMILIES[name].__name__})")
            _FAMILIES[name] = cls
        return cls

    return register


def list_families() -> list[str]:
    """The supported `model_type`s.

    Example:

    ```python
    >>> from arr_coc import list_families
    >>> {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"} <= set(list_families())
    True

    ```
    """
    return sorted(_FAMILIES)


def family_class(model_type: str) -> type[Family]:
    """The family of a `model_type`; an unknown one raises `ValueError` with the list of supported ones."""
    if model_type not in _FAMILIES:
        raise _unsupported(model_type)
    return _FAMILIES[model_type]


def _unsupported(name: str) -> ValueError:
    return ValueError(
        f"{name} is not supported; supported are {', '.join(list_families())}. "
        "To add one, subclass `arr_coc.families.family.Family` and register it with `@register_family`"
    )


def open_family(model: nn.Module) -> Family:
    """Find the family of a model, also inside wrappers; raise `ValueError` if the model cannot work."""
    prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if prompt_learning:
        raise ValueError(
            "prompt and prefix tuning shift or drop positions, so tokens would lose their places; use LoRA"
        )
    module = _find_model(model)
    if not _takes_encoded(type(module).forward):
        raise ValueError("this version of transformers does not accept encoded pictures; install >= 5.19")
    config: Any = module.config
    return _FAMILIES[config.model_type](module)


def _find_model(model: nn.Module) -> nn.Module:
    """The supported model inside wrappers: the one with a head for words, else a model without any head."""
    for module in _supported(model):
        if _has_head(module):
            return module
    for module in _supported(model):
        if "language_model" in _own_parts(module):
            # LoRA adds its weights inside; what has weights around the model reads its columns, which would be missing
            if len(list(model.parameters())) > len(list(module.parameters())):
                name = next(name for name, part in model.named_modules() if part is module)
                raise ValueError(
                    f"{type(model).__name__} has its own head, which reads columns of the full prompt; "
                    f"if it needs the last one only, use its part `{name}` instead"
                )
            return module
    raise _unsupported(type(model).__name__)


def _supported(model: nn.Module) -> Iterator[nn.Module]:
    """Supported models in a model, itself first: looking through all modules of a large one takes milliseconds."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "model_type", None) in _FAMILIES:
            yield module


@cache
def _takes_encoded(forward: Callable[..., Any]) -> bool:
    return "mm_encoder_outputs" in inspect.signature(forward).parameters


def _has_head(module: nn.Module) -> bool:
    return "lm_head" in _own_parts(module)


def _own_parts(module: nn.Module) -> dict[str, nn.Module]:
    """The module's own children: wrappers pass on attributes of the inner model."""
    return dict(module.named_children())


def read_levels(output: Any) -> tuple[Tensor, ...]:
    """Merged tokens `[N, D]` from an encoder's output, then its DeepStack levels."""
    return flat(output.pooler_output), *map(flat, getattr(output, "deepstack_features", None) or ())


def split_pictures(output: Any) -> list[Encoded]:
    """Each picture of an encoder output that [`Family.wrap`] has made."""
    levels = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
    return [Encoded(features, tuple(deepstack)) for features, *deepstack in zip(*levels, strict=True)]


def flat(values: Any) -> Tensor:
    """Features of all pictures in one tensor `[N, D]`; some families return a list."""
    return torch.cat(list(values)) if isinstance(values, tuple | list) else values
