"""Finding the question in a prompt, by the markers of the chat template.

The question is the text of the *last* user turn: what follows its last picture, or all of its text if nothing does or
the turn has no picture. The system prompt, the template's own words, special tokens and the answer (labels) never
count. A prompt without chat markers is treated as one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arr_coc.families.family import Family

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


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
        """The markers of a tokenizer with a chat template in Qwen's form."""
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
        begin, end = _last_user_turn(ids[row], chat)
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


def _last_user_turn(ids: Ints, chat: ChatTokens) -> tuple[int, int]:
    """Start and end of the last user turn's text; the whole prompt if there are no markers."""
    for start in (ids == chat.start).nonzero()[0][::-1]:
        begin = int(start) + 1 + len(chat.user)
        if tuple(ids[start + 1 : begin]) == chat.user:
            if begin < len(ids) and ids[begin] == chat.newline:
                begin += 1
            ends = (ids[begin:] == chat.end).nonzero()[0]
            return begin, begin + int(ends[0]) if len(ends) else len(ids)
    return 0, len(ids)


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
        asked = find_question(ids, mask, visual, family.special_ids(), chat or ChatTokens(), labels)
        return [torch.from_numpy(ids[row][asked[row]]) for row in range(rows)]
    if len(query) != rows:
        raise ValueError(f"`query` must have the ids of one question per row, got {len(query)} for {rows} rows")
    if any(not isinstance(row, Tensor) or row.ndim != 1 or not len(row) for row in query):
        raise ValueError("`query` must have the ids of each question as a one-dimensional tensor, and at least one id")
    return list(query)


@torch.no_grad()
def embed_question(family: Family, question: Sequence[Tensor], device: torch.device, layers: int = 0) -> list[Tensor]:
    """Embeddings `[Q, D]` of each question's ids `[Q]`, after this many layers of the language model."""
    return [family.embed_words(ids.to(device), layers) for ids in question]
