"""Making prompts: pictures and a question -> a conversation -> inputs for the model; texts contain no markers."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchEncoding

from arr_coc.inference.processors.clips import FPS, check_file
from arr_coc.pixels.files import as_picture

PictureLike = str | Path | Image.Image | np.ndarray
Message = Mapping[str, Any]
# Pictures and a question, or a conversation that has both.
Asked = tuple[PictureLike | Message | Iterable[PictureLike | Message] | None, str] | Message | Iterable[Message]


def make_messages(
    pictures: PictureLike | Message | Iterable[PictureLike | Message], question: str | None
) -> list[dict[str, Any]]:
    """A conversation about one or several pictures or clips; given messages, they are continued.

    A list of pictures is several pictures. A clip is `{"type": "video", "video": frames}`, in place of a picture or as
    a part of a message, where `frames` is a list of pictures of one size or an array `[T, H, W, 3]` of bytes, and
    `"fps": 4` beside them says how many come a second, if not 2. All are used. A video file in place of them needs
    torchvision and torchcodec.

    Args:
        pictures (a path, a `PIL.Image.Image`, an array `[H, W, 3]` of bytes, a clip, several of them, or messages):
            messages are dictionaries with `role` and `content`.
        question (`str`, *optional*): may be left out if the messages contain it.

    Example:

    ```python
    >>> from PIL import Image
    >>> from arr_coc.inference.messages import make_messages
    >>> frames = [Image.new("RGB", (64, 48), color) for color in ("red", "blue")]
    >>> [message] = make_messages({"type": "video", "video": frames, "fps": 4}, "what comes after red?")
    >>> [part["type"] for part in message["content"]]
    ['video', 'text']

    ```
    """
    if question is not None:
        check_question(question)
    items: list[Any] = [pictures]
    if isinstance(pictures, Iterable) and not isinstance(pictures, str | np.ndarray | Mapping):
        items = list(pictures)
    if not items:
        raise ValueError("there is no picture; give at least one picture, or messages")
    if not all(isinstance(item, Mapping) and not _is_clip(item) for item in items):
        if question is None:
            raise ValueError("there is no question; ask something about the picture")
        shown = _open_content(item if _is_clip(item) else {"type": "image", "image": item} for item in items)
        return [{"role": "user", "content": [*shown, {"type": "text", "text": question}]}]
    wrong = [item for item in items if not {"role", "content"} <= set(item)]
    if wrong:
        raise ValueError(f"a message needs `role` and `content`, got {', '.join(map(str, wrong[0])) or 'nothing'}")
    messages = [{**item, "content": _open_content(item["content"])} for item in items]
    if question is not None:
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
    return messages


def _is_clip(item: object) -> bool:
    """Whether this is a clip in place of a picture, not a message."""
    return isinstance(item, Mapping) and "video" in item and "role" not in item


def check_question(question: object) -> None:
    """Raise `TypeError` or `ValueError` unless this is the text of a question."""
    if not isinstance(question, str):
        raise TypeError(f"the question must be a string, got {type(question).__name__}")
    if not question.strip():
        raise ValueError("the question is empty; ask something about the picture")


def open_asked(asked: Asked) -> list[dict[str, Any]]:
    """A conversation from a pair of pictures and a question, or from messages; the pictures are opened."""
    items: list[Any] = [asked]
    if isinstance(asked, Iterable) and not isinstance(asked, str | np.ndarray | Mapping):
        items = list(asked)
    if items and all(isinstance(item, Mapping) for item in items):
        return make_messages(items, None)
    if len(items) != 2:
        given = type(asked).__name__ + (f" of {len(items)}" if isinstance(asked, list | tuple) else "")
        raise TypeError(f"a question must be a pair (pictures, text) or a list of messages, got {given}")
    pictures, question = items
    check_question(question)
    if pictures is None:
        return make_messages({"role": "user", "content": question}, None)
    return make_messages(pictures, question)


def _open_content(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        raise TypeError(f"`content` of a message must be a string or a list of parts, got {type(content).__name__}")
    opened = []
    for part in content:
        if not isinstance(part, Mapping):
            raise TypeError(
                "a part of a message must be a dictionary, such as {'type': 'text', 'text': 'what is this?'}, got "
                f"{type(part).__name__}"
            )
        if part.get("video") is not None and part.get("type", "video") == "video":
            opened.append({**part, "type": "video", "video": _open_clip(part["video"])})
        elif part.get("type", "image") in ("image", "image_url") and (found := _find_picture(part)) is not None:
            opened.append({"type": "image", "image": as_picture(found)})
        elif part.get("type") in ("image", "image_url"):
            raise ValueError(f"a part of type {part['type']!r} must have its picture, as `image`, got none")
        else:
            opened.append(dict(part))
    return opened


def _find_picture(part: Message) -> Any:
    """The picture of a part, under one of the names that transformers and OpenAI give it; None if there is none."""
    for name in ("image", "path", "url", "base64", "image_url"):
        found = part.get(name)
        if isinstance(found, Mapping):
            found = found.get("url")
        if name == "base64" and isinstance(found, str) and not found.startswith("data:"):
            found = f"data:;base64,{found}"
        if found is not None:
            return found
    return None


def _open_clip(clip: Any) -> Any:
    """The pictures of a clip; an array or the name of a video file stays as it is."""
    if isinstance(clip, str | Path):
        if Path(clip).is_dir():
            raise ValueError(f"a clip must be a list of pictures, got the folder {clip}; list its files in their order")
        return str(clip)
    if isinstance(clip, np.ndarray | torch.Tensor):
        if clip.ndim != 4 or not len(clip):
            raise ValueError(f"a clip must have shape [T, H, W, 3] or [T, 3, H, W], got {tuple(clip.shape)}")
        return clip
    if isinstance(clip, Mapping) or not isinstance(clip, Iterable):
        raise TypeError(f"a clip must be a list of pictures, an array or a video file, got {type(clip).__name__}")
    pictures = [as_picture(frame) for frame in clip]
    sizes = sorted({picture.size for picture in pictures})
    if not sizes:
        raise ValueError("a clip must have at least one picture, got none")
    if len(sizes) > 1:
        given = " and ".join(f"{width}x{height}" for width, height in sizes[:2])
        raise ValueError(f"a clip must be pictures of one size, got {given}; resize them first")
    return pictures


def check_messages(messages: Iterable[Message], processor: Any, *, still: bool = False) -> None:
    """Raise `ValueError` for clips that the processor cannot read; with `still`, for any."""
    for clip in _clips(messages):
        if still:
            raise ValueError("mode 'saccade' takes still pictures only; for clips use mode 'prune'")
        if getattr(processor, "video_processor", None) is None:
            raise ValueError("this model reads no clips; give pictures")
        if not _is_shown(clip):
            file = clip.get("video") or clip.get("path") or clip.get("url")
            if file is None:
                raise ValueError("a part of type 'video' must have its pictures, or a file, as `video`, got nothing")
            check_file(file, processor)


def _clips(messages: Iterable[Message]) -> list[Message]:
    """The parts of messages that are clips."""
    parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
    return [part for part in parts if part.get("type") == "video"]


def _is_shown(clip: Message) -> bool:
    """Whether a clip is given as pictures, not as a file."""
    return clip.get("video") is not None and not isinstance(clip["video"], str)


def _describe_clips(conversations: Sequence[Sequence[Message]]) -> dict[str, Any]:
    """Options of the processor for clips given as pictures: all are used, at the rate that their part says."""
    clips = [clip for messages in conversations for clip in _clips(messages)]
    if not clips or not all(map(_is_shown, clips)):
        return {}  # a file says it itself
    about = []
    for clip in clips:
        frames, fps = len(clip["video"]), clip.get("fps")
        fps = FPS if fps is None else fps
        if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < float(fps) < math.inf:
            raise ValueError(f"`fps` of a clip must be a positive number, got {fps!r}")
        about.append({"total_num_frames": frames, "fps": float(fps), "frames_indices": list(range(frames))})
    return {"do_sample_frames": False, "video_metadata": about}


def stand_in(picture: Image.Image, pixels: int = 2**16) -> Image.Image:
    """A small copy that holds a picture's place in the prompt; the model reads it only if the gaze fails."""
    scale = min(1.0, (pixels / (picture.width * picture.height)) ** 0.5)
    size = (max(64, round(picture.width * scale)), max(64, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)


def put_stand_ins(
    conversations: Sequence[Sequence[Message]],
) -> tuple[list[list[dict[str, Any]]], list[Image.Image]]:
    """The conversations with a small copy of each picture and of each clip's frames, and the original pictures."""
    originals: list[Image.Image] = []

    def replace_picture(part: Message) -> Message:
        if part.get("type") == "video" and isinstance(part.get("video"), list):
            frames = part["video"]
            return {**part, "video": [stand_in(frame, 2**16 // len(frames)) for frame in frames]}
        if part.get("type") != "image":
            return part
        originals.append(part["image"])
        return {**part, "image": stand_in(part["image"])}

    smaller = [
        [{**message, "content": [replace_picture(part) for part in message["content"]]} for message in conversation]
        for conversation in conversations
    ]
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

    Markers of the chat template inside a text, such as `<|im_end|>` or `<|image_pad|>`, are read as plain text.

    Args:
        processor (`ProcessorMixin`): the model's processor.
        conversations (`Sequence[Sequence[Mapping]]`): each a list of messages, see [`make_messages`].
        device (`torch.device`): the model's device.
        dtype (`torch.dtype`, *optional*): of the pixels; by default the processor's.
        answered (`bool`, *optional*, defaults to `False`): whether the last message is the answer, for training;
            otherwise the prompt ends where the model's answer begins.
    """
    hidden, reader = _read_texts_plainly(processor, conversations)
    side = {} if answered else {"padding_side": "left"}  # generation continues at the last column
    try:
        inputs = reader.apply_chat_template(
            hidden,
            add_generation_prompt=not answered,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"padding": True, "return_tensors": "pt", **side, **_describe_clips(conversations)},
        ).to(device)
    except ValueError as error:
        if "aspect ratio" not in str(error):  # how processors refuse what is too long and thin
            raise
        raise ValueError(
            "a picture is too long and thin for this model: its long side must be less than 200 times the short one; "
            "crop it, or add a margin"
        ) from None
    for name in ("pixel_values", "pixel_values_videos"):
        if dtype is not None and name in inputs:
            inputs[name] = inputs[name].to(dtype)
    return dict(inputs)


def count_text(processor: Any, conversation: Sequence[Message], *, answered: bool) -> int:
    """Number of tokens in a conversation, where each picture counts as one."""
    hidden, reader = _read_texts_plainly(processor, [conversation])
    text = reader.apply_chat_template(hidden[0], tokenize=False, add_generation_prompt=not answered)
    tokenizer = reader.tokenizer
    return len(tokenizer.read(text) if isinstance(tokenizer, _PlainReader) else _encode(tokenizer, text))


# --- markers inside texts -------------------------------------------------------------------------------------------
#
# A text may contain what the chat template uses as a marker, such as `<|im_end|>` or `<|image_pad|>`. It is text there.
# Each such place becomes one private character before the template is applied, and the ids of its plain letters after.

# What a message holds that is not text.
_NO_TEXT = ("type", "image", "image_url", "video", "audio", "path", "url", "base64")
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


def encode_text(processor: Any, text: str) -> list[int]:
    """Ids of a text by itself. Markers inside it, such as `<|im_end|>`, are read as plain text."""
    [[hidden]], reader = _read_texts_plainly(processor, [[{"role": "user", "content": text}]])
    ids: list[int] = reader.tokenizer([hidden["content"]], add_special_tokens=False)["input_ids"][0]
    return ids


def _read_texts_plainly(
    processor: Any, conversations: Sequence[Sequence[Message]]
) -> tuple[list[list[dict[str, Any]]], Any]:
    """The conversations without markers in their texts, and a processor that puts the letters of these markers back."""
    texts = [text for conversation in conversations for message in conversation for text in _texts(message)]
    used = set("".join(texts)) | set(str(processor.chat_template))
    free = (chr(code) for codes in _PRIVATE for code in codes if chr(code) not in used)
    stand_ins: dict[str, str] = {}
    hidden: list[list[dict[str, Any]]] = []
    for conversation in conversations:
        hidden.append([])
        for message in conversation:
            markers = _markers(processor, special_only=message.get("role") == "assistant")
            hidden[-1].append(_hide_markers(message, list(markers), stand_ins, free))
            _check_hidden(processor.tokenizer, hidden[-1][-1], markers, set(stand_ins.values()))
    if not stand_ins:
        return hidden, processor
    letters = {stand_in: _encode_letters(processor, text) for text, stand_in in stand_ins.items()}
    reader = copy.copy(processor)
    reader.tokenizer = _PlainReader(processor.tokenizer, letters)
    return hidden, reader


def _markers(processor: Any, special_only: bool) -> dict[str, int]:
    """All markers with their ids. In answers others than special tokens, such as `<think>`, belong to the template."""
    tokenizer = processor.tokenizer
    named = [getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio")]
    markers = {str(token) for token in (*tokenizer.all_special_tokens, *named) if token}
    for token in tokenizer.added_tokens_decoder.values():
        # other added tokens are words that somebody gave the model
        if token.special or not (special_only or re.fullmatch(r"[\w\s]+", token.content)):
            markers.add(token.content)
    return {marker: tokenizer.convert_tokens_to_ids(marker) for marker in markers}


def _hide_markers(
    message: Message, markers: Sequence[str], stand_ins: dict[str, str], free: Iterator[str]
) -> dict[str, Any]:
    """The message with a private character for each marker in its texts; one across two texts becomes two."""
    texts = _texts(message)
    joined = "".join(texts)
    pattern = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)) or "(?!)"
    spans = [found.span() for found in re.finditer(pattern, joined)]
    if not spans:
        return dict(message)
    ends = itertools.accumulate(len(text) for text in texts)
    starts = iter([0, *ends])

    def hide(text: str) -> str:
        start = next(starts)
        pieces, done = [], 0
        for begin, end in spans:
            begin, end = max(begin - start, 0), min(end - start, len(text))
            if begin < end:
                letters = text[begin:end]
                if letters not in stand_ins:
                    stand_ins[letters] = next(free)
                pieces += [text[done:begin], stand_ins[letters]]
                done = end
        return "".join([*pieces, text[done:]])

    changed: dict[str, Any] = _change_texts(message, hide)
    return changed


def _texts(message: Message) -> list[str]:
    """All texts of a message, in their order."""
    texts: list[str] = []
    _change_texts(message, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: item if name in _NO_TEXT else _change_texts(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_change_texts(item, change) for item in value]
    return value


def _check_hidden(tokenizer: Any, message: Message, markers: Mapping[str, int], private: set[str]) -> None:
    """Raise `ValueError` if a text still gives a marker; some tokenizers read `<S>` as `<s>`."""
    for text in _texts(message):
        _check_plain(tokenizer, _encode(tokenizer, "".join(" " if c in private else c for c in text)), markers)


def _check_plain(tokenizer: Any, ids: Sequence[int], markers: Mapping[str, int]) -> None:
    used = set(ids) - {tokenizer.unk_token_id}  # which any text may give
    for marker, number in markers.items():
        if number in used:
            raise ValueError(f"this model's tokenizer cannot read {marker} as plain text; leave it out of the text")


def _encode(tokenizer: Any, text: str, around: bool = False) -> list[int]:
    """Ids of a text, without a change to the tokenizer: other threads may be using it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=around)
    else:
        ids = backend.encode(text, add_special_tokens=around).ids
    return ids


def _encode_letters(processor: Any, letters: str) -> list[int]:
    """Ids of the plain letters of a marker."""
    tokenizer = processor.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        ids: list[int] = tokenizer.encode(letters, add_special_tokens=False, split_special_tokens=True)
    else:  # not `split_special_tokens`, which here changes the tokenizer and spares tokens that are not special
        text = letters if backend.normalizer is None else backend.normalizer.normalize_str(letters)
        splits = [(text, ())] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
        ids = [token.id for split, _ in splits for token in backend.model.tokenize(split)]
    _check_plain(tokenizer, ids, _markers(processor, special_only=False))
    return ids


class _PlainReader:
    """A tokenizer that reads private characters as the plain letters for which they stand.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        letters (`Mapping[str, list[int]]`): private characters, and the ids of what they stand for.
    """

    def __init__(self, tokenizer: Any, letters: Mapping[str, list[int]]) -> None:
        self._tokenizer = tokenizer
        self._letters = letters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self,
        text: Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool = False,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        **_: Any,
    ) -> BatchEncoding:
        before, after = self._surroundings() if add_special_tokens else ([], [])
        rows = [[*before, *self.read(row), *after] for row in text]
        width = max(map(len, rows)) if padding else 0
        fill = self._tokenizer.pad_token_id or 0
        left = (padding_side or self._tokenizer.padding_side) == "left"
        ids, masks = [], []
        for row in rows:
            rest = max(width - len(row), 0)
            ids.append([fill] * rest + row if left else row + [fill] * rest)
            masks.append([0] * rest + [1] * len(row) if left else [1] * len(row) + [0] * rest)
        return BatchEncoding({"input_ids": ids, "attention_mask": masks}, tensor_type=return_tensors)

    def read(self, text: str) -> list[int]:
        """Ids of a text, without any before or after it."""
        pieces = filter(None, re.split(f"([{''.join(self._letters)}])", text))
        known = self._letters
        return [i for piece in pieces for i in (known[piece] if piece in known else _encode(self._tokenizer, piece))]

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer adds before and after every text."""
        inner = _encode(self._tokenizer, "a")
        whole = _encode(self._tokenizer, "a", around=True)
        start = next(place for place in range(len(whole)) if whole[place : place + len(inner)] == inner)
        return whole[:start], whole[start + len(inner) :]
