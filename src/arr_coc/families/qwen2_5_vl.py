"""Qwen2.5-VL: Qwen2-VL with window attention in its encoder and absolute time in the positions of clips."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from arr_coc.config import Grid
from arr_coc.families.family import Inputs, register_family
from arr_coc.families.faster.leaner_layers import WINDOWS, lean_encoder, with_attention, with_fused_norms
from arr_coc.families.qwen2_vl import Qwen2VL


@register_family("qwen2_5_vl")
class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL. Its `get_rope_index` also takes `second_per_grid_ts`."""

    processor_class = "Qwen2_5_VLProcessor"

    def attending_layers(self, depth: int) -> Sequence[int]:
        """The layers with full attention; the others attend within windows."""
        return [int(layer) for layer in self.config.vision_config.fullatt_block_indexes]

    def cell_order(self, inputs: Inputs, kind: str) -> Tensor | None:
        """Index of each cell in the encoder, which works window by window."""
        vision = self.config.vision_config
        index, _ = get_vision_window_index(
            inputs[f"{kind}_grid_thw"],
            spatial_merge_size=vision.spatial_merge_size,
            window_size=vision.window_size,
            patch_size=vision.patch_size,
        )
        order: Tensor = index.argsort()
        return order

    def cell_arguments(self, places: Sequence[Tensor], grids: Sequence[Grid]) -> dict[str, Tensor]:
        """The chosen cells sorted by encoder window, and the length of each window's part."""
        order, windows = self._sort_by_window(places, grids)
        _, counts = torch.unique_consecutive(windows, return_counts=True)
        ends = (counts * self.config.vision_config.spatial_merge_size**2).cumsum(0, dtype=torch.int32)
        return {"window_index": order, "cu_window_seqlens": torch.cat([ends.new_zeros(1), ends])}

    def _sort_by_window(self, places: Sequence[Tensor], grids: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """The order `[k]` of the chosen cells in the encoder, window by window, and their windows in that order."""
        vision = self.config.vision_config
        side = vision.window_size // vision.patch_size // vision.spatial_merge_size  # in cells
        keys, first = [], 0
        for place, (_, rows, columns) in zip(places, grids, strict=True):
            per_row = -(-columns // side)  # windows in a row
            window = first + place[:, 0] // side * per_row + place[:, 1] // side
            inside = place[:, 0] % side * side + place[:, 1] % side
            keys.append(window * side**2 + inside)
            first += -(-rows // side) * per_row
        key = torch.cat(keys)
        order = key.argsort()
        return order, key[order] // side**2

    def _mask_windows(self, places: Sequence[Tensor], grids: Sequence[Grid]) -> dict[str, Tensor]:
        """The chosen cells sorted by encoder window, as one window, and a mask `[n, n]` of the patches of each."""
        order, windows = self._sort_by_window(places, grids)
        patches = self.config.vision_config.spatial_merge_size**2
        window = windows.repeat_interleave(patches)  # [n]
        return {
            "window_index": order,
            "cu_window_seqlens": torch.tensor([0, len(window)], dtype=torch.int32),
            "arr_coc_windows": window == window[:, None],
        }

    def record_cells(self, patches: Tensor, cells: Sequence[Tensor], grids: Sequence[Grid]) -> tuple[Tensor, ...]:
        """Every question looks into other windows, and only the device knows how many cells of each are chosen.

        So all patches attend under a mask that is True within windows, in layers that attend within windows.
        """
        visual = self.inner.visual
        encoder = lean_encoder(visual)
        encoder.__dict__["blocks"] = blocks = [with_fused_norms(block) for block in visual.blocks]
        for number, block in enumerate(blocks):
            if number not in visual.fullatt_block_indexes:
                block.__dict__["attn"] = with_attention(block.attn, WINDOWS)
        return self.call_lean(encoder, patches, self.describe_cells(cells, grids, self._mask_windows))
