"""Answer examples with a model, in batches, and compare with the known answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from PIL import Image

from arr_coc.config import Budget
from arr_coc.data.example import Example
from arr_coc.families.family import open_family
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.messages import make_inputs, make_messages, put_stand_ins
from arr_coc.inference.session import Session
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Mode, Settings
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.rules import FullSelector, OracleSelector


@torch.no_grad()
def answer_examples(
    model: Any,
    processor: Any,
    examples: Iterable[Example],
    selector: Selector | None = None,
    budget: Budget | None = None,
    batch_size: int = 16,
    max_new_tokens: int = 16,
    query_layers: int = 0,
    mode: Mode = "prune",
    gaze: Gaze | None = None,
) -> list[str]:
    """Answer examples greedily.

    Args:
        model (`PreTrainedModel`): a supported model.
        processor (`ProcessorMixin`): its processor.
        examples (`Iterable[Example]`): pictures with questions; may be lazy.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`, *optional*): by default all tokens are
            read. An [`OracleSelector`] gets the boxes of the examples.
        budget (`int`, `float` or `"auto"`, *optional*): visual tokens per picture.
        batch_size, max_new_tokens (`int`, *optional*): examples per batch, and the longest answer.
        query_layers, mode, gaze (*optional*): as in [`~arr_coc.prepare`]; saccades are cut from the pictures at full
            resolution.

    Returns:
        `list[str]`: one answer per example.
    """
    family, chat = open_family(model), ChatTokens.from_tokenizer(processor.tokenizer)
    stream, answers = iter(examples), list[str]()
    while batch := list(islice(stream, batch_size)):
        conversations = [make_messages(example.picture, example.question) for example in batch]
        images: list[Image.Image] | None = None
        if mode == "saccade":
            conversations, images = put_stand_ins(conversations)
        tell_boxes(selector, batch)
        settings = Settings(mode, budget, None, query_layers, chat, "raise", images, gaze)
        session = Session(family, selector or FullSelector(), settings)
        inputs = make_inputs(processor, conversations, model.device, model.dtype)
        run = session.generate({**inputs, "max_new_tokens": max_new_tokens, "do_sample": False})
        answers += decode(processor, run.generated)
    return answers


def tell_boxes(selector: Selector | None, examples: Sequence[Example]) -> None:
    """Give an oracle the boxes of the examples."""
    if isinstance(selector, OracleSelector):
        selector.boxes = [list(example.boxes) for example in examples]


def decode(processor: Any, generated: Any) -> list[str]:
    """Decode generated tokens `[B, n]`."""
    return [text.strip() for text in processor.batch_decode(generated, skip_special_tokens=True)]


def exact_match(examples: Sequence[Example], answers: Sequence[str]) -> float:
    """Share of answers that match exactly."""
    if len(examples) != len(answers):
        raise ValueError(f"each example needs one answer, got {len(answers)} answers for {len(examples)} examples")
    return sum(example.answer == answer for example, answer in zip(examples, answers, strict=True)) / len(examples)
