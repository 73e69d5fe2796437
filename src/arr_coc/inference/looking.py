"""Look, read, and if the answer is not sure look again, with more to read each time.

Each look is a call of a session of its own. What was encoded, measured and asked for one look serves the next, and in
mode `saccade` the language model does not read text and gestalt again. The cells of all looks are read in their order
on the page: a look that only adds cells behind those of the one before would save reading these again, and loses one
answer in ten on pages (`docs/looks.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arr_coc.config import PromptBudget
from arr_coc.families.family import Family, Inputs
from arr_coc.gaze.loop import (
    COUNTED,
    LAST_OF_LARGE,
    LAST_OF_SMALL,
    LEEWAY,
    Look,
    Looks,
    Then,
    least_log_probability,
    list_shares,
    sureness,
)
from arr_coc.inference.rows import can_take_rows
from arr_coc.inference.run import Run
from arr_coc.prompting.cache import Role
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.prefix import Prefix
from arr_coc.prompting.settings import OnError, Settings
from arr_coc.prompting.shortening import KeptCells
from arr_coc.runtime.stopwatch import Stopwatch
from arr_coc.selectors.contract import Selector, TokenSelector
from arr_coc.selectors.registry import selector_name

if TYPE_CHECKING:
    from arr_coc.inference.session import Session

# Ways to generate in which the likeliest token is not the one that is read on with.
_OTHER_WAYS = {"num_beams": (None, 1), "num_return_sequences": (None, 1), "assistant_model": (None,),
               "prompt_lookup_num_tokens": (None,), "custom_generate": (None,), "penalty_alpha": (None, 0),
               "return_dict_in_generate": (None, False), "past_key_values": (None,)}  # fmt: skip


def can_look_again(family: Family, arguments: Inputs) -> bool:
    """Whether a call of `generate` tells how sure its answer is, and can be made anew."""
    return all(family.option(arguments, name) in allowed for name, allowed in _OTHER_WAYS.items())


def can_gaze(family: Family, selector: Selector) -> bool:
    """Whether a model and a selector can choose before the whole picture is encoded."""
    try:
        family.cut()
    except ValueError:
        return False
    return isinstance(selector, TokenSelector) and selector.can_saccade


def settle(settings: Settings, mode: str, looks: Looks | None, selector: Selector) -> Settings:
    """Settings of mode `auto` for the mode that was chosen, `"full"` among them."""
    if not isinstance(selector, TokenSelector):  # it does not say what to read next
        return replace(settings, mode="prune", gaze=None, looks=None)
    if mode == "full":
        return replace(settings, mode="prune", budget=1.0, gaze=None, looks=None)
    gaze = settings.gaze if mode == "saccade" else None
    introspect = settings.introspect or "auto"  # a first look reads so little that it pays to ask
    return replace(settings, mode=mode, gaze=gaze, looks=looks, introspect=introspect)  # type: ignore[arg-type]


def look_until_sure(session: Session, arguments: Inputs, watch: Stopwatch) -> Run:
    """Generate from looks at the pictures, one after the other, until the answer is sure.

    Args:
        session (`Session`): with the settings of the last look.
        arguments (`Mapping`): of `generate`.
        watch (`Stopwatch`): times the stages of all looks together.
    """
    settings, family = session.settings, session.family
    if not isinstance(session.selector, TokenSelector):
        name = selector_name(session.selector)
        raise ValueError(f"`looks` need a selector that picks tokens of a picture, got {name!r}; drop `looks`")
    looks = settings.looks or Looks()
    settings = replace(settings, looks=None, budget=_last_budget(settings), encoded=_share_encodings(settings))
    if not can_look_again(family, arguments):
        return session.with_settings(settings).generate(arguments, watch)
    shares = list_shares(looks.rounds)
    streamer = arguments.get("streamer")
    answers: list[Any] = [None] * len(arguments["input_ids"])
    made: list[list[Look]] = [[] for _ in answers]
    ended: list[Run | None] = [None] * len(answers)  # the look that each row ended with
    failures: list[Exception] = []
    settings = replace(settings, on_error=_note_failures(settings.on_error, failures))
    spent = {"prefill": 0.0, "decode": 0.0}  # which a session measures for its own call alone
    while True:
        share, last = shares.pop(0), not shares
        going = [row for row, answer in enumerate(answers) if answer is None]
        meter = _Meter(family, arguments, least_log_probability(looks.sure), failures)
        given = {**arguments, "logits_processor": [*(arguments.get("logits_processor") or ()), meter]}
        held = None if last or streamer is None else _Held(streamer)
        if held is not None:
            given["streamer"] = held
        if not last:
            given["stopping_criteria"] = [*(arguments.get("stopping_criteria") or ()), meter.is_unsure]
        rows = going if can_take_rows(arguments) else None
        leeway = 1.0 if last or settings.mode != "prune" else LEEWAY
        run = session.with_settings(replace(settings, share=share, leeway=leeway)).generate(given, watch, rows)
        spent = {name: total + watch.milliseconds.get(name, 0.0) for name, total in spent.items()}
        generated: Any = run.generated
        sure = [sureness(value) for value in meter.total.tolist()]
        known = _count_known(run)
        parts = run.split(len(answers))
        whole = run.used >= run.full or run.failure is not None  # there is nothing more to see
        last = last or run.failure is not None
        for place, row in enumerate(range(len(answers)) if run.rows is None else run.rows):
            if answers[row] is not None:
                continue
            then: Then = "sure" if sure[place] >= looks.sure else "again"
            if last and then == "again":
                then = "whole" if whole else "last"
            read = parts[row].used + sum(parts[row].glanced_counts) - known
            made[row].append(Look(read, parts[row].used, round(sure[place], 4), then, tuple(parts[row].kept)))
            if then != "again":
                answers[row], ended[row] = generated[place], parts[row]
        if all(answer is not None for answer in answers):
            break
        if whole:
            shares = [1.0]  # the answer that was broken off is finished
    if held is not None:
        held.release()
    if watch.on:
        watch.milliseconds |= spent
    return _finish(run, made, answers, ended, arguments, family)


def _note_failures(on_error: OnError, failures: list[Exception]) -> OnError:
    """What to do if the selection fails: as the caller wants, and note it, so that the answer is not broken off."""
    if on_error == "raise":
        return on_error

    def note(error: Exception) -> None:
        failures.append(error)
        if callable(on_error):
            on_error(error)

    return note


def _last_budget(settings: Settings) -> PromptBudget:
    """What the last look may read: the budget of the call, or the usual one of its mode."""
    if settings.budget is None or settings.budget == "auto":
        return LAST_OF_LARGE if settings.mode == "saccade" else LAST_OF_SMALL
    return settings.budget


def _share_encodings(settings: Settings) -> Any:
    """Where looks leave for each other what was encoded, and in mode `saccade` what was read of text and gestalt."""
    if settings.encoded is not None:
        return settings.encoded
    encoded = Encodings()
    if settings.mode == "saccade":
        encoded.prefix = Prefix()
    return encoded


def _count_known(run: Run) -> int:
    """Visual tokens, of one row, that the language model had read in an earlier look."""
    if not run.reused or run.holding is None:
        return 0
    return int((run.holding.roles[:, : run.reused] >= Role.GESTALT).sum())


def _finish(
    run: Run,
    made: list[list[Look]],
    answers: list[Any],
    ended: Sequence[Run | None],
    arguments: Inputs,
    family: Family,
) -> Run:
    """The record of all looks: each row has the answer, and the cells, of the look after which it was sure."""
    prompt: Tensor = arguments["input_ids"]
    longest = max(len(answer) for answer in answers)
    generated = prompt.new_full((len(answers), longest), family.pad_id())
    for row, answer in enumerate(answers):
        generated[row, : len(answer)] = answer
    parts = [part for part in ended if part is not None]
    if run.prompt is not None and len(parts) == len(answers) > 1:
        places = [0] * len(parts)
        for picture, span in enumerate(run.prompt.spans):
            part, place = parts[span.row], places[span.row]
            places[span.row] += 1
            run.outputs[picture] = part.outputs[place]
            run.used_counts[picture], run.encoded_counts[picture] = part.used_counts[place], part.encoded_counts[place]
        kept = [(part, iter(part.kept)) for part in parts]
        run.kept = KeptCells(next(kept[span.row][1]) for span in run.prompt.spans)
    run.generated, run.result = generated, torch.cat([prompt, generated], dim=1)
    run.rows, run.looks = None, made
    return run


class _Meter:
    """Adds up the log-probability of each row's likeliest tokens while an answer is generated.

    Args:
        family (`Family`): the opened model.
        arguments (`Mapping`): of `generate`.
        least (`float`): below it a row is not sure enough.
        failures (`list[Exception]`): if there is one, everything is read, and no answer is broken off.
    """

    def __init__(self, family: Family, arguments: Inputs, least: float, failures: Sequence[Exception]) -> None:
        device, ends = arguments["input_ids"].device, family.option(arguments, "eos_token_id")
        self._ends = torch.tensor([] if ends is None else ends, device=device).flatten()
        self._least, self._going = least, torch.ones(0, dtype=torch.bool)
        self.total = torch.zeros(0)  # [B] of the rows that are generated, once the first token is
        self._count, self._failures = 0, failures

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """As a logits processor, which changes nothing."""
        if len(self.total):
            self._going &= ~torch.isin(input_ids[:, -1], self._ends)
        else:
            self._going = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
            self.total = torch.zeros(len(scores), device=scores.device)
        self._count += 1
        if self._count <= COUNTED:
            likeliest = scores.float().log_softmax(dim=-1).amax(dim=-1)  # [B, V] -> [B]
            self.total += torch.where(self._going, likeliest, 0.0)
        return scores

    def is_unsure(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """As a stopping criterion: what comes after a token makes an answer no surer."""
        return (self.total < self._least) & (not self._failures)


class _Held:
    """A streamer that waits until its answer is known to stay.

    Args:
        streamer (`BaseStreamer`): the caller's.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer, self._values = streamer, list[Tensor]()

    def put(self, value: Tensor) -> None:
        """Keep tokens."""
        self._values.append(value)

    def end(self) -> None:
        """Nothing yet."""

    def release(self) -> None:
        """Pass everything on."""
        for value in self._values:
            self.streamer.put(value)
        self.streamer.end()
