"""LLaVA: one-dimensional positions and a square grid; shows that the layer does not depend on M-RoPE."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from arr_coc.models.family import Encoded, Family, Inputs, flat, register_family
from arr_coc.patches import CLIP_MEAN, CLIP_STD, colour_constant


@register_family("llava")
class Llava(Family):
    """LLaVA 1.5. A padded batch equals the plain `forward` to rounding: that one counts padding in its positions."""

    needs_cache = True
    consumed = ("pixel_values", "image_sizes")

    def encode(self, inputs: Inputs, kind: str) -> Encoded:
        """Encode all pictures once; each has the same square grid."""
        output = self.inner.get_image_features(
            inputs["pixel_values"],
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
            return_dict=True,
        )
        pictures = list(output.pooler_output)
        side = math.isqrt(pictures[0].shape[0])
        if any(picture.shape[0] != side * side for picture in pictures):
            raise ValueError(f"a square grid of tokens is needed, got {pictures[0].shape[0]} tokens a picture")
        return Encoded(flat(pictures), (), ((1, side, side),) * len(pictures))

    def positions(self, inputs: Inputs, mask: Tensor) -> Tensor:
        """Places `[1, B, L]` in the full prompt."""
        return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[None]

    def place(self, mask: Tensor, positions: Tensor, next_position: Tensor) -> dict[str, Tensor]:
        """One row: the places the tokens had in the full prompt."""
        return {"position_ids": positions[0]}

    def pictures(self, inputs: Inputs, kind: str) -> list[Tensor] | None:
        """The pictures with CLIP's normalisation undone."""
        pixels = inputs["pixel_values"].float()
        mean, std = (colour_constant(values, pixels.device) for values in (CLIP_MEAN, CLIP_STD))
        return [picture[None] for picture in (pixels * std + mean).clamp(0, 1)]

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture."""
        return BaseModelOutputWithPooling(pooler_output=features)  # type: ignore[arg-type]
