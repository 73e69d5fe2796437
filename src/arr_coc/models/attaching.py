"""`with attach(model, selector):` the usual calls, pruned inside, and the model as it was afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from arr_coc.config import Budget
from arr_coc.models.asking import ChatTokens
from arr_coc.models.family import open_family
from arr_coc.models.preparing import Mode, OnError, Settings, prepare_with_outputs
from arr_coc.selecting import ARRCOCOutput, TokenSelector

_PATCHED = ("forward", "generate")


def _like(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement under the original's signature, which `generate` reads to see what `forward` takes."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return call


class Attachment:
    """What [`attach`] returns: a context manager and a handle.

    Args:
        output (`list[ARRCOCOutput | None]`): of the last call, one per picture.
    """

    def __init__(self, model: nn.Module, selector: TokenSelector, settings: Settings) -> None:
        self.family = open_family(model)
        self.selector = selector
        self.settings = settings
        self.output: list[ARRCOCOutput | None] = []
        target: Any = self.family.target
        if any(name in target.__dict__ for name in _PATCHED):
            raise ValueError("this model is already attached or patched; call `remove()` on the earlier handle first")
        self._forward, self._generate = target.forward, target.generate
        target.forward = _like(self._forward, self._pruned_forward)
        target.generate = _like(self._generate, self._pruned_generate)

    def remove(self) -> None:
        """Give the model back as it was; may be called twice."""
        for name in _PATCHED:
            self.family.target.__dict__.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _prepare(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared = prepare_with_outputs(self.family, inputs, self.selector, self.settings)
        self.output = prepared.outputs
        return prepared.inputs

    def _pruned_forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs["input_ids"], args = args[0], args[1:]
        if not self.family.present(kwargs):
            return self._forward(*args, **kwargs)
        return self._forward(*args, **self._prepare(kwargs))

    def _pruned_generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        if inputs is not None:
            kwargs["input_ids"] = inputs
        if not self.family.present(kwargs):
            return self._generate(**kwargs)
        if self.family.needs_cache and kwargs.get("use_cache") is False:
            raise ValueError(
                f"{type(self.family).__name__} keeps true positions only with a cache; drop use_cache=False"
            )
        full = kwargs["input_ids"]
        with torch.no_grad():
            prepared = self._prepare(kwargs)
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


def attach(
    model: nn.Module,
    selector: TokenSelector,
    *,
    mode: Mode = "prune",
    budget: Budget | None = None,
    chat: ChatTokens | None = None,
    on_error: OnError = "full",
) -> Attachment:
    """Let `model(**inputs)` and `model.generate(**inputs)` select visual tokens, until `remove()` or the end of `with`.

    Args:
        model (`nn.Module`): a supported model, also below PEFT's LoRA; it is not changed but for these two methods.
        selector (`TokenSelector`): decides which visual tokens stay.
        mode, budget, chat, on_error: as in [`prepare`].

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
    return Attachment(model, selector, Settings(mode=mode, budget=budget, chat=chat, on_error=on_error))
