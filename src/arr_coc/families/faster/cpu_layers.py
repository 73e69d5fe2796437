"""Layers of the embedded model that use oneDNN on a CPU.

torch computes products of float32 with MKL, which is half as fast on an AMD EPYC as oneDNN, which torch contains too.
Where oneDNN does not apply (gradients, other devices and types, autocast, compiled code) these layers run as those they
replace. Weights keep their places and names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUTanh
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention, Qwen3VLVisionMLP

# With fewer rows than this, oneDNN takes longer to start than it saves.
FEW_ROWS = 16
# With fewer patches than this, attention in one call is quicker than in products.
FEW_PATCHES = 256
# Attention of some patches at a time, so that their scores, 1 MB, stay in the CPU's cache and need no new memory: from
# 2 MB on, the C library gives it back to the system after each product, and takes it again, which costs more than both.
MOST_SCORES = 2**18


def can_multiply(values: Tensor, *weights: Tensor | None) -> bool:
    """Whether oneDNN can compute products of these tensors, is made for this CPU, and pays off."""
    return (
        values.numel() >= FEW_ROWS * values.shape[-1]
        and all(part is None or (part.is_cpu and part.dtype == torch.float32) for part in (values, *weights))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    )


def project(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, by oneDNN where it can."""
    return multiply(values, weight, bias) if can_multiply(values, weight, bias) else F.linear(values, weight, bias)


def multiply(values: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none", kind: str = "") -> Tensor:
    """`F.linear` of values `[*, F]` by oneDNN, and an activation that is named."""
    # it is a thousand times slower on tensors that are not contiguous
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values.contiguous(), weight.contiguous(), bias, then, [], kind)
    return product


class CPULinear(nn.Linear):
    """A linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        """Project values `[*, F]`."""
        return project(input, self.weight, self.bias)


class CPUVisionMLP(Qwen3VLVisionMLP):
    """Two linear layers of the encoder, whose activation is computed with the first product."""

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Hidden states `[n, D]`."""
        first = self.linear_fc1
        # neither a layer of PEFT, which adds to it, nor one that somebody watches
        alone = type(first) is CPULinear and not first._forward_hooks and not first._forward_pre_hooks
        usual = alone and type(self.act_fn) is GELUTanh
        if not usual or not can_multiply(hidden_state, first.weight, first.bias):
            old: Tensor = super().forward(hidden_state)  # type: ignore[no-untyped-call]
            return old
        hidden: Tensor = self.linear_fc2(multiply(hidden_state, first.weight, first.bias, "gelu", "tanh"))
        return hidden


class CPUVisionAttention(Qwen3VLVisionAttention):
    """Attention of the encoder: products of a head's queries, some at a time, with all of its keys."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states `[n, D]`, each of which attends to those of its picture."""
        usual = self.config._attn_implementation == "sdpa" and can_multiply(hidden_states)
        if position_embeddings is None or not usual:
            old: Tensor = super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
            return old
        projected = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)  # [n, 3, heads, d]
        angles = [part[:, None, None] for part in position_embeddings]  # [n, 1, 1, d]
        queries, keys = rotate(projected[:, :2], *angles).unbind(dim=1)
        lengths = cu_seqlens.diff().tolist()
        pictures = zip(*(part.split(lengths) for part in (queries * self.scaling, keys, projected[:, 2])), strict=True)
        attended = torch.cat([attend(*picture) for picture in pictures])  # [n, heads, d]
        hidden: Tensor = self.proj(attended.flatten(1))
        return hidden


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary position embedding of the last dimension."""
    half = heads.shape[-1] // 2
    rotated = heads * cosines
    rotated[..., :half].addcmul_(heads[..., half:], sines[..., :half], value=-1)
    rotated[..., half:].addcmul_(heads[..., :half], sines[..., half:])
    return rotated


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one picture, all `[n, heads, d]`; queries are scaled."""
    count, heads, _ = queries.shape
    if count < FEW_PATCHES:
        queries, keys, values = (part.transpose(0, 1) for part in (queries, keys, values))  # [heads, n, d]
        return F.scaled_dot_product_attention(queries, keys, values, scale=1.0).transpose(0, 1)
    queries, keys = queries.transpose(0, 1).contiguous(), keys.transpose(0, 1).contiguous()  # [heads, n, d]
    values = values.permute(1, 2, 0).contiguous()  # [heads, d, n]
    attended = values.new_empty(count, heads, values.shape[1])
    rows = max(FEW_ROWS, MOST_SCORES // count)
    for head in range(heads):
        for start in range(0, count, rows):
            scores = multiply(queries[head, start : start + rows], keys[head])  # [rows, n]
            attended[start : start + rows, head] = multiply(scores.softmax(dim=-1), values[head])
    return attended


_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: CPULinear,
    Qwen3VLVisionMLP: CPUVisionMLP,
    Qwen3VLVisionAttention: CPUVisionAttention,
}


def use_cpu_layers(model: nn.Module) -> None:
    """Let a model's layers run as those of this file; in place, with the same weights under the same names."""
    for module in model.modules():
        module.__class__ = _LAYERS.get(type(module), type(module))
