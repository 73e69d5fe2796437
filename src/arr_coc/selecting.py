"""Selecting: the one interface of everything that picks tokens, and the registry of all that do.

A selector gets one [`VisualQuery`] per picture or clip and answers with one [`Selection`] each. Three selectors that
know nothing live here, since no result is worth reporting without them: `random`, `grid` and `centre`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from arr_coc.attending import resolve_budget, spread_rank
from arr_coc.config import Budget, Grid, cell_count, check_grid
from arr_coc.outputs import ARRCOCOutput

__all__ = [
    "ARRCOCOutput",
    "Selection",
    "TokenSelector",
    "VisualQuery",
    "create_selector",
    "list_selectors",
    "register_selector",
]

LayerReader = Callable[[int], Tensor]
_SAME_AS_GRID: Grid = (0, 0, 0)


def check_cells(cells: Grid, grid: Grid) -> None:
    """Refuse cells that are not the tokens' grid or a finer one."""
    if cells[0] != grid[0] or cells[1] < grid[1] or cells[2] < grid[2]:
        raise ValueError(f"`cells` must have the frames of `grid` {grid} and be no coarser, got {cells}")


@dataclass(frozen=True, eq=False)
class VisualQuery:
    """One picture or clip as a selector sees it.

    Args:
        tokens (`Tensor` of shape `[N, D]`): the encoder's merged tokens.
        grid (`tuple[int, int, int]`): `(t, h, w)` of the tokens.
        words (`Tensor` of shape `[Q, D]`): embeddings of the query's words.
        cells (`tuple[int, int, int]`, *optional*): `(t, h, w)` on which relevance is asked; the tokens' by default.
        picture (`Tensor` of shape `[t, 3, H, W]`, *optional*): in [0, 1].
        attention_reader, key_reader (`Callable`, *optional*): compute what an encoder layer's patches receive, and
            its keys, when asked.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import VisualQuery
    >>> VisualQuery(tokens=torch.randn(12, 64), grid=(1, 3, 4), words=torch.randn(5, 64)).cells
    (1, 3, 4)

    ```
    """

    tokens: Tensor
    grid: Grid
    words: Tensor
    cells: Grid = _SAME_AS_GRID
    picture: Tensor | None = None
    attention_reader: LayerReader | None = field(default=None, repr=False)
    key_reader: LayerReader | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        grid = check_grid(self.grid)
        object.__setattr__(self, "grid", grid)
        cells = grid if self.cells == _SAME_AS_GRID else check_grid(self.cells, "cells")
        object.__setattr__(self, "cells", cells)
        if self.tokens.ndim != 2 or self.tokens.shape[0] != cell_count(grid):
            raise ValueError(
                f"`tokens` must have shape [{cell_count(grid)}, D] for grid {grid}, got {tuple(self.tokens.shape)}"
            )
        if self.words.ndim != 2 or self.words.shape[1] != self.tokens.shape[1]:
            raise ValueError(f"`words` must have shape [Q, {self.tokens.shape[1]}], got {tuple(self.words.shape)}")
        if self.words.shape[0] == 0:
            raise ValueError("`words` is empty; a query needs at least one word")
        check_cells(cells, grid)
        if self.picture is not None and (
            self.picture.ndim != 4 or self.picture.shape[:2] != (grid[0], 3) or 0 in self.picture.shape
        ):
            raise ValueError(f"`picture` must have shape [{grid[0]}, 3, H, W], got {tuple(self.picture.shape)}")

    def received_attention(self, layer: int) -> Tensor:
        """Mean attention `[N]` that the cells receive at a layer of the encoder."""
        return self._read(self.attention_reader, "attention", layer)

    def keys(self, layer: int) -> Tensor:
        """Keys `[N, F]` of the cells at a layer of the encoder."""
        return self._read(self.key_reader, "keys", layer)

    @staticmethod
    def _read(reader: LayerReader | None, what: str, layer: int) -> Tensor:
        if reader is None:
            raise ValueError(f"this query carries no encoder to read {what} from; use a selector that needs none")
        return reader(layer)


@dataclass(frozen=True, eq=False)
class Selection:
    """The tokens that stay of one picture or clip.

    Args:
        indices (`Tensor` of shape `[K]`): kept cells, ascending.
        features (`Tensor` of shape `[K, D]`, *optional*): replacement rows, for methods that merge tokens.
        deepstack (`tuple[Tensor, ...]`, *optional*): replacement rows for each DeepStack level.
        gate (`Tensor` of shape `[K]`, *optional*): value 1, carries the gradient to the selector.
        output (`ARRCOCOutput`, *optional*): what an ARR-COC layer saw.
    """

    indices: Tensor
    features: Tensor | None = None
    deepstack: tuple[Tensor, ...] | None = None
    gate: Tensor | None = None
    output: ARRCOCOutput | None = None


class TokenSelector(ABC):
    """Picks tokens after a full encoding. Subclasses implement `select` and are registered by name.

    One that never reads `VisualQuery.picture` sets `needs_picture = False`, and the picture is not rebuilt for it.
    """

    needs_picture: ClassVar[bool] = True

    @abstractmethod
    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Choose tokens of each query; `budget=None` means the selector's own default."""


SelectorT = TypeVar("SelectorT", bound=type[TokenSelector])
_REGISTRY: dict[str, type[TokenSelector]] = {}


def register_selector(name: str) -> Callable[[SelectorT], SelectorT]:
    """Class decorator that makes a selector known by name; a name is given once.

    Example:

    ```python
    >>> from arr_coc import TokenSelector, register_selector
    >>> @register_selector("grid")
    ... class Mine(TokenSelector):
    ...     def select(self, queries, budget=None):
    ...         return []
    Traceback (most recent call last):
        ...
    ValueError: a selector named 'grid' is already registered (GridSelector); choose another name

    ```
    """

    def register(cls: SelectorT) -> SelectorT:
        if name in _REGISTRY:
            raise ValueError(
                f"a selector named {name!r} is already registered ({_REGISTRY[name].__name__}); choose another name"
            )
        _REGISTRY[name] = cls
        return cls

    return register


def create_selector(name: str, **kwargs: Any) -> TokenSelector:
    """Make a registered selector.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import VisualQuery, create_selector
    >>> query = VisualQuery(tokens=torch.randn(16, 8), grid=(1, 4, 4), words=torch.randn(2, 8))
    >>> [selection] = create_selector("grid").select([query], budget=4)
    >>> selection.indices.tolist()
    [0, 2, 8, 10]

    ```
    """
    if name not in _REGISTRY:
        raise ValueError(f"no selector is named {name!r}; there are {', '.join(list_selectors())}")
    return _REGISTRY[name](**kwargs)


def list_selectors() -> list[str]:
    """Names of all registered selectors.

    Example:

    ```python
    >>> from arr_coc import list_selectors
    >>> {"arr-coc", "centre", "grid", "random"} <= set(list_selectors())
    True

    ```
    """
    return sorted(_REGISTRY)


class _Ranked(TokenSelector):
    """Keeps the first K cells of an order that depends on the grid alone; `"auto"` is the default ratio."""

    needs_picture = False
    default: Budget = 0.25

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Keep the first cells of the order."""
        selections = []
        for query in queries:
            wanted = resolve_budget(self.default if budget is None else budget, cell_count(query.cells))
            kept = wanted if wanted is not None else resolve_budget(self.default, cell_count(query.cells))
            rank = self.rank(query.cells, query.tokens.device)
            selections.append(Selection(indices=rank.argsort(stable=True)[:kept].sort().values))
        return selections

    @abstractmethod
    def rank(self, cells: Grid, device: torch.device) -> Tensor:
        """Rank `[N]` of each cell, lowest first."""


@register_selector("full")
class FullSelector(TokenSelector):
    """Keeps every token, whatever the budget: the plain model, by the same path as all others."""

    needs_picture = False

    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Keep all cells."""
        return [
            Selection(indices=torch.arange(cell_count(query.cells), device=query.tokens.device)) for query in queries
        ]


@register_selector("random")
class RandomSelector(_Ranked):
    """Keeps cells at random; the same ones for the same seed and grid."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rank(self, cells: Grid, device: torch.device) -> Tensor:
        """A random rank for each cell."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(cell_count(cells), generator=generator).to(device)


@register_selector("grid")
class GridSelector(_Ranked):
    """Keeps cells spread evenly over the picture."""

    def rank(self, cells: Grid, device: torch.device) -> Tensor:
        """Rank in an evenly spread order."""
        return spread_rank(cells, device)


@register_selector("centre")
class CentreSelector(_Ranked):
    """Keeps the cells nearest to the middle of each frame."""

    def rank(self, cells: Grid, device: torch.device) -> Tensor:
        """Rank by distance from the middle."""
        frames, rows, columns = cells
        y = (torch.arange(rows, device=device) - (rows - 1) / 2) / rows
        x = (torch.arange(columns, device=device) - (columns - 1) / 2) / columns
        distance = y[:, None].square() + x[None].square()  # [h, w]
        return distance.expand(frames, -1, -1).flatten()
