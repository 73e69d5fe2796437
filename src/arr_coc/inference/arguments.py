"""Arguments of a call that mean something else for a shorter prompt: some are refused, some adjusted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arr_coc.families.family import Family, Inputs

# arguments of attention kernels, and of the vision tower, that describe the full prompt or its pictures
_OF_FULL_PROMPT = {
    "position_ids": "`position_ids` are computed here, so that kept tokens keep their places; drop `position_ids`",
    "cache_position": "`cache_position` counts columns of the full prompt, of which fewer are read; drop it",
    "cu_seq_lens_q": "`cu_seq_lens_q` packs columns of the full prompt, of which fewer are read; pass padded rows",
    "cu_seq_lens_k": "`cu_seq_lens_k` packs columns of the full prompt, of which fewer are read; pass padded rows",
    "seq_idx": "`seq_idx` packs columns of the full prompt, of which fewer are read; pass padded rows",
    "shift_labels": "`shift_labels` stand at columns of the full prompt, of which fewer are read; pass `labels` alone",
    "vision_feature_layer": "`vision_feature_layer` is read from the model's config here; set it there",
    "vision_feature_select_strategy": "`vision_feature_select_strategy` is read from the model's config here; drop it",
}
# ways to generate that do not work with pictures
# Processors and criteria that `generate` makes from an option, and the value with which it makes none. One that is
# passed takes the place of its own of the same type.
_MADE_FROM: dict[str, tuple[str, Any]] = {
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", 1.0),
    "NoRepeatNGramLogitsProcessor": ("no_repeat_ngram_size", 0),
    "MinLengthLogitsProcessor": ("min_length", 0),
    "TemperatureLogitsWarper": ("temperature", 1.0),
    "TopKLogitsWarper": ("top_k", 0),
    "TopPLogitsWarper": ("top_p", 1.0),
    "MaxTimeCriteria": ("max_time", None),
    "EosTokenCriteria": ("eos_token_id", None),
}
_LOSING_PICTURES = {
    "prefill_chunk_size": "prefill_chunk_size loses the pictures of a prompt; drop it",
    "token_healing": "token_healing writes the prompt anew, without its pictures; drop it",
    "assistant_early_exit": "assistant_early_exit knows no models with pictures; use prompt_lookup_num_tokens instead",
}


def check_arguments(arguments: Inputs) -> None:
    """Raise `ValueError` for arguments that describe the full prompt in a way that a shorter one cannot honour."""
    ids = check_ids(arguments)
    logits, cache = arguments.get("logits_to_keep"), arguments.get("past_key_values")
    if arguments.get("mm_encoder_outputs") is not None:
        raise ValueError("`mm_encoder_outputs` come beside `pixel_values`; pass the pictures alone")
    _check_described(arguments)
    for name in ("attention_mask", "labels", "mm_token_type_ids"):
        value = arguments.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.shape != ids.shape):
            wanted = tuple(ids.shape)
            raise ValueError(
                f"`{name}` must have shape {wanted}, as `input_ids`, to be shortened, got {_describe(value)}"
            )
    for name in ("pixel_values", "pixel_values_videos"):
        if arguments.get(name) is not None and not isinstance(arguments[name], Tensor):
            raise ValueError(f"`{name}` must be a tensor, got {_describe(arguments[name])}; see `return_tensors`")
    if logits is not None and not isinstance(logits, int) and not (isinstance(logits, Tensor) and logits.ndim == 0):
        raise ValueError("`logits_to_keep` names columns of the full prompt; use a number of last columns")
    if isinstance(cache, tuple | list):
        raise ValueError(f"`past_key_values` must be a `Cache`, got {_describe(cache)}; start with a `DynamicCache()`")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "`past_key_values` already holds tokens, which a shortened prompt cannot follow; start without it"
        )


def check_turn(arguments: Inputs) -> None:
    """Raise `ValueError` for arguments that a further turn in the cache of a shortened prompt cannot honour."""
    check_ids(arguments)
    _check_described(arguments)
    if arguments.get("mm_encoder_outputs"):
        raise ValueError(
            "a further picture cannot join the cache of a shortened prompt; start without `past_key_values`"
        )


def _check_described(arguments: Inputs) -> None:
    for name, message in _OF_FULL_PROMPT.items():
        if arguments.get(name) is not None:
            raise ValueError(message)


def _describe(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def check_embeddings(arguments: Inputs) -> None:
    """Raise `ValueError` for `inputs_embeds`, which may contain pictures that nobody can find."""
    if arguments.get("inputs_embeds") is not None:
        raise ValueError("`inputs_embeds` do not say where the pictures are; pass `input_ids`")


def check_ids(arguments: Inputs) -> Tensor:
    """The ids `[B, L]` of a call; raise `ValueError` if it has none."""
    check_embeddings(arguments)
    ids = arguments.get("input_ids")
    if ids is None:
        raise ValueError("`input_ids` are missing, but say where the pictures are; pass all of the processor's output")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(f"`input_ids` must be a tensor of shape [B, L], got {_describe(ids)}")
    return ids


def check_text(family: Family, arguments: Inputs) -> None:
    """Raise `ValueError` if a call without pictures has a prompt with pictures."""
    check_embeddings(arguments)
    if arguments.get("mm_encoder_outputs"):
        raise ValueError("`mm_encoder_outputs` cannot be shortened; pass the pictures, as `pixel_values`, instead")
    ids, cache = arguments.get("input_ids"), arguments.get("past_key_values")
    if isinstance(ids, Tensor) and (cache is None or cache.get_seq_length() == 0):
        placeholders = int(torch.isin(ids, visual_ids(family, ids.device)).sum())
        if placeholders:
            raise ValueError(
                f"the prompt has {placeholders} placeholders of pictures, but no pictures; pass `pixel_values` too"
            )


def without_read_pictures(family: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` without pictures, if an ordinary cache holds the columns of all of them.

    A prompt that kept all its tokens leaves one, and processors give the pictures of a conversation in every turn.
    """
    ids, cache = arguments.get("input_ids"), arguments.get("past_key_values")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or cache is None or isinstance(cache, tuple | list):
        return arguments
    read = int(cache.get_seq_length())
    if not read or torch.isin(ids[:, read:], visual_ids(family, ids.device)).any():
        return arguments
    return {name: value for name, value in arguments.items() if name not in family.pixel_names.values()}


def visual_ids(family: Family, device: torch.device) -> Tensor:
    """The ids of placeholders, one for each kind of picture."""
    return torch.tensor([family.token_id(kind) for kind in family.kinds], device=device)


def check_generation(family: Family, arguments: Inputs) -> None:
    """Raise `ValueError` for a way to generate that would lose pictures or true positions."""
    ids, option = check_ids(arguments), partial(family.option, arguments)
    if family.needs_cache and option("use_cache") is False:
        raise ValueError(f"{type(family).__name__} keeps true positions only with a cache; drop use_cache=False")
    for name, message in _LOSING_PICTURES.items():
        if option(name):
            raise ValueError(message)
    if option("cache_implementation") == "paged":
        raise ValueError("cache_implementation='paged' loses the pictures of a prompt; drop it")
    if option("guidance_scale") not in (None, 1):
        raise ValueError("guidance_scale reads a second prompt, after which positions are lost; drop it")
    if torch.isin(ids[:, -1], visual_ids(family, ids.device)).any():
        raise ValueError("the prompt ends in a picture, after which decoding loses its position; end it in text")
    for function in (*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ())):
        _check_replacing(family, arguments, function)


def _check_replacing(family: Family, arguments: Inputs, function: object) -> None:
    """Raise `ValueError` for a function that `generate` would take in place of its own: of ours it would take both."""
    kind = type(function).__name__
    if kind == "MaxLengthCriteria":
        raise ValueError("a MaxLengthCriteria would count the shorter prompt too; use max_length or max_new_tokens")
    if kind not in _MADE_FROM:
        return
    name, neutral = _MADE_FROM[kind]
    value = arguments[name] if name in arguments else family.option(arguments, name)
    if value not in (None, neutral):
        raise ValueError(
            f"{kind} was passed and {name}={value!r} makes another one; add {name}={neutral!r}, or drop it"
        )


def adjust_limits(family: Family, arguments: Inputs, difference: int) -> dict[str, Any]:
    """`max_length` and `min_length` for the shorter prompt: both count the prompt's tokens."""
    limits = {}
    for name in ("max_length", "min_length"):
        limit = arguments.get(name)
        if limit is None and family.option(arguments, "max_new_tokens") is None:
            default = family.option(arguments, name)
            limit = default if default is not None and default > arguments["input_ids"].shape[1] else None
        if limit is not None:
            limits[name] = limit + difference
    return limits


class WithFullIds:
    """A logits processor or stopping criterion that sees the full prompt `[B, L]` instead of the shorter one.

    Args:
        function (`Callable`): the caller's.
        prompt (`Tensor` of shape `[B, L]`): the full prompt.
        length (`int`): tokens of the shorter prompt.
    """

    def __init__(self, function: Callable[..., Any], prompt: Tensor, length: int) -> None:
        self.function, self.prompt, self.length = function, prompt, length
        if hasattr(function, "eos_token_id"):  # `generate` looks for it, to fill up rows that have ended
            self.eos_token_id = function.eos_token_id

    def __call__(self, *args: Any, **options: Any) -> Any:  # `generate` takes further names for arguments it must give
        """Call the function with the full prompt and the new tokens."""
        input_ids, *scores = args
        prompts = self.prompt.repeat_interleave(len(input_ids) // len(self.prompt), dim=0).to(input_ids.device)
        return self.function(torch.cat([prompts, input_ids[:, self.length :]], dim=1), *scores, **options)


class FullPromptStreamer:
    """A streamer that is shown the full prompt instead of the shorter one.

    Args:
        streamer (`BaseStreamer`): the caller's.
        prompt (`Tensor` of shape `[B, L]`): the full prompt.
    """

    def __init__(self, streamer: Any, prompt: Tensor) -> None:
        self.streamer = streamer
        self.prompt: Tensor | None = prompt

    def put(self, value: Tensor) -> None:
        """Pass tokens on; the first are the prompt."""
        self.streamer.put(value if self.prompt is None else self.prompt.cpu())
        self.prompt = None

    def end(self) -> None:
        """Pass on that the answer has ended."""
        self.streamer.end()


def show_full_prompt(family: Family, arguments: Inputs, length: int) -> dict[str, Any]:
    """The arguments of `generate` that see the tokens, so that they see the full prompt instead of the shorter one.

    Args:
        family (`Family`): the opened model.
        arguments (`Mapping`): of `generate`, with the full prompt as `input_ids`.
        length (`int`): tokens of the shorter prompt.
    """
    prompt: Tensor = arguments["input_ids"]
    shown: dict[str, Any] = {}
    for name in ("logits_processor", "stopping_criteria"):
        if arguments.get(name):
            shown[name] = [WithFullIds(function, prompt, length) for function in arguments[name]]
    if arguments.get("streamer") is not None:
        shown["streamer"] = FullPromptStreamer(arguments["streamer"], prompt)
    allowed = arguments.get("prefix_allowed_tokens_fn")
    if allowed is not None:
        beams = family.option(arguments, "num_beams") or 1
        # beams of a row share its number; samples of a row have numbers of their own
        copies = 1 if beams > 1 else family.option(arguments, "num_return_sequences") or 1

        def allow(row: int, input_ids: Tensor) -> Any:
            begin = prompt[row // copies].to(input_ids.device)
            return allowed(row, torch.cat([begin, input_ids[length:]]))

        shown["prefix_allowed_tokens_fn"] = allow
    return shown


def scatter_logits(logits: Tensor, short: Inputs, full: Inputs, visual: Tensor) -> Tensor:
    """Logits `[B, L, V]` at the columns of the full prompt, from those `[B, L', V]` of the shorter one.

    Text is in both prompts in the same order. The last column of a picture predicts the text that follows it; all
    other columns of pictures, and of padding, are zero.

    Args:
        logits (`Tensor` of shape `[B, L', V]`): of the shorter prompt.
        short, full (`Mapping`): both prompts, with `input_ids` and perhaps `attention_mask`.
        visual (`Tensor`): ids of visual tokens.
    """
    places = []  # rows and columns [n, 2] of the text in each prompt
    for prompt in (short, full):
        ids, mask = prompt["input_ids"], prompt.get("attention_mask")
        is_text = ~torch.isin(ids, visual)
        places.append((is_text if mask is None else is_text & mask.bool()).nonzero())
    (rows, columns), (_, targets) = (place.T for place in places)
    scattered = logits.new_zeros(*full["input_ids"].shape, logits.shape[-1])
    scattered[rows, targets] = logits[rows, columns]
    follows = torch.isin(full["input_ids"][rows, targets - 1], visual) & (targets > 0) & (columns > 0)
    rows, columns, targets = rows[follows], columns[follows] - 1, targets[follows] - 1
    scattered[rows, targets] = logits[rows, columns]
    return scattered
