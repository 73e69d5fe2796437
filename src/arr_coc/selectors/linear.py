"""The `linear` selector: about a hundred weights, the reference that larger selectors have to beat."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.runtime.tensors import constant, unit_rows
from arr_coc.selectors.contract import Selection, VisualQuery
from arr_coc.selectors.per_picture import PerPictureSelector, strongest, unit_tokens
from arr_coc.selectors.registry import register_selector
from arr_coc.texture import CHANNELS, generate_texture_array

WEIGHTS = Path(__file__).parent.parent / "assets" / "linear" / "model.safetensors"
# All channels except those made from the encoder's tokens.
USED = [place for name, place in CHANNELS["full"].items() if not name.startswith("semantic")]
LEAST = 1e-6


def describe_cells(query: VisualQuery) -> Tensor:
    """Features `[N, F]` of the cells of a picture.

    They are the texture channels, their distances from the mean over the picture, the largest and the mean cosine with
    the words (both scaled to [0, 1] within the picture), and the products of channels and cosines.
    """
    frames = query.picture
    if frames is None or isinstance(frames, Mipmaps):
        channels = query.tokens.new_zeros(len(query.tokens), len(USED), dtype=torch.float32)
    else:
        texture = generate_texture_array(frames.float(), query.grid[1:], "full")  # [t, C, h, w]
        channels = texture[:, _used(texture.device)].permute(0, 2, 3, 1).flatten(0, 2)  # [N, C]
    cosine = unit_tokens(query) @ unit_rows(query.words.float()).mT  # [N, Q]
    match = torch.stack([cosine.amax(dim=1), cosine.mean(dim=1)], dim=1)  # [N, 2]
    least, most = match.aminmax(dim=0, keepdim=True)
    match = (match - least) / (most - least + LEAST)
    distance = (channels - channels.mean(dim=0)).abs()
    return torch.cat([channels, distance, match, channels * match[:, :1], channels * match[:, 1:]], dim=1)


@register_selector("linear")
class LinearSelector(PerPictureSelector):
    """Keeps the cells with the largest weighted sum of features.

    The weights were fitted by logistic regression on the worlds' boxes with the embedded model
    (`recipes/selector/linear.py`). They are used unchanged on other models: the features are picture channels and
    cosines, which any model has.
    """

    reads_question = True
    needs_picture = True

    def pick(self, query: VisualQuery, count: int) -> Selection:
        """Keep the cells with the largest sums."""
        weight = _weights(query.tokens.device)
        score = F.linear(describe_cells(query), weight[None, :-1], weight[-1:])[:, 0]  # [N]
        return Selection(indices=strongest(score, count).sort().values)


@constant
def _weights(device: torch.device) -> Tensor:
    """A weight for each feature, and the bias."""
    return load_file(WEIGHTS)["weight"].to(device)


@constant
def _used(device: torch.device) -> Tensor:
    """Indices of the channels in use."""
    return torch.tensor(USED, device=device)
