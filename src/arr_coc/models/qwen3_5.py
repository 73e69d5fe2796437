"""Qwen3.5: the encoder of Qwen3-VL without DeepStack, a language model that mixes linear and full attention."""

from __future__ import annotations

from arr_coc.models.family import register_family
from arr_coc.models.qwen2_vl import Qwen2VL
from arr_coc.patches import HALF


@register_family("qwen3_5")
class Qwen35(Qwen2VL):
    """Qwen3.5. In its linear layers a dropped token is not masked but never read."""

    processor_class = "Qwen3VLProcessor"
    image_mean = HALF
    image_std = HALF
