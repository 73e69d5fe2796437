"""The last prompt that the language model read: its keys and values serve the next prompt as far as both are the same.

Two prompts about one picture begin with the same text. In mode `saccade` the gestalt follows, also the same if the
saccades do not replace any of it. The rule is general: what is reused is the longest common beginning, in which every
token has the same id, the same position and, if it is visual, the same features. If that is a small share of the
prompt, the whole prompt is read: without a cache before it, attention needs no mask and is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from arr_coc.families.family import Encoded, Family, Inputs, read_levels, split_pictures
from arr_coc.families.recordable import State, read_state
from arr_coc.prompting.cache import Beginning, Holding, append, drop, keep_first, mark_cache, piece_of, text_piece

# The least share of a prompt that is worth reusing. On a CPU, reusing 2% takes 7% longer than reading the whole prompt,
# reusing 47% takes 40% less time.
WORTH = 1 / 8
# Options of `generate` with which one row is decoded token by token in a dynamic cache that nobody else has.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "past_key_values": (None,),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "return_dict_in_generate": (None, False),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1),
    "penalty_alpha": (None, 0),
    "assistant_model": (None,),
    "assistant_early_exit": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "custom_generate": (None,),
}


class _Read(NamedTuple):
    """A cache, what it holds, and the features `[N, D]` of its visual tokens on every level, by kind of picture."""

    cache: Any
    holding: Holding
    features: dict[str, tuple[Tensor, ...]]


class Prefix:
    """Keys and values of the last prompt, of one row, or of what was read of it to choose the rest.

    They belong to the weights and active adapters of the language model: after another adapter was chosen, or weights
    were put in the place of others, the whole prompt is read. Weights whose values change where they are cannot be
    noticed. With a language model in training mode, compiled, or with hooks, the whole prompt is read every time.

    Attributes:
        tokens_read (`int`): tokens of prompts that the language model read.
    """

    def __init__(self) -> None:
        self.tokens_read = 0
        self._state: State | None = None  # of the language model, when it was read
        self._last: _Read | None = None
        self._reading: _Read | None = None  # what the call that goes on now will have read

    @classmethod
    def of(cls, family: Family, cache: Any, holding: Holding, encoded: Mapping[str, Encoded]) -> Prefix:
        """What the language model has read into a cache in another call than `generate`.

        Args:
            family (`Family`): the opened model.
            cache (`DynamicCache`): what it has read.
            holding (`Holding`): the prompt it was.
            encoded (`Mapping[str, Encoded]`): its visual tokens, by kind of picture.
        """
        prefix = cls()
        prefix.tokens_read = holding.short_ids.numel()
        prefix._state = read_state(family.inner.language_model)
        mark_cache(cache, holding)
        features = {kind: (part.features, *part.deepstack) for kind, part in encoded.items()}
        prefix._last = _Read(cache, holding, features)
        return prefix

    def adopt(self, other: Prefix) -> bool:
        """Go on from what another has read, unless a prompt is kept already; returns whether it does."""
        if other is self:
            return True
        self.tokens_read += other.tokens_read
        begins = self._last is None
        if begins:
            self._state, self._last = other._state, other._last
        return begins

    @property
    def empty(self) -> bool:
        """Whether nothing is kept."""
        return self._last is None

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values and features take."""
        if self._last is None:
            return 0
        states = [tensor for layer in self._last.cache.layers for tensor in (layer.keys, layer.values)]
        levels = [level for kind in self._last.features.values() for level in kind]
        return sum(tensor.nbytes for tensor in states + levels)

    def begin(self, family: Family, arguments: Inputs, inputs: Inputs, holding: Holding | None) -> dict[str, Any]:
        """What to change in `inputs` so that a call of `generate` reads only what is new in its prompt.

        Args:
            family (`Family`): the opened model.
            arguments (`Mapping`): arguments of `generate`, as the caller passed them.
            inputs (`Mapping`): the model's arguments for the whole prompt.
            holding (`Holding`, *optional*): what a cache of the whole prompt holds; None if nobody knows beforehand.
        """
        self._reading, changed, common = None, dict[str, Any](), 0
        state = read_state(family.inner.language_model)
        if state != self._state:
            self._state, self._last = state, None
        known = state.obstacle is None and "mm_encoder_outputs" in inputs
        if holding is not None and known and is_plain(family, arguments):
            if holding.beginning is None:
                changed, common = self._continue(family, inputs, holding)
            else:
                changed, common = self._continue_beginning(family, inputs, holding, holding.beginning)
        self.tokens_read += inputs["input_ids"].numel() - common
        return changed

    def _continue_beginning(
        self, family: Family, inputs: Inputs, holding: Holding, beginning: Beginning
    ) -> tuple[dict[str, Any], int]:
        """The same as `_continue` for a prompt that says what it begins with, without waiting for the device."""
        last, self._last = self._last, None
        features = {kind: read_levels(output) for kind, output in inputs["mm_encoder_outputs"].items()}
        known = last is not None and beginning.same(last.holding.beginning)
        if last is None or not known or beginning.length < WORTH * holding.length:
            cache = open_cache(family)
            if cache is None:
                return {}, 0
            self._reading = _Read(cache, holding, features)
            return {"past_key_values": cache}, 0
        keep_first(last.cache, beginning.length)
        self._reading = _Read(last.cache, holding, features)
        first, *rest = split_pictures(inputs["mm_encoder_outputs"]["image"])
        count = beginning.gestalt
        new = Encoded(first.features[count:], tuple(level[count:] for level in first.deepstack))
        changed = {"past_key_values": last.cache, "mm_encoder_outputs": {"image": family.join([new, *rest])}}
        return changed, beginning.length

    def _continue(self, family: Family, inputs: Inputs, holding: Holding) -> tuple[dict[str, Any], int]:
        """The changed arguments, and the number of tokens that are not read again."""
        last, self._last = self._last, None  # should the call fail, nobody knows what the cache holds
        features = {kind: read_levels(output) for kind, output in inputs["mm_encoder_outputs"].items()}
        common = 0 if last is None else _count_common(family, last, holding, features)
        if common < WORTH * holding.length:
            last, common = None, 0
        if last is not None:
            cache = last.cache
            drop(family, cache, torch.arange(last.holding.length, device=last.holding.mask.device)[None] < common)
        else:
            cache = open_cache(family)
            if cache is None:
                return {}, 0
            mark_cache(cache, holding.nothing())
        added, _ = append(family, cache, piece_of(family, inputs, holding, common), decode=True)
        self._reading = _Read(cache, holding, features)
        return {"mm_encoder_outputs": None, **added}, common

    def keep(self, generated: Tensor) -> None:
        """Keep what the call has read, and what it has generated `[1, n]`, for the next prompt."""
        if self._reading is not None:
            cache, holding, features = self._reading
            answer = generated[:, : cache.get_seq_length() - holding.length]  # the last token was not read
            held = holding.followed_by(text_piece(answer))
            mark_cache(cache, held)
            self._last, self._reading = _Read(cache, held, features), None


def is_plain(family: Family, arguments: Inputs) -> bool:
    """Whether a call of `generate` reads one row and decodes it token by token, greedily or by sampling."""
    one_row = len(arguments["input_ids"]) == 1 and not family.target.training
    return one_row and all(family.option(arguments, name) in allowed for name, allowed in _PLAIN.items())


def open_cache(family: Family) -> DynamicCache | None:
    """An empty cache; None if nothing could be dropped from it for the next prompt, as with linear attention."""
    cache = DynamicCache(config=family.config.get_text_config(decoder=True))
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


def _count_common(family: Family, last: _Read, holding: Holding, features: dict[str, tuple[Tensor, ...]]) -> int:
    """Tokens of the longest common beginning; fewer than the prompt has, because its last token must be read."""
    held = last.holding
    count = min(held.length, holding.length - 1)
    ids, positions = holding.short_ids[0, :count], holding.positions[:, 0, :count]
    same = (ids == held.short_ids[0, :count]) & (positions == held.positions[:, 0, :count]).all(dim=0)  # [count]
    for kind, levels in features.items():
        columns = (ids == family.token_id(kind)).nonzero()[:, 0]
        for new, old in zip(levels, last.features.get(kind, levels), strict=True):
            rows = min(len(columns), len(old))
            same[columns[:rows]] &= (new[:rows] == old[:rows]).all(dim=1)
    return int(same.long().cumprod(dim=0).sum())
