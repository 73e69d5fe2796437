"""Attention inside recordings, where lengths are fixed and masks say what is attended to.

Two functions are registered with transformers under names of their own. Only copies of attention modules use them,
which share every weight with the model and are made for a recording.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

GROUPED, WINDOWS = "arr_coc_grouped", "arr_coc_windows"


def attend_grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Heads that share keys attend as if they were further tokens, so that the cache is not repeated for them.

    Args:
        query (`Tensor` of shape `[B, heads, n, d]`): of the new tokens.
        key, value (`Tensor` of shape `[B, groups, S, d]`): of all places.
        attention_mask (`Tensor` of shape `[B, 1, n, S]`): False where a token does not look.
    """
    batch, heads, count, width = query.shape
    share = heads // key.shape[1]
    grouped = query.reshape(batch, -1, share * count, width)  # [B, heads, n, d] -> [B, groups, share * n, d]
    mask = attention_mask.repeat(1, 1, share, 1)  # [B, 1, share * n, S]
    found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    # [B, groups, share * n, d] -> [B, n, heads, d]
    return found.reshape(batch, heads, count, width).transpose(1, 2).contiguous(), None


def attend_windows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, arr_coc_windows: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Patches attend within their windows, by a mask `[n, n]`: windows of many sizes would each need a call."""
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=arr_coc_windows, scale=scaling)
    return found.transpose(1, 2).contiguous(), None  # [1, heads, n, d] -> [1, n, heads, d]


AttentionInterface.register(GROUPED, attend_grouped)
AttentionInterface.register(WINDOWS, attend_windows)


def with_attention(layer: Any, name: str, part: str) -> Any:
    """A copy of a layer, with the same weights, whose attention module `part` uses the attention of that name."""
    attention = copy.copy(getattr(layer, part))
    config = copy.copy(attention.config)
    config._attn_implementation = name
    attention.__dict__["config"] = config
    twin = copy.copy(layer)
    twin.__dict__[part] = attention
    return twin
