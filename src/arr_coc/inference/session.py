"""`forward` and `generate` of a model with selected tokens, for whoever calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from arr_coc.config import Grid
from arr_coc.families.family import Family, Inputs
from arr_coc.prompting.inside_model import Cut, Slicing, check_decoding, check_slicing
from arr_coc.prompting.prune import prepare_with_outputs
from arr_coc.prompting.question import Ints
from arr_coc.prompting.settings import Settings, check_selector
from arr_coc.selectors.contract import LanguageSelector, Selector
from arr_coc.selectors.output import ARRCOCOutput


class SelectingCalls:
    """The usual calls, with the visual tokens selected on the way.

    Args:
        family (`Family`): the opened model.
        selector (`Selector`): decides which visual tokens stay.
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
        check_selector(selector)
        if isinstance(selector, LanguageSelector):
            check_slicing(family, selector, settings)
        self.family = family
        self.selector = selector
        self.settings = settings
        self.output: list[ARRCOCOutput | None] = []
        self.kept: list[tuple[Grid, Ints]] = []
        self._forward, self._generate = forward, generate
        self._short_caches: WeakSet[Any] = WeakSet()
        self._cuts: WeakKeyDictionary[Any, Cut] = WeakKeyDictionary()

    def prepare(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the shorter prompt; remembers what the selector saw."""
        prepared = prepare_with_outputs(self.family, inputs, self.selector, self.settings)
        self.output, self.kept = prepared.outputs, prepared.kept
        return prepared.inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; a call without pictures passes untouched."""
        named = _name_arguments(self.family.target.forward, args, kwargs)
        if isinstance(self.selector, LanguageSelector):
            going_on = named.get("past_key_values") in self._cuts
            if (self.family.present(named) or going_on) and not Slicing.running(self.family):
                return self._slice(self._forward, named)
            return self._forward(*args, **kwargs)
        if not self.family.present(named):
            return self._forward(*args, **kwargs)
        return self._forward(**self.prepare(named))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, with the full prompt in front of what was generated."""
        named = _name_arguments(self.family.target.generate, args, kwargs)
        if named.get("inputs") is not None:
            named["input_ids"] = named.pop("inputs")
        cache = named.get("past_key_values")
        if cache in self._short_caches or cache in self._cuts:
            raise ValueError(
                "this cache holds a shorter prompt than its ids say; start the next turn without `past_key_values`"
            )
        if not self.family.present(named):
            return self._generate(*args, **kwargs)
        check_generation(self.family, named)
        if isinstance(self.selector, LanguageSelector):
            check_decoding(self.family, self.selector, named)
            return self._slice(self._generate, named)
        full = named["input_ids"]
        with torch.no_grad():
            prepared = self.prepare(named)
        short = prepared["input_ids"].shape[1]
        prepared |= self._lengths(named, short - full.shape[1])
        result = self._generate(**prepared)
        sequences = result if isinstance(result, Tensor) else result.sequences
        # callers cut their own prompt off again: out[:, input_ids.shape[1]:]
        glued = torch.cat([full.repeat_interleave(len(sequences) // len(full), dim=0), sequences[:, short:]], dim=1)
        if isinstance(result, Tensor):
            return glued
        result.sequences = glued
        if getattr(result, "past_key_values", None) is not None:
            self._short_caches.add(result.past_key_values)
        return result

    def _slice(self, call: Callable[..., Any], named: dict[str, Any]) -> Any:
        """A call whose tokens leave inside the language model."""
        with self.slicing(named, self.settings) as slicing:
            result = call(**named | (self.family.completed(named) if slicing.prompt is not None else {}))
        if slicing.kept:  # not so for a further token
            self.output, self.kept = [None] * len(slicing.kept), slicing.kept
        return result

    def slicing(self, inputs: Inputs, settings: Settings) -> Slicing:
        """The context of one call, for a selector inside the language model."""
        selector: Any = self.selector
        return Slicing(self.family, inputs, selector, settings, self._cuts)

    def _lengths(self, named: dict[str, Any], difference: int) -> dict[str, int]:
        """Limits that count the prompt, for the shorter one."""
        config = named.get("generation_config") or self.family.target.generation_config
        limits = {}
        for name in ("max_length", "min_length"):
            limit = named.get(name)
            if limit is None and named.get("max_new_tokens") is None and config.max_new_tokens is None:
                own = getattr(config, name)
                limit = own if own is not None and own > named["input_ids"].shape[1] else None
            if limit is not None:
                limits[name] = limit + difference
        return limits


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


def check_generation(family: Family, kwargs: dict[str, Any]) -> None:
    """Refuse to decode where the true positions would be lost."""
    config = kwargs.get("generation_config") or family.target.generation_config
    cached = kwargs.get("use_cache")
    if family.needs_cache and (config.use_cache if cached is None else cached) is False:
        raise ValueError(f"{type(family).__name__} keeps true positions only with a cache; drop use_cache=False")
    last = kwargs["input_ids"][:, -1]
    visual = torch.tensor([family.token_id(kind) for kind in family.kinds], device=last.device)
    if torch.isin(last, visual).any():
        raise ValueError("the prompt ends in a picture, and decoding would lose its place; end it in text")
