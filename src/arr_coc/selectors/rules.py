"""Simple rules that ignore what the picture shows and the question asks: the baselines of every comparison.

`full` keeps everything, `random`, `grid` and `centre` choose blindly, and `oracle` is given the boxes of the answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from arr_coc.attending import spread_rank
from arr_coc.config import Budget, cell_count
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.selectors.contract import InvalidSelectorError, Selection, TokenSelector, VisualQuery
from arr_coc.selectors.per_picture import count_kept
from arr_coc.selectors.registry import register_selector

Box = Sequence[float]
# Multiples of the golden ratio are spread evenly over [0, 1).
_GOLDEN = (5**0.5 - 1) / 2


class _Ranked(TokenSelector):
    """Keeps the first K cells of an order that ignores the question."""

    needs_picture = False

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Keep the first cells of the order."""
        selections = []
        for place, query in enumerate(queries):
            kept = count_kept(budget, cell_count(query.cells))
            rank = self.rank(query, place)
            selections.append(Selection(indices=rank.argsort(stable=True)[:kept].sort().values))
        return selections

    @abstractmethod
    def rank(self, query: VisualQuery, place: int) -> Tensor:
        """Rank `[N]` of the cells of one picture, lowest first; `place` is the picture's place in the call."""


@register_selector("full")
class FullSelector(TokenSelector):
    """Keeps every token, whatever the budget: the plain model, on the same code path as other selectors."""

    needs_picture = False

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Keep all cells."""
        return [
            Selection(indices=torch.arange(cell_count(query.cells), device=query.tokens.device)) for query in queries
        ]


@register_selector("random")
class RandomSelector(_Ranked):
    """Keeps random cells: different ones for each picture, the same ones for the same seed and picture.

    Args:
        seed (`int`, *optional*, defaults to 0): seed of the random order.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import VisualQuery, create_selector
    >>> pictures = torch.rand(2, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    >>> queries = [VisualQuery(torch.zeros(64, 4), (1, 8, 8), torch.ones(1, 4), picture=clip) for clip in pictures]
    >>> first, second = create_selector("random").select(queries, budget=8)
    >>> first.indices.tolist() == second.indices.tolist()
    False

    ```
    """

    needs_picture = True  # two pictures of one size must get different cells

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rank(self, query: VisualQuery, place: int) -> Tensor:
        """A random rank for each cell, from the seed and a hash of the picture's pixels."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(cell_count(query.cells), generator=generator, dtype=torch.float64)
        # squaring a large number modulo 1 scatters close values, so every fingerprint gives another order
        return 1e6 * (drawn.to(query.tokens.device) + _fingerprint(query)).square() % 1


def _fingerprint(query: VisualQuery) -> Tensor:
    """A hash in [0, 1) of the picture's pixels, or of the question without them; it stays on the device."""
    content = query.picture.cells if isinstance(query.picture, Mipmaps) else query.picture
    values = (query.words if content is None else content).double().flatten()
    weights = torch.arange(1, len(values) + 1, device=values.device, dtype=torch.float64) % 1009
    return (1000 * values * weights).round().sum() * _GOLDEN % 1


@register_selector("grid")
class GridSelector(_Ranked):
    """Keeps cells spread evenly over the picture."""

    def rank(self, query: VisualQuery, place: int) -> Tensor:
        """Rank in an order that spreads evenly."""
        return spread_rank(query.cells, query.tokens.device)


@register_selector("centre")
class CentreSelector(_Ranked):
    """Keeps the cells closest to the middle of each frame."""

    def rank(self, query: VisualQuery, place: int) -> Tensor:
        """Rank by distance from the middle."""
        (frames, rows, columns), device = query.cells, query.tokens.device
        y = (torch.arange(rows, device=device) - (rows - 1) / 2) / rows
        x = (torch.arange(columns, device=device) - (columns - 1) / 2) / columns
        distance = y[:, None].square() + x[None].square()  # [h, w]
        return distance.expand(frames, -1, -1).flatten()


@register_selector("oracle")
class OracleSelector(_Ranked):
    """Keeps the cells under given boxes: the upper bound for a learned selector.

    Cells that overlap a box come first, from the middle of each box outwards; then the others, nearest first.

    Args:
        boxes (`Sequence[Sequence[Box]]`): for each picture of a call, its boxes `(left, top, right, bottom)` as shares
            of the picture's sides. Set them before each call.
    """

    def __init__(self, boxes: Sequence[Sequence[Box]] = ()) -> None:
        self.boxes = boxes

    def check(self, queries: Sequence[VisualQuery]) -> None:
        """Raise [`InvalidSelectorError`] unless there are valid boxes for every picture."""
        if len(self.boxes) != len(queries):
            raise InvalidSelectorError(
                f"`oracle` has boxes for {len(self.boxes)} pictures, the call has {len(queries)}; set `boxes` to one "
                "list of (left, top, right, bottom) per picture"
            )
        for box in (box for boxes in self.boxes for box in boxes):
            if len(box) != 4 or not (0 <= box[0] <= box[2] <= 1 and 0 <= box[1] <= box[3] <= 1):
                raise InvalidSelectorError(
                    f"boxes must be (left, top, right, bottom) within [0, 1], got {tuple(box)}; divide pixels by the "
                    "picture's sides"
                )

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Keep the cells that overlap the boxes, then those around them."""
        self.check(queries)
        return super().select(queries, budget)

    def rank(self, query: VisualQuery, place: int) -> Tensor:
        """Below 1 for cells that overlap a box, else 1 plus the distance in cells."""
        (frames, rows, columns), device = query.cells, query.tokens.device
        boxes = torch.tensor([list(box) for box in self.boxes[place]], dtype=torch.float32).view(-1, 4)
        if not len(boxes):  # without boxes, look everywhere
            return spread_rank(query.cells, device)
        scale = torch.tensor([columns, rows] * 2)
        low, high = (boxes * scale)[:, :2, None], (boxes * scale)[:, 2:, None]  # [n, 2, 1], in cells
        longest = max(rows, columns)
        left = torch.arange(longest, dtype=torch.float32).expand(2, -1)  # [2, longest], x and y
        gap = torch.maximum(low - left - 1, left - high).clamp(min=0)  # [n, 2, longest]
        inside = (left + 0.5 - (low + high) / 2).abs() / ((high - low) / 2 + 1)
        gap_x, gap_y = gap[:, 0, None, :columns], gap[:, 1, :rows, None]
        distance = (gap_x.square() + gap_y.square()).sqrt()  # [n, h, w]
        central = torch.maximum(inside[:, 0, None, :columns], inside[:, 1, :rows, None])
        # a cell next to a box has a gap of 0 but does not overlap it
        touches = (low - left < 1) & (high - left > 0)
        touched = touches[:, 0, None, :columns] & touches[:, 1, :rows, None]
        rank = torch.where(touched, central.clamp(max=0.999), 1 + distance).amin(dim=0)  # [h, w]
        return rank.expand(frames, -1, -1).flatten().to(device)
