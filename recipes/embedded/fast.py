"""The same model, computed for pictures of one size in dense batches: several times faster than packed sequences.

Only for training; `check` shows that it computes what the model itself does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

BEFORE = 4  # text tokens before the picture


def patches(pictures: Tensor, patch: int = 16, merge: int = 2) -> Tensor:
    """Pictures `[B, H, W, 3]` of bytes as patches `[B, n, C * T * P * P]` in merge order."""
    batch, height, width, _ = pictures.shape
    h, w = height // patch // merge, width // patch // merge
    # [B, h, m, P, w, m, P, C] -> [B, h, w, m, m, C, P, P]
    split = pictures.view(batch, h, merge, patch, w, merge, patch, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    rows = split.reshape(batch, h * w * merge**2, 3, 1, patch * patch).float() / 127.5 - 1
    return rows.expand(-1, -1, -1, 2, -1).reshape(batch, h * w * merge**2, -1)


def vision_block(block: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One layer of the encoder for a batch `[B, n, C]`."""
    batch, count, width = hidden.shape
    heads = block.attn.num_heads
    # [B, n, 3 * C] -> [3, B, n, heads, d]
    q, k, v = block.attn.qkv(block.norm1(hidden)).view(batch, count, 3, heads, -1).permute(2, 0, 1, 3, 4).unbind(0)
    q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
    seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    hidden = hidden + block.attn.proj(seen.transpose(1, 2).reshape(batch, count, width))
    return hidden + block.mlp(block.norm2(hidden))


def text_block(block: Any, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """One layer of the language model."""
    out = block(hidden, attention_mask=mask, position_embeddings=(cos, sin))
    return out[0] if isinstance(out, tuple) else out


class FastPath:
    """Runs a tiny Qwen3-VL on dense batches."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self.visual, self.language = model.model.visual, model.model.language_model
        self.vision_block = torch.compile(vision_block, dynamic=True) if compiled else vision_block
        self.text_block = torch.compile(text_block, dynamic=True) if compiled else text_block

    def encode(self, pictures: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
        """Merged tokens `[B, N, D]` and further levels of them."""
        visual, rows = self.visual, patches(pictures)
        if torch.is_autocast_enabled(pictures.device.type):
            rows = rows.to(torch.get_autocast_dtype(pictures.device.type))
        one = torch.tensor([[1, 2 * grid[0], 2 * grid[1]]], device=pictures.device)
        index, weight = get_vision_interpolation_indices_and_weights(
            one, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners, spatial_merge_size=2,
        )  # fmt: skip
        project = visual.patch_embed.proj
        hidden = F.linear(rows, project.weight.flatten(1), project.bias)  # a convolution with no overlap
        hidden = hidden + (visual.pos_embed(index) * weight[:, :, None]).sum(1).to(hidden.dtype)
        cos, sin = visual.rotary_pos_emb(hidden[0], get_vision_position_ids(one, 2))
        levels = []
        for number, block in enumerate(visual.blocks):
            hidden = self.vision_block(block, hidden, cos, sin)
            if number in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)]
                levels.append(merger(hidden.flatten(0, 1)).unflatten(0, (len(rows), -1)))
        return visual.merger(hidden.flatten(0, 1)).unflatten(0, (len(rows), -1)), levels

    def read(self, before: Tensor, batch: dict[str, Any], tokens: Tensor, levels: list[Tensor]) -> Tensor:
        """Last hidden states `[B, T, D]` of the questions' text, each question by itself."""
        (height, width), count = batch["grid"], tokens.shape[1]
        embed = self.language.embed_tokens
        opening = embed(before).expand(len(tokens), -1, -1).to(tokens.dtype)
        hidden = torch.cat([opening, tokens, embed(batch["ids"]).to(tokens.dtype)], dim=1)
        cos, sin = self.language.rotary_emb(hidden, positions(batch["within"], height, width))
        mask = self.mask(batch["turn"], BEFORE + count)
        for number, block in enumerate(self.language.layers):
            hidden = self.text_block(block, hidden, cos, sin, mask)
            if number < len(levels):
                hidden = torch.cat(
                    [
                        hidden[:, :BEFORE],
                        hidden[:, BEFORE : BEFORE + count] + levels[number],
                        hidden[:, BEFORE + count :],
                    ],
                    dim=1,
                )
        return self.language.norm(hidden[:, BEFORE + count :])

    @staticmethod
    def mask(turn: Tensor, prefix: int) -> Tensor:
        """True `[B, 1, L, L]` where a token may look: back, at the picture and at its own question."""
        owner = F.pad(turn, (prefix, 0))  # 0 is the picture, and padding
        owner[:, :prefix] = 0
        padding = F.pad(turn == 0, (prefix, 0))
        same = (owner[:, :, None] == owner[:, None, :]) | (owner[:, None, :] == 0) & ~padding[:, None, :]
        length = owner.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=turn.device).tril()
        return (same & causal)[:, None]


def positions(within: Tensor, height: int, width: int) -> Tensor:
    """M-RoPE positions `[3, B, L]` of opening, picture, and each question after the picture."""
    batch, device = len(within), within.device
    opening = torch.arange(BEFORE, device=device).expand(3, -1)
    row = torch.arange(height, device=device).repeat_interleave(width) + BEFORE
    column = torch.arange(width, device=device).repeat(height) + BEFORE
    picture = torch.stack([torch.full_like(row, BEFORE), row, column])
    fixed = torch.cat([opening, picture], dim=1)[:, None].expand(-1, batch, -1)
    text = (within + BEFORE + max(height, width)).expand(3, -1, -1)
    return torch.cat([fixed, text], dim=2)
