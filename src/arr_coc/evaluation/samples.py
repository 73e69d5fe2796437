"""Asking a model about samples whose answers are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from PIL import Image

from arr_coc.config import Budget
from arr_coc.data.example import Example
from arr_coc.gaze.plan import Gaze
from arr_coc.inference.attach import attach
from arr_coc.inference.messages import stand_in
from arr_coc.prompting.layout import Mode
from arr_coc.prompting.prune import prepare
from arr_coc.prompting.question import ChatTokens
from arr_coc.selectors.contract import Selector
from arr_coc.selectors.rules import OracleSelector


@torch.no_grad()
def answer_samples(
    model: Any,
    processor: Any,
    samples: Iterable[Example],
    selector: Selector | None = None,
    budget: Budget | None = None,
    batch_size: int = 16,
    max_new_tokens: int = 16,
    query_layers: int = 0,
    mode: Mode = "prune",
    gaze: Gaze | None = None,
) -> list[str]:
    """Answers to samples, greedily, in batches.

    Args:
        model (`PreTrainedModel`): a supported model.
        processor (`ProcessorMixin`): its processor.
        samples (`Iterable[Example]`): pictures with questions; may be lazy.
        selector (`TokenSelector`, `PictureSelector` or `LanguageSelector`, *optional*): by default all tokens are
            read. An [`OracleSelector`] gets the samples' boxes.
        budget (`int`, `float` or `"auto"`, *optional*): visual tokens per picture.
        batch_size, max_new_tokens (`int`, *optional*): how many at once, and how long an answer may be.
        query_layers, mode, gaze (*optional*): as in [`~arr_coc.prepare`]; saccades are cut from the samples' pictures
            at their own resolution.
    """
    answers: list[str] = []
    stream = iter(samples)
    chat = ChatTokens.from_tokenizer(processor.tokenizer)
    shown = stand_in if mode == "saccade" else lambda picture: picture
    while batch := list(islice(stream, batch_size)):
        questions = [sample.question for sample in batch]
        inputs = make_inputs(model, processor, [shown(sample.picture) for sample in batch], questions)
        if isinstance(selector, OracleSelector):
            selector.boxes = [sample.boxes for sample in batch]
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        if selector is None:
            out = model.generate(**inputs, **options)
        elif mode == "saccade":
            pictures = [sample.picture for sample in batch]
            inputs = prepare(
                model, inputs, selector, mode=mode, budget=budget, query_layers=query_layers, chat=chat,
                on_error="raise", images=pictures, gaze=gaze,
            )  # fmt: skip
            out = model.generate(**inputs, **options)
        else:
            with attach(model, selector, budget=budget, chat=chat, query_layers=query_layers, on_error="raise"):
                out = model.generate(**inputs, **options)
        new = out[:, inputs["input_ids"].shape[1] :]
        answers += [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]
    return answers


def make_inputs(
    model: Any, processor: Any, pictures: Sequence[Image.Image], questions: Sequence[str]
) -> dict[str, Any]:
    """A batch of questions, each about its picture, as the model takes it, on its device."""
    inputs = processor.apply_chat_template(
        [conversation(picture, question) for picture, question in zip(pictures, questions, strict=True)],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"padding": True, "return_tensors": "pt"},
    ).to(model.device)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    return dict(inputs)


def conversation(picture: Image.Image, question: str) -> list[dict[str, Any]]:
    """A question about a picture, in the form of transformers."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def exact_match(samples: Sequence[Example], answers: Sequence[str]) -> float:
    """Share of answers that are exactly right."""
    if len(samples) != len(answers):
        raise ValueError(f"there are {len(samples)} samples and {len(answers)} answers")
    return sum(sample.answer == answer for sample, answer in zip(samples, answers, strict=True)) / len(samples)
