"""LLaVA: one-dimensional positions, one square grid for every picture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from arr_coc.config import Grid
from arr_coc.families.encoder_attention import LayerInput
from arr_coc.families.family import Family, Inputs, flat, register_family
from arr_coc.pixels.patches import CLIP_MEAN, CLIP_STD, colour_constant


@register_family("llava")
class Llava(Family):
    """LLaVA 1.5. Padded batches match the plain `forward` up to rounding, because that one counts padding positions."""

    processor_class = "LlavaProcessor"
    needs_cache = True
    consumed = ("pixel_values", "image_sizes")

    def __init__(self, target: nn.Module) -> None:
        super().__init__(target)
        tower, strategy = self.config.vision_config.model_type, self.config.vision_feature_select_strategy
        if tower != "clip_vision_model" or strategy != "default":
            raise ValueError(
                f"LLaVA is supported with CLIP and the strategy 'default', got {tower} and {strategy!r}; "
                "subclass `arr_coc.families.llava.Llava` for other towers"
            )

    def grids(self, inputs: Inputs, kind: str) -> list[Grid]:
        """The same square grid for each picture."""
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        return [(1, side, side)] * len(inputs["pixel_values"])

    def run_encoder(self, inputs: Inputs, kind: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Encode all pictures once."""
        output = self.inner.get_image_features(
            inputs["pixel_values"],
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
            return_dict=True,
        )
        return flat(list(output.pooler_output)), ()

    def encoder_attention(self) -> list[nn.Module]:
        """The attention module of each layer of the vision tower."""
        return [layer.self_attn for layer in self.inner.vision_tower.encoder.layers]

    def read_layer(self, module: nn.Module, called: dict[str, Any], inputs: Inputs, kind: str) -> LayerInput:
        """Queries and keys of the patches; the class token is left out."""
        attention: Any = module
        hidden = called["hidden_states"][:, 1:]  # [P, n, F]
        content = attention.k_proj(hidden).flatten(0, 1)  # [P * n, F]
        queries = attention.q_proj(hidden).view(len(content), attention.num_heads, -1).transpose(0, 1)  # [heads, n, d]
        return LayerInput(
            queries=queries,
            keys=content.view(len(content), attention.num_heads, -1).transpose(0, 1),
            content=content,
            lengths=(hidden.shape[1],) * hidden.shape[0],
            scale=attention.head_dim**-0.5,
            patches=1,
        )

    def positions(self, inputs: Inputs) -> Tensor:
        """Positions `[1, B, L]` in the full prompt, without padding."""
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(inputs["input_ids"]) if mask is None else mask
        return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[None]

    def place(self, mask: Tensor, positions: Tensor, next_position: Tensor) -> dict[str, Tensor]:
        """One row: the positions of the tokens in the full prompt."""
        return {"position_ids": positions[0]}

    def pictures(self, inputs: Inputs, kind: str) -> list[Tensor] | None:
        """The pictures with CLIP's normalisation undone."""
        pixels = inputs["pixel_values"].float()
        mean, std = (colour_constant(values, pixels.device) for values in (CLIP_MEAN, CLIP_STD))
        return [picture[None] for picture in (pixels * std + mean).clamp(0, 1)]

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture."""
        return BaseModelOutputWithPooling(pooler_output=features)  # type: ignore[arg-type]
