"""An answer, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arr_coc.config import Grid, PromptBudget
from arr_coc.gaze.loop import Look, explain_looks
from arr_coc.inference.run import Run, TokenCount
from arr_coc.selectors.output import ARRCOCOutput

AnswerMode = Literal["auto", "full", "prune", "weight", "saccade"]
STAGES = ("encode", "select", "prefill", "decode")


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer and how it came about.

    Args:
        text (`str`): the model's answer.
        outputs (`tuple[ARRCOCOutput | None, ...]`): the layer's output for each picture; None from other selectors.
        kept (`tuple[tuple[Grid, ndarray], ...]`): for each picture, its grid and the cells whose tokens were read.
        tokens (`TokenCount`): `full` and `used`. If tokens are dropped inside the language model, `used` counts those
            that reach its later layers.
        strategy (`str`): how tokens were chosen: `"relevance"`, `"grid"`, `"all"`, `"weight"`, `"saccade"`, or the
            selector's name.
        reason (`str`): why, in words.
        timings_ms (`dict[str, float]`): milliseconds by stage: encode, select, prefill, decode. Answers of one batch
            share the times of the whole batch.
        words (`tuple[str, ...]`): the question, token by token.
        budget (`int`, `float`, `"auto"` or `dict`, *optional*): the budget in effect; None if all tokens stay.
        failure (`str`, *optional*): the error, if the selection failed and all tokens were kept.
        mode (`str`): how the pictures were read; where `"auto"` was asked for, what was chosen.
        looks (`tuple[Look, ...]`): the looks at the pictures, if there could be more than one. `tokens` then counts
            those of all looks.
    """

    text: str
    outputs: tuple[ARRCOCOutput | None, ...]
    kept: tuple[tuple[Grid, NDArray[np.int64]], ...]
    tokens: TokenCount
    strategy: str
    reason: str
    timings_ms: dict[str, float]
    words: tuple[str, ...] = ()
    budget: PromptBudget | None = None
    failure: str | None = None
    mode: str = "prune"
    looks: tuple[Look, ...] = ()

    @property
    def sure(self) -> float | None:
        """How sure the answer is, in (0, 1]; None if it was read in one look, without asking."""
        return self.looks[-1].sure if self.looks else None

    @property
    def output(self) -> ARRCOCOutput | None:
        """The layer's output for the first picture; None if it has none."""
        return self.outputs[0] if self.outputs else None

    def __str__(self) -> str:
        return self.text


def make_answer(run: Run, mode: AnswerMode, text: str, tokenizer: Any) -> Answer:
    """The answer of a run of one row; the tokenizer turns its question back into words."""
    strategy, reason = explain(run, mode)
    looks = run.looks[0] if run.looks else []
    if looks:
        reason = f"{explain_looks(looks)}; {reason}"
    return Answer(
        text=text,
        outputs=tuple(run.outputs),
        kept=tuple(run.kept),
        tokens=TokenCount(run.full, sum(look.tokens for look in looks) if looks else run.used),
        strategy=strategy,
        reason=reason,
        timings_ms={name: round(run.milliseconds.get(name, 0.0), 3) for name in STAGES},
        words=tuple(tokenizer.decode([word]).strip() for ids in run.question[:1] for word in ids.tolist()),
        budget=None if mode == "full" else run.budget,
        failure=run.failure,
        mode=mode,
        looks=tuple(looks),
    )


def explain(run: Run, mode: str) -> tuple[str, str]:
    """How the tokens were chosen, and why, in words."""
    if run.failure is not None:
        return "all", f"selection failed: {run.failure}"
    if mode == "full" or not run.outputs:
        return "all", "mode is full" if run.outputs else "there is no picture"
    if mode == "weight":
        return "weight", f"all {run.full} tokens stay, scaled by their relevance"
    if mode == "saccade":
        return "saccade", _explain_gaze(run)
    if run.inside_layer is not None:
        reason = f"{run.used} of {run.full} tokens go on after layer {run.inside_layer} of the language model"
        return run.selector, reason
    outputs = [output for output in run.outputs if output is not None]
    if not outputs:
        return run.selector, "this selector gives no reasons"
    strategies = dict.fromkeys(output.strategy[0] for output in outputs)
    reasons = dict.fromkeys(output.reason[0] for output in outputs)
    return ", ".join(strategies), "; ".join(reasons)


def _explain_gaze(run: Run) -> str:
    """The sizes of gestalt and saccades, and the layer's reasons."""
    saccades = sum(len(cells) for _, cells in run.kept)
    if saccades == run.full:
        return f"the budget covers all {run.full} tokens"
    sizes = f"the whole picture in {run.used - saccades} tokens, then {saccades} of {run.full} at full resolution"
    reasons = dict.fromkeys(output.reason[0].split(": ", 1)[-1] for output in run.outputs if output is not None)
    return "; ".join([sizes, *reasons])
