"""Qwen's image processor for PIL with less work: the same floats to the bit, sooner.

A byte has 256 values. What rescaling and normalising make of each of them is computed once, and then looked up for
every pixel, after the bytes, a quarter of the floats, were put in the order of the patches. A picture that has its size
already is not resized.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from transformers import BatchFeature
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize


class Qwen2VLImageProcessorPil(transformers.Qwen2VLImageProcessorPil):
    """Reads pictures as its parent does, under whose name it is saved."""

    def resize(  # type: ignore[override]
        self, image: np.ndarray, size: Any, resample: Any, factor: int, **kwargs: Any
    ) -> np.ndarray:
        """Resize a picture `[C, H, W]`, unless it has its size."""
        if size.shortest_edge and size.longest_edge and image.dtype == np.uint8:
            height, width = image.shape[-2:]
            if smart_resize(height, width, factor, size.shortest_edge, size.longest_edge) == (height, width):
                return image
        resized: np.ndarray = super().resize(image, size=size, resample=resample, factor=factor, **kwargs)
        return resized

    def _preprocess(self, images: list[np.ndarray], **settings: Any) -> Any:  # type: ignore[override]
        if settings["do_resize"]:
            cell, names = settings["patch_size"] * settings["merge_size"], ("size", "resample")
            images = [self.resize(image, factor=cell, **{name: settings[name] for name in names}) for image in images]
            settings["do_resize"] = False
        usual = settings["do_rescale"] and settings["do_normalize"]
        if not usual or not all(image.dtype == np.uint8 and len(image) == 3 for image in images):
            return super()._preprocess(images, **settings)
        every = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        floats = self.rescale(every, settings["rescale_factor"])
        table = self.normalize(floats, settings["image_mean"], settings["image_std"])[:, 0]  # [3, 256]
        cut = [settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size")]
        rows = np.concatenate([_cut(image, table, *cut) for image in images])
        grids = np.array([[1, *(side // cut[0] for side in image.shape[1:])] for image in images], dtype=np.int64)
        found = {"pixel_values": rows, "image_grid_thw": grids}
        return BatchFeature(data=found, tensor_type=settings["return_tensors"])


def _cut(image: np.ndarray, table: np.ndarray, patch: int, merge: int, frames: int) -> np.ndarray:
    """Patches `[h * w, C * T * P * P]` of a picture `[C, H, W]` of bytes, in merge order."""
    channels, height, width = image.shape
    h, w = height // patch, width // patch
    # [C, h/m, m, P, w/m, m, P] -> [C, h/m, w/m, m, m, P, P]
    split = image.reshape(channels, h // merge, merge, patch, w // merge, merge, patch).transpose(0, 1, 4, 2, 5, 3, 6)
    rows = np.empty((h * w, channels, frames, patch * patch), dtype=table.dtype)
    for channel, values in enumerate(table):
        rows[:, channel] = values[split[channel].reshape(h * w, 1, -1)]
    return rows.reshape(h * w, -1)
