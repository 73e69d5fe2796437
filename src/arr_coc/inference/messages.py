"""Making prompts: pictures and a question -> a conversation -> inputs for the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from arr_coc.pixels.files import as_picture

PictureLike = str | Path | Image.Image | np.ndarray
Message = Mapping[str, Any]


def make_messages(
    pictures: PictureLike | Message | Iterable[PictureLike | Message], question: str | None
) -> list[dict[str, Any]]:
    """A conversation about one or several pictures; given messages, they are continued.

    Args:
        pictures (a path, a `PIL.Image.Image`, an array `[H, W, 3]` of bytes, several of them, or messages): messages
            are dictionaries with `role` and `content`.
        question (`str`, *optional*): may be left out if the messages contain it.
    """
    if question is not None and not isinstance(question, str):
        raise TypeError(f"the question must be a string, got {type(question).__name__}")
    if question is not None and not question.strip():
        raise ValueError("the question is empty; ask something about the picture")
    items: list[Any] = [pictures]
    if isinstance(pictures, Iterable) and not isinstance(pictures, str | np.ndarray | Mapping):
        items = list(pictures)
    if not items:
        raise ValueError("there is no picture; give at least one picture, or messages")
    if not all(isinstance(item, Mapping) for item in items):
        if question is None:
            raise ValueError("there is no question; ask something about the picture")
        shown: list[dict[str, Any]] = [{"type": "image", "image": as_picture(picture)} for picture in items]
        return [{"role": "user", "content": [*shown, {"type": "text", "text": question}]}]
    wrong = [item for item in items if not {"role", "content"} <= set(item)]
    if wrong:
        raise ValueError(f"a message needs `role` and `content`, got {', '.join(map(str, wrong[0])) or 'nothing'}")
    messages = [{**item, "content": _open_content(item["content"])} for item in items]
    if question is not None:
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
    return messages


def _open_content(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    opened = []
    for part in content:
        source = next((name for name in ("image", "path", "url") if name in part), None)
        is_picture = source is not None and part.get("type", "image") == "image"
        opened.append({"type": "image", "image": as_picture(part[source])} if is_picture else part)
    return opened


def check_messages(messages: list[dict[str, Any]], processor: Any) -> None:
    """Raise `ValueError` for clips that the processor cannot read, and for texts that contain chat markers."""
    parts = [part for message in messages for part in message["content"]]
    clips = any("video" in (part.get("type"), *part) for part in parts)
    if clips and getattr(processor, "video_processor", None) is None:
        raise ValueError("a clip needs torchvision, which is not installed; give pictures")
    markers = sorted({str(token) for token in processor.tokenizer.all_special_tokens}, key=len, reverse=True)
    for part in parts:
        text = part.get("text")
        used = next((marker for marker in markers if isinstance(text, str) and marker in text), None)
        if used is not None:
            raise ValueError(f"the text contains {used}, which is reserved for the chat template; leave it out")


def stand_in(picture: Image.Image, pixels: int = 2**16) -> Image.Image:
    """A small copy that holds a picture's place in the prompt; the model reads it only if the gaze fails."""
    scale = min(1.0, (pixels / (picture.width * picture.height)) ** 0.5)
    size = (max(64, round(picture.width * scale)), max(64, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)


def put_stand_ins(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """The conversation with a small copy of each picture, and the original pictures."""
    originals: list[Image.Image] = []
    smaller = []
    for message in messages:
        parts = []
        for part in message["content"]:
            if part.get("type") == "image":
                originals.append(part["image"])
                part = {**part, "image": stand_in(part["image"])}
            parts.append(part)
        smaller.append({**message, "content": parts})
    return smaller, originals


def make_inputs(
    processor: Any,
    conversations: Sequence[Sequence[Message]],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    answered: bool = False,
) -> dict[str, Any]:
    """The model's inputs for a batch of conversations.

    Args:
        processor (`ProcessorMixin`): the model's processor.
        conversations (`Sequence[Sequence[Mapping]]`): each a list of messages, see [`make_messages`].
        device (`torch.device`): the model's device.
        dtype (`torch.dtype`, *optional*): of the pixels; by default the processor's.
        answered (`bool`, *optional*, defaults to `False`): whether the last message is the answer, for training;
            otherwise the prompt ends where the model's answer begins.
    """
    inputs = processor.apply_chat_template(
        [list(conversation) for conversation in conversations],
        add_generation_prompt=not answered,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"padding": True, "return_tensors": "pt"},
    ).to(device)
    if dtype is not None and "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    return dict(inputs)


def count_text(processor: Any, conversation: Sequence[Message], *, answered: bool) -> int:
    """Number of tokens in a conversation, where each picture counts as one."""
    text = processor.apply_chat_template(list(conversation), tokenize=False, add_generation_prompt=not answered)
    return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
