"""Saliency maps of a picture: centre-surround contrast, rarity, clusters, strokes, distance to edges, structure.

The contrast maps follow Itti, Koch and Niebur (1998), "A model of saliency-based visual attention for rapid scene
analysis", with the mean of the whole picture as the last surround, so that a unique object differs from everything.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from arr_coc.pixels.mipmaps import halve, halve_peaks, peak_to, peaks_around, pool_to, resize
from arr_coc.runtime.tensors import constant

EDGE_THRESHOLD = 0.12
CLUSTERS = 3
# Cells are compared with at most this many others to judge how rare their colour is.
RARITY_SAMPLES = 256
RARITY_FLOOR = 1e-3
COLOUR_BANDWIDTH = 0.1
# The exact distance transform is quadratic in the side; larger grids are halved until they fit.
DISTANCE_SIDE = 128
# Least autocorrelation of neighbouring cells that counts as structure in a picture of 256 cells or more.
LEAST_ALIKE = 0.29


def opponent_colours(colour: Tensor) -> Tensor:
    """Red-green and blue-yellow opponency `[B, 2, H, W]` in [-1, 1] of `[B, 3, H, W]`."""
    red, green, blue = colour.chunk(3, dim=1)
    return torch.cat([red - green, blue - (red + green) / 2], dim=1)


def orientation(gradients: Tensor, magnitude: Tensor) -> Tensor:
    """Gradient with its angle doubled `[B, 2, H, W]`: opposite sides of a bar agree, crossing bars oppose."""
    x, y = gradients.chunk(2, dim=1)
    unit = x / magnitude.clamp(min=1e-6)  # cosine of the angle; cos 2a = 2 cos^2 a - 1, sin 2a = 2 cos a sin a
    return torch.cat([2 * unit * x - magnitude, 2 * unit * y], dim=1)


def centre_surround(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """Contrast `[B, 3, h, w]` (intensity, colour, orientation) of features `[B, 5, H, W]` with their surroundings."""
    half = pool_to(features, (2 * grid[0], 2 * grid[1]))  # [B, 5, 2h, 2w]
    pyramid = [half, pool_to(half, grid)]
    for _ in range(3):
        pyramid.append(halve(pyramid[-1]))
    overall = pyramid[1].mean(dim=(-2, -1), keepdim=True)  # [B, 5, 1, 1]
    near, far = pyramid[3:]
    contrasts = [_contrast(centre, near, far, overall, grid) for centre in pyramid[:2]]
    return (contrasts[0] + contrasts[1]).clamp_(max=1)


def _contrast(centre: Tensor, near: Tensor, far: Tensor, overall: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean difference `[B, 3, h, w]` of one level `[B, 5, *, *]` from three surroundings."""
    size = (centre.shape[-2], centre.shape[-1])
    squared = torch.stack([centre - resize(near, size), centre - resize(far, size), centre - overall]).square_()
    intensity, colour, edges = squared[:, :, :1], squared[:, :, 1:3], squared[:, :, 3:]  # [3, B, 1 or 2, *, *]
    length = torch.cat([intensity, colour.sum(dim=2, keepdim=True), edges.sum(dim=2, keepdim=True)], dim=2).sqrt_()
    return pool_to(length.mean(dim=0), grid)


@constant
def _sampled_cells(count: int, device: torch.device) -> Tensor:
    """Indices of up to 256 random cells: a regular pattern could fall in step with tiles or windows."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[:RARITY_SAMPLES].sort().values.to(device)


def colour_rarity(cells: Tensor) -> Tensor:
    """How rare a cell's colour is in its picture `[B, 1, h, w]`: 0 if all cells have it, 1 if hardly any."""
    batch, _, rows, columns = cells.shape
    points = cells.flatten(2).mT  # [B, N, 3]
    others = points.index_select(1, _sampled_cells(rows * columns, cells.device))  # [B, S, 3]
    squared = _squared_distance(points, others)  # [B, N, S]
    density = squared.mul_(-0.5 / COLOUR_BANDWIDTH**2).exp_().mean(dim=-1)  # [B, N]
    rarity = (density + RARITY_FLOOR).log_() / math.log(RARITY_FLOOR)
    return rarity.clamp_(0, 1).view(batch, 1, rows, columns)


def _squared_distance(points: Tensor, others: Tensor) -> Tensor:
    """Squared distances `[B, N, S]` of `[B, N, F]` and `[B, S, F]`, for few features.

    Exact for near neighbours, where a matrix product would cancel; exact `cdist` takes ten times as long on CUDA.
    """
    total = points.new_zeros(points.shape[0], points.shape[1], others.shape[1])
    for here, there in zip(points.unbind(dim=-1), others.unbind(dim=-1), strict=True):
        difference = here[:, :, None] - there[:, None]
        total.addcmul_(difference, difference)
    return total


def cluster_cells(features: Tensor, steps: int = 4) -> Tensor:
    """Soft membership `[B, 3, h, w]` of cells in three clusters of their features `[B, F, h, w]`, largest first.

    Soft k-means with farthest-first seeds: deterministic and independent of the order of the batch.
    """
    batch, _, rows, columns = features.shape
    points = features.flatten(2).mT  # [B, N, F]
    centres = points.mean(dim=1, keepdim=True)  # [B, 1, F]
    distance = (points - centres).square().sum(dim=-1)  # [B, N]
    for _ in range(CLUSTERS - 1):
        index = distance.argmax(dim=1)[:, None, None].expand(-1, 1, points.shape[-1])
        seed = points.gather(1, index)  # [B, 1, F]
        distance = torch.minimum(distance, (points - seed).square().sum(dim=-1))
        centres = torch.cat([centres, seed], dim=1)
    membership = _memberships(points, centres)
    for _ in range(steps):
        weight = membership / membership.sum(dim=1, keepdim=True).clamp_(min=1e-6)
        membership = _memberships(points, weight.mT @ points)
    order = membership.sum(dim=1).argsort(dim=1, descending=True, stable=True)  # [B, 3]
    membership = membership.gather(2, order[:, None].expand_as(membership))
    return membership.mT.reshape(batch, CLUSTERS, rows, columns)


def _memberships(points: Tensor, centres: Tensor) -> Tensor:
    squared = (points[:, :, None] - centres[:, None]).square().sum(dim=-1)  # [B, N, 3]
    return torch.softmax(-50 * squared, dim=-1)


def stroke_density(gradients: Tensor, grid: tuple[int, int]) -> Tensor:
    """Text likelihood `[B, 1, h, w]`: rising and falling edges close together, along both axes.

    A lone edge has one sign and a smooth gradient hardly any slope; letters have both signs within a stroke's width.
    """
    signed = torch.cat([gradients, -gradients], dim=1)  # [B, 4, H, W]: +x, +y, -x, -y
    peaks = peaks_around(halve_peaks(signed))  # windows of six samples a side
    strokes = torch.minimum(peaks[:, :2], peaks[:, 2:]).clamp_(min=0)  # [B, 2, H, W]
    density = (strokes[:, :1] * strokes[:, 1:]).sqrt_()
    return (3 * pool_to(density, grid)).clamp_(max=1)


@constant
def _squared_offsets(side: int, device: torch.device) -> Tensor:
    index = torch.arange(side, device=device, dtype=torch.float32)
    return (index[:, None] - index[None]).square_()  # [side, side]


def edge_distance(magnitude: Tensor, grid: tuple[int, int]) -> Tensor:
    """Euclidean distance `[B, 1, h, w]` to the nearest cell with an edge; 1 from a quarter of the longer side on.

    Exact in two separable minimum passes (Felzenszwalb and Huttenlocher, 2012) over the whole grid at once.
    """
    edges = peak_to(magnitude, grid) > EDGE_THRESHOLD  # [B, 1, h, w]
    while max(edges.shape[-2:]) > DISTANCE_SIDE:
        edges = F.max_pool2d(edges.float(), 2, ceil_mode=True) > 0
    rows, columns = edges.shape[-2:]
    reach = max(1.0, max(rows, columns) / 4) ** 2
    start = torch.where(edges[:, 0], 0.0, reach)  # [B, h, w], squared and saturated
    along = (start[:, :, None, :] + _squared_offsets(columns, edges.device)).amin(dim=-1)  # [B, h, w]
    # [B, w, h, h] -> minimum over the source row -> [B, w, h]
    across = (along.mT[:, :, None, :] + _squared_offsets(rows, edges.device)).amin(dim=-1)
    distance = (across.mT / reach).clamp_(max=1).sqrt_()
    return resize(distance[:, None], grid)


@constant
def _neighbours(side: int, device: torch.device) -> Tensor:
    """Matrix `[side, side]` of the cells one and two steps before and after each; with both sides they are eight."""
    steps = (torch.arange(side)[:, None] - torch.arange(side)).abs()
    return (((steps == 1) | (steps == 2)) / 8).to(device)


def structure_of(maps: Tensor, floor: float = 0.01, chances: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Two measures `[B, C]` of how far maps `[B, C, h, w]` are from noise; 1 and above means structure.

    Objects make neighbouring cells alike (autocorrelation over one and two cells) or stand alone (an outlier larger
    than chance). Noise, flat fields and splatter do neither. On small grids neither can be told from chance, so the
    thresholds are lower.

    Args:
        maps (`Tensor` of shape `[B, C, h, w]`): any values.
        floor (`float`, *optional*, defaults to 0.01): deviation below which a map counts as flat.
        chances (`Tensor` of shape `[B]`, *optional*): number of maps searched for an outlier, one by default.
    """
    count = maps.shape[-2] * maps.shape[-1]
    centred = maps - maps.mean(dim=(-2, -1), keepdim=True)
    variance = centred.square().mean(dim=(-2, -1)) + floor**2
    rows, columns = (_neighbours(side, maps.device) for side in maps.shape[-2:])
    around = rows @ centred + centred @ columns  # mean of eight cells: up, down, left and right
    alike = (centred * around).mean(dim=(-2, -1)) / variance
    alone = centred.abs().amax(dim=(-2, -1)) / variance.sqrt()
    least_alike = LEAST_ALIKE * min(1.0, math.sqrt(count / 256))
    # the largest of n independent normal values is about sqrt(2 ln n)
    least_alone = math.sqrt(2 * math.log(max(2, count))) + 0.6
    if chances is None:
        return alike / least_alike, alone / least_alone
    among_all = (2 * (math.log(max(2, count)) + chances.clamp(min=1).float().log())).sqrt() + 0.6  # [B]
    return alike / least_alike, alone / among_all[:, None]


def picture_structure(maps: Tensor) -> Tensor:
    """Structure `[B]` of pictures, from the mean over their channels `[B, C, h, w]`."""
    alike, alone = structure_of(maps)
    return torch.maximum(alike.mean(dim=-1), alone.mean(dim=-1))
