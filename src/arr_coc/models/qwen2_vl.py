"""Qwen2-VL: three-dimensional positions (M-RoPE), patches of 14 pixels, normalisation of CLIP."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from arr_coc.config import Grid
from arr_coc.models.family import Encoded, Family, Inputs, flat, register_family
from arr_coc.patches import CLIP_MEAN, CLIP_STD, picture_from_patches


@register_family("qwen2_vl")
class Qwen2VL(Family):
    """Qwen2-VL, and the base of the families that followed it."""

    kinds = ("image", "video")
    consumed = (
        *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"),
        *("second_per_grid_ts", "mm_token_type_ids"),
    )
    image_mean: ClassVar[Sequence[float]] = CLIP_MEAN
    image_std: ClassVar[Sequence[float]] = CLIP_STD

    def encode(self, inputs: Inputs, kind: str) -> Encoded:
        """Encode all pictures of a kind once."""
        patch_grid = inputs[f"{kind}_grid_thw"]
        output = getattr(self.inner, f"get_{kind}_features")(inputs[self.pixel_names[kind]], patch_grid)
        merge = self.config.vision_config.spatial_merge_size
        grids: list[Grid] = [(t, h // merge, w // merge) for t, h, w in patch_grid.tolist()]
        deepstack = tuple(flat(level) for level in getattr(output, "deepstack_features", None) or ())
        return Encoded(flat(output.pooler_output), deepstack, tuple(grids))

    def positions(self, inputs: Inputs, mask: Tensor) -> Tensor:
        """M-RoPE positions `[3, B, L]` of the full prompt."""
        known = dict(inputs) | {"attention_mask": mask}
        if known.get("mm_token_type_ids") is None:
            # without it `generate` would silently fall back to text positions
            ids = known["input_ids"]
            kinds = [(ids == self.token_id(kind)).int() * (place + 1) for place, kind in enumerate(self.kinds)]
            known["mm_token_type_ids"] = sum(kinds[1:], kinds[0])
        wanted = inspect.signature(self.inner.get_rope_index).parameters
        arguments = {name: known[name] for name in wanted if known.get(name) is not None}
        positions: Tensor = self.inner.get_rope_index(**arguments)[0]
        return positions

    def place(self, mask: Tensor, positions: Tensor, next_position: Tensor) -> dict[str, Tensor]:
        """Four rows: a gapless count for the mask, in which gaps would read as packed sequences, then t, h, w."""
        text = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
        self.inner.rope_deltas = (next_position - mask.long().sum(dim=-1))[:, None]  # where decoding goes on
        return {"position_ids": torch.cat([text[None], positions])}

    def pictures(self, inputs: Inputs, kind: str) -> list[Tensor] | None:
        """One frame per row of tokens, exactly as the processor had it after resizing."""
        vision = self.config.vision_config
        clips = picture_from_patches(
            inputs[self.pixel_names[kind]],
            inputs[f"{kind}_grid_thw"],
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            image_mean=self.image_mean,
            image_std=self.image_std,
        )
        return [clip[:: vision.temporal_patch_size] for clip in clips]

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture; this family has no DeepStack."""
        return BaseModelOutputWithPooling(pooler_output=features)  # type: ignore[arg-type]
