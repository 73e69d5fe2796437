"""How well a selector looked: kept cells and relevance compared with the cells inside the boxes.

| measure     | is                                                                             |
|-------------|--------------------------------------------------------------------------------|
| `precision` | share of the kept cells that lie inside the boxes                              |
| `coverage`  | share of the boxes' cells that were kept                                       |
| `seen`      | share of the answer's own box that was kept, see [`answer_coverage`]           |
| `overlap`   | intersection over union of the boxes' cells and as many most relevant cells    |
| `pointing`  | whether the most relevant cell lies inside (the pointing game)                 |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from arr_coc.data.boxes import cells_inside
from arr_coc.data.example import Example

# Below this share of its own box, an answer counts as not seen.
LOOKED = 0.5


def precision(kept: Tensor, inside: Tensor) -> Tensor:
    """Share `[B]` of the kept cells `[B, N]` that lie inside `[B, N]`."""
    return (kept & inside).sum(dim=-1) / kept.sum(dim=-1).clamp(min=1)


def coverage(kept: Tensor, inside: Tensor) -> Tensor:
    """Share `[B]` of the cells inside `[B, N]` that were kept `[B, N]`."""
    return (kept & inside).sum(dim=-1) / inside.sum(dim=-1).clamp(min=1)


def answer_coverage(kept: Tensor, example: Example) -> float:
    """Share of the answer's own box that was kept `[h, w]`; other boxes, such as the label of a value, do not count.

    Of several boxes of its own, the one that was kept least counts, as all are needed, or the one that was kept most if
    `example.any_box`. In a clip `[t, h, w]` a cell counts as kept if any frame has it.

    Example:

    ```python
    >>> import torch
    >>> from PIL import Image
    >>> from arr_coc.data.example import Example
    >>> from arr_coc.evaluation.metrics import answer_coverage
    >>> label, value = (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)
    >>> example = Example("what is the price?", Image.new("RGB", (64, 32)).copy, boxes=(label, value), clues=1)
    >>> answer_coverage(torch.tensor([[True, False]]), example), answer_coverage(torch.tensor([[False, True]]), example)
    (0.0, 1.0)

    ```
    """
    if kept.ndim == 3:
        kept = kept.any(dim=0)  # [t, h, w] -> [h, w]
    flat = kept.flatten()  # [h, w] -> [N]
    shares = [float(coverage(flat, cells_inside([box], *kept.shape).flatten())) for box in example.answer_boxes]
    if not shares:
        raise ValueError("the example has no box of its answer's own; give `boxes`, and fewer `clues` than boxes")
    return max(shares) if example.any_box else min(shares)


def overlap(relevance: Tensor, inside: Tensor) -> Tensor:
    """Intersection over union `[B]` of the cells inside `[B, N]` and as many most relevant cells `[B, N]`.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.evaluation.metrics import overlap
    >>> overlap(torch.tensor([[0.9, 0.8, 0.1, 0.0]]), torch.tensor([[True, False, True, False]]))
    tensor([0.3333])

    ```
    """
    order = relevance.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(inside)
    first = torch.arange(inside.shape[-1], device=inside.device) < inside.sum(dim=-1, keepdim=True)
    chosen.scatter_(-1, order, first)
    return (chosen & inside).sum(dim=-1) / (chosen | inside).sum(dim=-1).clamp(min=1)


def pointing(relevance: Tensor, inside: Tensor) -> Tensor:
    """Whether `[B]` the most relevant cell `[B, N]` lies inside `[B, N]`."""
    return inside.gather(-1, relevance.argmax(dim=-1, keepdim=True))[..., 0]


def find_misleading(
    relevance: Tensor, scores: Mapping[str, Tensor], weights: Mapping[str, float], inside: Tensor
) -> str:
    """Name of the weighted score `[N]` that most preferred the best cells elsewhere to the cells inside `[N]`.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.evaluation.metrics import find_misleading
    >>> scores = {"right": torch.tensor([1.0, 0.0]), "wrong": torch.tensor([0.0, 1.0])}
    >>> find_misleading(scores["wrong"], scores, {"right": 0.5, "wrong": 0.5}, torch.tensor([True, False]))
    'wrong'

    ```
    """
    elsewhere = relevance.masked_fill(inside, -1).topk(max(1, int(inside.sum()))).indices
    pulls = {
        name: weights[name] * float(score[elsewhere].mean() - score[inside].mean()) for name, score in scores.items()
    }
    return max(pulls, key=lambda name: pulls[name])
