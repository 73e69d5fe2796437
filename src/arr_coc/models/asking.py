"""Which words are the query: the user's question, found through the structure of the chat template.

It is the text of the *last* user turn, after its last picture; all text of that turn if the picture comes last; in a
later turn without a picture, that turn's text. The system prompt, the template's own words, special tokens and the
answer (labels) never count. A prompt without chat markers is taken as a whole: what follows the last picture, or all
text if nothing does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChatTokens:
    """Ids of the chat markers; the defaults are those of all Qwen2 and Qwen3 vocabularies.

    Args:
        start (`int`, *optional*): `<|im_start|>`.
        end (`int`, *optional*): `<|im_end|>`.
        user (`int`, *optional*): the word `user` after a start.
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
    user: int = 872
    newline: int = 198


def find_question(
    ids: Tensor, mask: Tensor, visual: Tensor, special: set[int], chat: ChatTokens, labels: Tensor | None = None
) -> Tensor:
    """Boolean mask `[B, L]` of the words that are asked; all arguments on the host.

    Args:
        ids (`Tensor` of shape `[B, L]`): the full prompt.
        mask (`Tensor` of shape `[B, L]`): False where padded.
        visual (`Tensor` of shape `[B, L]`): True at visual tokens.
        special (`set[int]`): ids that are no words.
        chat (`ChatTokens`): the markers.
        labels (`Tensor` of shape `[B, L]`, *optional*): -100 everywhere but in the answer.
    """
    no_words = torch.tensor(sorted({chat.start, chat.end, *special}))
    words = mask & ~visual & ~torch.isin(ids, no_words)
    if labels is not None:
        words &= labels == -100
    found = torch.zeros_like(words)
    for row in range(ids.shape[0]):
        begin, end = _last_user_turn(ids[row].tolist(), chat)
        turn = torch.zeros_like(words[row])
        turn[begin:end] = True
        pictures = (visual[row] & turn).nonzero()[:, 0]
        after = turn.clone()
        if len(pictures):
            after[: int(pictures[-1]) + 1] = False
        asked = words[row] & after
        if not asked.any():
            asked = words[row] & turn
        if not asked.any():
            asked = words[row]
        found[row] = asked
    return found


def _last_user_turn(ids: Sequence[int], chat: ChatTokens) -> tuple[int, int]:
    """Where the text of the last user turn begins and ends; the whole prompt if there are no markers."""
    for place in range(len(ids) - 2, -1, -1):
        if ids[place] == chat.start and ids[place + 1] == chat.user:
            begin = place + 2
            if begin < len(ids) and ids[begin] == chat.newline:
                begin += 1
            end = next((i for i in range(begin, len(ids)) if ids[i] == chat.end), len(ids))
            return begin, end
    return 0, len(ids)
