"""The session: the one run that everything goes through.

example -> prompt -> encoding -> texture -> knowing -> balancing -> attending -> realizing -> shorter prompt -> answer

A [`Session`] is a model, a selector and settings. It alone knows the three kinds of selectors, and what happens when a
selection fails. Each call gives one record of what happened, a [`Run`]. `prepare`, `attach`, [`ARRCOCQwen`], the
commands, evaluation, timing, training and the page are thin layers above it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from arr_coc.config import Budget
from arr_coc.families.family import Family, Inputs, open_family
from arr_coc.gaze.plan import DEFAULT_BUDGET, Gaze
from arr_coc.prompting.inside_model import Cut, InsideModel, check_decoding, check_inside
from arr_coc.prompting.layout import Prompt, check_selections
from arr_coc.prompting.prune import KeepingAll, Pruning
from arr_coc.prompting.question import ChatTokens, Ints
from arr_coc.prompting.resize import SmallerPicture
from arr_coc.prompting.saccade import Saccading
from arr_coc.prompting.settings import Mode, OnError, Settings
from arr_coc.prompting.shortening import Kept, Shortening
from arr_coc.runtime.stopwatch import OFF, Stopwatch
from arr_coc.selectors.contract import (
    InvalidSelectorError,
    LanguageSelector,
    PictureSelector,
    Selector,
    TokenSelector,
)
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.selectors.registry import selector_name

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Run:
    """What happened to one call.

    Args:
        inputs (`dict`): arguments of the shorter prompt, for `model(**inputs)` or `model.generate(**inputs)`.
        mode (`str`): how the prompt was shortened.
        selector (`str`): the selector's name.
        budget (`int`, `float` or `"auto"`, *optional*): what was asked for, or the selector's own; None where all
            tokens stay.
        outputs (`list[ARRCOCOutput | None]`): what a layer saw, one per picture.
        kept (`list[tuple[Grid, ndarray]]`): for each picture its grid and the cells whose tokens were read.
        full, used (`int`): visual tokens of the full prompt, and those that were read. Inside the language model,
            `used` counts those that go on.
        question (`list[Tensor]`): ids `[Q]` of the words that each row asks.
        failure (`str`, *optional*): why all tokens were kept, if the selection failed.
        inside_layer (`int`, *optional*): after which layer of the language model tokens left, if they did so there.
        milliseconds (`dict[str, float]`): by stage, where a stopwatch was given.
        result (`Any`): what the model returned, if it was called.
        generated (`Tensor` of shape `[B, n]`, *optional*): the new tokens.
    """

    inputs: dict[str, Any]
    mode: str = "prune"
    selector: str = ""
    budget: Budget | None = None
    outputs: list[ARRCOCOutput | None] = field(default_factory=list)
    kept: Kept = field(default_factory=list)
    full: int = 0
    used: int = 0
    question: list[Tensor] = field(default_factory=list)
    failure: str | None = None
    inside_layer: int | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)
    result: Any = None
    generated: Tensor | None = None
    prompt: Prompt | None = field(default=None, repr=False)


def check_selector(selector: object) -> None:
    """Refuse what is no selector."""
    if not isinstance(selector, Selector):
        given = f"the class {selector.__name__}" if isinstance(selector, type) else repr(selector)
        raise TypeError(f"`selector` must be a selector, got {given}; make one with create_selector(name)")


class Session:
    """A model that reads what a selector chooses.

    Args:
        family (`Family`): the opened model.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`): decides which visual tokens stay.
        settings (`Settings`): how; see [`prepare`].
        forward, generate (`Callable`, *optional*): what calls the model, where that is not the model itself: a wrapper
            around it, or the methods that an attachment replaced.
    """

    def __init__(
        self,
        family: Family,
        selector: Selector,
        settings: Settings,
        forward: Callable[..., Any] | None = None,
        generate: Callable[..., Any] | None = None,
    ) -> None:
        self.family, self.settings = family, settings
        self.selector = selector
        self._forward = forward or family.target.__call__
        self._generate = generate or family.target.generate
        self._short_caches: WeakSet[Any] = WeakSet()
        self._cuts: WeakKeyDictionary[Any, Cut] = WeakKeyDictionary()

    @property
    def selector(self) -> Selector:
        """What decides which visual tokens stay; may be set anew."""
        return self._selector

    @selector.setter
    def selector(self, selector: Selector) -> None:
        check_selector(selector)
        self._inside: LanguageSelector | None = None
        if isinstance(selector, LanguageSelector):
            check_inside(self.family, selector, self.settings)
            self._inside = selector
        self._selector = selector

    @property
    def inside(self) -> bool:
        """Whether tokens leave inside the language model, so that no arguments alone can say which."""
        return self._inside is not None

    def prepare(self, inputs: Inputs, watch: Stopwatch = OFF) -> Run:
        """The shorter prompt, and what was seen on the way; the language model is not run.

        Args:
            inputs (`Mapping`): what the processor delivered, and whatever else the model is called with.
            watch (`Stopwatch`, *optional*): times the stages `encode` and `select`.
        """
        if not self.family.present(inputs):
            return Run(dict(inputs), self.settings.mode, selector_name(self.selector))
        steps = self._open_steps(inputs)
        with watch.stage("select"):
            steps.read()
        with watch.stage("encode"):
            steps.encode()
        with watch.stage("select"):
            failure = self._attempt(steps.choose, steps.fallback)
        if failure is None:
            with watch.stage("encode"):
                steps.encode_chosen()
            with watch.stage("select"):
                short = steps.build()
        else:
            short = steps.keep_all()
        return Run(
            inputs=short.inputs,
            mode=self.settings.mode,
            selector=selector_name(self.selector),
            budget=self._budget(),
            outputs=short.outputs,
            kept=short.kept,
            full=short.full,
            used=short.used,
            question=steps.question,
            failure=failure,
            milliseconds=watch.milliseconds,
            prompt=steps.prompt,
        )

    def _open_steps(self, inputs: Inputs) -> Shortening:
        """The way from full to short for this kind of selector."""
        given = self.family, inputs, self.settings
        if self._inside is not None:
            return KeepingAll(*given)
        if isinstance(self.selector, TokenSelector):
            kind = Saccading if self.settings.mode == "saccade" else Pruning
            return kind(*given, self.selector)
        if self.settings.mode == "saccade" or not isinstance(self.selector, PictureSelector):
            raise ValueError("mode 'saccade' needs a selector that picks cells; this one changes the picture itself")
        return SmallerPicture(*given, self.selector)

    def _attempt(self, choose: Callable[[], None], fallback: str) -> str | None:
        """Choose; if that fails and may, say so once and return why. Wrong arguments and full memory always raise."""
        try:
            choose()
        except (InvalidSelectorError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            logger.warning("selection failed, %s: %s", fallback, error)
            return str(error)
        return None

    def _budget(self) -> Budget | None:
        """The budget in force."""
        if self.settings.mode == "weight":
            return None
        if self.settings.budget is not None:
            return self.settings.budget
        return DEFAULT_BUDGET if self.settings.mode == "saccade" else self.selector.default_budget

    def look(self, inputs: Inputs, watch: Stopwatch = OFF) -> Run:
        """What would be read: the shorter prompt, and where tokens leave inside the model, one pass of it."""
        if self.inside:
            return self.forward({**inputs, "logits_to_keep": 1}, watch)
        return self.prepare(inputs, watch)

    def forward(self, arguments: Inputs, watch: Stopwatch = OFF) -> Run:
        """Call the model on the shorter prompt. A call that goes on from a cache of an earlier one may have no picture.

        Args:
            arguments (`Mapping`): of the model's `forward`.
            watch (`Stopwatch`, *optional*): times the stages `encode`, `select` and `prefill`.
        """
        run = self.prepare(arguments, watch)
        with watch.stage("prefill"):
            run.result = self._call(self._forward, run)
        return run

    def generate(self, arguments: Inputs, watch: Stopwatch = OFF) -> Run:
        """Generate from the shorter prompt; the result has the full prompt in front, which callers cut off again.

        Args:
            arguments (`Mapping`): of the model's `generate`, with `input_ids`.
            watch (`Stopwatch`, *optional*): times the stages `encode`, `select`, `prefill` and `decode`.
        """
        given = dict(arguments)
        if self.family.present(given):
            check_generation(self.family, given)
            if self._inside is not None:
                check_decoding(self.family, self._inside, given)
        prompt: Tensor = given["input_ids"]
        with torch.no_grad():
            run = self.prepare(given, watch)
        length = run.inputs["input_ids"].shape[1]
        options = _lengths(self.family, given, length - prompt.shape[1])
        first = _FirstToken(watch)
        if watch.on:
            options["logits_processor"] = [first, *(given.get("logits_processor") or [])]
        begin = watch.now() if watch.on else 0.0
        run.result = self._call(self._generate, run, options)
        if watch.on:
            watch.milliseconds |= {"prefill": first.at - begin, "decode": watch.now() - first.at}
        plain = isinstance(run.result, Tensor)
        sequences = run.result if plain else run.result.sequences
        run.generated = sequences[:, length:]
        # callers cut their own prompt off again: out[:, input_ids.shape[1]:]
        glued = torch.cat([prompt.repeat_interleave(len(sequences) // len(prompt), dim=0), run.generated], dim=1)
        if plain:
            run.result = glued
        else:
            run.result.sequences = glued
            if getattr(run.result, "past_key_values", None) is not None and not self.inside and run.kept:
                self._short_caches.add(run.result.past_key_values)
        return run

    def goes_on(self, cache: Any) -> bool:
        """Whether a cache holds a prompt of which tokens left inside the model, so that the next call needs us too."""
        return cache is not None and cache in self._cuts

    def check_cache(self, cache: Any) -> None:
        """Refuse a cache that holds a shorter prompt than its ids say."""
        if cache is not None and (cache in self._short_caches or cache in self._cuts):
            raise ValueError(
                "this cache holds a shorter prompt than its ids say; start the next turn without `past_key_values`"
            )

    def _call(self, call: Callable[..., Any], run: Run, options: dict[str, Any] | None = None) -> Any:
        """Call the model; tokens leave inside it if the selector is of that kind."""
        arguments = {**run.inputs, **(options or {})}
        if self._inside is None or (run.prompt is None and not self.goes_on(arguments.get("past_key_values"))):
            return call(**arguments)
        selector, failures = self._inside, list[str | None]()

        def choose(paid: Sequence[Tensor]) -> list[Ints]:
            spans = [] if run.prompt is None else run.prompt.spans
            chosen = [np.arange(len(span.columns)) for span in spans]

            def select() -> None:
                chosen[:] = check_selections(spans, selector.select(paid, self.settings.budget))

            failures.append(self._attempt(select, Shortening.fallback))
            return chosen

        with InsideModel(self.family, selector, run.prompt, choose, self._cuts) as inside:
            result = call(**arguments)
        if inside.kept:  # not so for a further token
            run.kept, run.used = inside.kept, sum(len(cells) for _, cells in inside.kept)
            run.failure, run.inside_layer = failures[0], selector.layer
        return result


def check_generation(family: Family, arguments: Inputs) -> None:
    """Refuse to decode where the true positions would be lost."""
    config = arguments.get("generation_config") or family.target.generation_config
    cached = arguments.get("use_cache")
    if family.needs_cache and (config.use_cache if cached is None else cached) is False:
        raise ValueError(f"{type(family).__name__} keeps true positions only with a cache; drop use_cache=False")
    last = arguments["input_ids"][:, -1]
    visual = torch.tensor([family.token_id(kind) for kind in family.kinds], device=last.device)
    if torch.isin(last, visual).any():
        raise ValueError("the prompt ends in a picture, and decoding would lose its place; end it in text")


def _lengths(family: Family, arguments: Inputs, difference: int) -> dict[str, Any]:
    """Limits that count the prompt, for the shorter one."""
    config = arguments.get("generation_config") or family.target.generation_config
    limits = {}
    for name in ("max_length", "min_length"):
        limit = arguments.get(name)
        if limit is None and arguments.get("max_new_tokens") is None and config.max_new_tokens is None:
            own = getattr(config, name)
            limit = own if own is not None and own > arguments["input_ids"].shape[1] else None
        if limit is not None:
            limits[name] = limit + difference
    return limits


class _FirstToken:
    """Notes when the first logits are there; has the form of a logits processor."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.at = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.at:
            self.at = self.watch.now()
        return scores


def prepare(
    model: nn.Module,
    inputs: Inputs,
    selector: Selector,
    *,
    mode: Mode = "prune",
    budget: Budget | None = None,
    query: Sequence[Tensor] | None = None,
    query_layers: int = 0,
    chat: ChatTokens | None = None,
    on_error: OnError = "full",
    images: Sequence[Image.Image | Tensor] | None = None,
    gaze: Gaze | None = None,
) -> dict[str, Any]:
    """Make ordinary arguments of a physically shorter prompt.

    Args:
        model (`nn.Module`): a supported model, also below PEFT's LoRA.
        inputs (`Mapping`): what its processor delivered, `labels` included if there are any.
        selector (`TokenSelector` or `PictureSelector`): decides which visual tokens stay.
        mode (`str`, *optional*, defaults to `"prune"`): `"prune"` drops tokens; `"weight"` keeps all and scales their
            embeddings by relevance, which needs a selector that gives an [`ARRCOCOutput`]; `"saccade"` encodes the
            whole picture small, and cells of full resolution only where it matters.
        budget (`int`, `float` or `"auto"`, *optional*): wins over the selector's own.
        query (`Sequence[Tensor]`, *optional*): ids of the question of each row, instead of finding it in the prompt.
        query_layers (`int`, *optional*, defaults to 0): take the question's words after this many layers of the
            language model, read by themselves, instead of from its embedding table; it binds "the *left* dog".
        chat (`ChatTokens`, *optional*): chat markers; Qwen's by default.
        on_error (`str`, *optional*, defaults to `"full"`): if the selection itself fails, `"full"` warns and keeps all
            tokens, `"raise"` raises. Invalid arguments always raise.
        images (`Sequence[PIL.Image.Image | Tensor]`, *optional*): for `"saccade"`, the original pictures in the order
            of the prompt, RGB, or `[3, H, W]` of bytes; cells are cut from them at their own resolution, and what the
            processor made of them only holds their places. By default cells are those that it delivered.
        gaze (`Gaze`, *optional*): for `"saccade"`, how tokens are shared between the whole and its parts.

    Returns:
        `dict`: for `model(**kwargs)` or `model.generate(**kwargs)`, once and before the next `prepare`: beams change
        its features in place, and where decoding goes on is kept in the model, as in its own `forward`. LLaVA needs a
        cache to decode (no `use_cache=False`). A prompt without pictures comes back as it was.

    Example:

    ```python
    >>> from arr_coc import create_selector, prepare
    >>> inputs = processor(images=image, text=prompt, return_tensors="pt")  # doctest: +SKIP
    >>> out = model.generate(**prepare(model, inputs, create_selector("grid"), budget=0.25))  # doctest: +SKIP

    ```
    """
    settings = Settings(mode, budget, query, query_layers, chat, on_error, images, gaze)
    session = Session(open_family(model), selector, settings)
    if session.inside:
        name = selector_name(selector)
        raise ValueError(f"{name!r} acts inside the language model, which no arguments can say; use `attach`")
    return session.prepare(inputs).inputs
