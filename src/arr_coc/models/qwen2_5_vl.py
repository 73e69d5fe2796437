"""Qwen2.5-VL: as Qwen2-VL, with windows in its encoder and absolute time in the positions of clips."""

from __future__ import annotations

from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from arr_coc.models.family import Inputs, register_family
from arr_coc.models.qwen2_vl import Qwen2VL


@register_family("qwen2_5_vl")
class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL. `second_per_grid_ts` reaches its positions by name."""

    processor_class = "Qwen2_5_VLProcessor"

    def cell_order(self, inputs: Inputs, kind: str) -> Tensor | None:
        """The encoder works window by window."""
        vision = self.config.vision_config
        index, _ = get_vision_window_index(
            inputs[f"{kind}_grid_thw"],
            spatial_merge_size=vision.spatial_merge_size,
            window_size=vision.window_size,
            patch_size=vision.patch_size,
        )
        order: Tensor = index.argsort()
        return order
