"""What a frozen model sees of a picture: all of it, or its gestalt beside the texture of the windows."""

from __future__ import annotations

from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from arr_coc.config import Grid
from arr_coc.families.family import Family
from arr_coc.gaze.gestalt import encode_gestalts
from arr_coc.gaze.plan import Gaze, GazePlan, plan_gaze
from arr_coc.gaze.source import NativeSource
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.realizing import ARRCOCLayer


class EncodedPicture(NamedTuple):
    """What is kept of a picture: tokens `[N, D]` on `grid`, texture `[n, C]` on `cells`, and how much of the cells'
    width and height the picture fills.
    """

    tokens: Tensor
    texture: Tensor
    grid: Grid
    cells: Grid
    reach: tuple[float, float] = (1.0, 1.0)


class PictureEncoder:
    """Encodes pictures as a model does: whole, or with `gaze` as mode `saccade` sees them."""

    def __init__(self, family: Family, processor: Any, layer: ARRCOCLayer, gaze: bool) -> None:
        self.family, self.processor, self.layer, self.gaze = family, processor, layer, gaze

    def __call__(self, picture: Image.Image) -> EncodedPicture:
        """Encode a picture whole, or its gestalt."""
        family, device = self.family, self.family.target.device
        if self.gaze:
            sight = NativeSource(picture, family.cut(), device)
            plan = plan_gaze(sight.grid, None, Gaze())
            if plan.scale > 1:
                return self._encode_gestalt(sight, plan)
        inputs = self.processor.image_processor(images=[picture], return_tensors="pt").to(device)
        inputs["pixel_values"] = inputs["pixel_values"].to(family.target.dtype)
        tokens, grid = family.encode(inputs, "image").features, family.grids(inputs, "image")[0]
        shown = family.pictures(inputs, "image")
        return self._keep(tokens, grid, grid, None if shown is None else shown[0])

    def _encode_gestalt(self, sight: NativeSource, plan: GazePlan) -> EncodedPicture:
        maps = sight.measure(plan)
        overview = encode_gestalts(self.family, [sight], [plan], [maps], replay=True)
        height, width = maps.size
        reach = (sight.size[1] / width, sight.size[0] / height)
        return self._keep(overview.features, plan.gestalt, plan.windows, maps)._replace(reach=reach)

    def _keep(self, tokens: Tensor, grid: Grid, cells: Grid, frames: Tensor | Mipmaps | None) -> EncodedPicture:
        texture = self.layer.read_texture(tokens[None], grid, cells, frames, None)  # [1, C, h, w]
        return EncodedPicture(tokens.cpu(), texture[0].flatten(1).mT.cpu(), grid, cells)
