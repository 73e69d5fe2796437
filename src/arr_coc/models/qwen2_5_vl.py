"""Qwen2.5-VL: as Qwen2-VL, with windows in its encoder and absolute time in the positions of clips."""

from __future__ import annotations

from arr_coc.models.family import register_family
from arr_coc.models.qwen2_vl import Qwen2VL


@register_family("qwen2_5_vl")
class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL. `second_per_grid_ts` reaches its positions by name."""
