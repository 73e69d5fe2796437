"""Who is measured: selectors by the names under which they stand in a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arr_coc.config import EMBEDDED, EMBEDDED_MODEL, Budget, check_budget
from arr_coc.inference.load import load_selector
from arr_coc.prompting.settings import Mode
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.registry import list_selectors

OURS = "arr-coc"
FULL = "full"
UNTRAINED = "untrained"
SACCADE = "@saccade"


@dataclass(frozen=True, eq=False)
class Contender:
    """A selector with its name in the report, and the mode it is used in."""

    name: str
    selector: Selector
    mode: Mode = "prune"

    def budgets(self, budgets: Sequence[str]) -> list[str]:
        """The budgets it is measured at; all tokens are all tokens at any of them."""
        return [FULL] if self.name == FULL else list(budgets)


def known_contenders() -> list[str]:
    """Names that [`open_contenders`] knows, in the order of a report."""
    return [OURS, f"{OURS}{SACCADE}", UNTRAINED, *(name for name in list_selectors() if name != OURS)]


def open_contenders(names: Sequence[str], model: Any) -> list[Contender]:
    """Open selectors for a model.

    | name                  | is                                                                               |
    |-----------------------|----------------------------------------------------------------------------------|
    | `arr-coc`             | the trained layer of the embedded model; for other models the untrained one      |
    | `untrained`           | the layer as it is made, without any training                                    |
    | a registered selector | see [`list_selectors`]                                                           |
    | a directory, a Hub id | a trained layer                                                                  |
    | any `NAME@saccade`    | the same, in mode `"saccade"`                                                    |
    | `all`                 | all of the first three kinds, and `arr-coc@saccade`                              |

    `full` is always among them: what is lost is lost against it.
    """
    wanted = [one for name in names for one in (known_contenders() if name == "all" else [name])]
    unique = list(dict.fromkeys([FULL, *wanted]))
    trained = getattr(model.config, "name_or_path", None) == EMBEDDED_MODEL
    return [_open(name, model, trained) for name in unique]


def _open(name: str, model: Any, trained: bool) -> Contender:
    plain = name.removesuffix(SACCADE)
    place = {OURS: EMBEDDED if trained else OURS, UNTRAINED: OURS}.get(plain, plain)
    try:
        selector = load_selector(place, model)
    except ValueError as error:
        if str(error).startswith("no selector is named"):
            raise ValueError(f"no selector is named {name!r}; there are {', '.join(known_contenders())}") from None
        raise
    if name == plain:
        return Contender(name, selector)
    if not selector.can_saccade:
        raise ValueError(f"{plain} cannot look by saccades; {OURS}{SACCADE} can")
    return Contender(name, selector, "saccade")


def parse_budgets(text: str) -> list[str]:
    """Budgets as they were written, each once: shares of the tokens, or numbers of them.

    Example:

    ```python
    >>> from arr_coc.evaluation.contenders import parse_budgets
    >>> parse_budgets("0.5, 64,64")
    ['0.5', '64']

    ```
    """
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise ValueError("`budgets` is empty; give shares such as 0.25 or numbers such as 64, with commas")
    for part in found:
        read_budget(part)
    return found


def read_budget(text: str) -> Budget | None:
    """A budget from its writing; `full` has none."""
    if text == FULL:
        return None
    try:
        return check_budget(float(text) if "." in text else int(text))
    except ValueError as error:
        if "`budget`" in str(error):
            raise
        raise ValueError(f"`budgets` must be shares such as 0.25 or numbers such as 64, got {text!r}") from None
