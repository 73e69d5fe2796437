"""Many questions in batches: picture files are opened ahead, and what fails belongs to its question alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

import torch

from arr_coc.inference.answer import Answer
from arr_coc.inference.messages import Asked, open_asked
from arr_coc.prompting.settings import OnError, Settings
from arr_coc.runtime.read_ahead import read_ahead

Messages = list[dict[str, Any]]
MakePrompt = Callable[[Sequence[Messages]], tuple[dict[str, Any], Settings]]
Generate = Callable[[dict[str, Any], Settings], list[Answer]]


@torch.no_grad()
def answer_batches(
    questions: Iterable[Asked], batch_size: int, make_prompt: MakePrompt, generate: Generate
) -> Generator[Answer | Exception]:
    """The answer to each question in order, or why it cannot be asked.

    Args:
        questions (`Iterable`): as in [`ARRCOCQwen.answer_many`].
        batch_size (`int`): questions in a batch.
        make_prompt (`Callable`): the model's inputs for some conversations, and the settings of their call.
        generate (`Callable`): one answer for each row of such inputs.
    """
    with closing(read_ahead(map(_try_to_open, questions), ahead=batch_size)) as opened:
        while batch := list(islice(opened, batch_size)):
            conversations = [conversation for conversation in batch if not isinstance(conversation, Exception)]
            answers = iter(_answer_batch(conversations, make_prompt, generate))
            yield from [item if isinstance(item, Exception) else next(answers) for item in batch]


def _answer_batch(
    conversations: Sequence[Messages], make_prompt: MakePrompt, generate: Generate
) -> list[Answer | Exception]:
    """One answer for each conversation, or why it cannot be asked."""
    if not conversations:
        return []
    alone = len(conversations) == 1
    try:
        inputs, settings = make_prompt(conversations)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # such as a picture of a shape that the processor refuses
        if alone:
            return [error]
    else:
        on_error = _tell(settings.on_error) if alone else _stop
        try:
            return [*generate(inputs, replace(settings, on_error=on_error))]
        except _SelectionFailed as failed:
            if alone:
                return [failed.error]
    # which question it was shows when each is asked alone
    return [_answer_batch([conversation], make_prompt, generate)[0] for conversation in conversations]


class _SelectionFailed(Exception):
    """The selection failed, and no tokens are to be kept instead."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _stop(error: Exception) -> NoReturn:
    raise _SelectionFailed(error) from error


def _tell(on_error: OnError) -> OnError:
    """The same `on_error`, but what it raises can be told from errors that do not belong to one question."""
    if on_error == "raise":
        return _stop
    if not callable(on_error):
        return on_error

    def call(error: Exception) -> None:
        try:
            on_error(error)
        except Exception as raised:
            _stop(raised)

    return call


def _try_to_open(asked: Asked) -> Messages | Exception:
    """The conversation with its pictures opened, or why that is not possible."""
    try:
        return open_asked(asked)
    except Exception as error:
        return error


def raise_exceptions(answers: Generator[Answer | Exception]) -> Iterator[Answer]:
    """The answers; an exception among them is raised in its turn."""
    with closing(answers):
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer
