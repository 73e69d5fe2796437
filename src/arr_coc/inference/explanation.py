"""How an answer came about, in words."""

from __future__ import annotations

from arr_coc.prompting.settings import Prepared
from arr_coc.selectors.contract import LanguageSelector, Selector
from arr_coc.selectors.registry import selector_name


def explain_answer(prepared: Prepared, mode: str, selector: Selector) -> tuple[str, str]:
    """Strategy and reason of an answer, in words."""
    if prepared.failure is not None:
        return "all", f"selection failed: {prepared.failure}"
    if mode == "full" or not prepared.outputs:
        return "all", "mode is full" if prepared.outputs else "there is no picture"
    if mode == "weight":
        return "weight", f"all {prepared.full} tokens stay, scaled by their relevance"
    if mode == "saccade":
        return "saccade", _explain_gaze(prepared)
    if isinstance(selector, LanguageSelector):
        kept = f"{prepared.used} of {prepared.full} tokens go on after layer {selector.layer} of the language model"
        return selector_name(selector), kept
    seen = [output for output in prepared.outputs if output is not None]
    if not seen:
        return selector_name(selector), "this selector gives no reasons"
    strategies = dict.fromkeys(output.strategy[0] for output in seen)
    reasons = dict.fromkeys(output.reason[0] for output in seen)
    return ", ".join(strategies), "; ".join(reasons)


def _explain_gaze(prepared: Prepared) -> str:
    """What was looked at, and why, in words."""
    sharp = sum(len(cells) for _, cells in prepared.kept)
    if sharp == prepared.full:
        return f"the budget covers all {prepared.full} tokens"
    whole = f"the whole picture in {prepared.used - sharp} tokens, then {sharp} of {prepared.full} at full resolution"
    reasons = dict.fromkeys(output.reason[0].split(": ", 1)[-1] for output in prepared.outputs if output is not None)
    return "; ".join([whole, *reasons])
