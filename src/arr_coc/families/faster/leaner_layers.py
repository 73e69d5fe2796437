"""Copies of a model's layers that do the same with less work, where rounding may differ from the original's last bit.

They share every weight with the model, which stays as it is. Attention takes what is attended to from masks, so that
lengths are fixed. Norms run as one kernel instead of seven.

Importing this file registers two attention functions with transformers. That changes no model: they have names of their
own, replace none that was there, and only a config that names them uses them, which the copies here alone do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextAttention,
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextMLP,
)

from arr_coc.families.faster.cpu_layers import project

GROUPED, WINDOWS = "arr_coc_grouped", "arr_coc_windows"


def attend_grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Heads that share keys attend as if they were further tokens, so that the cache is not repeated for them.

    Args:
        query (`Tensor` of shape `[B, heads, n, d]`): of the new tokens.
        key, value (`Tensor` of shape `[B, groups, S, d]`): of all places.
        attention_mask (`Tensor` of shape `[B, 1, share * n, S]`): minus infinity where a token does not look, else 0,
            for each of the heads that share keys.
    """
    batch, heads, count, width = query.shape
    share = heads // key.shape[1]
    grouped = query.reshape(batch, -1, share * count, width)  # [B, heads, n, d] -> [B, groups, share * n, d]
    found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
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


class _FusedNorm:
    """A norm of transformers (`weight * x / rms(x)`) as one kernel."""

    def __init__(self, norm: Any) -> None:
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


def with_fused_norms(module: Any) -> Any:
    """A copy of a module whose own norms, not those of its parts, run as one kernel each."""
    twin = copy.copy(module)
    for name, part in module._modules.items():
        if type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
            twin.__dict__[name] = _FusedNorm(part)  # found before the module's part of that name
    return twin


def with_attention(module: Any, name: str) -> Any:
    """A copy of an attention module that uses the attention registered under a name."""
    twin, config = copy.copy(module), copy.copy(module.config)
    config._attn_implementation = name
    twin.__dict__["config"] = config
    return twin


class PatchProjection(nn.Conv3d):
    """The first layer of an encoder, a convolution that sees each patch once, as a matrix product."""

    def forward(self, patches: Tensor) -> Tensor:
        """Project patches `[n, C, T, P, P]` to `[n, D, 1, 1, 1]`; each is as large as the kernel."""
        return project(patches.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def lean_encoder(visual: Any) -> Any:
    """A copy of an encoder that embeds patches by a matrix product."""
    twin = copy.copy(visual)
    if isinstance(visual.patch_embed.proj, nn.Conv3d):  # not a layer of PEFT, which adds to it
        twin.__dict__["patch_embed"] = embed = copy.copy(visual.patch_embed)
        embed.__dict__["proj"] = projection = copy.copy(visual.patch_embed.proj)
        projection.__class__ = PatchProjection  # the same weights
    return twin


class _SignedRotary:
    """A rotary embedding whose sines carry the sign of the half that they move: see [`TurnedTogether`]."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(*args, **kwargs)
        half = sin.shape[-1] // 2
        return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


class TurnedTogether(Qwen3VLTextAttention):
    """Attention of Qwen3-VL that turns queries and keys in one go: four kernels instead of ten."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **kw: Any,
    ) -> tuple[Tensor, Any]:
        """As its parent's, but that sines are signed, and that it must be given a cache."""
        found, weights = self.look(hidden_states, position_embeddings, attention_mask, past_key_values, **kw)
        return self.o_proj(found), weights

    def look(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, past_key_values: Any, **kw: Any
    ) -> tuple[Tensor, Any]:
        """What the heads find, `[B, n, heads * d]`, before it is projected; and their weights, if they are known."""
        cos, sin = (part.unsqueeze(-2) for part in position_embeddings)  # [B, n, 1, d]
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)  # [B, n, heads * d] -> [B, n, heads, d]
        query = self.q_norm(self.q_proj(hidden_states).view(heads))
        key = self.k_norm(self.k_proj(hidden_states).view(heads))
        both = torch.cat([query, key], dim=2)
        # written head by head, as heads that share keys want their queries: they need no copy then
        turned = both.new_empty(both.transpose(1, 2).shape)  # [B, heads, n, d]
        torch.addcmul(both * cos, both.roll(self.head_dim // 2, dims=-1), sin, out=turned.transpose(1, 2))
        query, key = turned[:, : query.shape[2]], turned[:, query.shape[2] :]
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        found, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kw)
        return found.reshape(*hidden_states.shape[:-1], -1), weights  # [B, n, heads, d] -> [B, n, heads * d]


class AddedInPlace(Qwen3VLTextDecoderLayer):
    """A layer of Qwen3-VL whose last products are added to the hidden states as part of the product itself."""

    self_attn: TurnedTogether

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **kw: Any
    ) -> Tensor:
        """As its parent's, without gradients, and it changes the hidden states that it is given."""
        attention, mlp = self.self_attn, self.mlp
        found, _ = attention.look(self.input_layernorm(hidden_states), position_embeddings, attention_mask, **kw)
        add_product(hidden_states, found, attention.o_proj)
        normed = self.post_attention_layernorm(hidden_states)
        add_product(hidden_states, mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed), mlp.down_proj)
        return hidden_states


def add_product(total: Tensor, values: Tensor, linear: Any) -> None:
    """Add a linear layer's result `[B, n, D]` of values `[B, n, E]` to a contiguous total, in one kernel if it can be.

    Example:

    ```python
    >>> import torch
    >>> from torch import nn
    >>> from arr_coc.families.faster.leaner_layers import add_product
    >>> total, values, linear = torch.ones(1, 2, 3), torch.ones(1, 2, 4), nn.Linear(4, 3, bias=False)
    >>> expected = total + linear(values)
    >>> with torch.no_grad():
    ...     add_product(total, values, linear)
    >>> torch.allclose(total, expected)
    True

    ```
    """
    plain = type(linear) is nn.Linear  # not a layer of PEFT, which adds to it
    if plain and linear.bias is None:
        total.view(-1, total.shape[-1]).addmm_(values.flatten(0, -2), linear.weight.T)  # [B, n, D] -> [B * n, D]
    else:
        total.add_(linear(values))


def lean_language_model(language: Any, attention: str | None = None) -> Any:
    """A copy of a language model with fused norms and leaner layers, which may change the embeddings it is given.

    Args:
        language (`nn.Module`): the model.
        attention (`str`, *optional*): name of the registered attention that its layers use; by default their own.
    """
    twin = with_fused_norms(language)
    layers = [lean_layer(layer, attention) for layer in language.layers]
    if all(type(layer.self_attn) is Qwen3VLTextAttention for layer in layers):
        twin.__dict__["rotary_emb"] = _SignedRotary(language.rotary_emb)
        for layer in layers:
            layer.self_attn.__class__ = TurnedTogether  # of the copies
            if type(layer) is Qwen3VLTextDecoderLayer and type(layer.mlp) is Qwen3VLTextMLP:
                layer.__class__ = AddedInPlace
    twin.__dict__["layers"] = layers
    return twin


def lean_layer(layer: Any, attention: str | None = None) -> Any:
    """A copy of a layer of a language model with fused norms and, if a name is given, that attention."""
    twin, inside = with_fused_norms(layer), with_fused_norms(layer.self_attn)
    twin.__dict__["self_attn"] = inside if attention is None else with_attention(inside, attention)
    return twin
