"""Finding the question in a prompt, by the markers of the chat template.

The question is the text of the *last* user turn: what follows its last picture, or all of its text if nothing does or
the turn has no picture. The system prompt, the template's own words, special tokens and the answer (labels) never
count. A prompt without chat markers is treated as one turn.

The markers are those of the caller, or Qwen's where the model has Qwen's vocabulary, or those of the tokenizer beside
the model's weights. A chat whose markers remain unknown is read as one turn too, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arr_coc.families.family import Family
from arr_coc.runtime.tensors import upload

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

logger = logging.getLogger(__name__)
# The markers of chats and pictures are neighbours in Qwen's vocabularies; no two are farther apart than this.
_NEIGHBOURS = 16


@dataclass(frozen=True)
class ChatTokens:
    """Ids of the chat markers; the defaults are those of all Qwen2 and Qwen3 vocabularies.

    Args:
        start (`int`, *optional*): `<|im_start|>`.
        end (`int`, *optional*): `<|im_end|>`.
        user (`tuple[int, ...]`, *optional*): the role `user` after a start.
        newline (`int`, *optional*): the line break after the role.

    Example:

    ```python
    >>> from arr_coc import ChatTokens
    >>> ChatTokens().start
    151644

    ```
    """

    start: int = 151644
    end: int = 151645
    user: tuple[int, ...] = (872,)
    newline: int = 198

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatTokens:
        """The markers of a tokenizer, or a processor's tokenizer, with a chat template in Qwen's form."""
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if not hasattr(tokenizer, "convert_tokens_to_ids"):
            raise TypeError(f"`processor` must be the model's processor or tokenizer, got {type(tokenizer).__name__}")
        start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        if start is None or end is None or tokenizer.unk_token_id in (start, end):
            return cls()
        user, newline = (tokenizer.encode(text, add_special_tokens=False) for text in ("user", "\n"))
        return cls(start=start, end=end, user=tuple(user), newline=newline[-1] if newline else -1)


def find_question(
    ids: Ints, mask: Bools, visual: Bools, special: set[int], chat: ChatTokens, labels: Ints | None = None
) -> Bools:
    """Boolean mask `[B, L]` of the question's words.

    Args:
        ids (`ndarray` of shape `[B, L]`): the full prompt.
        mask (`ndarray` of shape `[B, L]`): False where padded.
        visual (`ndarray` of shape `[B, L]`): True at visual tokens.
        special (`set[int]`): ids that are not words.
        chat (`ChatTokens`): the chat markers.
        labels (`ndarray` of shape `[B, L]`, *optional*): -100 everywhere except in the answer.
    """
    words = mask & ~visual & ~np.isin(ids, sorted({chat.start, chat.end, *special}))
    question = np.zeros_like(words)
    for row in range(len(ids)):
        if labels is not None and (words[row] & (labels[row] == -100)).any():
            words[row] &= labels[row] == -100  # some collators label the whole prompt, which says nothing
        begin, end = _last_user_turn(ids[row], chat) or (0, len(ids[row]))
        turn = np.zeros_like(words[row])
        turn[begin:end] = True
        pictures = (visual[row] & turn).nonzero()[0]
        after = turn.copy()
        if len(pictures):
            after[: pictures[-1] + 1] = False
        asked = words[row] & after
        if not asked.any():
            asked = words[row] & turn
        if not asked.any():
            asked = words[row]
        question[row] = asked
    return question


def _last_user_turn(ids: Ints, chat: ChatTokens) -> tuple[int, int] | None:
    """Start and end of the last user turn's text; None if there are no markers."""
    for start in (ids == chat.start).nonzero()[0][::-1]:
        begin = int(start) + 1 + len(chat.user)
        if tuple(ids[start + 1 : begin]) == chat.user:
            if begin < len(ids) and ids[begin] == chat.newline:
                begin += 1
            ends = (ids[begin:] == chat.end).nonzero()[0]
            return begin, begin + int(ends[0]) if len(ends) else len(ids)
    return None


def choose_chat(chat: ChatTokens | None, processor: Any) -> ChatTokens | None:
    """The chat markers that a caller gave, by themselves or in a processor; None if neither."""
    return chat if chat is not None or processor is None else ChatTokens.from_tokenizer(processor)


def find_chat(family: Family) -> ChatTokens:
    """The chat markers of a model: Qwen's if it has that vocabulary, else those of the tokenizer beside its weights."""
    usual = ChatTokens()
    if abs(family.token_id("image") - usual.end) <= _NEIGHBOURS:
        return usual
    name = getattr(family.config, "name_or_path", "")
    return (_read_chat(name, getattr(family.config, "_commit_hash", None)) if name else None) or usual


@lru_cache(maxsize=16)
def _read_chat(name: str, commit: str | None) -> ChatTokens | None:
    """The markers of the tokenizer in a directory or in the Hub's cache; None if there is none. Asks no network."""
    from transformers import AutoTokenizer  # loaded only for models that need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=commit or "main", local_files_only=True)
    except Exception as error:  # files that others wrote fail in many ways, and all mean that there is no tokenizer
        logger.debug("no tokenizer beside %s: %s", name, error)
        return None
    return ChatTokens.from_tokenizer(tokenizer)


def _turn_ends(family: Family) -> list[int]:
    """Ids after which the model stops, and which so end a turn of a chat."""
    ends: set[int] = set()
    configs = getattr(family.target, "generation_config", None), family.config, family.config.get_text_config()
    for value in (getattr(config, "eos_token_id", None) for config in configs):
        if value is not None:
            ends |= set(value) if isinstance(value, list | tuple) else {value}
    return sorted(ends)


def _warn_if_unknown(family: Family, ids: Ints, mask: Bools, chat: ChatTokens) -> None:
    """Warn if a row is a chat, because the model's turn ends inside it, but has none of the known markers."""
    ends = _turn_ends(family)
    for row, valid in zip(ids, mask, strict=True):
        # an answer to learn from ends with its turn, and a line break may follow
        if np.isin(row[valid][:-2], ends).any() and _last_user_turn(row[valid], chat) is None:
            _warn_once(
                "the prompt looks like a chat, but its markers are unknown, so that all of its text counts as the "
                "question; pass `processor`, or the markers as `chat`"
            )


@lru_cache(maxsize=16)
def _warn_once(message: str) -> None:
    logger.warning(message)


def find_query(
    family: Family,
    ids: Ints,
    mask: Bools,
    labels: Ints | None,
    query: Sequence[Tensor] | None = None,
    chat: ChatTokens | None = None,
) -> list[Tensor]:
    """Token ids `[Q]` of each row's question: those given as `query`, or those found in the prompt `[B, L]`."""
    rows = len(ids)
    if query is None:
        visual = np.isin(ids, [family.token_id(kind) for kind in family.kinds])
        chat = chat or find_chat(family)
        _warn_if_unknown(family, ids, mask, chat)
        asked = find_question(ids, mask, visual, family.special_ids(), chat, labels)
        return [torch.from_numpy(ids[row][asked[row]]) for row in range(rows)]
    if len(query) != rows:
        raise ValueError(f"`query` must have the ids of one question per row, got {len(query)} for {rows} rows")
    if any(not isinstance(row, Tensor) or row.ndim != 1 or not len(row) for row in query):
        raise ValueError("`query` must have the ids of each question as a one-dimensional tensor, and at least one id")
    return list(query)


@torch.no_grad()
def embed_question(family: Family, question: Sequence[Tensor], device: torch.device, layers: int = 0) -> list[Tensor]:
    """Embeddings `[Q, D]` of each question's ids `[Q]`, after this many layers of the language model."""
    return [family.embed_words(upload(ids, device), layers) for ids in question]
