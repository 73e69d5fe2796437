"""Plan a gaze: the whole picture at low resolution (gestalt), then full-resolution cells where it matters (saccades).

The plan needs no model: how many tokens of each, where they stand, in what order they are read, and which tokens of the
gestalt the saccades replace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from arr_coc.attending import resolve_budget
from arr_coc.config import Budget, Grid, cell_count
from arr_coc.gaze.compression import HALVING, MOST_SIDE, Compress, check_compress
from arr_coc.runtime.tensors import constant

Overlap = Literal["auto", "keep", "drop"]
Order = Literal["raster", "relevance"]

DEFAULT_BUDGET = 529
# The gestalt's part of the default budget; a smaller budget is shared in the same proportion.
GESTALT_TOKENS = 256
# Below this many cells a side under one gestalt token, the token shows what its cells show.
NEAR_SCALES = 4
# Most windows on which relevance is scored.
MOST_WINDOWS = 2**15


@dataclass(frozen=True, kw_only=True)
class Gaze:
    """Settings of mode `"saccade"`: how a picture is looked at.

    Args:
        gestalt (`int`, *optional*): most tokens of the gestalt; by default the same share of any budget as 256 of 529,
            but never more than 256.
        overlap (`str`, *optional*, defaults to `"auto"`): whether tokens of the gestalt that saccades cover entirely
            stay (`"keep"`) or make room for more saccades (`"drop"`). `"auto"` drops them where a token of the gestalt
            stands for 2x2 or 3x3 cells, because it repeats what they show, and keeps them where it stands for more.
        fixation (`int`, *optional*, defaults to 2): most cells a side of a window. Windows are chosen as a whole and
            lie on the grid of the gestalt.
        order (`str`, *optional*, defaults to `"raster"`): saccades are read row by row, as models are trained to read,
            or most relevant first (`"relevance"`), which breaks words into letters.
        compress (`str`, *optional*): encode a gestalt of up to 16 times as many tokens and compress it to `gestalt`,
            by `"pool"`, `"merge"` or `"conv"`, see [`~arr_coc.gaze.compression`]. Merged tokens are never dropped.

    Example:

    ```python
    >>> from arr_coc import Gaze
    >>> Gaze(overlap="keep").overlap
    'keep'

    ```
    """

    gestalt: int | None = None
    overlap: Overlap = "auto"
    fixation: int = 2
    order: Order = "raster"
    compress: Compress | None = None

    def __post_init__(self) -> None:
        for name, value in (("gestalt", self.gestalt), ("fixation", self.fixation)):
            if name == "gestalt" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}")
        for name, allowed in (("overlap", get_args(Overlap)), ("order", get_args(Order))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        check_compress(self.compress)


class GazePlan(NamedTuple):
    """Plan of the gaze on one picture.

    Args:
        gestalt (`Grid`): grid of the overview; the full grid if the whole picture is encoded.
        scale (`int`): full-resolution cells a side under one token of the gestalt.
        saccades (`int` or `None`): full-resolution cells to read; `None` lets relevance decide.
        side (`int`): cells a side of a window; divides `scale`.
        tokens (`int`): most tokens of gestalt and saccades together.
        squeeze (`int`): tokens a side that are encoded for each token of the gestalt; divides `scale`.
        drop (`bool`): whether covered tokens of the gestalt make room.
    """

    gestalt: Grid
    scale: int
    saccades: int | None
    side: int
    tokens: int
    squeeze: int = 1
    drop: bool = False

    @property
    def encoded(self) -> Grid:
        """Grid of the overview before compression."""
        return 1, self.gestalt[1] * self.squeeze, self.gestalt[2] * self.squeeze

    @property
    def overview(self) -> tuple[Grid, int, int, int]:
        """What the gestalt and the windows depend on: plans that share it differ in how much is read alone."""
        return self.gestalt, self.scale, self.side, self.squeeze

    def part(self, share: float) -> GazePlan:
        """A plan that reads the same gestalt and this share of the saccades."""
        if not self.saccades or share == 1:
            return self
        saccades = max(1, round(share * self.saccades))
        return self._replace(saccades=saccades, tokens=self.tokens - self.saccades + saccades)

    @property
    def windows(self) -> Grid:
        """Grid of the windows, on which relevance is scored."""
        factor = self.scale // self.side
        return 1, self.gestalt[1] * factor, self.gestalt[2] * factor


def plan_gaze(grid: Grid, budget: Budget | None, gaze: Gaze) -> GazePlan:
    """Share a budget between gestalt and saccades for a picture of `grid` full-resolution cells.

    Each token of the gestalt stands for a square of whole cells; the last ones may reach beyond the picture.

    Example:

    ```python
    >>> from arr_coc.gaze.plan import Gaze, plan_gaze
    >>> plan_gaze((1, 64, 64), None, Gaze())
    GazePlan(gestalt=(1, 16, 16), scale=4, saccades=273, side=2, tokens=529, squeeze=1, drop=False)

    ```
    """
    total = cell_count(grid)
    resolved = resolve_budget(DEFAULT_BUDGET if budget is None else budget, total)
    tokens = DEFAULT_BUDGET if resolved is None else resolved
    if total <= tokens:
        return GazePlan(grid, 1, 0, 1, total)
    most = gaze.gestalt or min(GESTALT_TOKENS, max(1, tokens * GESTALT_TOKENS // DEFAULT_BUDGET))
    scale, step = 2, 4 if total > MOST_WINDOWS else gaze.fixation
    while cell_count(_shrink(grid, scale)) > min(most, tokens):
        scale += 1
    if scale > 2 * step:  # a multiple of the step, so that whole windows fit; too coarse a rounding for small scales
        scale = -(-scale // step) * step
    if gaze.compress in HALVING:
        scale += scale % 2
    gestalt = _shrink(grid, scale)
    sides = [side for side in range(1, scale + 1) if scale % side == 0]
    allowed = [side for side in sides if cell_count(gestalt) * (scale // side) ** 2 <= MOST_WINDOWS]
    side = max([side for side in allowed if side <= gaze.fixation], default=allowed[0])
    squeeze = 1
    if gaze.compress is not None:
        squeeze = max(
            part for part in sides if part <= MOST_SIDE and (part == 1 or part % 2 == 0 or gaze.compress not in HALVING)
        )
    drop = scale < NEAR_SCALES if gaze.overlap == "auto" else gaze.overlap == "drop"
    saccades = None if resolved is None else tokens - cell_count(gestalt)
    return GazePlan(gestalt, scale, saccades, side, tokens, squeeze, drop and gaze.compress != "merge")


def _shrink(grid: Grid, scale: int) -> Grid:
    return 1, -(-grid[1] // scale), -(-grid[2] // scale)


def open_windows(windows: Tensor, plan: GazePlan, grid: Grid, most: int, enough: bool = False) -> Tensor:
    """Cells `[k]` of windows `[m]`, window by window; at most `most`, and none outside the picture.

    If there are known to be `enough`, they are found without waiting for the device to count them.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.gaze.plan import GazePlan, open_windows
    >>> plan = GazePlan(gestalt=(1, 2, 2), scale=2, saccades=6, side=2, tokens=10)
    >>> open_windows(torch.tensor([1, 0]), plan, (1, 3, 3), 6).tolist()
    [2, 5, 0, 1, 3, 4]

    ```
    """
    cells = _cells_of_windows(plan.windows, plan.side, grid, windows.device)[windows].flatten()
    if enough:
        return cells[(cells < 0).int().argsort(stable=True)[:most]]
    return cells[cells >= 0][:most]


@constant
def _cells_of_windows(windows: Grid, side: int, grid: Grid, device: torch.device) -> Tensor:
    """The cells `[m, side * side]` of each window; -1 outside the picture."""
    rows, columns = torch.arange(windows[1] * side), torch.arange(windows[2] * side)
    inside = (rows < grid[1])[:, None] & (columns < grid[2])
    cells = torch.where(inside, rows[:, None] * grid[2] + columns, -1)
    # [h * side, w * side] -> [h, side, w, side] -> [h * w, side * side]
    return cells.view(windows[1], side, windows[2], side).transpose(1, 2).reshape(-1, side**2).to(device)


def count_beyond(plan: GazePlan, grid: Grid) -> int:
    """Number of windows that lie wholly outside the picture.

    Example:

    ```python
    >>> from arr_coc.gaze.plan import GazePlan, count_beyond
    >>> count_beyond(GazePlan(gestalt=(1, 2, 2), scale=4, saccades=6, side=2, tokens=10), (1, 6, 8))
    4

    ```
    """
    inside = [-(-cells // plan.side) for cells in grid[1:]]
    return cell_count(plan.windows) - inside[0] * inside[1]


@constant
def place_gestalt(plan: GazePlan, grid: Grid, device: torch.device) -> Tensor:
    """The middle cell `[g]` of the cells under each token of the gestalt.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.gaze.plan import GazePlan, place_gestalt
    >>> place_gestalt(GazePlan((1, 1, 2), 3, 4, 1, 6), (1, 3, 6), torch.device("cpu")).tolist()
    [7, 10]

    ```
    """
    rows, columns = (
        (torch.arange(parts, device=device) * plan.scale + (plan.scale - 1) // 2).clamp(max=cells - 1)
        for parts, cells in zip(plan.gestalt[1:], grid[1:], strict=True)
    )
    return (rows[:, None] * grid[2] + columns).flatten()


def replace_covered(cells: Tensor, plan: GazePlan, grid: Grid) -> tuple[Tensor, Tensor]:
    """Keep as many cells `[k]`, most relevant first, as fit when the gestalt tokens they cover make room.

    Returns:
        The cells that fit, and a mask `[g]` of the gestalt tokens that stay.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.gaze.plan import GazePlan, replace_covered
    >>> plan = GazePlan(gestalt=(1, 2, 2), scale=2, saccades=3, side=1, tokens=7)
    >>> cells, stay = replace_covered(torch.tensor([0, 1, 4, 5, 2, 3]), plan, (1, 4, 4))
    >>> cells.tolist(), stay.tolist()
    ([0, 1, 4, 5], [False, True, True, True])

    ```
    """
    device = cells.device
    rank = torch.full((grid[1] * grid[2],), math.inf, device=device)
    rank[cells] = torch.arange(1.0, len(cells) + 1, device=device)
    rows, columns = (torch.arange(side, device=device) // plan.scale for side in grid[1:])
    owner = (rows[:, None] * plan.gestalt[2] + columns).flatten()  # the gestalt token of each cell
    # a token of the gestalt is covered once the last of its cells is read
    covered_at = torch.zeros(cell_count(plan.gestalt), device=device).scatter_reduce(0, owner, rank, "amax")
    counts = torch.arange(len(cells) + 1, device=device)
    dropped = torch.searchsorted(covered_at.sort().values, counts.float(), right=True)
    fits = len(covered_at) - dropped + counts <= plan.tokens
    count = int((fits * counts).max())
    return cells[:count], covered_at > count
