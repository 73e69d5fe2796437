"""Attending: turn relevance into kept tokens: which ones, how many, in what order.

The budget rule, `resolve_budget` and `TokenAllocator.automatic_count`:

- an int is a number of tokens per picture; more than `N` keeps all;
- a float `r` in (0, 1] is `max(1, round(r * N))`;
- `"auto"` is `min_tokens .. max_tokens` per picture or frame, from the entropy of the sharpened relevance: few if
  focused, many if spread;
- with a leeway `l`, a number `k` is `k / l .. k * l`, from the tension `detail`.
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

# A plain softmax over a thousand scores in [0, 1] is nearly uniform and would always ask for `max_tokens`.
SHARPNESS = 45.0
# The share of tokens that `explore` = 1 spreads evenly.
MOST_EXPLORED = 0.5
# Tokens whose centred cosine exceeds this are near-duplicates.
DUPLICATE = 0.8
# Only this many of the most relevant cells are compared with each other; near-duplicates beyond them stay.
MOST_CANDIDATES = 2048
# Text cells up to this many steps left and right of a relevant cell are worth this share of the cell before them.
CARRIED_CELLS, CARRIED = 2, 0.95
# A cell whose `text` channel is above this has strokes.
STROKES = 0.1
# Below these neither the picture nor the question says where to look. Blots of paint are alike over some cells and
# resemble some word of many, so where the model itself was asked and looks nowhere, they have to say more.
LEAST_STRUCTURE, LEAST_MATCH = 1.0, 1.0
LEAST_STRUCTURE_ASKED, LEAST_MATCH_ASKED = 1.4, 1.25


def resolve_budget(budget: Budget, total: int) -> int | None:
    """Number of tokens that `budget` keeps of `total`; `None` for `"auto"`.

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
    """Rank `[N]` of each cell in an order whose first cells, however many, are spread evenly over the grid.

    This is the order of Bayer's dither matrix: four cells fall into four quarters, sixteen into sixteen. Each frame of
    a clip starts elsewhere.

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

    [`TokenAllocator.plan`] makes it without leaving the device, padded to the largest possible length.
    [`finish_plan`] cuts it to the actual lengths once the host knows them, and adds the reasons.

    Args:
        indices (`Tensor` of shape `[B, M]`): kept cells in ascending order; 0 where padded.
        mask (`Tensor` of shape `[B, M]`): False where padded.
        budgets (`Tensor` of shape `[B, M]`): relevance of each kept cell, with gradient; 0 where padded.
        expected (`Tensor` of shape `[B]`): tokens that `"auto"` would give, differentiable.
        report (`Tensor` of shape `[B, 5]` or `[B, 6]`): count, fallback, structure, match, spread and, if the model was
            asked, focus, for one transfer to the host.
        num_kept (`Tensor` of shape `[B]`, *optional*): number of kept cells, on the host.
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
    """Relevance `[B, t, h, w]`, raised where text stands left or right of a relevant cell.

    Half a word is worth nothing: strokes beside a relevant cell come before cells that are less relevant than it.

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
    carried = CARRIED * (text.flatten(0, 1)[:, None] > STROKES)  # [B * t, 1, h, w]
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

    def automatic_count(self, relevance: Tensor, detail: Tensor, frames: int = 1) -> tuple[Tensor, Tensor]:
        """Number of tokens `[B]` (float, differentiable) for relevance `[B, N]`, and its normalised entropy `[B]`.

        The limits are those of one picture, times the number of frames of a clip.
        """
        spread = torch.special.entr(torch.softmax(SHARPNESS * relevance, dim=-1)).sum(dim=-1)
        spread = spread / math.log(max(2, relevance.shape[1]))
        share = (0.5 + self.steepness * (spread - self.offset)).clamp(0, 1)
        least, most = self.min_tokens * frames, self.max_tokens * frames
        count = least + (most - least) * share
        scaled = count * torch.exp2(2 * detail - 1)
        return scaled.clamp(least, most), spread

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
        focus: Tensor | None = None,
        leeway: float = 1.0,
    ) -> Plan:
        """Choose cells without leaving the device.

        Args:
            relevance (`Tensor` of shape `[B, t, h, w]`): in [0, 1].
            features (`Tensor` of shape `[B, N, F]`): compared to find near-duplicates.
            tensions (`Tensor` of shape `[B, 3]`): detail, explore, variety.
            budget (`int`, `float` or `"auto"`): see the budget rule.
            structure (`Tensor` of shape `[B]`, *optional*): from [`~arr_coc.pixels.saliency.picture_structure`];
                without it (no picture) there is no grid fallback.
            match (`Tensor` of shape `[B]`, *optional*): from [`~arr_coc.knowing.Participation`].
            visited (`Tensor` of shape `[B, N]`, *optional*): True where earlier frames kept a cell; exploration goes
                elsewhere first.
            text (`Tensor` of shape `[B, t, h, w]`, *optional*): text likelihood, see [`carry_along`].
            focus (`Tensor` of shape `[B]`, *optional*): of the model's own attention, from
                [`~arr_coc.knowing.focus_of`], if it was asked.
            leeway (`float`, *optional*, defaults to 1.0): how many times more or fewer tokens than a budget of a number
                or ratio may stay, as `detail` says.
        """
        batch, frames, rows, columns = relevance.shape
        flat = relevance.flatten(1)  # [B, N]
        total = flat.shape[1]
        expected, spread = self.automatic_count(flat, tensions[:, 0], frames)
        with torch.no_grad():
            _, explore, variety = tensions.unbind(dim=1)
            fixed = resolve_budget(budget, total)
            if fixed is None:
                count = expected.round().long().clamp(1, total)
                most = min(self.max_tokens * frames, total)
            elif leeway == 1:
                count = torch.full((batch,), fixed, device=flat.device)
                most = fixed
            else:
                count = (fixed * leeway ** (2 * tensions[:, 0] - 1)).round().long().clamp(1, total)
                most = min(math.ceil(fixed * leeway), total)
            even_rank = spread_rank((frames, rows, columns), flat.device)  # [N]
            places = torch.arange(total, device=flat.device)
            # clamped because inputs may be NaN, which the host finds out only later
            explored = torch.minimum((MOST_EXPLORED * explore * count).round().long().clamp_(min=0), count)
            worth = relevance if text is None else carry_along(relevance, text)
            worth = self._suppress_duplicates(
                worth.flatten(1), features, variety, min(total, 2 * most, MOST_CANDIDATES)
            )
            # 1. the cells that are worth most
            exploited = _first(worth.argsort(dim=1, descending=True, stable=True), places, count - explored)
            near = F.max_pool2d(exploited.view(-1, 1, rows, columns).to(flat.dtype), 3, stride=1, padding=1)
            covered = near.view(batch, total) > 0
            if visited is not None:
                covered = covered | visited
            # 2. cells spread evenly: first where nothing was looked at, then around chosen or visited cells
            turn = even_rank + total * (covered.long() + exploited)
            kept = exploited | _first(turn.argsort(dim=1), places, explored)
            known_match = flat.new_zeros(batch) if match is None else match.to(flat.dtype)
            if structure is None:
                structure = flat.new_full((batch,), math.inf)
            # 3. an even grid instead of both, where neither picture nor question nor the model says where to look
            if focus is None:
                fallback = (structure < LEAST_STRUCTURE) & (known_match < LEAST_MATCH)
            else:
                fallback = (structure < LEAST_STRUCTURE_ASKED) & (known_match < LEAST_MATCH_ASKED) & (focus < 1)
            fallback = fallback & (count < total)
            kept = torch.where(fallback[:, None], even_rank < count[:, None], kept)
            report = [count.to(flat.dtype), fallback.to(flat.dtype), structure, known_match, spread]
            report += [] if focus is None else [focus.to(flat.dtype)]
            # each kept cell goes to its place among the kept cells, all others into an extra column that is cut off
            place = torch.where(kept, kept.cumsum(dim=1) - 1, most)
            indices = torch.zeros(batch, most + 1, dtype=torch.long, device=flat.device)
            indices = indices.scatter_(1, place, places.expand(batch, -1))[:, :most]
            mask = places[:most] < count[:, None]
            indices = indices * mask
        budgets = flat.gather(1, indices) * mask
        return Plan(indices, mask, budgets, expected, torch.stack(report, dim=1).detach())

    @staticmethod
    def _suppress_duplicates(flat: Tensor, features: Tensor, variety: Tensor, candidates: int) -> Tensor:
        """Lower the worth of cells that resemble a more relevant cell, in one step (matrix NMS, Wang et al. 2020)."""
        value, index = flat.sort(dim=1, descending=True, stable=True)  # topk would not order ties
        value, index = value[:, :candidates], index[:, :candidates]  # [B, M], most relevant first
        picked = features.gather(1, index[:, :, None].expand(-1, -1, features.shape[-1]))
        picked = unit_rows(picked - features.mean(dim=1, keepdim=True))
        alike = ((picked @ picked.mT).float() - DUPLICATE).clamp_(min=0).div_(1 - DUPLICATE).triu_(1)  # [B, M, M]
        repeated = alike.amax(dim=1)  # how much each candidate resembles a better one
        # a duplicate counts less against others if it is suppressed itself
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
        """[`~TokenAllocator.plan`], then [`finish_plan`] after one transfer to the host."""
        plan = self.plan(relevance, features, tensions, budget, structure, match)
        return finish_plan(plan, plan.report.tolist(), relevance[0].numel())


def finish_plan(plan: Plan, report: Sequence[Sequence[float]], total: int) -> Plan:
    """Cut a plan to the lengths in its report, and say why these tokens were kept.

    Args:
        plan (`Plan`): from [`TokenAllocator.plan`].
        report (`Sequence[Sequence[float]]`): the rows of its `report`, now on the host.
        total (`int`): number of cells of each picture.
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
    """Mask `[B, N]` of the first `count` `[B]` cells in each order `[B, N]`."""
    chosen = torch.empty_like(order, dtype=torch.bool)
    return chosen.scatter_(1, order, places < count[:, None])


def _explain(report: Sequence[float], total: int) -> tuple[str, str]:
    count, fallback, structure, match, spread, *focus = report
    kept = f"{int(count)} of {total} tokens"
    if count >= total:
        return "all", f"the budget covers all {total} tokens"
    if fallback:
        noise, chance = (LEAST_STRUCTURE_ASKED, LEAST_MATCH_ASKED) if focus else (LEAST_STRUCTURE, LEAST_MATCH)
        return "grid", (
            f"{kept} on an even grid: the picture has no structure ({structure:.2f}; noise is below {noise:g}) "
            f"and no word of the question points to a place ({match:.2f}; chance is below {chance:g})"
            + "".join(f", nor does the model itself look at one ({each:.2f}; noise is below 1)" for each in focus)
        )
    points = "the question points to a place" if match >= 1 else "the question points nowhere in particular"
    shape = "focused" if spread < 1 / 3 else "spread out" if spread > 2 / 3 else "moderately focused"
    whose = "that matter most, by where the model itself looks" if focus else "that matter most"
    return "relevance", (
        f"the {kept} {whose}: relevance is {shape} ({spread:.2f} of the largest entropy), "
        f"{points} ({match:.2f}; chance is below 1)"
    )
