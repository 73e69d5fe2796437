"""Contenders: the selectors that an evaluation compares, by their names in the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from arr_coc.config import TRAINED, UNTRAINED, Budget, Introspect, check_budget
from arr_coc.evaluation.wrong_question import WRONG
from arr_coc.gaze.compression import Compress
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.load import current_name, is_embedded, load_selector, selector_names
from arr_coc.prompting.settings import Mode
from arr_coc.selectors.contract import LanguageSelector, Selector, TokenSelector
from arr_coc.selectors.registry import UnknownSelectorError, create_selector, find_class, list_selectors

OURS = TRAINED
FULL = "full"
SACCADE = "@saccade"
ASKED = "@asked"
AUTO = "@auto"
COMPRESSED = {f"@{how}": how for how in get_args(Compress)}


@dataclass(frozen=True, eq=False)
class Contender:
    """A selector with its name in the results, its mode, and whether it is asked another picture's question.

    `seed_of` is the row of the report that it is one seed of, if it is. `introspect` says whether the model is asked
    where it looks; None leaves that to the selector. `gaze` belongs to mode `"saccade"`.
    """

    name: str
    selector: Selector
    mode: Mode = "prune"
    wrong: bool = False
    seed_of: str | None = None
    introspect: Introspect | None = None
    gaze: Gaze | None = None

    @property
    def row(self) -> str:
        """The row of the report that shows it."""
        return self.seed_of or self.name

    def budgets(self, budgets: Sequence[str]) -> list[str]:
        """The budgets to measure it at; `full` always reads all tokens, so it is measured once."""
        return [FULL] if self.name == FULL else list(budgets)


def known_contenders(embedded: bool = True) -> list[str]:
    """Names that [`open_contenders`] accepts, in report order, for the embedded model or for another."""
    ours = TRAINED if embedded else UNTRAINED
    first = [ours, f"{ours}{SACCADE}", f"{ours}{WRONG}", UNTRAINED]
    return list(dict.fromkeys([*first, *selector_names(embedded)]))


def find_ours(names: Iterable[str], seeded: Iterable[str] = ()) -> str:
    """The row that a report compares the others with.

    The trained layer; if it is not there, the first row with seeds of its own (`seeded`), or the untrained layer.
    """
    named = set(names)
    for name in (TRAINED, *seeded, UNTRAINED):
        if name in named:
            return name
    return TRAINED


def rename(name: str, embedded: bool) -> str:
    """The name of a contender that may be given by another one: `untrained`, or `embedded` for the embedded model.

    Example:

    ```python
    >>> from arr_coc.evaluation.contenders import rename
    >>> rename("untrained@saccade", embedded=False), rename("embedded", embedded=True)
    ('arr-coc-untrained@saccade', 'arr-coc')

    ```
    """
    plain, suffix = split_name(name)
    if plain == "untrained":
        return UNTRAINED + suffix
    return (current_name(plain) if embedded else plain) + suffix


def split_name(name: str) -> tuple[str, str]:
    """The name of a selector, and what follows it: `@asked`, `@auto`, `@saccade`, `@wrong`, several, or nothing.

    Example:

    ```python
    >>> from arr_coc.evaluation.contenders import split_name
    >>> split_name("arr-coc@saccade@wrong"), split_name("runs/at@home")
    (('arr-coc', '@saccade@wrong'), ('runs/at@home', ''))

    ```
    """
    plain = name
    while plain.endswith((WRONG, SACCADE, ASKED, AUTO, *COMPRESSED)):
        plain = plain[: plain.rindex("@")]
    return plain, name[len(plain) :]


def open_contenders(
    names: Sequence[str], model: Any, seeds: Mapping[str, Sequence[str]] | None = None
) -> list[Contender]:
    """Open selectors for a model.

    `seeds` are the selectors behind each row that has some, see [`~arr_coc.evaluation.seeds.read_seeds`].

    | name                  | is                                                                               |
    |-----------------------|----------------------------------------------------------------------------------|
    | `arr-coc`             | the layer that was trained for the model, which the embedded model has           |
    | `arr-coc-untrained`   | the layer with its initial weights                                               |
    | a registered selector | see [`list_selectors`]                                                           |
    | `fastv:3`             | one inside the language model, after another number of layers than its own       |
    | a directory, a Hub id | a trained layer                                                                  |
    | any `NAME@saccade`    | the same, in mode `"saccade"`                                                    |
    | any `NAME@pool`       | the same with a compressed gestalt; also `@merge`, and `@conv` if it learned it  |
    | any `NAME@auto`       | the same, in mode `"auto"`: a budget is what the last look may read              |
    | any `NAME@asked`      | an ARR-COC layer that asks the model where it looks, at every budget             |
    | any `NAME@wrong`      | the same, asked another picture's question: a control                            |
    | `all`                 | all names of the first three kinds, and of the first the other two forms         |
    | `wrong`               | the control of every selector that reads the question                            |

    `full` is always included: losses are measured against it.
    """
    embedded = is_embedded(model)
    known = known_contenders(embedded)
    groups = {"all": known, "wrong": [f"{name}{WRONG}" for name in known if "@" not in name and _reads(name)]}
    wanted = [each for name in names for each in groups.get(name, [name])]
    unique = list(dict.fromkeys([FULL, *(rename(name, embedded) for name in wanted)]))
    contenders = []
    for name in unique:
        plain, suffix = split_name(name)
        places = (seeds or {}).get(plain)
        if places is None:
            contenders.append(_open(name, model, known))
            continue
        for number, place in enumerate(places, start=1):
            opened = _open(rename(place, embedded) + suffix, model, known)
            contenders.append(replace(opened, name=f"{plain}#{number}{suffix}", seed_of=name))
    return contenders


def open_contender(name: str, model: Any) -> Contender:
    """Open one selector for a model, by a name that [`open_contenders`] knows, but for those of groups."""
    embedded = is_embedded(model)
    return _open(rename(name, embedded), model, known_contenders(embedded))


def _reads(name: str) -> bool:
    """Whether a selector of a known name reads the question."""
    return name == TRAINED or find_class(name).reads_question


def _open_selector(name: str, model: Any) -> Selector:
    """A selector by its name; one inside the language model may have its number of layers behind it."""
    plain, _, layer = name.partition(":")
    if not layer or plain not in list_selectors():
        return load_selector(name, model)
    if not issubclass(find_class(plain), LanguageSelector) or not layer.isdigit():
        raise ValueError(f"{name!r} names no layer; only a selector inside the language model has one, as fastv:3")
    selector: Selector = create_selector(plain, layer=int(layer))
    return selector


def _open(name: str, model: Any, known: Sequence[str]) -> Contender:
    plain, suffix = split_name(name)
    try:
        selector = _open_selector(plain, model)
    except UnknownSelectorError:
        raise ValueError(f"no selector is named {name!r}; use {', '.join(known)}") from None
    compress = [how for ending, how in COMPRESSED.items() if ending in suffix]
    if (SACCADE in suffix or compress) and not selector.can_saccade:
        raise ValueError(f"{plain} has no saccade mode, got {name!r}; use {plain} or {known[1]}")
    if AUTO in suffix and SACCADE in suffix:
        raise ValueError(f"{name!r} names two modes; use {plain}{AUTO} or {plain}{SACCADE}")
    if AUTO in suffix and not isinstance(selector, TokenSelector):
        raise ValueError(f"{plain} picks no tokens of a picture, so it takes one look, got {name!r}; use {plain}")
    if WRONG in suffix and not selector.reads_question:
        raise ValueError(f"{plain} does not read the question, got {name!r}; use {plain}")
    if ASKED in suffix and getattr(selector, "default_introspect", None) is None:
        raise ValueError(f"{plain} does not ask the model, or always does, got {name!r}; use {plain}")
    if len(compress) > 1:
        raise ValueError(f"a gestalt is compressed in one way, got {name!r}; use {plain}@{compress[0]}")
    if compress == ["conv"] and getattr(selector, "compressor", None) is None:
        raise ValueError(f"{plain} has learned no compression, got {name!r}; use {plain}@pool or {plain}@merge")
    mode: Mode = "auto" if AUTO in suffix else "saccade" if SACCADE in suffix or compress else "prune"
    gaze = Gaze(compress=compress[0]) if compress else None
    return Contender(name, selector, mode, WRONG in suffix, introspect="on" if ASKED in suffix else None, gaze=gaze)


def parse_budgets(text: str) -> list[str]:
    """Split a comma-separated list of budgets, shares, numbers of tokens or `auto`, and drop repeats.

    Example:

    ```python
    >>> from arr_coc.evaluation.contenders import parse_budgets
    >>> parse_budgets("0.5, 64,64")
    ['0.5', '64']

    ```
    """
    budgets = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not budgets:
        raise ValueError("`budgets` is empty; give shares such as 0.25, numbers such as 64, or auto, with commas")
    for budget in budgets:
        read_budget(budget)
    return budgets


def read_budget(text: str) -> Budget | None:
    """Parse one budget; `full` gives None."""
    if text == FULL:
        return None
    if text == "auto":
        return "auto"
    try:
        return check_budget(float(text) if "." in text else int(text))
    except ValueError as error:
        if "`budget`" in str(error):
            raise
        raise ValueError(f"`budgets` must be shares such as 0.25, numbers such as 64, or auto, got {text!r}") from None
