"""Contenders: the selectors that an evaluation compares, by their names in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arr_coc.config import EMBEDDED, EMBEDDED_MODEL, Budget, check_budget
from arr_coc.inference.load import load_selector
from arr_coc.prompting.settings import Mode
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.registry import UnknownSelectorError, list_selectors

OURS = "arr-coc"
FULL = "full"
UNTRAINED = "untrained"
SACCADE = "@saccade"


@dataclass(frozen=True, eq=False)
class Contender:
    """A selector with its name in the report and its mode."""

    name: str
    selector: Selector
    mode: Mode = "prune"

    def budgets(self, budgets: Sequence[str]) -> list[str]:
        """The budgets to measure it at; `full` always reads all tokens, so it is measured once."""
        return [FULL] if self.name == FULL else list(budgets)


def known_contenders() -> list[str]:
    """Names that [`open_contenders`] accepts, in report order."""
    return [OURS, f"{OURS}{SACCADE}", UNTRAINED, *(name for name in list_selectors() if name != OURS)]


def open_contenders(names: Sequence[str], model: Any) -> list[Contender]:
    """Open selectors for a model.

    | name                  | is                                                                               |
    |-----------------------|----------------------------------------------------------------------------------|
    | `arr-coc`             | the trained layer of the embedded model; for other models the untrained one      |
    | `untrained`           | the layer with its initial weights                                               |
    | a registered selector | see [`list_selectors`]                                                           |
    | a directory, a Hub id | a trained layer                                                                  |
    | any `NAME@saccade`    | the same, in mode `"saccade"`                                                    |
    | `all`                 | all names of the first three kinds, and `arr-coc@saccade`                        |

    `full` is always included: losses are measured against it.
    """
    wanted = [each for name in names for each in (known_contenders() if name == "all" else [name])]
    unique = list(dict.fromkeys([FULL, *wanted]))
    trained = getattr(model.config, "name_or_path", None) == EMBEDDED_MODEL
    return [_open(name, model, trained) for name in unique]


def _open(name: str, model: Any, trained: bool) -> Contender:
    plain = name.removesuffix(SACCADE)
    source = {OURS: EMBEDDED if trained else OURS, UNTRAINED: OURS}.get(plain, plain)
    try:
        selector = load_selector(source, model)
    except UnknownSelectorError:
        raise ValueError(f"no selector is named {name!r}; use {', '.join(known_contenders())}") from None
    if name == plain:
        return Contender(name, selector)
    if not selector.can_saccade:
        raise ValueError(f"{plain} has no saccade mode, got {name!r}; use {plain} or {OURS}{SACCADE}")
    return Contender(name, selector, "saccade")


def parse_budgets(text: str) -> list[str]:
    """Split a comma-separated list of budgets, shares or numbers of tokens, and drop repeats.

    Example:

    ```python
    >>> from arr_coc.evaluation.contenders import parse_budgets
    >>> parse_budgets("0.5, 64,64")
    ['0.5', '64']

    ```
    """
    budgets = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not budgets:
        raise ValueError("`budgets` is empty; give shares such as 0.25 or numbers such as 64, separated by commas")
    for budget in budgets:
        read_budget(budget)
    return budgets


def read_budget(text: str) -> Budget | None:
    """Parse one budget; `full` gives None."""
    if text == FULL:
        return None
    try:
        return check_budget(float(text) if "." in text else int(text))
    except ValueError as error:
        if "`budget`" in str(error):
            raise
        raise ValueError(f"`budgets` must be shares such as 0.25 or numbers such as 64, got {text!r}") from None
