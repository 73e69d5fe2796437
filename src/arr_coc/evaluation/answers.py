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
from arr_coc.inference.messages import Message, check_messages, make_inputs, make_messages, put_stand_ins
from arr_coc.inference.session import Session
from arr_coc.prompting.question import ChatTokens
from arr_coc.prompting.settings import Mode, Settings
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.rules import FullSelector, OracleSelector

# A picture, or a clip as a part of a message.
Shown = Image.Image | Message
# In tokens: the worlds' longest answers are texts of twenty characters, read one by one.
LONGEST_ANSWER = 32


@torch.no_grad()
def answer_examples(
    model: Any,
    processor: Any,
    examples: Iterable[Example],
    selector: Selector | None = None,
    budget: Budget | None = None,
    batch_size: int = 16,
    max_new_tokens: int = LONGEST_ANSWER,
    query_layers: int = 0,
    mode: Mode = "prune",
    gaze: Gaze | None = None,
) -> list[str]:
    """Answer examples greedily.

    Args:
        model (`PreTrainedModel`): a supported model.
        processor (`ProcessorMixin`): its processor.
        examples (`Iterable[Example]`): pictures or clips with questions; may be lazy.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`, *optional*): by default all tokens are
            read. An [`OracleSelector`] gets the boxes of the examples, which hold in every frame of a clip.
        budget (`int`, `float` or `"auto"`, *optional*): visual tokens per picture or clip.
        batch_size, max_new_tokens (`int`, *optional*): examples per batch, and the longest answer.
        query_layers, mode, gaze (*optional*): as in [`~arr_coc.prepare`]; saccades are cut from the pictures at full
            resolution, and not from clips.

    Returns:
        `list[str]`: one answer per example.
    """
    family, chat = open_family(model), ChatTokens.from_tokenizer(processor.tokenizer)
    stream, answers = iter(examples), list[str]()
    while batch := list(islice(stream, batch_size)):
        shown = [show_example(example) for example in batch]
        asked = zip(shown, batch, strict=True)
        conversations = [make_messages(picture, example.question) for picture, example in asked]
        for messages in conversations:
            check_messages(messages, processor, still=mode == "saccade")
        images: list[Image.Image] | None = None
        if mode == "saccade":
            conversations, images = put_stand_ins(conversations)
        tell_boxes(selector, batch, shown)
        settings = Settings(mode, budget, None, query_layers, chat, "raise", images, gaze)
        session = Session(family, selector or FullSelector(), settings)
        inputs = make_inputs(processor, conversations, model.device, model.dtype)
        run = session.generate({**inputs, "max_new_tokens": max_new_tokens, "do_sample": False})
        answers += decode(processor, run.generated)
    return answers


def show_example(example: Example) -> Shown:
    """The picture of an example, or its clip as a part of a message; opened now."""
    opened = example.open()
    return opened if isinstance(opened, Image.Image) else {"type": "video", "video": opened, "fps": example.fps}


def tell_boxes(selector: Selector | None, examples: Sequence[Example], shown: Sequence[Shown]) -> None:
    """Give an oracle the boxes of the examples; selectors are asked about pictures first, then about clips."""
    if isinstance(selector, OracleSelector):
        in_turn = sorted(range(len(examples)), key=lambda place: not isinstance(shown[place], Image.Image))
        selector.boxes = [list(examples[place].boxes) for place in in_turn]


def decode(processor: Any, generated: Any) -> list[str]:
    """Decode generated tokens `[B, n]`."""
    return [text.strip() for text in processor.batch_decode(generated, skip_special_tokens=True)]


def exact_match(examples: Sequence[Example], answers: Sequence[str]) -> float:
    """Share of answers that match exactly."""
    if len(examples) != len(answers):
        raise ValueError(f"each example needs one answer, got {len(answers)} answers for {len(examples)} examples")
    return sum(example.answer == answer for example, answer in zip(examples, answers, strict=True)) / len(examples)
