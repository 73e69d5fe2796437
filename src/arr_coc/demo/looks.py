"""The looks behind an answer, side by side in their order."""

from __future__ import annotations

from html import escape

from arr_coc.demo.drawings import draw_all_looks, draw_look, encode_picture
from arr_coc.demo.snapshot import Snapshot
from arr_coc.demo.texts import write_bar
from arr_coc.drawing.looks import explain_end, name_look
from arr_coc.gaze.loop import WHOLE

NO_LOOKS = (
    '<p class="quiet">This was read in one look. Mode auto looks again at pictures of more than '
    f"{WHOLE} cells until the answer is sure.</p>"
)


def write_looks(snapshot: Snapshot) -> str:
    """A numbered tile for each look, and after several one that shows which look saw what first; as HTML."""
    if not snapshot.looks:
        return NO_LOOKS
    tiles = []
    for number, look in enumerate(snapshot.looks, start=1):
        name, end = escape(name_look(number, look)), escape(explain_end(look))
        tiles.append(
            f'<figure><img alt="what look {number} could use" src="{encode_picture(draw_look(snapshot, number))}">'
            f"<figcaption><b>{name}</b>{write_bar(look.sure)}<small>{end}</small></figcaption></figure>"
        )
    if len(snapshot.looks) > 1:
        tiles.append(
            f'<figure class="wide"><img alt="all looks, numbered" src="{encode_picture(draw_all_looks(snapshot))}">'
            "<figcaption><b>all looks</b><small>each cell has the number of the look that first saw it</small>"
            "</figcaption></figure>"
        )
    return (
        f'<p class="caption">What each look could use at full resolution</p><div class="tiles">{"".join(tiles)}</div>'
    )
