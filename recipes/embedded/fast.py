"""The same model, computed for pictures or clips of one size in dense batches: much faster than packed sequences.

Only for training; `check` shows that it computes what the model itself does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids


def patches(pictures: Tensor, dtype: torch.dtype, patch: int = 16, merge: int = 2) -> Tensor:
    """Pictures `[B, F, 3, H, W]` in 0 to 255 as patches `[B * G, n, C * T * P * P]` in merge order.

    Two frames of a clip make one group of tokens (T = 2); of a picture, which the model sees as two equal frames, each
    patch is given once (T = 1).
    """
    _, frames, _, height, width = pictures.shape
    pair = 1 if frames == 1 else 2
    h, w = height // patch // merge, width // patch // merge
    # [B * G, T, C, h, m, P, w, m, P] -> [B * G, h, w, m, m, C, T, P, P]
    split = pictures.reshape(-1, pair, 3, h, merge, patch, w, merge, patch).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return (split.float() / 127.5 - 1).to(dtype).reshape(len(split), h * w * merge**2, -1)


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
        # layer by layer: all layers of a kind share what is compiled, which takes a sixth of the time
        self.vision_block = torch.compile(vision_block, dynamic=True) if compiled else vision_block
        self.text_block = torch.compile(text_block, dynamic=True) if compiled else text_block
        self.patches = torch.compile(patches, dynamic=True) if compiled else patches
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def places(self, grid: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a grid's patches: four neighbours in the table of positions and their weights, cosines and sines."""
        if grid not in self.known:
            visual, one = self.visual, torch.tensor([[1, 2 * grid[0], 2 * grid[1]]], device=like.device)
            near = get_vision_interpolation_indices_and_weights(
                one, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners, spatial_merge_size=2,
            )  # fmt: skip
            self.known[grid] = (*near, *visual.rotary_pos_emb(like.detach(), get_vision_position_ids(one, 2)))
        return self.known[grid]

    def encode(self, pictures: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
        """Merged tokens `[B, G * N, D]` of pictures `[B, F, 3, H, W]`, and further levels of them."""
        visual, device = self.visual, pictures.device.type
        mixed = torch.is_autocast_enabled(device)
        rows = self.patches(pictures, torch.get_autocast_dtype(device) if mixed else torch.float32)
        index, weight, cos, sin = self.places(grid, rows)
        project = visual.patch_embed.proj
        # a convolution with no overlap; equal frames share the sum of both weights
        weight_of = project.weight.sum(dim=2) if pictures.shape[1] == 1 else project.weight
        hidden = F.linear(rows, weight_of.flatten(1), project.bias)
        hidden = hidden + (visual.pos_embed(index) * weight[:, :, None]).sum(1).to(hidden.dtype)
        levels, begin = [], 0
        for merger, number in zip(visual.deepstack_merger_list, visual.deepstack_visual_indexes, strict=True):
            hidden = self.see(visual.blocks[begin : number + 1], hidden, cos, sin)
            levels.append(merger(hidden.flatten(0, 1)).unflatten(0, (len(pictures), -1)))
            begin = number + 1
        hidden = self.see(visual.blocks[begin:], hidden, cos, sin)
        return visual.merger(hidden.flatten(0, 1)).unflatten(0, (len(pictures), -1)), levels

    def see(self, blocks: Sequence[Any], hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Some layers of the encoder, one after the other."""
        for block in blocks:
            hidden = self.vision_block(block, hidden, cos, sin)
        return hidden

    def understand(self, blocks: Sequence[Any], hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Some layers of the language model, one after the other."""
        for block in blocks:
            hidden = self.text_block(block, hidden, cos, sin, mask)
        return hidden

    def read(self, batch: dict[str, Any], tokens: Tensor, levels: list[Tensor]) -> Tensor:
        """Last hidden states `[B, T, D]` of the questions' text, each question by itself."""
        opening, visual = batch["opening"], batch["visual"]  # ids [L0], and which of them stand for tokens
        embed = self.language.embed_tokens
        before = embed(opening).to(tokens.dtype).expand(len(tokens), -1, -1)
        hidden = torch.cat([before.index_copy(1, visual, tokens), embed(batch["ids"]).to(tokens.dtype)], dim=1)
        begin = batch["positions"].max() + 1
        text = (batch["within"] + begin).expand(3, -1, -1)
        positions = torch.cat([batch["positions"][:, None].expand(-1, len(tokens), -1), text], dim=2)
        cos, sin = self.language.rotary_emb(hidden, positions)
        mask = self.mask(batch["turn"], len(opening))
        for number, level in enumerate(levels):
            hidden = self.understand(self.language.layers[number : number + 1], hidden, cos, sin, mask)
            hidden = hidden.index_add(1, visual, level.to(hidden.dtype))
        hidden = self.understand(self.language.layers[len(levels) :], hidden, cos, sin, mask)
        return self.language.norm(hidden[:, len(opening) :])

    @staticmethod
    def mask(turn: Tensor, prefix: int) -> Tensor:
        """True `[B, 1, L, L]` where a token may look: back, at the picture and at its own question."""
        owner = F.pad(turn, (prefix, 0))  # 0 is what comes before the questions, and padding
        padding = F.pad(turn == 0, (prefix, 0))
        same = (owner[:, :, None] == owner[:, None, :]) | (owner[:, None, :] == 0) & ~padding[:, None, :]
        length = owner.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=turn.device).tril()
        return (same & causal)[:, None]
