"""The session: runs a model on the visual tokens that a selector keeps. Every way to use the package goes through it.

example -> prompt -> encoding -> texture -> knowing -> balancing -> attending -> realizing -> shorter prompt -> answer

A [`Session`] holds a model, a selector and settings. Only the session tells the kinds of selectors apart and
handles a selection that fails. Each call returns a [`Run`], the record of what happened. `prepare`, `attach`,
[`ARRCOCQwen`], the commands, evaluation, timing, training and the demo page are thin layers on top of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arr_coc.config import PromptBudget, cell_count
from arr_coc.families.family import Family, IncompleteFamilyError, Inputs
from arr_coc.families.language_graph import replayed_passes
from arr_coc.families.language_passes import is_too_long
from arr_coc.families.recordable import unchanged_modules
from arr_coc.gaze.loop import Looks, choose_mode
from arr_coc.gaze.plan import DEFAULT_BUDGET
from arr_coc.inference.arguments import (
    adjust_limits,
    check_arguments,
    check_generation,
    check_text,
    check_turn,
    scatter_logits,
    show_full_prompt,
    visual_ids,
)
from arr_coc.inference.looking import can_gaze, first_look, look_until_sure, settle
from arr_coc.inference.rows import take_rows
from arr_coc.inference.run import Run
from arr_coc.prompting.cache import Holding, calling, cut_of, holding_of, mark_cache
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.first_look.glance import Glancing
from arr_coc.prompting.first_look.introspection import cannot_introspect
from arr_coc.prompting.inside_model import InsideModel, check_decoding, check_inside
from arr_coc.prompting.layout import Prompt, check_selections
from arr_coc.prompting.picture_cache import EncodingCache
from arr_coc.prompting.prefix import is_plain
from arr_coc.prompting.prune import KeepingAll, Pruning, PruningPixels
from arr_coc.prompting.question import Ints
from arr_coc.prompting.resize import SmallerPicture
from arr_coc.prompting.saccade import Saccading
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.sharing import select_shared, share_budget
from arr_coc.prompting.shortening import Shortening
from arr_coc.runtime.stopwatch import OFF, Stopwatch
from arr_coc.runtime.tracing import untraced, untraced_itself
from arr_coc.selectors.contract import (
    GlanceSelector,
    InvalidSelectorError,
    LanguageSelector,
    PictureSelector,
    PixelSelector,
    Selector,
    TokenSelector,
)
from arr_coc.selectors.registry import selector_name

logger = logging.getLogger(__name__)


def check_selector(selector: object) -> None:
    """Raise `TypeError` unless this is a selector."""
    if not isinstance(selector, Selector):
        given = f"the class {selector.__name__}" if isinstance(selector, type) else repr(selector)
        raise TypeError(f"`selector` must be a selector, got {given}; make one with create_selector(name)")


class Session:
    """Runs a model on the visual tokens that a selector keeps.

    Args:
        family (`Family`): the opened model.
        selector (`Selector`): decides which visual tokens stay.
        settings (`Settings`): how the prompt is shortened; see [`prepare`].
        forward, generate (`Callable`, *optional*): used instead of the model's own: the methods of a wrapper around
            it, or the originals of an attached model.
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
        own_generate: Callable[..., Any] = getattr(family.target, "generate", _cannot_generate)
        self._generate = generate or own_generate

    @property
    def selector(self) -> Selector:
        """Decides which visual tokens stay; may be replaced."""
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
        """Whether tokens are dropped inside the language model rather than from the prompt."""
        return self._inside is not None

    def with_settings(self, settings: Settings) -> Session:
        """The same session with other settings."""
        return Session(self.family, self.selector, settings, self._forward, self._generate)

    def _settle(self, inputs: Inputs, looks: Looks | None = None) -> Session:
        """In mode `auto`, a session of the mode that fits the pictures of these inputs; otherwise this one."""
        settings = self.settings
        if settings.mode != "auto":
            return self
        # a further turn has no picture to read, and what is missing is said later
        known = all(inputs.get(name) is not None for name in self.family.needs(inputs))
        if not known or holding_of(inputs.get("past_key_values")) is not None:
            return self.with_settings(replace(settings, mode="prune", gaze=None, looks=None))
        if settings.images is None:
            kinds = self.family.present(inputs)
            cells = [cell_count(grid) for kind in kinds for grid in self.family.grids(inputs, kind)]
            mode, _ = choose_mode(max(cells, default=0), kinds == ["image"], can_gaze(self.family, self.selector))
        else:
            mode = "saccade"  # the prompt has only small copies of its pictures
        return self.with_settings(settle(settings, mode, looks, self.selector))

    @untraced
    @unchanged_modules()
    def prepare(self, inputs: Inputs, watch: Stopwatch = OFF, reads_on: bool = False) -> Run:
        """Build the shorter prompt, without running the language model.

        Args:
            inputs (`Mapping`): the processor's output, and any other arguments of the model.
            watch (`Stopwatch`, *optional*): times the stages `encode` and `select`.
            reads_on (`bool`, *optional*, defaults to `False`): whether what is read to choose is kept as `Run.begun`.
        """
        if self.settings.mode == "auto":
            return self._settle(inputs).prepare(inputs, watch, reads_on)
        if not self.family.present(inputs):
            check_text(self.family, inputs)
            return Run(dict(inputs), self.settings.mode, selector_name(self.selector))
        check_arguments(inputs)
        encoded = self.settings.encoded
        if not isinstance(encoded, EncodingCache):
            if encoded is not None:
                encoded.check_source(self.family, inputs)
            return self._shorten(self._make_steps(inputs, encoded), inputs, watch, reads_on)
        with ExitStack() as stack:
            with watch.stage("encode"):
                encodings = stack.enter_context(encoded.open(self.family, inputs, self.settings.images))
            return self._shorten(self._make_steps(inputs, encodings), inputs, watch, reads_on)

    def _shorten(self, steps: Shortening, inputs: Inputs, watch: Stopwatch, reads_on: bool) -> Run:
        """Take the steps from a full prompt to a shorter one."""
        steps.reads_on = reads_on
        with watch.stage("select"):
            steps.read()
            if self.family.headless:
                _check_ending(self.family, steps.prompt)
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
            full_counts=short.full,
            used_counts=short.used,
            encoded_counts=short.full if short.encoded is None else short.encoded,
            glanced_counts=[0] * len(short.full) if short.glanced is None else short.glanced,
            glanced_layers=short.glanced_layers,
            question=steps.question,
            failure=failure,
            milliseconds=watch.milliseconds,
            prompt=steps.prompt,
            begun=short.begun,
            holding=None if short.holding is None else replace(short.holding, full_ids=inputs["input_ids"]),
        )

    def _make_steps(self, inputs: Inputs, encoded: Encodings | None) -> Shortening:
        """The steps that shorten a prompt for this kind of selector and this mode."""
        settings = replace(self.settings, encoded=encoded)
        if isinstance(self.selector, TokenSelector):
            steps = Saccading if settings.mode == "saccade" else Pruning
            return steps(self.family, inputs, settings, self.selector)
        name = selector_name(self.selector)
        if settings.introspect not in (None, "auto", "off"):
            raise ValueError(cannot_introspect(name, settings.introspect))
        arguments = self.family, inputs, replace(settings, introspect=None)
        if self._inside is not None:
            return KeepingAll(*arguments)
        if self.settings.mode == "saccade":
            raise ValueError(f"mode 'saccade' needs a selector that picks cells, got {name!r}; use mode 'prune'")
        if self.settings.mode == "weight":
            raise ValueError(f"mode 'weight' scales by relevance, which {name!r} does not compute; use arr-coc")
        if isinstance(self.selector, PixelSelector):
            return PruningPixels(*arguments, self.selector)
        if isinstance(self.selector, GlanceSelector):
            return Glancing(*arguments, self.selector, self._glance)
        if isinstance(self.selector, PictureSelector):
            return SmallerPicture(*arguments, self.selector)
        raise TypeError(f"`selector` is of no kind that is known, got {name!r}; subclass one of the five kinds")

    def _glance(self, arguments: Inputs) -> Any:
        """Call the model on a prompt as it is."""
        with calling(self.family.target):
            return self._forward(**arguments)

    def _attempt(self, choose: Callable[[], None], fallback: str) -> str | None:
        """Call `choose`. If it fails and `on_error` is not `"raise"`, log a warning and return the error as text.

        A selector that does not fit the call and a lack of memory always raise.
        """
        try:
            choose()
        except (InvalidSelectorError, IncompleteFamilyError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.settings.on_error == "raise":
                raise
            if callable(self.settings.on_error):
                self.settings.on_error(error)  # if it raises, there is no fallback to tell of
            # the traceback is for those who ask for it; an error without a text has at least a name
            logger.warning("selection failed, %s: %s", fallback, error, exc_info=logger.isEnabledFor(logging.DEBUG))
            return str(error) or type(error).__name__
        return None

    def _budget(self) -> PromptBudget | None:
        """The budget in effect; None if all tokens stay."""
        if self.settings.mode == "weight":
            return None
        if self.settings.budget is not None:
            return self.settings.budget
        return DEFAULT_BUDGET if self.settings.mode == "saccade" else self.selector.default_budget

    def inspect(self, inputs: Inputs, watch: Stopwatch = OFF) -> Run:
        """Choose tokens without generating: of several looks, those of the first.

        If they are dropped inside the model, this takes one forward pass.
        """
        if self.inside:
            return self.forward({**inputs, "logits_to_keep": 1}, watch)
        if self.settings.mode == "auto":
            return self._settle(inputs, self.settings.looks or Looks()).inspect(inputs, watch)
        if self.settings.looks is not None and self.family.present(inputs):
            return self.with_settings(first_look(self.settings)).prepare(inputs, watch)
        return self.prepare(inputs, watch)

    @untraced_itself
    def forward(self, arguments: Inputs, watch: Stopwatch = OFF) -> Run:
        """Call the model on the shorter prompt. A call that continues from an earlier cache may have no picture.

        Args:
            arguments (`Mapping`): arguments of the model's `forward`.
            watch (`Stopwatch`, *optional*): times the stages `encode`, `select` and `prefill`.
        """
        if self.settings.mode == "auto":
            return self._settle(arguments).forward(arguments, watch)
        holding = holding_of(arguments.get("past_key_values"))
        if holding is None:
            run = self.prepare(arguments, watch)
        else:
            run = Run(self._continue_by_hand(arguments, holding), self.settings.mode, selector_name(self.selector))
        with watch.stage("prefill"):
            run.result = self._call(self._forward, run)
        _mark(getattr(run.result, "past_key_values", None), run.holding)
        logits = getattr(run.result, "logits", None)
        # with `logits_to_keep` there are fewer columns, which are the last of both prompts
        length = run.holding.length if run.holding is not None and run.holding.shorter else None
        if self.settings.full_logits and logits is not None and logits.shape[1] == length:
            visual = visual_ids(self.family, logits.device)
            run.result.logits = scatter_logits(logits, run.inputs, arguments, visual)
        return run

    @untraced_itself
    def generate(
        self,
        arguments: Inputs,
        watch: Stopwatch = OFF,
        rows: Sequence[int] | None = None,
        prepared: Callable[[Run], None] | None = None,
    ) -> Run:
        """Generate from the shorter prompt. The result begins with the full prompt, as the model's own would.

        Args:
            arguments (`Mapping`): arguments of the model's `generate`, with `input_ids`.
            watch (`Stopwatch`, *optional*): times the stages `encode`, `select`, `prefill` and `decode`.
            rows (`Sequence[int]`, *optional*): generate for these rows of the batch alone, where that can be: not if
                the selection failed. [`Run`] says for which it was.
            prepared (`Callable`, *optional*): told the record once the shorter prompt is laid out.
        """
        if self.settings.mode == "auto":
            return self._settle(arguments, self.settings.looks or Looks()).generate(arguments, watch)
        if self.settings.looks is not None and self.family.present(arguments):
            return look_until_sure(self, arguments, watch)
        holding = holding_of(arguments.get("past_key_values"))
        if self.family.present(arguments) or holding is not None:
            check_generation(self.family, arguments)
            if self._inside is not None:
                check_decoding(self.family, self._inside, arguments)
        with torch.no_grad():
            if holding is None:
                run = self.prepare(arguments, watch, self._reads_on(arguments))
            else:
                run = Run(self._continue(arguments, holding), self.settings.mode, selector_name(self.selector))
        if rows is not None:
            arguments = take_rows(self.family, arguments, run, rows)
        if prepared is not None:
            prepared(run)
        prompt_ids: Tensor = arguments["input_ids"]
        length = run.inputs["input_ids"].shape[1]
        options = adjust_limits(self.family, arguments, length - prompt_ids.shape[1])
        options |= show_full_prompt(self.family, arguments, length)
        first_token = _FirstToken(watch)
        if watch.on:
            options["logits_processor"] = [first_token, *options.get("logits_processor", [])]
        begin = watch.now() if watch.on else 0.0
        kept = None if self.settings.encoded is None else self.settings.encoded.prefix
        prefix = run.begun if kept is None else kept
        if prefix is not None:
            begun = run.begun is not None and prefix.adopt(run.begun)
            before = prefix.tokens_read
            options |= prefix.begin(self.family, arguments, run.inputs, run.holding)
            reused = run.inputs["input_ids"].numel() - (prefix.tokens_read - before)
            run.reused = 0 if begun else reused
            if begun and reused:
                run.glanced_counts = [0] * len(run.glanced_counts)  # what was read to choose is not read again
        run.result = self._call(self._generate, run, options)
        if watch.on:
            watch.milliseconds |= {"prefill": first_token.at - begin, "decode": watch.now() - first_token.at}
        is_tensor = isinstance(run.result, Tensor)
        sequences = run.result if is_tensor else run.result.sequences
        run.generated = sequences[:, length:]
        run.begun = None
        if kept is not None:
            kept.keep(run.generated)
        # callers cut off the prompt they passed: out[:, input_ids.shape[1]:]
        prompts = prompt_ids.repeat_interleave(len(sequences) // len(prompt_ids), dim=0)
        sequences = torch.cat([prompts, run.generated], dim=1)
        if is_tensor:
            run.result = sequences
        else:
            run.result.sequences = sequences
            _mark(getattr(run.result, "past_key_values", None), run.holding)
        _mark(arguments.get("past_key_values"), run.holding)
        return run

    def _reads_on(self, arguments: Inputs) -> bool:
        """Whether a call of `generate` can go on from what is read to choose."""
        kept = None if self.settings.encoded is None else self.settings.encoded.prefix
        return (kept is None or kept.empty) and is_plain(self.family, arguments)

    @untraced
    def _continue(self, arguments: Inputs, holding: Holding) -> dict[str, Any]:
        """Arguments of a further turn, whose ids begin with the full prompt that a cache holds shortened."""
        check_turn(arguments)
        ids: Tensor = arguments["input_ids"]
        text = ids[:, holding.full_length :]
        begins = ids[:, : holding.full_length]
        if not text.shape[1] or begins.shape != holding.full_ids.shape or not torch.equal(begins, holding.full_ids):
            raise ValueError(
                "`input_ids` do not go on from the prompt that this cache holds; pass the whole conversation, or start "
                "without `past_key_values`"
            )
        if torch.isin(text, visual_ids(self.family, ids.device)).any():
            raise ValueError(
                "a further picture cannot join the cache of a shortened prompt; start this turn without "
                "`past_key_values`"
            )
        described = {*self.family.consumed, *self.family.pixel_names.values(), *self.family.completed(arguments)}
        passed = {name: value for name, value in arguments.items() if name not in described}
        mask = holding.mask_after(arguments.get("attention_mask"), text.shape[1])
        return passed | holding.extend(self.family, text, mask)

    @untraced
    def _continue_by_hand(self, arguments: Inputs, holding: Holding) -> dict[str, Any]:
        """Arguments of a forward pass that adds tokens `[B, n]` to a cache."""
        check_turn(arguments)
        if self.family.present(arguments):
            raise ValueError(
                "a further picture cannot join the cache of a shortened prompt; start without `past_key_values`"
            )
        added = holding.add(
            self.family, arguments["past_key_values"], arguments["input_ids"], arguments.get("attention_mask")
        )
        return {**arguments, **added}

    def continues(self, cache: Any) -> bool:
        """Whether a cache holds a shortened prompt, so that a later call needs the session too."""
        return holding_of(cache) is not None or cut_of(cache) is not None

    def check_cache(self, cache: Any) -> None:
        """Raise `ValueError` if a cache cannot be continued by `generate`."""
        if cut_of(cache) is not None:
            raise ValueError(
                "tokens left inside the language model when this cache was filled, so that its layers have different "
                "lengths; start the next turn without `past_key_values`"
            )

    @untraced_itself
    def _call(self, call: Callable[..., Any], run: Run, options: dict[str, Any] | None = None) -> Any:
        """Call the model; a selector inside the language model drops tokens during this call."""
        arguments = {**run.inputs, **(options or {})}
        with calling(self.family.target):
            cut = cut_of(arguments.get("past_key_values"))
            if self._inside is not None and (run.prompt is not None or cut is not None):
                return self._call_inside(self._inside, call, run, arguments)
            alone = call is self._forward  # one pass, where `generate` has others after it
            if not self.settings.graphs or (alone and is_too_long(arguments["input_ids"])):
                return call(**arguments)
            with replayed_passes(self.family, _is_unpadded(run)):
                return call(**arguments)

    @untraced_itself
    def _call_inside(
        self, selector: LanguageSelector, call: Callable[..., Any], run: Run, arguments: dict[str, Any]
    ) -> Any:
        """Call the model while a selector drops tokens inside it."""
        failures: list[str | None] = []

        def choose(attention: Sequence[Tensor]) -> list[Ints]:
            spans = [] if run.prompt is None else run.prompt.spans
            kept = [np.arange(len(span.columns)) for span in spans]
            budgets = share_budget(self.settings.budget, [span.row for span in spans], list(map(len, kept)))

            def select() -> None:
                kept[:] = check_selections(spans, select_shared(selector.select, attention, budgets))

            failures.append(self._attempt(select, Shortening.fallback))
            return kept

        with InsideModel(self.family, selector, run.prompt, choose) as inside:
            result = call(**arguments)
        if inside.kept:  # empty if this call only decoded another token
            run.kept, run.used_counts = inside.kept, [len(cells) for _, cells in inside.kept]
            run.failure, run.inside_layer = failures[0], selector.layer
        return result


def _cannot_generate(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("a model without a head generates nothing; use the model with its `lm_head`")


def _check_ending(family: Family, prompt: Prompt) -> None:
    """Raise `ValueError` if a prompt ends in a picture: its last column, which embedders read, might be dropped."""
    last = prompt.ids[np.arange(len(prompt.ids)), prompt.last_columns()]
    if np.isin(last, [family.token_id(kind) for kind in family.kinds]).any():
        raise ValueError(
            "the prompt ends in a picture, but a model without a head is read at the last token; end it in text"
        )


def _is_unpadded(run: Run) -> bool:
    """Whether the prompt that the model reads is known to have no padding."""
    if run.holding is not None:
        return not run.holding.padded
    return run.prompt is not None and bool(run.prompt.mask.all())


def _mark(cache: Any, holding: Holding | None) -> None:
    """Mark a cache that a prompt has filled, unless its layers hold different tokens of the prompt."""
    if cache is not None and holding is not None and cut_of(cache) is None:
        mark_cache(cache, holding)


class _FirstToken:
    """A logits processor that only records when the first logits arrive."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.at = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.at:
            self.at = self.watch.now()
        return scores
