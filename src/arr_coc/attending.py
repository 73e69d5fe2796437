"""Attending: relevance becomes a budget: which tokens stay, how many, in what order.

The budget rule, `resolve_budget` and `TokenAllocator.automatic_count`:

- an int is tokens per picture; above `N` keeps all;
- a float `r` in (0, 1] is `max(1, round(r * N))`;
- `"auto"` is `min_tokens .. max_tokens`, from the entropy of the sharpened relevance: focused is few, spread is many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arr_coc.config import ARRCOCConfig, Budget, Grid, check_budget
from arr_coc.runtime.tensors import constant, unit_rows

# A plain softmax over a thousand scores in [0, 1] is nearly uniform and would always ask for the most tokens.
SHARPNESS = 45.0
# `explore` = 1 spreads this share of the tokens.
MOST_EXPLORED = 0.5
# Tokens whose centred cosine exceeds this are near-duplicates.
DUPLICATE = 0.8
# Only so many leading candidates are compared with each other: beyond them, near-duplicates are not suppressed.
MOST_CANDIDATES = 2048
# Beside a relevant cell, so many cells with text to each side are worth this share of it, each of the one before.
CARRIED_CELLS, CARRIED = 2, 0.95
# Above this the `text` channel sees strokes.
STROKES = 0.1


def resolve_budget(budget: Budget, total: int) -> int | None:
    """Number of tokens that a budget means for a picture of `total` tokens; `None` for `"auto"`.

    Example:

    ```python
    >>> from arr_coc.attending import resolve_budget
    >>> resolve_budget(0.25, 256), resolve_budget(100, 256), resolve_budget(1000, 256), resolve_budget("auto", 256)
    (64, 100, 256, None)

    ```
    """
    budget = check_budget(budget)
    if isinstance(budget, str):
        return None
    return min(budget, total) if isinstance(budget, int) else max(1, round(budget * total))


@constant
def spread_rank(grid: Grid, device: torch.device) -> Tensor:
    """Rank `[N]` of each cell in an order of which every beginning is spread evenly over the grid.

    The order of Bayer's dither matrix: the first four cells are the quarters, the first sixteen their quarters.
    Each frame of a clip starts elsewhere.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.attending import spread_rank
    >>> spread_rank((1, 2, 2), torch.device("cpu")).tolist()
    [0, 2, 3, 1]

    ```
    """
    frames, rows, columns = grid
    bits = max(1, (max(rows, columns) - 1).bit_length())
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)[None]
    value = torch.zeros(rows, columns, dtype=torch.long)
    for bit in range(bits):
        quarter = 2 * ((row >> bit & 1) ^ (column >> bit & 1)) + (row >> bit & 1)
        value += quarter << 2 * (bits - 1 - bit)
    # golden-ratio steps move the pattern from frame to frame
    size = 4**bits
    shift = (torch.arange(frames) * round(size * 0.618)) % size
    value = (value[None] - shift[:, None, None]) % size  # [t, h, w]
    order = value.flatten().argsort(stable=True)
    rank: Tensor = order.argsort()  # the inverse of a permutation
    return rank.to(device)


class Plan(NamedTuple):
    """Which tokens stay, right-padded over the batch.

    [`TokenAllocator.plan`] makes it without leaving the device, as long as the budget allows. [`finish_plan`] cuts it
    to the lengths that the host has learned, and adds them with the reasons.

    Args:
        indices (`Tensor` of shape `[B, M]`): kept cells in ascending order; 0 where padded.
        mask (`Tensor` of shape `[B, M]`): False where padded.
        budgets (`Tensor` of shape `[B, M]`): relevance of each kept cell, carries the gradient; 0 where padded.
        expected (`Tensor` of shape `[B]`): tokens that `"auto"` would give, differentiable.
        report (`Tensor` of shape `[B, 5]`): count, fallback, structure, match, spread, for the one transfer.
        num_kept (`Tensor` of shape `[B]`, *optional*): how many cells stay, on the host.
        strategy (`tuple[str, ...]`): `"relevance"`, `"grid"` or `"all"` for each picture.
        reason (`tuple[str, ...]`): why, in words.
    """

    indices: Tensor
    mask: Tensor
    budgets: Tensor
    expected: Tensor
    report: Tensor
    num_kept: Tensor | None = None
    strategy: tuple[str, ...] = ()
    reason: tuple[str, ...] = ()


def carry_along(relevance: Tensor, text: Tensor) -> Tensor:
    """Worth `[B, t, h, w]` of cells, of which the relevant ones carry the text beside them in their row along.

    Half a word is worth nothing: where something is relevant, strokes to its left and right are looked at before
    anything that is less so.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc.attending import carry_along
    >>> relevance, text = torch.tensor([[0.2, 0.0, 0.0, 1.0, 0.1], [0.0, 0.5, 0.5, 0.5, 0.0]]).view(2, 1, 1, 1, 5)
    >>> carry_along(relevance, text).flatten()
    tensor([0.2000, 0.9025, 0.9500, 1.0000, 0.1000])

    ```
    """
    worth = relevance.flatten(0, 1)[:, None]  # [B * t, 1, h, w]
    carried = CARRIED * (text.flatten(0, 1)[:, None] > STROKES)
    for _ in range(CARRIED_CELLS):
        worth = torch.maximum(worth, carried * F.max_pool2d(worth, (1, 3), stride=1, padding=(0, 1)))
    return worth.view_as(relevance)


class TokenAllocator(nn.Module):
    """Turn relevance and tensions into kept cells.

    Example:

    ```python
    >>> import torch
    >>> from arr_coc import ARRCOCConfig
    >>> from arr_coc.attending import TokenAllocator
    >>> allocator = TokenAllocator(ARRCOCConfig(hidden_size=64))
    >>> relevance = torch.zeros(1, 1, 4, 4)
    >>> relevance[0, 0, 1, 2] = 1.0
    >>> exploit = torch.tensor([[0.5, 0.0, 0.0]])
    >>> allocator(relevance, torch.randn(1, 16, 64), exploit, budget=1).indices.tolist()
    [[6]]

    ```
    """

    def __init__(self, config: ARRCOCConfig) -> None:
        super().__init__()
        self.min_tokens, self.max_tokens = config.min_tokens, config.max_tokens
        self.steepness = nn.Parameter(torch.tensor(1.0 / 0.9))
        self.offset = nn.Parameter(torch.tensor(0.5))

    def automatic_count(self, relevance: Tensor, detail: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `[B]` (float, differentiable) that relevance `[B, N]` deserves, and its normalised entropy `[B]`."""
        spread = torch.special.entr(torch.softmax(SHARPNESS * relevance, dim=-1)).sum(dim=-1)
        spread = spread / math.log(max(2, relevance.shape[1]))
        share = (0.5 + self.steepness * (spread - self.offset)).clamp(0, 1)
        count = self.min_tokens + (self.max_tokens - self.min_tokens) * share
        scaled = count * torch.exp2(2 * detail - 1)
        return scaled.clamp(self.min_tokens, self.max_tokens), spread

    def plan(
        self,
        relevance: Tensor,
        features: Tensor,
        tensions: Tensor,
        budget: Budget,
        structure: Tensor | None = None,
        match: Tensor | None = None,
        visited: Tensor | None = None,
        text: Tensor | None = None,
    ) -> Plan:
        """Choose cells without leaving the device.

        Args:
            relevance (`Tensor` of shape `[B, t, h, w]`): in [0, 1].
            features (`Tensor` of shape `[B, N, F]`): what near-duplicates are judged by.
            tensions (`Tensor` of shape `[B, 3]`): detail, explore, variety.
            budget (`int`, `float` or `"auto"`): see the budget rule.
            structure (`Tensor` of shape `[B]`, *optional*): from [`~arr_coc.pixels.saliency.picture_structure`];
                without it (no picture) the grid fallback is never taken.
            match (`Tensor` of shape `[B]`, *optional*): from [`~arr_coc.knowing.Participation`].
            visited (`Tensor` of shape `[B, N]`, *optional*): True where earlier frames were looked at; exploration
                goes elsewhere first.
            text (`Tensor` of shape `[B, t, h, w]`, *optional*): how likely there is text, see [`carry_along`].
        """
        batch, frames, rows, columns = relevance.shape
        flat = relevance.flatten(1)  # [B, N]
        total = flat.shape[1]
        expected, spread = self.automatic_count(flat, tensions[:, 0])
        with torch.no_grad():
            _, explore, variety = tensions.unbind(dim=1)
            fixed = resolve_budget(budget, total)
            if fixed is None:
                count = expected.round().long().clamp(1, total)
                most = min(self.max_tokens, total)
            else:
                count = torch.full((batch,), fixed, device=flat.device)
                most = fixed
            even = spread_rank((frames, rows, columns), flat.device)  # [N]
            places = torch.arange(total, device=flat.device)
            # bounded even if the inputs were NaN, of which the host hears only afterwards
            explored = torch.minimum((MOST_EXPLORED * explore * count).round().long().clamp_(min=0), count)
            along = relevance if text is None else carry_along(relevance, text)
            worth = self._suppress_duplicates(
                along.flatten(1), features, variety, min(total, 2 * most, MOST_CANDIDATES)
            )
            exploited = _first(worth.argsort(dim=1, descending=True, stable=True), places, count - explored)
            near = F.max_pool2d(exploited.view(-1, 1, rows, columns).to(flat.dtype), 3, stride=1, padding=1)
            looked = near.view(batch, total) > 0
            if visited is not None:
                looked = looked | visited
            # unvisited cells first, then visited, then chosen ones; within each in evenly spread order
            turn = even + total * (looked.long() + exploited)
            kept = exploited | _first(turn.argsort(dim=1), places, explored)
            known_match = flat.new_zeros(batch) if match is None else match.to(flat.dtype)
            if structure is None:
                structure = flat.new_full((batch,), math.inf)
            fallback = (structure < 1) & (known_match < 1) & (count < total)
            kept = torch.where(fallback[:, None], even < count[:, None], kept)
            report = [count.to(flat.dtype), fallback.to(flat.dtype), structure, known_match, spread]
            # each kept cell moves to its place among the kept ones, all others into one column that is cut off
            place = torch.where(kept, kept.cumsum(dim=1) - 1, most)
            indices = torch.zeros(batch, most + 1, dtype=torch.long, device=flat.device)
            indices = indices.scatter_(1, place, places.expand(batch, -1))[:, :most]
            mask = places[:most] < count[:, None]
            indices = indices * mask
        budgets = flat.gather(1, indices) * mask
        return Plan(indices, mask, budgets, expected, torch.stack(report, dim=1).detach())

    @staticmethod
    def _suppress_duplicates(flat: Tensor, features: Tensor, variety: Tensor, candidates: int) -> Tensor:
        """Lower the worth of cells that repeat a more relevant one, all at once (matrix NMS, Wang et al. 2020)."""
        value, index = flat.sort(dim=1, descending=True, stable=True)  # not topk, whose ties have no order
        value, index = value[:, :candidates], index[:, :candidates]  # [B, M], most relevant first
        picked = features.gather(1, index[:, :, None].expand(-1, -1, features.shape[-1]))
        picked = unit_rows(picked - features.mean(dim=1, keepdim=True))
        alike = ((picked @ picked.mT).float() - DUPLICATE).clamp_(min=0).div_(1 - DUPLICATE).triu_(1)  # [B, M, M]
        repeated = alike.amax(dim=1)  # how much each candidate itself repeats a better one
        # a duplicate counts less against others if it is to be dropped itself
        factor = ((1 - alike) / (1 - repeated[:, :, None]).clamp(min=1e-3)).amin(dim=1).clamp_(max=1)
        value = value * (1 - variety[:, None] * (1 - factor))
        return flat.scatter(1, index, value)

    def forward(
        self,
        relevance: Tensor,
        features: Tensor,
        tensions: Tensor,
        budget: Budget,
        structure: Tensor | None = None,
        match: Tensor | None = None,
    ) -> Plan:
        """[`~TokenAllocator.plan`] and [`finish_plan`] with one transfer between them."""
        plan = self.plan(relevance, features, tensions, budget, structure, match)
        return finish_plan(plan, plan.report.tolist(), relevance[0].numel())


def finish_plan(plan: Plan, report: Sequence[Sequence[float]], total: int) -> Plan:
    """Cut a plan to the lengths in its report, which is now on the host, and say why these tokens were kept.

    Args:
        plan (`Plan`): as [`TokenAllocator.plan`] made it.
        report (`Sequence[Sequence[float]]`): the rows of its `report`.
        total (`int`): cells of each picture.
    """
    counts = [int(row[0]) for row in report]
    most = max(counts)
    explained = [_explain(row, total) for row in report]
    return plan._replace(
        indices=plan.indices[:, :most],
        mask=plan.mask[:, :most],
        budgets=plan.budgets[:, :most],
        num_kept=torch.tensor(counts),
        strategy=tuple(name for name, _ in explained),
        reason=tuple(why for _, why in explained),
    )


def _first(order: Tensor, places: Tensor, count: Tensor) -> Tensor:
    """Boolean `[B, N]`: the first `count` `[B]` cells of each order `[B, N]`."""
    chosen = torch.empty_like(order, dtype=torch.bool)
    return chosen.scatter_(1, order, places < count[:, None])


def _explain(report: Sequence[float], total: int) -> tuple[str, str]:
    count, fallback, structure, match, spread = report
    kept = f"{int(count)} of {total} tokens"
    if count >= total:
        return "all", f"the budget covers all {total} tokens"
    if fallback:
        return "grid", (
            f"{kept} on an even grid: the picture has no structure ({structure:.2f}; noise is below 1) "
            f"and no word of the question points to a place ({match:.2f}; chance is below 1)"
        )
    points = "the question points to a place" if match >= 1 else "the question points nowhere in particular"
    shape = "focused" if spread < 1 / 3 else "spread out" if spread > 2 / 3 else "moderately focused"
    return "relevance", (
        f"the {kept} that matter most: relevance is {shape} ({spread:.2f} of the largest entropy), "
        f"{points} ({match:.2f}; chance is below 1)"
    )
