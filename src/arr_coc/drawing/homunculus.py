"""The homunculus: a picture redrawn so that the area of every part is in proportion to the tokens spent on it.

It is a diffusion cartogram (Gastner and Newman, 2004, doi:10.1073/pnas.0400280101): token density diffuses until it is
uniform, and the picture moves along with the flow. The edges are mirrors, so nothing leaves the frame.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]

# Density of a cell without tokens, as a share of one token: it is squeezed, but stays visible.
LEAST = 0.04
_FINE = 96  # points along the longer side of the density field
_STEPS = 60  # of the integration
_MOST = 30.0  # highest density, in multiples of the mean


class Flow:
    """A density that diffuses with time on a grid with mirrors at its edges.

    Args:
        density (`ndarray` of shape `[h, w]`): at time 0; positive.
    """

    def __init__(self, density: Floats) -> None:
        rows, columns = density.shape
        self.shape = density.shape
        mirrored = np.concatenate([density, density[::-1]])
        mirrored = np.concatenate([mirrored, mirrored[:, ::-1]], axis=1)  # [2h, 2w]: even, so periodic
        self.wave = np.fft.rfft2(mirrored)
        self.down = 2 * np.pi * np.fft.fftfreq(2 * rows)[:, None]
        self.along = 2 * np.pi * np.fft.rfftfreq(2 * columns)[None]

    def speed(self, time: float, points: Floats) -> Floats:
        """Velocity `[2, n]` of the flow at points `[2, n]` (rows, columns) at a given time, in cells."""
        wave = self.wave * np.exp(-(self.down**2 + self.along**2) * time)
        fields = [wave, 1j * self.down * wave, 1j * self.along * wave]
        # the density and its gradient along rows and columns, each [2h, 2w]
        density, down, along = (np.fft.irfft2(field, s=(2 * self.shape[0], 2 * self.shape[1])) for field in fields)
        values = [_sample(field, points - 0.5) for field in (density, down, along)]
        return -np.stack(values[1:]) / np.maximum(values[0], 1e-9)


def _sample(field: Floats, places: Floats) -> Floats:
    """Values of a periodic field `[2h, 2w]` at places between its points, by bilinear interpolation."""
    low = np.floor(places).astype(int)
    share = places - low
    rows, columns = (np.stack([low[axis], low[axis] + 1]) % field.shape[axis] for axis in (0, 1))
    upper = field[rows[0], columns[0]] * (1 - share[1]) + field[rows[0], columns[1]] * share[1]
    lower = field[rows[1], columns[0]] * (1 - share[1]) + field[rows[1], columns[1]] * share[1]
    return np.asarray(upper * (1 - share[0]) + lower * share[0])


def flow_back(density: Floats, points: Floats) -> Floats:
    """Where points `[2, n]` (rows, columns, in cells) of the uniform density came from."""
    flow = Flow(density)
    longest = max(density.shape)
    # short steps first: high densities move fast, and long waves die last
    times = np.geomspace(1e-2, 2 * longest**2 / np.pi**2, _STEPS) - 1e-2
    for after, before in zip(times[::-1], times[-2::-1], strict=False):
        step = after - before
        first = flow.speed(after, points)
        middle = flow.speed((after + before) / 2, points - first * step / 2)
        points = points - middle * step
        for axis, size in enumerate(density.shape):
            points[axis] = points[axis].clip(0, size)
    return points


def spread_tokens(tokens: Floats) -> Floats:
    """The density `[h, w]`, with mean 1, for the number of tokens spent on each cell."""
    density = np.maximum(tokens, LEAST)
    density = np.minimum(density / density.mean(), _MOST)
    return np.asarray(density / density.mean())


def draw_homunculus(image: Image.Image, tokens: Floats, side: int = 720) -> Image.Image:
    """Redraw a picture so that areas are in proportion to tokens.

    Args:
        image (`PIL.Image.Image`): the picture.
        tokens (`ndarray` of shape `[h, w]`): spent on each cell.
        side (`int`, *optional*, defaults to 720): longest side of the drawing in pixels.

    Example:

    ```python
    >>> import numpy as np
    >>> from PIL import Image
    >>> from arr_coc.drawing.homunculus import draw_homunculus
    >>> left = np.array([[1.0, 0.0, 0.0, 0.0]] * 4)  # only the white quarter was read
    >>> picture = Image.new("RGB", (64, 64))
    >>> picture.paste("white", (0, 0, 16, 64))
    >>> np.asarray(draw_homunculus(picture, left, 64))[32, 32].tolist()
    [255, 255, 255]

    ```
    """
    share = side / max(image.size)
    size = (max(1, round(image.width * share)), max(1, round(image.height * share)))
    density = _refine(spread_tokens(np.asarray(tokens, dtype=np.float64)))
    if np.allclose(density, 1.0):
        return image.resize(size, Image.Resampling.LANCZOS)
    rows, columns = density.shape
    down, along = (np.linspace(0, count, count + 1) for count in (rows, columns))
    points = np.stack(np.meshgrid(down, along, indexing="ij")).reshape(
        2, -1
    )  # [2, n]: corners of the cells of the new picture
    source = flow_back(density, points).reshape(2, rows + 1, columns + 1)
    scale = np.array([image.height / rows, image.width / columns])[:, None, None]
    corners = (source * scale)[::-1]  # [x, y] in pixels of the original, so that what grows stays sharp
    x = np.round(np.linspace(0, size[0], columns + 1)).astype(int)
    y = np.round(np.linspace(0, size[1], rows + 1)).astype(int)
    mesh = []
    for row in range(rows):
        for column in range(columns):
            quad = [corners[:, row + i, column + j] for i, j in ((0, 0), (1, 0), (1, 1), (0, 1))]
            box = (int(x[column]), int(y[row]), int(x[column + 1]), int(y[row + 1]))
            if box[0] == box[2] or box[1] == box[3]:
                continue  # smaller than a pixel
            mesh.append((box, tuple(float(value) for corner in quad for value in corner)))
    return image.transform(size, Image.Transform.MESH, mesh, Image.Resampling.BILINEAR)


def _refine(density: Floats) -> Floats:
    """The same density on a finer grid of about `_FINE` points a side."""
    by = max(1, round(_FINE / max(density.shape)))
    return np.asarray(np.kron(density, np.ones((by, by))), dtype=np.float64)
