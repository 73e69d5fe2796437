"""The control `wrong`: a selector is asked another picture's question, the model its own.

If a selector needs the question, it must answer worse with a wrong one. If it does not, it shows: then the same tokens
would have been kept whatever was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from arr_coc.evaluation.tasks import Task
from arr_coc.selectors.contract import GlanceSelector, PictureSelector, Selector

WRONG = "@wrong"


def other_question(task: Task, number: int) -> str:
    """The question of the next example of a task that asks something else; of the next at all if none does.

    Example:

    ```python
    >>> from arr_coc.evaluation.tasks import open_task
    >>> from arr_coc.evaluation.wrong_question import other_question
    >>> task = open_task("scenes/color", limit=3)
    >>> [item.question for item in task]
    ['what color is the circle?', 'what color is the circle?', 'which color is the square?']
    >>> other_question(task, 0)
    'which color is the square?'

    ```
    """
    own = task[number].question
    for step in range(1, len(task)):
        question = task[(number + step) % len(task)].question
        if question != own:
            return question
    return own


def record_choices(selector: Selector) -> tuple[Selector, Callable[[], Selector]]:
    """A copy of a selector that remembers what it chose, and a function that makes one which chooses the same again.

    The second must be asked in the same order about the same pictures; what it is told besides has no effect.
    """
    name = "plan" if isinstance(selector, GlanceSelector | PictureSelector) else "select"
    choices: list[Any] = []

    def remember(*arguments: Any, **options: Any) -> Any:
        choices.append(getattr(selector, name)(*arguments, **options))
        return choices[-1]

    def repeat() -> Selector:
        remembered = iter(choices)
        return _with_method(selector, name, lambda *arguments, **options: next(remembered))

    return _with_method(selector, name, remember), repeat


def _with_method(selector: Selector, name: str, method: Callable[..., Any]) -> Selector:
    """A shallow copy, which shares all weights, with another method."""
    other = copy(selector)
    object.__setattr__(other, name, method)
    return other
