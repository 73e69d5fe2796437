"""The output of an ARR-COC layer: its maps, weights and kept cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ARRCOCOutput:
    """The output of an [`ARRCOCLayer`] for a batch of pictures of one grid, right-padded.

    Args:
        tokens (`Tensor` of shape `[B, Kmax, D]`, *optional*): kept tokens; `None` if the cells are not the tokens, or
            tokens were not requested.
        indices (`Tensor` of shape `[B, Kmax]`): flat indices of the kept cells, ascending; 0 where padded.
        mask (`Tensor` of shape `[B, Kmax]`): False where padded.
        budgets (`Tensor` of shape `[B, Kmax]`): relevance of each kept cell.
        num_kept (`Tensor` of shape `[B]`): number of kept cells, on the host.
        expected_tokens (`Tensor` of shape `[B]`): number that `"auto"` would keep, before rounding; differentiable.
        relevance (`Tensor` of shape `[B, t, h, w]`): of every cell, in [0, 1].
        scores (`Mapping[str, Tensor]`): the three score maps `[B, t, h, w]` by name.
        weights (`Tensor` of shape `[B, 3]`): of the three scores.
        tensions (`Tensor` of shape `[B, 3]`): detail, explore, variety.
        strategy (`tuple[str, ...]`): `"relevance"`, `"grid"` or `"all"`.
        reason (`tuple[str, ...]`): why, in words.
        texture (`Tensor` of shape `[B, t, C, h, w]`, *optional*): with `details=True`.
        word_pull (`Tensor` of shape `[B, Q, t, h, w]`, *optional*): with `details=True`.
        voice (`Tensor` of shape `[B, t, h, w]`, *optional*): where the model itself looks, in [0, 1], if it was asked.
    """

    tokens: Tensor | None
    indices: Tensor
    mask: Tensor
    budgets: Tensor
    num_kept: Tensor
    expected_tokens: Tensor
    relevance: Tensor
    scores: Mapping[str, Tensor]
    weights: Tensor
    tensions: Tensor
    strategy: tuple[str, ...]
    reason: tuple[str, ...]
    texture: Tensor | None = None
    word_pull: Tensor | None = None
    voice: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Frame, row and column `[B, Kmax, 3]` of each kept cell."""
        _, _, rows, columns = self.relevance.shape
        index = self.indices
        return torch.stack([index // (rows * columns), index // columns % rows, index % columns], dim=-1)

    @property
    def order(self) -> Tensor:
        """Places `[B, Kmax]` of the kept cells, most relevant first, padding last."""
        return self.budgets.masked_fill(~self.mask, -1.0).argsort(dim=1, descending=True, stable=True)

    def kept_mask(self) -> Tensor:
        """Boolean map `[B, t, h, w]` of the kept cells."""
        kept = torch.zeros_like(self.relevance.flatten(1), dtype=torch.int8)
        kept.scatter_add_(1, self.indices, self.mask.to(torch.int8))
        return kept.view_as(self.relevance) > 0

    def picture(self, index: int) -> ARRCOCOutput:
        """The output of one picture of the batch, without padding."""
        index = range(len(self.strategy))[index]
        kept = int(self.num_kept[index])
        row = slice(index, index + 1)
        return ARRCOCOutput(
            tokens=None if self.tokens is None else self.tokens[row, :kept],
            indices=self.indices[row, :kept],
            mask=self.mask[row, :kept],
            budgets=self.budgets[row, :kept],
            num_kept=self.num_kept[row],
            expected_tokens=self.expected_tokens[row],
            relevance=self.relevance[row],
            scores={name: value[row] for name, value in self.scores.items()},
            weights=self.weights[row],
            tensions=self.tensions[row],
            strategy=self.strategy[row],
            reason=self.reason[row],
            texture=None if self.texture is None else self.texture[row],
            word_pull=None if self.word_pull is None else self.word_pull[row],
            voice=None if self.voice is None else self.voice[row],
        )


def spread_windows(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Repeat values `[..., h, w]` of windows for the cells `[..., rows, columns]` under them.

    The last windows may reach beyond the picture.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.selectors.output import spread_windows
    >>> spread_windows(torch.tensor([[1, 2]]), (2, 3)).tolist()
    [[1, 1, 2], [1, 1, 2]]

    ```
    """
    side = max(-(-cells // windows) for cells, windows in zip(grid, values.shape[-2:], strict=True))
    return values.repeat_interleave(side, dim=-2).repeat_interleave(side, dim=-1)[..., : grid[0], : grid[1]]
