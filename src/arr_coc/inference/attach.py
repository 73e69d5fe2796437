"""`with attach(model, selector):` makes the usual calls of a model select tokens, and restores the model afterwards."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import nn

from arr_coc.config import Grid, PromptBudget
from arr_coc.families.family import open_family
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.session import Run, Session
from arr_coc.prompting.cache import calling, is_called
from arr_coc.prompting.question import ChatTokens, Ints, choose_chat
from arr_coc.prompting.settings import Mode, OnError, Settings
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.output import ARRCOCOutput

_PATCHED = ("forward", "generate")


class Replacement:
    """A method that replaces another and shows its signature, which `generate` and trainers inspect.

    A deep copy of an attached model gets the original method back: the copy is not attached.
    """

    def __init__(self, target: Any, name: str, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, getattr(target, name))
        self.target, self.name, self.call = target, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement."""
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        target = copy.deepcopy(self.target, memo)
        return getattr(type(target), self.name).__get__(target)


class Calls:
    """`forward` and `generate` with the model's signatures, which select visual tokens.

    Args:
        session (`Session`): selects them.
        forward, generate (`Callable`): the model's own, for calls without pictures.
    """

    def __init__(self, session: Session, forward: Callable[..., Any], generate: Callable[..., Any]) -> None:
        self.session = session
        self.last = Run({})
        self._forward, self._generate = forward, generate

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Like the model's own; a call without pictures is passed on unchanged."""
        session, family = self.session, self.session.family
        arguments = _name_arguments(family.target.forward, args, kwargs)
        if is_called(family.target):  # by our own `generate`, with a prompt that is shorter already
            return self._forward(*args, **kwargs)
        if not family.present(arguments) and not session.continues(arguments.get("past_key_values")):
            self._check_features(arguments)
            return self._forward(*args, **kwargs)
        run = session.forward(arguments)
        if run.kept:  # empty if this call only decoded another token
            self.last = run
        return run.result

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Like the model's own: the result begins with the full prompt."""
        arguments = _name_arguments(self.session.family.target.generate, args, kwargs)
        if arguments.get("inputs") is not None:
            arguments["input_ids"] = arguments.pop("inputs")
        cache = arguments.get("past_key_values")
        self.session.check_cache(cache)
        if not self.session.family.present(arguments) and not self.session.continues(cache):
            self._check_features(arguments)
            with calling(self.session.family.target):  # its passes have nothing to shorten either
                return self._generate(*args, **kwargs)
        run = self.session.generate(arguments)
        if run.kept:  # empty for a further turn
            self.last = run
        return run.result

    @staticmethod
    def _check_features(arguments: dict[str, Any]) -> None:
        if arguments.get("mm_encoder_outputs"):
            raise ValueError("`mm_encoder_outputs` cannot be shortened; pass the pictures, as `pixel_values`, instead")


def _name_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(function)
    bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound


class Attachment:
    """The handle that [`attach`] returns, also a context manager."""

    def __init__(self, model: nn.Module, selector: Selector, settings: Settings) -> None:
        family = open_family(model)
        self._target: Any = family.target
        if any(isinstance(self._target.__dict__.get(name), Replacement) for name in _PATCHED):
            raise ValueError("this model is already attached; call `remove()` on the earlier handle first")
        originals = self._target.forward, self._target.generate
        self._calls = Calls(Session(family, selector, settings, *originals), *originals)
        self._replacements = {name: Replacement(self._target, name, getattr(self._calls, name)) for name in _PATCHED}
        # accelerate and others set methods on the model too; `remove` restores those
        self._before = {name: self._target.__dict__[name] for name in _PATCHED if name in self._target.__dict__}
        self._target.__dict__.update(self._replacements)

    @property
    def output(self) -> list[ARRCOCOutput | None]:
        """The layer's output in the last call, one per picture; None from other selectors."""
        return self._calls.last.outputs

    @property
    def kept(self) -> list[tuple[Grid, Ints]]:
        """For each picture of the last call, its grid and the cells whose tokens stayed."""
        return self._calls.last.kept

    def remove(self) -> None:
        """Restore the model; calling it again does nothing."""
        for name in _PATCHED:
            if self._target.__dict__.get(name) is self._replacements[name]:
                del self._target.__dict__[name]
                if name in self._before:
                    self._target.__dict__[name] = self._before[name]

    def __enter__(self) -> Self:
        if self._target.__dict__.get("forward") is not self._replacements["forward"]:
            raise ValueError("this handle was removed; call `attach` again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def attach(
    model: nn.Module,
    selector: Selector,
    *,
    mode: Mode = "prune",
    budget: PromptBudget | None = None,
    query_layers: int = 0,
    chat: ChatTokens | None = None,
    processor: Any = None,
    on_error: OnError = "full",
    gaze: Gaze | None = None,
) -> Attachment:
    """Let `model(**inputs)` and `model.generate(**inputs)` select visual tokens, until `remove()` or the end of `with`.

    Args:
        model (`nn.Module`): a supported model, with or without PEFT's LoRA around it; only these two methods change.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`): decides which visual tokens stay. With one
            inside the language model (`fastv`), there are logits for the columns that stay, left-padded.
        mode, budget, query_layers, chat, processor, on_error, gaze: as in [`prepare`]; saccades are cut from the
            processor's pixels.

    Example:

    ```python
    >>> import torch
    >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    >>> from arr_coc import attach, create_selector
    >>> tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> vision, text = CLIPVisionConfig(image_size=56, patch_size=14, **tiny), LlamaConfig(vocab_size=64, **tiny)
    >>> config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)
    >>> model = LlavaForConditionalGeneration(config).eval()
    >>> inputs = {"input_ids": torch.tensor([[7] + [5] * 16 + [8, 9]]), "pixel_values": torch.rand(1, 3, 56, 56)}
    >>> with torch.no_grad(), attach(model, create_selector("grid"), budget=4):
    ...     model(**inputs).logits.shape
    torch.Size([1, 7, 64])

    ```
    """
    chat = choose_chat(chat, processor)
    settings = Settings(mode, budget, None, query_layers, chat, on_error, None, gaze)
    return Attachment(model, selector, settings)
