"""The contract of selectors: the classes that everything that picks tokens implements.

Five kinds, by where they act:

| kind                 | acts                                     | decides by                            |
|----------------------|------------------------------------------|---------------------------------------|
| [`PixelSelector`]    | before the encoder                       | pixels: other cells are never encoded |
| [`PictureSelector`]  | before the encoder                       | size: the picture is read smaller     |
| [`GlanceSelector`]   | after the model has read a small picture | what the model made of it             |
| [`TokenSelector`]    | between encoder and language model       | tokens and question ([`VisualQuery`]) |
| [`LanguageSelector`] | between two layers of the language model | attention inside it                   |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from arr_coc.config import Budget, CellBox, EncoderLayer, Grid, Introspect, cell_count, check_grid
from arr_coc.pixels.mipmaps import Mipmaps
from arr_coc.selectors.output import ARRCOCOutput

# Share of the tokens kept without a budget.
DEFAULT_RATIO = 0.25
LayerReader = Callable[[EncoderLayer], Tensor]
_SAME_AS_GRID: Grid = (0, 0, 0)


def check_cells(cells: Grid, grid: Grid) -> None:
    """Raise `ValueError` unless `cells` is the tokens' grid or a finer one."""
    if cells[0] != grid[0] or cells[1] < grid[1] or cells[2] < grid[2]:
        raise ValueError(f"`cells` must have the frames of `grid` {grid} and be no coarser, got {cells}")


@dataclass(frozen=True, eq=False)
class VisualQuery:
    """One picture or clip and its question: the input of a selector.

    Args:
        tokens (`Tensor` of shape `[N, D]`): the encoder's merged tokens.
        grid (`tuple[int, int, int]`): `(t, h, w)` of the tokens.
        words (`Tensor` of shape `[Q, D]`): embeddings of the question's words.
        cells (`tuple[int, int, int]`, *optional*): grid `(t, h, w)` to choose from; by default that of the tokens.
        picture (`Tensor` of shape `[t, 3, H, W]` or `Mipmaps`, *optional*): in [0, 1], or its statistics.
        attention_reader, key_reader (`Callable`, *optional*): compute the attention that cells receive in an encoder
            layer, and their keys, on demand.
        deepstack (`tuple[Tensor, ...]`, *optional*): rows `[N, D]` of the tokens at each DeepStack level, for methods
            that merge tokens.
        attended (`Tensor` of shape `[N]`, *optional*): attention that the language model itself pays `cells` when it is
            asked the question, for selectors that introspect.
        details (`bool`, *optional*, defaults to `False`): whether the layer's output keeps its texture and the pull of
            each word.
        leeway (`float`, *optional*, defaults to 1.0): how many times more or fewer tokens than the budget a selector
            may keep if it finds that the question needs so many.

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
    picture: Tensor | Mipmaps | None = None
    attention_reader: LayerReader | None = field(default=None, repr=False)
    key_reader: LayerReader | None = field(default=None, repr=False)
    deepstack: tuple[Tensor, ...] = field(default=(), repr=False)
    attended: Tensor | None = field(default=None, repr=False)
    details: bool = False
    leeway: float = 1.0

    def __post_init__(self) -> None:
        if not self.leeway >= 1:
            raise ValueError(
                f"`leeway` must be at least 1, got {self.leeway}; 1 keeps as many tokens as the budget says"
            )
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
            raise ValueError("`words` is empty; pass the embedding of at least one word")
        wrong = [tuple(level.shape) for level in self.deepstack if level.shape != self.tokens.shape]
        if wrong:
            shape = tuple(self.tokens.shape)
            raise ValueError(f"levels of `deepstack` must have the tokens' shape {shape}, got {wrong[0]}")
        check_cells(cells, grid)
        if self.attended is not None and self.attended.shape != (cell_count(cells),):
            raise ValueError(f"`attended` must have shape [{cell_count(cells)}], got {tuple(self.attended.shape)}")
        if isinstance(self.picture, Tensor) and (
            self.picture.ndim != 4 or self.picture.shape[:2] != (grid[0], 3) or 0 in self.picture.shape
        ):
            raise ValueError(f"`picture` must have shape [{grid[0]}, 3, H, W], got {tuple(self.picture.shape)}")

    def received_attention(self, layer: EncoderLayer) -> Tensor:
        """Mean attention `[N]` that the cells receive in an encoder layer."""
        return self._read(self.attention_reader, "attention", layer)

    def keys(self, layer: EncoderLayer) -> Tensor:
        """Keys `[N, F]` of the cells in an encoder layer."""
        return self._read(self.key_reader, "keys", layer)

    @staticmethod
    def _read(reader: LayerReader | None, name: str, layer: EncoderLayer) -> Tensor:
        if reader is None:
            raise ValueError(f"this query carries no encoder to read {name} from; use a selector that needs none")
        return reader(layer)


@dataclass(frozen=True, eq=False)
class Selection:
    """The tokens that a selector keeps of one picture or clip.

    Args:
        indices (`Tensor` of shape `[K]`): kept cells, ascending.
        features (`Tensor` of shape `[K, D]`, *optional*): replacement rows, for methods that merge tokens; `indices`
            then names the cells whose places they take.
        deepstack (`tuple[Tensor, ...]`, *optional*): replacement rows for each DeepStack level.
        gate (`Tensor` of shape `[K]`, *optional*): factors of value 1 that carry the gradient to the selector.
        output (`ARRCOCOutput`, *optional*): the output of an ARR-COC layer.
        order (`Tensor` of shape `[K]`, *optional*): places in `indices`, most relevant first; by default the order of
            `output`.
    """

    indices: Tensor
    features: Tensor | None = None
    deepstack: tuple[Tensor, ...] | None = None
    gate: Tensor | None = None
    output: ARRCOCOutput | None = None
    order: Tensor | None = None

    def by_relevance(self) -> Tensor:
        """Kept cells `[K]`, most relevant first; ascending if there is no order."""
        if self.order is not None:
            return self.indices[self.order]
        return self.indices if self.output is None else self.indices[self.output.order[0]]


class InvalidSelectorError(ValueError):
    """The selector does not fit the call; always raised, whatever `on_error` says."""


class Selector(ABC):  # noqa: B024  (each kind has a method of its own)
    """The base class of the five kinds.

    Class attributes:
        keeps_cells: whether the kept tokens are cells of the full picture.
        reads_question: whether another question can change the choice.
        default_budget: the budget if none is given.
    """

    keeps_cells: ClassVar[bool] = True
    reads_question: ClassVar[bool] = False
    default_budget: Budget = DEFAULT_RATIO

    @property
    def can_saccade(self) -> bool:
        """Whether it can choose before the full picture is encoded, as mode `"saccade"` needs."""
        return False


class TokenSelector(Selector):
    """Picks tokens of an encoded picture. Subclasses implement `select` and are registered by name.

    Class attributes:
        needs_picture: `False` if `select` never reads `VisualQuery.picture`, which is then not rebuilt.
        ordered: whether selections have an order of relevance. Mode `"saccade"` then asks for as many cells as may fit
            and reads them in that order until the budget is used.
        checked: whether selections are right by construction, so that nobody must look at them on the host.
        encoder_layers: encoder layers whose attention or keys `select` reads; they are recorded while the picture is
            encoded, without a second pass. Negative numbers count from the end; a float is a share of the depth and
            means the nearest layer that attends to the whole picture.
        introspects: whether `select` needs `VisualQuery.attended`: the language model then reads the prompt once more
            before, with few tokens for each picture, see [`~arr_coc.prompting.first_look.introspection`].
        default_introspect: of a selector that can also do without it, when it is read if a call does not say; None if
            never.
    """

    needs_picture: ClassVar[bool] = True
    ordered: bool = False
    checked: ClassVar[bool] = False
    encoder_layers: tuple[EncoderLayer, ...] = ()
    introspects: ClassVar[bool] = False
    default_introspect: Introspect | None = None

    @property
    def can_saccade(self) -> bool:
        """Whether it can choose before the full picture is encoded, as mode `"saccade"` needs."""
        return not self.encoder_layers

    def check(self, queries: Sequence[VisualQuery]) -> None:
        """Raise [`InvalidSelectorError`] if the selector does not fit these queries."""

    @abstractmethod
    def select(self, queries: Sequence[VisualQuery], budget: Budget | None = None) -> list[Selection]:
        """Choose tokens of each query; without a budget, `default_budget` applies."""


class PictureSelector(Selector):
    """Makes the picture smaller, and may add tokens of the full one. Subclasses implement `plan`.

    Class attributes:
        beside: the selector that picks tokens of the full picture, if any.
    """

    keeps_cells = False
    beside: TokenSelector | None = None

    @abstractmethod
    def plan(self, grid: Grid, budget: Budget | None = None) -> tuple[Grid, int]:
        """Token grid of the smaller picture, and the number of tokens that `beside` picks from the full one.

        Returning `(grid, 0)` leaves the picture as it is.
        """


class LanguageSelector(Selector):
    """Picks tokens inside the language model: the first layers read all tokens, the later ones only those kept.

    Subclasses implement `select` and may set `layer`, the number of decoder layers that read every token. They work
    with [`attach`], not with [`prepare`], whose arguments cannot change what happens between two layers.
    """

    reads_question = True
    layer: int = 2

    @abstractmethod
    def select(self, attention: Sequence[Tensor], budget: Budget | None = None) -> list[Selection]:
        """Choose tokens of each picture or clip, given the attention `[N]` that the prompt's last token pays to them.

        The attention is the mean over the heads of the last layer that reads every token. Without a budget,
        `default_budget` applies. Only the `indices` of a [`Selection`] are used.
        """


class PixelQuery(NamedTuple):
    """A still picture `[1, 3, H, W]` in [0, 1], and the grid `(1, h, w)` of its cells."""

    picture: Tensor
    grid: Grid


class PixelSelector(Selector):
    """Picks cells by their pixels, before the encoder: the others are never encoded. Subclasses implement `select`."""

    @abstractmethod
    def select(self, queries: Sequence[PixelQuery], budget: Budget | None = None) -> list[Selection]:
        """Choose cells of each picture; only the `indices` of a [`Selection`] are used."""


@dataclass(frozen=True, eq=False)
class Glance:
    """What the model made of a small picture.

    Args:
        full, small (`tuple[int, int, int]`): grids `(t, h, w)` of the full picture and of the small one.
        attention (`Tensor` of shape `[n]`): what the prompt's last token pays to the tokens of the small picture, mean
            over heads.
        standing (`Tensor` of shape `[n]`): the same with the question's words hidden: where the model looks anyway.
        confidence (`float`): probability of the likeliest first token of the answer.
    """

    full: Grid
    small: Grid
    attention: Tensor
    standing: Tensor
    confidence: float


@dataclass(frozen=True)
class Reading:
    """What to read after a glance: the whole picture at a size, and perhaps a part of it.

    Args:
        overview (`tuple[int, int, int]`): grid of the whole picture; that of the glance costs the encoder nothing.
        box (`CellBox`, *optional*): a part of it in cells of the full picture: top, left, height, width.
        crop (`tuple[int, int]`, *optional*): rows and columns of tokens to read the part with.
    """

    overview: Grid
    box: CellBox | None = None
    crop: tuple[int, int] = (0, 0)


class GlanceSelector(Selector):
    """Lets the model read a small picture with its question, then decides what to read. Two passes or more.

    Subclasses implement `small` and `plan`.

    Class attributes:
        layer: the decoder layer whose attention is read, as a share of the depth; None for the mean over all.
        needs_attention: whether `plan` reads `Glance.attention` and `Glance.standing`; they are empty otherwise.
        needs_standing: whether `plan` reads `Glance.standing`, which costs one more pass; else it is the attention.
    """

    keeps_cells = False
    reads_question = True
    layer: float | None = None
    needs_attention: bool = True
    needs_standing: bool = False

    @abstractmethod
    def small(self, grid: Grid, budget: Budget | None = None) -> Grid:
        """The grid of the small picture."""

    @abstractmethod
    def plan(self, glance: Glance, budget: Budget | None = None) -> Reading:
        """What to read, within the budget."""
