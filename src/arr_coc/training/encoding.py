"""What a frozen model sees of a picture: all of it, or its gestalt beside the texture of the windows."""

from __future__ import annotations

from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from arr_coc.config import Grid
from arr_coc.families.family import Family
from arr_coc.gaze.gestalt import encode_overviews
from arr_coc.gaze.plan import Gaze, GazePlan, plan_gaze
from arr_coc.gaze.source import NativeSight
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.realizing import ARRCOCLayer


class Seen(NamedTuple):
    """What is kept of a picture: tokens `[N, D]` on `grid`, texture `[n, C]` on `cells`, and how much of the cells'
    width and height the picture fills.
    """

    tokens: Tensor
    texture: Tensor
    grid: Grid
    cells: Grid
    reach: tuple[float, float] = (1.0, 1.0)


class Seer:
    """Looks at pictures as a model does."""

    def __init__(self, family: Family, processor: Any, layer: ARRCOCLayer, gaze: bool) -> None:
        self.family, self.processor, self.layer, self.gaze = family, processor, layer, gaze

    def __call__(self, picture: Image.Image) -> Seen:
        """Encode a picture whole, or its gestalt."""
        family, device = self.family, self.family.target.device
        if self.gaze:
            sight = NativeSight(picture, family.cut(), device)
            plan = plan_gaze(sight.grid, None, Gaze())
            if plan.scale > 1:
                return self._glance(sight, plan)
        inputs = self.processor.image_processor(images=[picture], return_tensors="pt").to(device)
        inputs["pixel_values"] = inputs["pixel_values"].to(family.target.dtype)
        tokens, grid = family.encode(inputs, "image").features, family.grids(inputs, "image")[0]
        shown = family.pictures(inputs, "image")
        return self._keep(tokens, grid, grid, None if shown is None else shown[0])

    def _glance(self, sight: NativeSight, plan: GazePlan) -> Seen:
        maps = sight.measure(plan)
        overview = encode_overviews(self.family, [sight], [plan], [maps])
        height, width = maps.size
        reach = (sight.size[1] / width, sight.size[0] / height)
        return self._keep(overview.features, plan.gestalt, plan.windows, maps)._replace(reach=reach)

    def _keep(self, tokens: Tensor, grid: Grid, cells: Grid, frames: Tensor | Mipmaps | None) -> Seen:
        texture = self.layer.read_texture(tokens[None], grid, cells, frames, None)  # [1, C, h, w]
        return Seen(tokens.cpu(), texture[0].flatten(1).mT.cpu(), grid, cells)
