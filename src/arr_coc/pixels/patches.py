"""Convert pictures to the flattened patches of a Qwen-VL processor, and back, exactly.

Qwen's `pixel_values` is not `[B, 3, H, W]` but one row per patch, `[sum(t * h * w), C * T * P * P]`, with the patches
of each 2x2 merge cell next to each other. Frames come in groups of `T`; a still picture is repeated `T` times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.runtime.tensors import constant

# Normalisation of Qwen2-VL and Qwen2.5-VL; Qwen3-VL uses 0.5 throughout.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@constant
def colour_constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One value per colour as `[3, 1, 1]`, to normalise a picture."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(3, 1, 1)


def patches_from_picture(
    picture: Tensor,
    *,
    patch_size: int = 16,
    merge_size: int = 2,
    temporal_patch_size: int = 2,
    image_mean: Sequence[float] = HALF,
    image_std: Sequence[float] = HALF,
) -> tuple[Tensor, tuple[int, int, int]]:
    """Normalise a picture and cut it into patches in merge order, as a Qwen-VL processor does after resizing.

    Args:
        picture (`Tensor` of shape `[frames, 3, H, W]` or `[3, H, W]`): in [0, 1]; sides are multiples of
            `patch_size * merge_size`. A still picture or an incomplete last group is filled with its last frame.
        patch_size (`int`, *optional*, defaults to 16): 14 for Qwen2-VL and Qwen2.5-VL, 16 for Qwen3-VL.
        merge_size (`int`, *optional*, defaults to 2): patches a side of one token.
        temporal_patch_size (`int`, *optional*, defaults to 2): frames of one patch.
        image_mean, image_std (`Sequence[float]`, *optional*): the processor's normalisation.

    Returns:
        `pixel_values` `[t * h * w, C * T * P * P]` and the patch grid `(t, h, w)`.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import patches_from_picture
    >>> rows, grid = patches_from_picture(torch.rand(3, 64, 96))
    >>> rows.shape, grid
    (torch.Size([24, 1536]), (1, 4, 6))

    ```
    """
    if picture.ndim == 3:
        picture = picture[None]
    if picture.ndim != 4 or picture.shape[1] != 3:
        raise ValueError(f"`picture` must have shape [frames, 3, H, W] or [3, H, W], got {tuple(picture.shape)}")
    frames, _, height, width = picture.shape
    cell = patch_size * merge_size
    if height % cell or width % cell or 0 in picture.shape:
        raise ValueError(f"`picture` sides must be multiples of {cell} pixels, got {height}x{width}; resize it first")
    missing = -frames % temporal_patch_size
    mean, std = colour_constant(tuple(image_mean), picture.device), colour_constant(tuple(image_std), picture.device)
    normal = (picture.float() - mean) / std
    if missing:
        normal = torch.cat([normal, normal[-1:].expand(missing, -1, -1, -1)])
    t, h, w = (frames + missing) // temporal_patch_size, height // patch_size, width // patch_size
    # [t, T, C, h/m, m, P, w/m, m, P] -> [t, h/m, w/m, m, m, C, T, P, P]
    split = normal.view(
        t, temporal_patch_size, 3, h // merge_size, merge_size, patch_size, w // merge_size, merge_size, patch_size
    )
    rows = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)
    return rows.to(picture.dtype), (t, h, w)


def picture_from_patches(
    pixel_values: Tensor,
    grid_thw: Tensor | Sequence[Sequence[int]],
    *,
    patch_size: int = 16,
    merge_size: int = 2,
    temporal_patch_size: int = 2,
    image_mean: Sequence[float] = HALF,
    image_std: Sequence[float] = HALF,
) -> list[Tensor]:
    """Undo [`patches_from_picture`] for several pictures or clips: the pictures `[t * T, 3, H, W]` in [0, 1].

    A still picture comes back as its `T` equal frames; take `[::temporal_patch_size]` for one frame per token row.
    The result is clamped to [0, 1] against rounding.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import patches_from_picture, picture_from_patches
    >>> picture = torch.rand(3, 64, 96)
    >>> rows, grid = patches_from_picture(picture)
    >>> [restored] = picture_from_patches(rows, [grid])
    >>> torch.allclose(restored[0], picture, atol=1e-6)
    True

    ```
    """
    # a transfer only if the grid is on the device; processors make it on the host
    grids = grid_thw.tolist() if isinstance(grid_thw, Tensor) else [list(grid) for grid in grid_thw]
    width = 3 * temporal_patch_size * patch_size**2
    counts = [t * h * w for t, h, w in grids]
    if pixel_values.ndim != 2 or pixel_values.shape[1] != width:
        raise ValueError(
            f"`pixel_values` must have shape [patches, {width}] for patch size {patch_size} and {temporal_patch_size} "
            f"frames a patch, got {tuple(pixel_values.shape)}"
        )
    if sum(counts) != pixel_values.shape[0]:
        raise ValueError(
            f"`grid_thw` has {sum(counts)} patches, `pixel_values` {pixel_values.shape[0]}; "
            "take both from one call of the processor"
        )
    if any(h % merge_size or w % merge_size for _, h, w in grids):
        raise ValueError(f"`grid_thw` sides must be multiples of the merge size {merge_size}, got {grids}")
    mean, std = (
        colour_constant(tuple(image_mean), pixel_values.device),
        colour_constant(tuple(image_std), pixel_values.device),
    )
    pictures = []
    for rows, (t, h, w) in zip(torch.split(pixel_values, counts), grids, strict=True):
        # [t, h/m, w/m, m, m, C, T, P, P] -> [t, T, C, h/m, m, P, w/m, m, P]
        split = rows.view(
            t, h // merge_size, w // merge_size, merge_size, merge_size, 3, temporal_patch_size, patch_size, patch_size
        )
        normal = split.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(
            t * temporal_patch_size, 3, h * patch_size, w * patch_size
        )
        pictures.append((normal.float() * std).add_(mean).clamp_(0, 1).to(pixel_values.dtype))
    return pictures
