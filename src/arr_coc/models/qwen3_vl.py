"""Qwen3-VL: patches of 16 pixels, one run of tokens per frame, DeepStack levels that must be pruned alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from arr_coc.models.family import register_family
from arr_coc.models.qwen2_vl import Qwen2VL
from arr_coc.patches import HALF


@register_family("qwen3_vl", "qwen3_vl_moe")
class Qwen3VL(Qwen2VL):
    """Qwen3-VL and its mixture of experts."""

    processor_class = "Qwen3VLProcessor"
    image_mean = HALF
    image_std = HALF

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture and their rows of every DeepStack level."""
        # here, not above: opening another family should not load this one
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        return BaseModelOutputWithDeepstackFeatures(
            pooler_output=features,  # type: ignore[arg-type]
            deepstack_features=deepstack,  # type: ignore[arg-type]
        )
