"""ARR, COC and both for one question: what saccades are worth, what compression costs, and how far both get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from arr_coc.attending import resolve_budget
from arr_coc.config import Grid, cell_count
from arr_coc.demo.drawings import draw_seen, encode_picture
from arr_coc.demo.engine import Engine, Mistake
from arr_coc.demo.snapshot import Snapshot
from arr_coc.demo.texts import write_card
from arr_coc.gaze.compression import Compress
from arr_coc.gaze.plan import Gaze, plan_gaze
from arr_coc.pixels.files import Picture


class Way(NamedTuple):
    """One way to read a picture small.

    Args:
        name (`str`): ARR, COC or ARR-COC.
        gaze (`Gaze`): how the picture is looked at.
        tokens (`int`): the budget.
    """

    name: str
    gaze: Gaze
    tokens: int


def list_ways(grid: Grid, tokens: int, compress: Compress) -> list[Way]:
    """ARR, COC and both, with the same number of tokens, at most `tokens`, for a picture of `grid` cells.

    ARR spends half of them on a plain small picture and half on saccades, COC all on a compressed small picture, and
    ARR-COC half on a compressed small picture and half on saccades, as in the table of docs/gaze.md.

    Example:

    ```python
    >>> from arr_coc.demo.arr_and_coc import list_ways
    >>> [(way.name, way.gaze.gestalt, way.gaze.compress) for way in list_ways((1, 64, 64), 256, "pool")]
    [('ARR', 128, None), ('COC', 256, 'pool'), ('ARR-COC', 128, 'pool')]

    ```
    """
    # a small picture may not fill the budget; what is left would become saccades, which COC alone has none of
    tokens = cell_count(plan_gaze(grid, tokens, Gaze(gestalt=tokens, compress=compress)).gestalt)
    half = max(1, tokens // 2)
    return [
        Way("ARR", Gaze(gestalt=half), tokens),
        Way("COC", Gaze(gestalt=tokens, compress=compress), tokens),
        Way("ARR-COC", Gaze(gestalt=half, compress=compress), tokens),
    ]


def ask_ways(
    engine: Engine, picture: Picture, question: str, share: float, compress: Compress
) -> Iterator[tuple[Way, Snapshot]]:
    """Ask a question in all three ways, one after the other."""
    grid = engine.find_grid(picture.image)
    tokens = resolve_budget(share, cell_count(grid))
    if tokens is None or tokens >= cell_count(grid):
        raise Mistake(f"a budget of {share:.0%} reads this picture whole; use less to compare ARR and COC")
    ways = list_ways(grid, tokens, compress)
    for way in ways:  # all are refused before the first is asked
        engine.check(picture, question, "saccade", share, way.gaze)
    for way in ways:
        yield way, engine.ask(picture, question, "saccade", share, gaze=way.gaze, tokens=way.tokens)


def write_ways(asked: Sequence[tuple[Way, Snapshot]]) -> str:
    """Each way with its answer, its tokens and what was seen, as HTML."""
    tiles = []
    for way, snapshot in asked:
        plan = plan_gaze((1, *snapshot.grid), way.tokens, way.gaze)
        sharp = len(snapshot.cells)
        small = f"{snapshot.used - sharp:,} tokens of the small picture"
        if way.gaze.compress is not None:
            small += f", compressed by {way.gaze.compress} from {cell_count(plan.encoded):,}"
        tiles.append(
            f'<figure>{write_card(way.name, snapshot)}<img alt="what {way.name} saw" '
            f'src="{encode_picture(draw_seen(snapshot))}"><figcaption><small>{escape(small)}; '
            f"{sharp or 'no'} cells at full resolution</small></figcaption></figure>"
        )
    about = f"ARR, COC and both, with a budget of {asked[0][0].tokens:,} tokens each"
    return f'<p class="caption">{about}</p><div class="tiles three">{"".join(tiles)}</div>'
