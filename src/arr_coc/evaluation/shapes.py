"""Models with the shapes of released ones and random weights, to measure times without a download."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

QUESTION = 40  # text tokens around the picture
IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
_TEXT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_ENCODER = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")
# family, text sizes, encoder sizes, and special encoder layers: DeepStack's, or those with full attention
SHAPES: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...], list[int]]] = {
    "Qwen3-VL-2B": ("qwen3", (2048, 6144, 28, 16, 8), (24, 1024, 4096, 16, 2048), [5, 11, 17]),
    "Qwen3-VL-4B": ("qwen3", (2560, 9728, 36, 32, 8), (24, 1024, 4096, 16, 2560), [5, 11, 17]),
    "Qwen3-VL-8B": ("qwen3", (4096, 12288, 36, 32, 8), (27, 1152, 4304, 16, 4096), [8, 16, 24]),
    "Qwen2.5-VL-7B": ("qwen2.5", (3584, 18944, 28, 28, 4), (32, 1280, 3420, 16, 3584), [7, 15, 23, 31]),
    "tiny Qwen3-VL": ("qwen3", (256, 256, 3, 2, 1), (2, 32, 64, 2, 256), [0]),
}


def build_shape(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Build a model with random weights on a device, in a data type.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.evaluation.shapes import build_shape
    >>> build_shape("tiny Qwen3-VL", torch.device("cpu"), torch.float32).config.model_type
    'qwen3_vl'

    ```
    """
    if name not in SHAPES:
        raise ValueError(f"no shape is named {name!r}; there are {', '.join(SHAPES)}")
    kind, text_sizes, encoder_sizes, special = SHAPES[name]
    text: dict[str, Any] = dict(zip(_TEXT, text_sizes, strict=True))
    encoder: dict[str, Any] = dict(zip(_ENCODER, encoder_sizes, strict=True))
    encoder |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if kind == "qwen3":
        rope |= {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
        text |= {"vocab_size": 151936, "max_position_embeddings": 262144, "head_dim": 128, "rope_parameters": rope}
        encoder |= {"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": special}
        config_class: Any = transformers.Qwen3VLConfig
        model_class: Any = transformers.Qwen3VLForConditionalGeneration
    else:
        rope |= {"mrope_section": [16, 24, 24]}
        text |= {"vocab_size": 152064, "max_position_embeddings": 128000, "rope_parameters": rope}
        encoder |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": special}
        config_class = transformers.Qwen2_5_VLConfig
        model_class = transformers.Qwen2_5_VLForConditionalGeneration
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return model_class(config_class(text_config=text, vision_config=encoder, **IDS)).eval()
    finally:
        torch.set_default_dtype(before)


def inputs_for_shape(model: Any, grid: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs in a processor's format: a picture of noise with `grid` cells inside a short prompt."""
    generator = torch.Generator().manual_seed(seed)
    patch, count = model.config.vision_config.patch_size, grid[0] * grid[1]
    image, start, end = (IDS[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end"))
    words = torch.randint(100, 5000, (QUESTION,), generator=generator).tolist()
    ids = torch.tensor([[*words[:8], start, *[image] * count, end, *words[8:]]], device=model.device)
    pixels = 2 * torch.rand(4 * count, 6 * patch**2, generator=generator) - 1
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == image).int(),
        "pixel_values": pixels.to(model.device, model.dtype),
        "image_grid_thw": torch.tensor([[1, 2 * grid[0], 2 * grid[1]]]).to(model.device),
    }
