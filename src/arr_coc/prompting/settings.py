"""The settings of a shortened prompt, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from PIL import Image
from torch import Tensor

from arr_coc.config import Introspect, PromptBudget, check_introspect, check_prompt_budget
from arr_coc.gaze.loop import Looks
from arr_coc.gaze.plan import Gaze
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.picture_cache import EncodingCache
from arr_coc.prompting.question import ChatTokens
from arr_coc.selectors.contract import DEFAULT_RATIO, Selector

Mode = Literal["auto", "prune", "weight", "saccade"]
OnError = Literal["full", "raise"] | Callable[[Exception], object]


def usual_mode(mode: str | None, budget: PromptBudget | None, selector: Selector) -> str:
    """The mode of a call that may leave it open: then `"auto"`, or `"prune"` if it says how many tokens to keep.

    Args:
        mode (`str`, *optional*), budget (`int`, `float`, `"auto"` or `dict`, *optional*): of the call.
        selector (`Selector`): may have a budget of its own, other than the one that all have.

    Example:

    ```python
    >>> from arr_coc import create_selector
    >>> from arr_coc.prompting.settings import usual_mode
    >>> grid = create_selector("grid")
    >>> usual_mode(None, None, grid), usual_mode(None, 0.25, grid), usual_mode("saccade", None, grid)
    ('auto', 'prune', 'saccade')

    ```
    """
    named = budget is not None or getattr(selector, "default_budget", DEFAULT_RATIO) != DEFAULT_RATIO
    return mode or ("prune" if named else "auto")


@dataclass(frozen=True)
class Settings:
    """How a prompt is shortened; see [`~arr_coc.prepare`] for the other fields.

    Args:
        details (`bool`, *optional*, defaults to `False`): keep the layer's texture and the pull of each word.
        graphs (`bool`, *optional*, defaults to `True`): on CUDA, replay passes of the language model, and in mode
            `saccade` of the encoder, as graphs: equal up to rounding.
        introspect (`"auto"`, `"on"`, `"off"` or `int`, *optional*): by default the selector's own.
        looks (`Looks`, *optional*): look again until an answer is sure; by default one look, in mode `auto` two.
        share (`float`, *optional*, defaults to 1.0): of the budget, in saccades of the cells, that this look reads.
        leeway (`float`, *optional*, defaults to 1.0): how many times more or fewer tokens than that a selector may keep
            in mode `prune`, as the question needs.
        further (`bool`, *optional*, defaults to `False`): whether this is a look after the first of a call. What the
            model was asked in the first is then heard again, whatever the budget, and all cells are encoded together.
    """

    mode: Mode = "prune"
    budget: PromptBudget | None = None
    query: Sequence[Tensor] | None = None
    query_layers: int = 0
    chat: ChatTokens | None = None
    on_error: OnError = "full"
    images: Sequence[Image.Image | Tensor] | None = None
    gaze: Gaze | None = None
    details: bool = False
    encoded: Encodings | EncodingCache | None = None
    full_logits: bool = False
    graphs: bool = True
    introspect: Introspect | None = None
    looks: Looks | None = None
    share: float = 1.0
    leeway: float = 1.0
    further: bool = False

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if self.mode not in ("auto", "saccade") and (self.images is not None or self.gaze is not None):
            raise ValueError(f"`images` and `gaze` belong to mode 'saccade', got mode {self.mode!r}; drop them")
        if self.on_error not in ("full", "raise") and not callable(self.on_error):
            raise ValueError(f"`on_error` must be 'full' or 'raise', got {self.on_error!r}; or give a function")
        if isinstance(self.query_layers, bool) or not isinstance(self.query_layers, int) or self.query_layers < 0:
            raise ValueError(f"`query_layers` must be a whole number of at least 0, got {self.query_layers!r}")
        for name, kind in (("looks", Looks), ("gaze", Gaze)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"`{name}` must be a {kind.__name__}, got {value!r}; use {kind.__name__}()")
        if self.mode == "weight" and self.looks is not None:
            raise ValueError("mode 'weight' reads all tokens in one look; drop `looks`, or use 'auto'")
        if self.budget is not None:
            check_prompt_budget(self.budget)
        if self.introspect is not None:
            check_introspect(self.introspect)
