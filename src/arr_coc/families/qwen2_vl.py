"""Qwen2-VL: three-dimensional positions (M-RoPE), patches of 14 pixels, CLIP's normalisation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_cu_seqlens

from arr_coc.config import CellBox, Grid
from arr_coc.families.encoder_attention import LayerInput
from arr_coc.families.encoder_graph import call_encoder
from arr_coc.families.family import Encoded, Family, Inputs, read_levels, register_family
from arr_coc.families.faster.leaner_layers import lean_encoder
from arr_coc.pixels.patches import CLIP_MEAN, CLIP_STD, patches_from_picture, picture_from_patches
from arr_coc.runtime.tensors import constant


@register_family("qwen2_vl")
class Qwen2VL(Family):
    """Qwen2-VL, and the base class of the later Qwen families."""

    processor_class = "Qwen2VLProcessor"
    kinds = ("image", "video")
    consumed = (
        *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"),
        *("second_per_grid_ts", "mm_token_type_ids"),
    )
    graphs_language = True
    image_mean: ClassVar[Sequence[float]] = CLIP_MEAN
    image_std: ClassVar[Sequence[float]] = CLIP_STD

    def needs(self, inputs: Inputs) -> list[str]:
        """The grid of every kind of picture."""
        return [f"{kind}_grid_thw" for kind in self.present(inputs)]

    def grids(self, inputs: Inputs, kind: str) -> list[Grid]:
        """The patch grids divided by the encoder's merge size."""
        merge = self.config.vision_config.spatial_merge_size
        return [(t, h // merge, w // merge) for t, h, w in inputs[f"{kind}_grid_thw"].tolist()]

    def run_encoder(self, inputs: Inputs, kind: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Encode all pictures of a kind once."""
        grids = inputs[f"{kind}_grid_thw"]
        run = getattr(self.inner, f"get_{kind}_features")
        output = run(inputs[self.pixel_names[kind]], grids, **self.attended_lengths(grids, kind))
        features, *deepstack = read_levels(output)
        return features, tuple(deepstack)

    def attended_lengths(self, grids: Tensor, kind: str) -> dict[str, Tensor]:
        """Where one picture's patches end and the next begin, on the host.

        Every layer of the encoder asks for it, and would wait for the device each time; flash attention reads it there.
        """
        if kind != "image" or "flash" in str(self.inner.visual.config._attn_implementation):
            return {}  # transformers takes it for pictures only
        return {"image_cu_seqlens": get_vision_cu_seqlens(grids.cpu())}

    def encode_cells(
        self, patches: Tensor, cells: Sequence[Tensor], grids: Sequence[Grid], replay: bool = False
    ) -> Encoded:
        """Call the encoder with the patches of the chosen cells and their places as arguments."""
        visual = self.inner.visual

        def plain(patches: Tensor, *cells: Tensor) -> tuple[Tensor, ...]:
            return read_levels(
                visual(patches, return_dict=True, **self.describe_cells(cells, grids, self.cell_arguments))
            )

        def recorded(patches: Tensor, *cells: Tensor) -> tuple[Tensor, ...]:
            return self.record_cells(patches, cells, grids)

        tensors = (patches.to(visual.dtype), *cells)
        levels = call_encoder(visual, tensors, plain, recorded, tuple(grids), replay)
        return Encoded(levels[0], levels[1:])

    def record_cells(self, patches: Tensor, cells: Sequence[Tensor], grids: Sequence[Grid]) -> tuple[Tensor, ...]:
        """The levels of cells, without waiting for the device."""
        arguments = self.describe_cells(cells, grids, self.cell_arguments)
        return self.call_lean(lean_encoder(self.inner.visual), patches, arguments)

    def call_lean(self, encoder: Any, patches: Tensor, arguments: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The levels from a leaner copy of the encoder: its class runs it, not its call, which may be compiled."""
        return read_levels(type(encoder).forward(encoder, patches, return_dict=True, **arguments))

    def describe_cells(
        self, cells: Sequence[Tensor], grids: Sequence[Grid], further: Callable[..., dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The encoder's arguments besides the patches, given the chosen cells `[k]` of each picture.

        `further` gives those that only some families have, from the rows and columns `[k, 2]` of the cells.
        """
        merge, device = self.config.vision_config.spatial_merge_size, cells[0].device
        places = [
            torch.stack([k // grid[2], k % grid[2]], dim=1) for k, grid in zip(cells, grids, strict=True)
        ]  # [k, 2]
        inside = torch.cartesian_prod(*[torch.arange(merge, device=device)] * 2)  # [m * m, 2]
        positions = (torch.cat(places)[:, None] * merge + inside).flatten(0, 1)  # [n, 2]
        lengths = torch.tensor([0] + [len(indices) * merge**2 for indices in cells], dtype=torch.int32)
        layout = {"cu_seqlens": lengths.cumsum(0, dtype=torch.int32), **further(places, grids)}
        return {
            "grid_thw": self.state_grids("image", grids, device)["image_grid_thw"],
            "position_ids": positions,
            **{name: value.to(self._argument_device(name, device)) for name, value in layout.items()},
        }

    def _argument_device(self, name: str, device: torch.device) -> torch.device:
        """The device of an encoder argument: layers read lengths on the host, except with flash attention."""
        flash = "flash" in str(self.inner.visual.config._attn_implementation)
        return device if flash or "seqlens" not in name else torch.device("cpu")

    def cell_arguments(self, places: Sequence[Tensor], grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Further encoder arguments, given the rows and columns `[k, 2]` of each picture's chosen cells."""
        return {}

    def encoder_attention(self) -> list[nn.Module]:
        """The attention module of each encoder layer."""
        return [block.attn for block in self.inner.visual.blocks]

    def read_layer(self, module: nn.Module, called: dict[str, Any], inputs: Inputs, kind: str) -> LayerInput:
        """Queries and keys of a layer; attention stays inside a frame (or window)."""
        attention: Any = module
        hidden = called["hidden_states"]
        # [n, 3 * F] -> [3, n, heads, d]
        split = attention.qkv(hidden).view(hidden.shape[0], 3, attention.num_heads, -1).transpose(0, 1)
        queries, keys = apply_rotary_pos_emb_vision(split[0], split[1], *called["position_embeddings"])
        return LayerInput(
            queries=queries.transpose(0, 1),  # [heads, n, d]
            keys=keys.transpose(0, 1),
            content=split[1].flatten(1),
            lengths=tuple(called["cu_seqlens"].diff().tolist()),
            scale=attention.head_dim**-0.5,
            patches=self.config.vision_config.spatial_merge_size**2,
            order=self.cell_order(inputs, kind),
        )

    def cell_order(self, inputs: Inputs, kind: str) -> Tensor | None:
        """Index of each cell in the encoder; None if that is the order of the picture."""
        return None

    def completed(self, inputs: Inputs) -> dict[str, Tensor]:
        """`mm_token_type_ids`; without them `generate` silently falls back to text positions."""
        if inputs.get("mm_token_type_ids") is not None:
            return {}
        ids = inputs["input_ids"]
        kinds = [(ids == self.token_id(kind)).int() * (place + 1) for place, kind in enumerate(self.kinds)]
        return {"mm_token_type_ids": sum(kinds[1:], kinds[0])}

    def positions(self, inputs: Inputs) -> Tensor:
        """M-RoPE positions `[3, B, L]` of the full prompt."""
        available = {**inputs, **self.completed(inputs)}
        names = inspect.signature(self.inner.get_rope_index).parameters
        arguments = {name: available[name] for name in names if available.get(name) is not None}
        positions: Tensor = self.inner.get_rope_index(**arguments)[0]
        return positions

    def place(self, mask: Tensor, positions: Tensor, next_position: Tensor) -> dict[str, Tensor]:
        """Four rows: text positions without gaps, which would mean packed sequences, then t, h, w."""
        text = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
        self.inner.rope_deltas = (next_position - mask.long().sum(dim=-1))[:, None]  # for decoding
        return {"position_ids": torch.cat([text[None], positions])}

    def pictures(self, inputs: Inputs, kind: str) -> list[Tensor] | None:
        """One frame per temporal patch, exactly as the processor resized it."""
        rows, cut = inputs[self.pixel_names[kind]], self.cut()
        # [n, C * T * P * P] -> [n, C, T, P * P] -> [n, C * P * P]: only the first frame of each pair
        rows = rows.view(len(rows), 3, cut["temporal_patch_size"], -1)[:, :, 0].flatten(1)
        return picture_from_patches(rows, inputs[f"{kind}_grid_thw"], **{**cut, "temporal_patch_size": 1})

    def resize(
        self, inputs: Inputs, kind: str, grids: Sequence[Grid], boxes: Sequence[CellBox] | None = None
    ) -> dict[str, Tensor]:
        """Pixel values and grids of the resized pictures, or of parts of them; bicubic, as in the processor."""
        pixels, patch_grid = inputs[self.pixel_names[kind]], inputs[f"{kind}_grid_thw"]
        clips = picture_from_patches(pixels, patch_grid, **self.cut())
        cell = self.config.vision_config.patch_size * self.config.vision_config.spatial_merge_size
        rows, sizes = [], []
        if boxes is not None:
            clips = [
                clip[..., top * cell : (top + h) * cell, left * cell : (left + w) * cell]
                for clip, (top, left, h, w) in zip(clips, boxes, strict=True)
            ]
        for clip, (_, height, width) in zip(clips, grids, strict=True):
            size = (height * cell, width * cell)
            if clip.shape[2:] != size:
                clip = F.interpolate(clip.float(), size, mode="bicubic", antialias=True).clamp(0, 1)
            patches, patch_size = patches_from_picture(clip, **self.cut())
            rows.append(patches.to(pixels.dtype))
            sizes.append(patch_size)
        grid = torch.tensor(sizes, dtype=patch_grid.dtype, device=patch_grid.device)
        return {self.pixel_names[kind]: torch.cat(rows), f"{kind}_grid_thw": grid}

    def state_grids(self, kind: str, grids: Sequence[Grid], device: torch.device) -> dict[str, Tensor]:
        """The patch grids."""
        merge = self.config.vision_config.spatial_merge_size
        return {f"{kind}_grid_thw": _state(tuple((t, h * merge, w * merge) for t, h, w in grids), device)}

    def cut(self) -> dict[str, Any]:
        """How pictures are cut into patches."""
        vision = self.config.vision_config
        return {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "image_mean": self.image_mean,
            "image_std": self.image_std,
        }

    def wrap(self, features: list[Tensor], deepstack: list[list[Tensor]]) -> Any:
        """Features of each picture; this family has no DeepStack."""
        return BaseModelOutputWithPooling(pooler_output=features)  # type: ignore[arg-type]


@constant
def _state(grids: tuple[Grid, ...], device: torch.device) -> Tensor:
    return torch.tensor(grids, device=device)
