"""Dropping visual tokens inside the language model, between two of its layers.

The first layers read all tokens. Hooks on the decoder layers, set for one call, compute the attention of the prompt's
last token, ask the selector, and pass the later layers a shorter prompt: hidden states, true positions and a mask of
that length. The cache then holds the full prompt in the first layers and the shorter one in the others. Decoding needs
the hooks too, because transformers makes a single mask from the first layer's length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.masking_utils import create_causal_mask

from arr_coc.config import Grid
from arr_coc.families.family import Family, Inputs
from arr_coc.families.language_attention import Asking, paid_attention
from arr_coc.prompting.cache import cut_of, mark_cache
from arr_coc.prompting.layout import Prompt, choose_columns
from arr_coc.prompting.question import Ints
from arr_coc.prompting.settings import Settings
from arr_coc.selectors.contract import LanguageSelector
from arr_coc.selectors.registry import selector_name


@dataclass(frozen=True, eq=False)
class Cut:
    """The columns of a prompt that the later layers read.

    Args:
        source (`Tensor` of shape `[B, L']`): columns of the full prompt, left-padded.
        valid (`Tensor` of shape `[B, L']`): False where padded.
    """

    source: Tensor
    valid: Tensor

    def take(self, values: Tensor) -> Tensor:
        """Take these columns `[B, L', ...]` of values `[B, L, ...]`, or of `[1, L, ...]` that all rows share."""
        source = self.source.to(values.device)
        rows = values.expand(len(source), *values.shape[1:])
        return rows[torch.arange(len(source), device=source.device)[:, None], source]


CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_inside(family: Family, selector: LanguageSelector, settings: Settings) -> None:
    """Raise `ValueError` if a selector inside the language model cannot work with this model and these settings."""
    name, language = selector_name(selector), family.inner.language_model
    if settings.mode not in ("prune", "auto"):
        raise ValueError(f"{name!r} drops tokens inside the language model; use mode 'prune', not {settings.mode!r}")
    other_types = set(getattr(language.config, "layer_types", None) or ()) - {"full_attention"}
    if other_types:
        raise ValueError(
            f"{name!r} needs full attention in every layer, this model has {', '.join(sorted(other_types))}; "
            "use a selector that picks tokens before the language model"
        )
    if not 1 <= selector.layer < len(language.layers):
        raise ValueError(f"`layer` must be in 1..{len(language.layers) - 1} for this model, got {selector.layer!r}")


def check_decoding(family: Family, selector: LanguageSelector, kwargs: Inputs) -> None:
    """Raise `ValueError` for ways to decode that need the same length in all layers of the cache."""
    name = selector_name(selector)
    if family.option(kwargs, "use_cache") is False:
        raise ValueError(f"{name!r} keeps its choice of tokens in the cache; drop use_cache=False")
    if family.option(kwargs, "prompt_lookup_num_tokens") or kwargs.get("assistant_model") is not None:
        raise ValueError(f"{name!r} decodes one token at a time; drop `assistant_model` and `prompt_lookup_num_tokens`")


_CURRENT: ContextVar[InsideModel | None] = ContextVar("inside_model", default=None)

# Takes the attention paid to the tokens of each picture, returns the cells of each that stay.
Choose = Callable[[Sequence[Tensor]], list[Ints]]


class InsideModel:
    """A context in which one call of a model (`forward` or `generate`) drops visual tokens between two layers.

    Args:
        family (`Family`): the opened model.
        selector (`LanguageSelector`): names the layer.
        prompt (`Prompt`, *optional*): the call's prompt; without one the call continues from an earlier cache.
        choose (`Callable`): returns the cells of each picture that stay, given the attention `[N]` paid to its tokens.
    """

    def __init__(self, family: Family, selector: LanguageSelector, prompt: Prompt | None, choose: Choose) -> None:
        self.family, self.selector, self.prompt, self.choose = family, selector, prompt, choose
        self.kept: list[tuple[Grid, Ints]] = []
        if prompt is not None:
            self._check_prompt(prompt)
        self._language: Any = family.inner.language_model
        self._handles: list[RemovableHandle] = []
        self._token: Token[InsideModel | None] | None = None
        # state of the current forward pass
        self._reads_prompt = False
        self._cut: Cut | None = None  # the columns that stay
        self._changed: dict[str, Any] = {}  # new arguments of the later layers
        self._levels: Sequence[Tensor] = ()  # DeepStack levels of the prompt
        self._visual: Tensor | None = None  # [B, L], True at visual tokens

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.labels is not None:
            raise ValueError("tokens dropped inside the language model have no logits for their labels; drop `labels`")
        visual = [self.family.token_id(kind) for kind in self.family.kinds]
        if np.isin(prompt.ids[np.arange(len(prompt.ids)), prompt.last_columns()], visual).any():
            raise ValueError("the prompt ends in a picture, but its last token does the choosing; end it in text")

    @staticmethod
    def running(family: Family) -> bool:
        """Whether this thread is already inside such a call of the model."""
        current = _CURRENT.get()
        return current is not None and current.family is family

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        layers, first = self._language.layers, self.selector.layer
        self._handles = [
            self._language.register_forward_pre_hook(self._begin, with_kwargs=True),
            layers[first - 1].self_attn.register_forward_hook(self._choose, with_kwargs=True),
            layers[first].register_forward_pre_hook(self._shorten, with_kwargs=True),
        ]
        for place, layer in enumerate(layers[first:], start=first):
            self._handles.append(layer.register_forward_pre_hook(self._replace, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(partial(self._add_level, place)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if self._token is not None:
            _CURRENT.reset(self._token)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> CallArguments | None:
        """Before the language model: check the prompt, and hold back the DeepStack levels of the later layers."""
        if _CURRENT.get() is not self:  # another thread is running the same model
            return None
        self._reads_prompt = self.prompt is not None and not self.kept
        self._cut, self._changed, self._levels = None, {}, ()
        if self.prompt is None or not self._reads_prompt:
            return None
        cache, name = kwargs.get("past_key_values"), selector_name(self.selector)
        if getattr(cache, "is_compileable", False):
            raise ValueError(f"{name!r} gives the layers of a cache different lengths; use a dynamic cache")
        past = 0 if cache is None else cache.get_seq_length()
        if past or kwargs["inputs_embeds"].shape[1] != self.prompt.ids.shape[1]:
            raise ValueError(f"{name!r} needs the whole prompt in one pass; drop `past_key_values` and chunked prefill")
        levels = kwargs.get("deepstack_visual_embeds")
        if not levels:
            return None
        self._levels, self._visual = levels, kwargs["visual_pos_masks"]
        return args, kwargs | {"deepstack_visual_embeds": levels[: self.selector.layer]}

    @torch.no_grad()
    def _choose(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """After the last layer's attention that reads everything: choose the columns that stay."""
        if _CURRENT.get() is not self or self.prompt is None or not self._reads_prompt:
            return
        hidden: Tensor = kwargs["hidden_states"]
        prompt, device = self.prompt, hidden.device
        beams = len(hidden) // len(prompt.ids)  # adjacent rows that repeat one row of the prompt
        attention = paid_attention(
            module,
            hidden[::beams],
            tuple(value[::beams] for value in kwargs["position_embeddings"]),
            Asking.alone(torch.from_numpy(prompt.last_columns()).to(device)),
            torch.from_numpy(prompt.mask).to(device),
        ).mean(dim=(1, 2))  # [B, heads, 1, L] -> [B, L]
        places = [span.row * prompt.ids.shape[1] + span.columns for span in prompt.spans]
        visual = attention.flatten()[torch.from_numpy(np.concatenate(places)).to(device)]  # [B, L] -> [N]
        chosen = self.choose(torch.split(visual, [len(place) for place in places]))
        self.kept = [(span.grid, cells) for span, cells in zip(prompt.spans, chosen, strict=True)]
        source, valid = (part.repeat_interleave(beams, dim=0) for part in choose_columns(prompt, chosen, device))
        self._cut = Cut(source, valid)

    def _shorten(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
        """Before the first of the later layers: drop tokens, and make the new arguments of all later layers."""
        if _CURRENT.get() is not self:
            return None
        cache, layer = kwargs.get("past_key_values"), self.selector.layer
        hidden, changed = args[0], dict[str, Any]()
        earlier: Cut | None = cut_of(cache)
        cut = self._cut if self._reads_prompt else earlier
        if cut is None:
            return None
        if self._reads_prompt:
            hidden = cut.take(hidden)
            changed["position_embeddings"] = tuple(map(cut.take, kwargs["position_embeddings"]))
            if kwargs.get("position_ids") is not None:  # a gap in them would mean the start of a packed sequence
                changed["position_ids"] = (cut.valid.cumsum(dim=1) - 1).clamp(min=0)
            if cache is not None:
                mark_cache(cache, cut=cut)
        past = 0 if cache is None else cache.get_seq_length(layer)
        generated = past + hidden.shape[1] - cut.valid.shape[1]
        changed["attention_mask"] = create_causal_mask(
            config=self._language.config,
            inputs_embeds=hidden,
            attention_mask=F.pad(cut.valid, (0, generated), value=True),
            past_key_values=cache,
            layer_idx=layer,
        )
        self._changed = changed
        return (hidden, *args[1:]), kwargs

    def _replace(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
        """Before each later layer: replace positions and mask."""
        return (args, kwargs | self._changed) if _CURRENT.get() is self else None

    def _add_level(self, place: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """After a later layer: add its DeepStack level to the tokens that stayed."""
        if _CURRENT.get() is not self or place >= len(self._levels) or self._cut is None or self._visual is None:
            return None
        number = self._visual.flatten().cumsum(dim=0).view_as(self._visual) - 1  # [B, L], each token's row in a level
        visual = self._cut.take(self._visual) & self._cut.valid.to(self._visual.device)  # [B, L']
        level = self._levels[place]
        added: Tensor = self._language._deepstack_process(
            output, visual, level[self._cut.take(number)[visual].to(level.device)]
        )
        return added
