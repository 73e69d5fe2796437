"""The texts of the page as HTML; everything that a visitor wrote is escaped."""

from __future__ import annotations

from html import escape

import numpy as np

from arr_coc.demo.drawings import Cell, encode_map
from arr_coc.demo.snapshot import Maps, Snapshot

MODE_HELP = (
    "auto takes one of the next two, with few cells first and up to the budget if the answer is not sure; prune "
    "encodes the whole picture and reads the cells that matter; saccade encodes the picture small, and at full "
    "resolution only where it matters; weight reads all cells, scaled by relevance; full is the plain model"
)
COMPRESS_HELP = "in modes saccade and auto: encode the small picture larger, and compress it (COC)"
SCORE_HELP = {
    "information": "how much is here",
    "perspectival": "what stands out",
    "participatory": "what the question asks for",
}
STAGE_NAMES = {"encode": "encoding the picture", "select": "choosing", "prefill": "reading", "decode": "answering"}
NOTHING_ASKED = '<p class="quiet">No question was asked yet.</p>'


def write_answer(text: str) -> str:
    """The answer so far."""
    return f'<div class="answer" role="status">{escape(text) or "…"}</div>'


def name_way(snapshot: Snapshot) -> str:
    """The selector, and how the picture was read."""
    if snapshot.mode == "full":
        return "plain"
    compress = "" if snapshot.compress is None else f", compressed by {snapshot.compress}"
    return f"{snapshot.selector}, {snapshot.mode}{compress}"


def write_card(title: str, snapshot: Snapshot) -> str:
    """An answer with its tokens and its time."""
    note = "all of them" if snapshot.used == snapshot.full else f"{snapshot.used / snapshot.full:.0%} of them"
    answer = escape(snapshot.answer) or "(no answer)"
    return (
        f'<div class="card"><h4>{escape(title)}</h4><div class="answer">{answer}</div>'
        f'<div class="fact"><b>{snapshot.used:,}</b> of {snapshot.full:,} tokens, {note}</div>'
        f'<div class="fact"><b>{snapshot.first_token:,.0f} ms</b> to the first token</div></div>'
    )


def write_costs(snapshot: Snapshot, plain: Snapshot | None) -> str:
    """The answer with its tokens and times, beside that from all tokens if there is one."""
    parts = [
        '<div class="cards">',
        write_card(name_way(snapshot), snapshot),
    ]
    if plain is not None:
        parts.append(write_card("all tokens", plain))
    parts.append("</div>")
    if plain is not None:
        parts.append(f'<p class="difference">{compare_costs(snapshot, plain)}</p>')
    longest = max(snapshot.milliseconds.values(), default=0.0) or 1.0
    rows = "".join(
        f"<tr><td>{escape(STAGE_NAMES.get(name, name))}</td><td>{write_bar(value / longest)}</td>"
        f"<td>{value:,.0f} ms</td></tr>"
        for name, value in snapshot.milliseconds.items()
    )
    parts.append(f'<table class="bars"><caption>time by stage</caption>{rows}</table>')
    parts.append(f'<p class="reason"><b>{escape(snapshot.strategy)}</b>: {escape(snapshot.reason)}</p>')
    parts += [f'<p class="quiet">{escape(note)}</p>' for note in snapshot.notes]
    return "".join(parts)


def compare_costs(snapshot: Snapshot, plain: Snapshot) -> str:
    """How an answer differs from the one from all tokens, in one sentence."""
    same = "The same answer" if snapshot.answer.strip().lower() == plain.answer.strip().lower() else "Another answer"
    saved = 1 - snapshot.used / plain.used if plain.used else 0.0
    tokens = f"{abs(saved):.0%} {'fewer' if saved > 0 else 'more'} tokens" if abs(saved) > 0.005 else "as many tokens"
    ratio = plain.first_token / snapshot.first_token if snapshot.first_token else 1.0
    gain = f"{abs(plain.first_token - snapshot.first_token):,.0f} ms"
    if 0.95 < ratio < 1.05:
        speed = "as fast"
    elif ratio > 1:
        speed = f"{ratio:.1f} times as fast to the first token ({gain} less)"
    else:
        speed = f"{1 / ratio:.1f} times as long to the first token ({gain} more)"
    return f"{same}, {tokens}, {speed}."


def write_bar(share: float) -> str:
    """A bar as long as the share, of all its room; it begins at 0 and ends at 1, as the number beside it."""
    return f'<div class="bar"><i style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></div>'


def write_weights(maps: Maps) -> str:
    """Weights of the three scores, and the three tensions, as bars."""
    rows = "".join(
        f"<tr><td>{escape(name)}<small>{escape(SCORE_HELP.get(name, ''))}</small></td>"
        f"<td>{write_bar(value)}</td><td>{value:.2f}</td></tr>"
        for name, value in maps.weights.items()
    )
    tensions = "".join(
        f"<tr><td>{escape(name)}</td><td>{write_bar(value)}</td><td>{value:.2f}</td></tr>"
        for name, value in maps.tensions.items()
    )
    return (
        f'<div class="pair"><table class="bars"><caption>weights of the scores</caption>{rows}</table>'
        f'<table class="bars"><caption>tensions, 0 to 1</caption>{tensions}</table></div>'
    )


def write_maps(maps: dict[str, np.ndarray], kind: str, cell: Cell | None = None) -> str:
    """Small maps with their names, and their values at one cell; `kind` is large or small."""
    tiles = []
    for name, values in maps.items():
        value = "" if cell is None else f" <b>{float(values[cell]):.2f}</b>"
        shown = f"{float(values.min()):.2f} to {float(values.max()):.2f}"
        tiles.append(
            f'<figure title="{escape(name)}: {shown}"><img alt="map of {escape(name)}" src="{encode_map(values)}">'
            f"<figcaption>{escape(name)}{value}</figcaption></figure>"
        )
    return f'<div class="maps {kind}">{"".join(tiles)}</div>'


def write_words(snapshot: Snapshot, cell: Cell | None) -> str:
    """The question with each word marked by how strongly it pulls: at one cell, or at the cell it pulls most."""
    maps = snapshot.maps
    if maps is None or not len(maps.pull):
        return NOTHING_ASKED
    pulls = maps.pull.max(axis=(1, 2)) if cell is None else maps.pull[:, cell[0], cell[1]]  # [Q, h, w] -> [Q]
    strongest = max(float(maps.pull.max()), 1e-6)
    spans = []
    for word, pull in zip(maps.words, pulls.tolist(), strict=True):
        share = min(max(pull / strongest, 0.0), 1.0)  # no tint for a word that pulls away
        spans.append(
            f'<span class="word" style="--pull:{100 * share:.0f}%"><i>{escape(word) or "·"}</i>'
            f"<small>{pull:.2f}</small></span>"
        )
    where = "anywhere" if cell is None else f"row {cell[0] + 1}, column {cell[1] + 1}"
    return f'<p class="quiet">How strongly each word pulls ({where}):</p><div class="words">{"".join(spans)}</div>'


def write_cell(snapshot: Snapshot, cell: Cell | None) -> str:
    """Scores, strongest words and most unusual channels of one cell."""
    maps = snapshot.maps
    if maps is None:
        why = "In mode full nothing is chosen" if snapshot.mode == "full" else "This selector shows no maps"
        return f'<p class="quiet">{why}; ask in another mode, or with arr-coc or arr-coc-untrained.</p>'
    if cell is None:
        return '<p class="quiet">Click a cell of the picture, or give its row and column.</p>'
    read = snapshot.tokens[cell] >= 1
    rank = int((maps.relevance > maps.relevance[cell]).sum()) + 1
    rows = "".join(
        f"<tr><td>{escape(name)}<small>weight {maps.weights[name]:.2f}</small></td>"
        f"<td>{write_bar(float(score[cell]))}</td><td>{float(score[cell]):.2f}</td></tr>"
        for name, score in maps.scores.items()
    )
    words = ""
    if len(maps.pull):
        order = maps.pull[:, cell[0], cell[1]].argsort()[::-1][:3]
        words = ", ".join(f"<b>{escape(maps.words[place])}</b> {maps.pull[place][cell]:.2f}" for place in order)
        words = f'<p class="fact">strongest words: {words}</p>'
    unusual = sorted(maps.channels, key=lambda name: -_oddness(maps.channels[name], cell))[:5]
    channels = "".join(
        f"<tr><td>{escape(name)}<small>{_range(maps.channels[name])}</small></td>"
        f"<td>{write_bar(float(maps.channels[name][cell]))}</td><td>{float(maps.channels[name][cell]):.2f}</td></tr>"
        for name in unusual
    )
    return (
        f"<h4>row {cell[0] + 1}, column {cell[1] + 1}: {'read' if read else 'not read'}, relevance "
        f"{float(maps.relevance[cell]):.2f}, rank {rank} of {maps.relevance.size}</h4>"
        f'<table class="bars"><caption>scores, 0 to 1</caption>{rows}</table>{words}'
        f'<table class="bars"><caption>channels that stand out here, 0 to 1</caption>{channels}</table>'
    )


def _oddness(values: np.ndarray, cell: Cell) -> float:
    """How many standard deviations a value lies from the mean of its map."""
    return abs(float(values[cell]) - float(values.mean())) / max(float(values.std()), 1e-3)


def _range(values: np.ndarray) -> str:
    """The lowest and the highest value of a map, so that one that stands out is seen to."""
    return f"{float(values.min()):.2f} to {float(values.max()):.2f} in the picture"
