"""Qwen3-VL: patches of 16 pixels, one run of tokens per frame, DeepStack levels that are pruned with the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from arr_coc.config import Grid
from arr_coc.families.family import register_family
from arr_coc.families.qwen2_vl import Qwen2VL
from arr_coc.pixels.patches import HALF
from arr_coc.runtime.tensors import constant


@register_family("qwen3_vl", "qwen3_vl_moe")
class Qwen3VL(Qwen2VL):
    """Qwen3-VL and its mixture-of-experts variant."""

    processor_class = "Qwen3VLProcessor"
    image_mean = HALF
    image_std = HALF

    def cell_arguments(self, places: Sequence[Tensor], grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Indices and weights of the cells' patches in the encoder's position table, which is stretched to the picture.

        Each side is stretched independently, so a picture of one column and one of one row give all values.
        """
        merge, side = self.config.vision_config.spatial_merge_size, self.inner.visual.num_grid_per_side
        indices, weights = [], []
        inside = torch.cartesian_prod(*[torch.arange(merge, device=places[0].device)] * 2)  # [m * m, 2]
        for place, (_, rows, columns) in zip(places, grids, strict=True):
            patch = (place[:, None] * merge + inside).flatten(0, 1)  # [k * m * m, 2]
            (row, row_weight), (column, column_weight) = (
                tuple(value[patch[:, axis]] for value in self._interpolate(axis, cells * merge, patch.device))
                for axis, cells in enumerate((rows, columns))
            )
            indices.append((row[:, :, None] * side + column[:, None]).flatten(1))
            weights.append((row_weight[:, :, None] * column_weight[:, None]).flatten(1))
        return {"interp_indices": torch.cat(indices), "interp_weights": torch.cat(weights)}

    def _interpolate(self, axis: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each patch along a side, the nearby rows (axis 0) or columns of the table, and their weights."""
        visual = self.inner.visual
        stretch = (
            axis,
            length,
            visual.num_grid_per_side,
            visual.interpolation_mode,
            visual.interpolation_align_corners,
        )
        return _nearby_places(*stretch, device), _nearby_weights(*stretch, device)

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture, and its rows of every DeepStack level."""
        # imported here, so that other families do not load it
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        return BaseModelOutputWithDeepstackFeatures(
            pooler_output=features,  # type: ignore[arg-type]
            deepstack_features=deepstack,  # type: ignore[arg-type]
        )


@constant
def _nearby_places(axis: int, length: int, side: int, mode: str, align: bool, device: torch.device) -> Tensor:
    places, _ = _stretch(axis, length, side, mode, align)
    return (places[:, :, 0] // side if axis == 0 else places[:, 0] % side).to(device)


@constant
def _nearby_weights(axis: int, length: int, side: int, mode: str, align: bool, device: torch.device) -> Tensor:
    _, weights = _stretch(axis, length, side, mode, align)
    return weights.sum(dim=2 if axis == 0 else 1).to(device)


def _stretch(axis: int, length: int, side: int, mode: str, align: bool) -> tuple[Tensor, Tensor]:
    """Nearby places of the position table and their weights `[length, rows, columns]`, for a picture of one line."""
    places, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([(1, length, 1) if axis == 0 else (1, 1, length)]),
        num_grid_per_side=side,
        mode=mode,
        align_corners=align,
    )
    count = round(places.shape[1] ** 0.5)
    return places.view(length, count, count), weights.view(length, count, count)
