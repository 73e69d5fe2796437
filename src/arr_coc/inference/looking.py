"""Look, read, and if the answer is not sure look again, with more to read each time.

Each look is a call of a session of its own. What was encoded, measured and asked for one look serves the next, but for
cells in mode `saccade`, which have to see each other. There the language model does not read text and gestalt again.
The cells of all looks are read in their order on the page: a look that only adds cells behind those of the one before
would save reading these again, and loses one answer in ten on pages (`docs/looks.md`).
"""

from __future__ import annotations

import math
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
from arr_coc.prompting.settings import Settings
from arr_coc.prompting.shortening import KeptCells
from arr_coc.runtime.stopwatch import Stopwatch
from arr_coc.selectors.contract import DEFAULT_RATIO, Selector, TokenSelector
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
        if settings.looks is not None:
            raise ValueError(_cannot_look(selector))
        return replace(settings, mode="prune", gaze=None, looks=None)
    if mode == "full":
        return replace(settings, mode="prune", budget=1.0, gaze=None, looks=None)
    gaze, introspect = settings.gaze if mode == "saccade" else None, settings.introspect
    if introspect is None and selector.default_introspect in (None, "off"):
        introspect = "auto"  # a first look reads so little that it pays to ask
    settings = replace(settings, mode=mode, gaze=gaze, looks=looks, introspect=introspect)  # type: ignore[arg-type]
    return settings if looks is None else replace(settings, budget=_last_budget(settings, selector))


def first_look(settings: Settings) -> Settings:
    """Settings of the first of several looks."""
    looks = settings.looks or Looks()
    return _part(replace(settings, looks=None), list_shares(looks.rounds)[0], last=looks.rounds == 1)


def _part(settings: Settings, share: float, last: bool) -> Settings:
    """Settings of a look that reads a share of the budget, perhaps more or less as the question needs."""
    return replace(settings, share=share, leeway=1.0 if last or settings.mode != "prune" else LEEWAY)


def _cannot_look(selector: Selector) -> str:
    return f"`looks` need a selector that picks tokens of a picture, got {selector_name(selector)!r}; drop `looks`"


def look_until_sure(session: Session, arguments: Inputs, watch: Stopwatch) -> Run:
    """Generate from looks at the pictures, one after the other, until the answer is sure.

    Args:
        session (`Session`): with the settings of the last look.
        arguments (`Mapping`): of `generate`.
        watch (`Stopwatch`): times the stages of all looks together.
    """
    settings, family = session.settings, session.family
    if not isinstance(session.selector, TokenSelector):
        raise ValueError(_cannot_look(session.selector))
    looks = settings.looks or Looks()
    budget = _last_budget(settings, session.selector)
    settings = replace(settings, looks=None, budget=budget, encoded=_share_encodings(settings))
    if not can_look_again(family, arguments):
        return session.with_settings(settings).generate(arguments, watch)
    shares = list_shares(looks.rounds)
    streamer = arguments.get("streamer")
    answers: list[Any] = [None] * len(arguments["input_ids"])
    made: list[list[Look]] = [[] for _ in answers]
    ended: list[Run | None] = [None] * len(answers)  # the look that each row ended with
    glanced: list[int] | None = None  # of each picture, in the first look
    spent = {"prefill": 0.0, "decode": 0.0}  # which a session measures for its own call alone
    while True:
        share, last = shares.pop(0), not shares
        going = [row for row, answer in enumerate(answers) if answer is None]
        meter = _Meter(family, arguments, -math.inf if last else least_log_probability(looks.sure), going)
        given = {**arguments, "logits_processor": [*(arguments.get("logits_processor") or ()), meter]}
        held = None if last or streamer is None else _Held(streamer)
        if held is not None:
            given["streamer"] = held
        if not last:
            given["stopping_criteria"] = [*(arguments.get("stopping_criteria") or ()), meter.is_unsure]
        rows = going if can_take_rows(arguments) else None
        look = session.with_settings(_part(settings, share, last))
        run = look.generate(given, watch, rows, meter.prepare)
        settings = replace(settings, further=True)
        spent = {name: total + watch.milliseconds.get(name, 0.0) for name, total in spent.items()}
        generated: Any = run.generated
        sure = [sureness(value) for value in meter.measure(generated)]
        known = _count_known(run)
        parts = run.split(len(answers))
        if glanced is None:
            glanced, asked_layers = run.glanced_counts, run.glanced_layers
        for place, row in enumerate(range(len(answers)) if run.rows is None else run.rows):
            if answers[row] is not None:
                continue
            then: Then = "sure" if sure[place] >= looks.sure else "again"
            if then == "again" and (last or meter.whole[row]):
                then = "whole" if meter.whole[row] else "last"
            read = parts[row].used + sum(parts[row].glanced_counts) - known
            made[row].append(Look(read, parts[row].used, round(sure[place], 4), then, tuple(parts[row].kept)))
            if then != "again":
                answers[row], ended[row] = generated[place], parts[row]
        if all(answer is not None for answer in answers):
            break
    if held is not None:
        held.release()
    if watch.on:
        watch.milliseconds |= spent
    run.glanced_counts, run.glanced_layers = glanced, asked_layers
    return _finish(run, made, answers, ended, arguments, family)


def _last_budget(settings: Settings, selector: Selector) -> PromptBudget:
    """What the last look may read: the budget of the call, the selector's if it has one, or the usual of its mode."""
    if settings.budget is not None and settings.budget != "auto":
        return settings.budget
    if settings.mode == "saccade":
        return LAST_OF_LARGE
    own = selector.default_budget
    return LAST_OF_SMALL if own in (DEFAULT_RATIO, "auto") else own


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
    shown = [bool(part.kept) for part in run.split(len(answers))]  # a row without pictures looks at nothing
    run.rows, run.looks = None, [looks if seen else [] for looks, seen in zip(made, shown, strict=True)]
    return run


class _Meter:
    """Measures the probability of each row's likeliest tokens while an answer is generated.

    Args:
        family (`Family`): the opened model.
        arguments (`Mapping`): of `generate`.
        least (`float`): a row below it is not sure enough, and broken off.
        rows (`Sequence[int]`): that have no answer yet.
    """

    def __init__(self, family: Family, arguments: Inputs, least: float, rows: Sequence[int]) -> None:
        ends, pad = (family.option(arguments, name) for name in ("eos_token_id", "pad_token_id"))
        self._ends = torch.tensor([] if ends is None else ends).flatten()
        self._pad = torch.tensor([] if pad is None else pad).flatten()
        self._least, self._rows = least, rows
        self._steps: list[Tensor] = []  # log-probabilities [B] of the rows that are generated
        self._total = torch.zeros(())  # of each row, all its steps together
        self.whole = [False] * len(arguments["input_ids"])  # rows of which there is nothing more to see
        self._open = torch.zeros(0, dtype=torch.bool)  # whether a generated row may be broken off

    def prepare(self, run: Run) -> None:
        """Note which rows read all there is, once their prompt is laid out: their answers are not broken off."""
        unread = [0] * len(self.whole)  # tokens of each row that it leaves out
        for span, used, full in zip(
            run.prompt.spans if run.prompt else (), run.used_counts, run.full_counts, strict=True
        ):
            unread[span.row] += full - used
        self.whole = [run.failure is not None or not count for count in unread]
        rows = range(len(unread)) if run.rows is None else run.rows
        self._open = torch.tensor([not self.whole[row] and row in self._rows for row in rows])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """As a logits processor, which changes nothing."""
        if len(self._steps) < COUNTED:
            self._steps.append(scores.float().log_softmax(dim=-1).amax(dim=-1))  # [B, V] -> [B]
            self._total = self._total.to(scores.device) + self._steps[-1]
        return scores

    def is_unsure(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """As a stopping criterion: what comes after a token makes an answer no surer."""
        return (self._total < self._least) & self._open.to(self._total.device)

    def measure(self, generated: Tensor) -> list[float]:
        """The log-probability of each row's answer `[B, n]`, up to where it would have ended alone."""
        logs = torch.stack(self._steps, dim=1).cpu()  # [B, s]
        ids, opened = generated[:, : logs.shape[1]].cpu(), self._open[:, None]
        end = torch.isin(ids, self._ends)
        # a row that a criterion of the caller has ended goes on with padding
        padding = torch.isin(ids, self._pad) & ~end
        so_far = logs.cumsum(dim=1)
        broken = (so_far < self._least) & opened
        last = end | broken
        after = (last.cumsum(dim=1) > last.long()) | (padding.cumsum(dim=1) > 0)
        return torch.where(after, 0.0, logs).sum(dim=1).tolist()


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
