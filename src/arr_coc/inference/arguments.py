"""Arguments of a call that mean something else for a shorter prompt: some are refused, some adjusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arr_coc.families.family import Family, Inputs


def check_arguments(arguments: Inputs) -> None:
    """Raise `ValueError` for arguments that describe the full prompt in a way that a shorter one cannot honour."""
    cache, mask = arguments.get("past_key_values"), arguments.get("attention_mask")
    logits = arguments.get("logits_to_keep")
    if arguments.get("inputs_embeds") is not None:
        raise ValueError("`inputs_embeds` do not say where the pictures are; pass `input_ids`")
    if arguments.get("mm_encoder_outputs") is not None:
        raise ValueError("`mm_encoder_outputs` come beside `pixel_values`; pass the pictures alone")
    if arguments.get("position_ids") is not None:
        raise ValueError("`position_ids` are computed here, so that kept tokens keep their places; drop `position_ids`")
    if isinstance(mask, Tensor) and mask.ndim != 2:
        raise ValueError(f"`attention_mask` must have shape [B, L] to be shortened, got {tuple(mask.shape)}")
    if isinstance(logits, Tensor) and logits.ndim > 0:
        raise ValueError("`logits_to_keep` names columns of the full prompt; use a number of last columns")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "`past_key_values` already holds tokens, which a shortened prompt cannot follow; start without it"
        )


def check_generation(family: Family, arguments: Inputs) -> None:
    """Raise `ValueError` if decoding would lose the true positions."""
    config = arguments.get("generation_config") or family.target.generation_config
    use_cache = arguments.get("use_cache")
    if family.needs_cache and (config.use_cache if use_cache is None else use_cache) is False:
        raise ValueError(f"{type(family).__name__} keeps true positions only with a cache; drop use_cache=False")
    chunk = arguments.get("prefill_chunk_size") or getattr(config, "prefill_chunk_size", None)
    paged = arguments.get("cache_implementation") or getattr(config, "cache_implementation", None)
    if chunk or paged == "paged":
        name = "prefill_chunk_size" if chunk else "cache_implementation='paged'"
        raise ValueError(f"{name} loses the pictures of a prompt; drop it")
    last = arguments["input_ids"][:, -1]
    visual = torch.tensor([family.token_id(kind) for kind in family.kinds], device=last.device)
    if torch.isin(last, visual).any():
        raise ValueError("the prompt ends in a picture, after which decoding loses its position; end it in text")


def adjust_limits(family: Family, arguments: Inputs, difference: int) -> dict[str, Any]:
    """`max_length` and `min_length` for the shorter prompt: both count the prompt's tokens."""
    config = arguments.get("generation_config") or family.target.generation_config
    limits = {}
    for name in ("max_length", "min_length"):
        limit = arguments.get(name)
        if limit is None and arguments.get("max_new_tokens") is None and config.max_new_tokens is None:
            default = getattr(config, name)
            limit = default if default is not None and default > arguments["input_ids"].shape[1] else None
        if limit is not None:
            limits[name] = limit + difference
    return limits


def with_full_ids(function: Callable[..., Any], prompt: Tensor, length: int) -> Callable[..., Any]:
    """A logits processor or stopping criterion that sees the full prompt `[B, L]` instead of the shorter one.

    Args:
        function (`Callable`): the caller's.
        prompt (`Tensor` of shape `[B, L]`): the full prompt.
        length (`int`): tokens of the shorter prompt.
    """

    def call(input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        prompts = prompt.repeat_interleave(len(input_ids) // len(prompt), dim=0).to(input_ids.device)
        return function(torch.cat([prompts, input_ids[:, length:]], dim=1), scores, **kwargs)

    return call


def scatter_logits(logits: Tensor, short: Inputs, full: Inputs, visual: Tensor) -> Tensor:
    """Logits `[B, L, V]` at the columns of the full prompt, from those `[B, L', V]` of the shorter one.

    Text is in both prompts in the same order. Columns of pictures and padding are zero; labels ignore them.

    Args:
        logits (`Tensor` of shape `[B, L', V]`): of the shorter prompt.
        short, full (`Mapping`): both prompts, with `input_ids` and perhaps `attention_mask`.
        visual (`Tensor`): ids of visual tokens.
    """
    text = []
    for prompt in (short, full):
        ids, mask = prompt["input_ids"], prompt.get("attention_mask")
        is_text = ~torch.isin(ids, visual)
        text.append(is_text if mask is None else is_text & mask.bool())
    scattered = logits.new_zeros(*full["input_ids"].shape, logits.shape[-1])
    scattered[text[1]] = logits[text[0]]
    return scattered
