"""Sheets: everything that was seen of one picture on one page, or two selectors side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from arr_coc.drawing.labels import label_channels, label_tensions, label_weights, write_values
from arr_coc.drawing.looks import mark_looks
from arr_coc.drawing.overlay import (
    PAPER,
    colour_map,
    count_seen,
    draw_gaze,
    fit_to_cells,
    kept_cells,
    show_heat,
    show_kept,
    stretch,
)
from arr_coc.selectors.output import spread_windows

if TYPE_CHECKING:
    from arr_coc.inference.answer import Answer

Tile = tuple[str, Image.Image]

_INK, _FAINT = (25, 25, 28), (110, 110, 116)
_WIDTH, _MARGIN, _CAPTION = 1440, 24, 22
_LARGE, _SMALL = 3, 10  # tiles in a row


def explain_no_relevance(answer: Answer) -> str:
    """Why an answer has no relevance to show."""
    if sum(len(cells) for _, cells in answer.kept) == answer.tokens.full:
        return f"all {answer.tokens.full} tokens were read, without a choice"
    return "this selector gives no relevance"


def draw_sheet(image: Image.Image, question: str, answer: Answer, footnotes: tuple[str, ...] = ()) -> Image.Image:
    """Draw the contact sheet of one picture: what was read, relevance, the three scores and every texture channel.

    If the model itself was asked where it looks, that is shown beside the scores.

    Args:
        image (`PIL.Image.Image`): the picture at the size of its cells, see [`fit_to_cells`].
        question (`str`): what was asked.
        answer (`Answer`): from `answer` or `inspect` with `details=True`; maps only where the selector has some.
        footnotes (`tuple[str, ...]`, *optional*): lines at the foot of the sheet.
    """
    output = answer.output
    (_, rows, columns), _ = answer.kept[0]
    lines = [f"strategy {answer.strategy}: {answer.reason}"]
    if output is None:
        lines.append(f"{explain_no_relevance(answer)}, so there are no maps to show")
        tiles = [("the picture", image), _tile_of_read(image, answer)]
        return _compose(question, lines, [(tiles, len(tiles))], image.height / image.width, footnotes)
    if output.texture is None:
        raise ValueError("the sheet shows every channel; ask with `details=True`")
    grid = (rows, columns)
    relevance = spread_windows(output.relevance[0, 0], grid)  # [h, w]
    texture = spread_windows(output.texture[0, 0], grid)  # [C, h, w]
    large = [
        ("the picture", image),
        ("relevance", show_heat(image, stretch(relevance))),
        _tile_of_read(image, answer),
    ]
    scored = [
        (f"{name}, weight {weight:.2f}", show_heat(image, stretch(spread_windows(output.scores[name][0, 0], grid))))
        for name, weight in label_weights(output).items()
    ]
    if output.voice is not None:
        voice = spread_windows(output.voice[0, 0], grid)
        scored.append(("where the model itself looks", show_heat(image, stretch(voice))))
    channels = [
        (f"{index} {name}", colour_map(stretch(channel)))
        for index, (name, channel) in enumerate(label_channels(texture).items())
    ]
    lines.append(f"tensions: {write_values(label_tensions(output))}")
    blocks = [(large, _LARGE), (scored, len(scored)), (channels, _SMALL)]
    return _compose(question, lines, blocks, image.height / image.width, footnotes)


def _tile_of_read(image: Image.Image, answer: Answer) -> Tile:
    """What was read of the picture, and how many tokens that took."""
    (_, rows, columns), cells = answer.kept[0]
    total = rows * columns
    if len(answer.looks) > 1:
        read = " + ".join(str(look.tokens) for look in answer.looks)
        return f"read: {read} tokens in {len(answer.looks)} looks", mark_looks(image, answer)
    if answer.strategy == "saccade" and len(cells) < total:
        gestalt = count_seen(answer) - len(cells)
        caption = f"read: gestalt of {gestalt} tokens, {len(cells)} of {total} cells sharp"
        return caption, draw_gaze(image, answer, image.width / columns)
    if answer.strategy == "weight":
        return f"kept: all {total} tokens, scaled by relevance", image
    kept = kept_cells(answer)
    return f"kept: {int(kept.sum())} of {total} tokens", show_kept(image, kept)


class Column(NamedTuple):
    """What one selector saw and read, as [`draw_comparison`] shows it.

    Args:
        name (`str`): of the selector.
        answer (`Answer`): what was answered, and how.
    """

    name: str
    answer: Answer


def draw_comparison(image: Image.Image, question: str, columns: list[Column], cell: int = 32) -> Image.Image:
    """Draw how several selectors looked at one picture, one column each: relevance above what was read.

    Args:
        image (`PIL.Image.Image`): the picture that was asked about.
        question (`str`): what was asked.
        columns (`list[Column]`): one for each selector.
        cell (`int`, *optional*, defaults to 32): side of a token in pixels.
    """
    maps: list[Tile] = []
    reads: list[Tile] = []
    lines = []
    for name, answer in columns:
        fitted, output = fit_to_cells(image, answer, cell), answer.output
        if output is None:
            maps.append((f"{name} has no relevance to show", fitted))
        else:
            (_, down, along), _ = answer.kept[0]
            relevance = spread_windows(output.relevance[0, 0], (down, along))  # [h, w]
            maps.append((f"{name}: relevance", show_heat(fitted, stretch(relevance))))
            weights, tensions = write_values(label_weights(output)), write_values(label_tensions(output))
            lines.append(f"{name}: {weights}; tensions {tensions}")
        caption, tile = _tile_of_read(fitted, answer)
        reads.append((f"{name} {caption}; answer: {answer.text}", tile))
    blocks = [(maps, len(columns)), (reads, len(columns))]
    return _compose(question, lines, blocks, image.height / image.width, ())


def _compose(
    question: str,
    lines: list[str],
    blocks: list[tuple[list[Tile], int]],
    aspect: float,
    footnotes: tuple[str, ...],
) -> Image.Image:
    """Lay out title, lines, blocks of captioned tiles (each with its number of columns) and footnotes on one sheet."""
    aspect = min(max(aspect, 0.2), 2.0)  # very long pictures are squeezed so that the sheet stays readable
    title = _wrap(question, 30)[:3]
    body = [part for line in lines for part in _wrap(line, 15)]
    notes = [part for line in footnotes for part in _wrap(line, 13)]
    heights = [_tile_size(columns, aspect)[1] + _CAPTION + 10 for _, columns in blocks]
    rows = [-(-len(tiles) // columns) for tiles, columns in blocks]
    height = _MARGIN * 2 + 40 * len(title) + 22 * len(body) + 16
    height += sum(h * r for h, r in zip(heights, rows, strict=True)) + 18 * len(notes)
    sheet = Image.new("RGB", (_WIDTH, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    y = _MARGIN
    for line in title:
        pen.text((_MARGIN, y), line, fill=_INK, font=_font(30))
        y += 40
    for line in body:
        pen.text((_MARGIN, y), line, fill=_FAINT, font=_font(15))
        y += 22
    y += 16
    for (tiles, columns), step in zip(blocks, heights, strict=True):
        size = _tile_size(columns, aspect)
        for place, (caption, tile) in enumerate(tiles):
            x = _MARGIN + place % columns * (size[0] + 10)
            top = y + place // columns * step
            smooth = tile.size[0] > size[0]
            method = Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST
            sheet.paste(tile.resize(size, method), (x, top))
            pen.text((x, top + size[1] + 3), caption, fill=_INK, font=_font(15 if columns <= _LARGE else 12))
        y += step * -(-len(tiles) // columns)
    for line in notes:
        pen.text((_MARGIN, y), line, fill=_FAINT, font=_font(13))
        y += 18
    return sheet


def _tile_size(columns: int, aspect: float) -> tuple[int, int]:
    width = (_WIDTH - 2 * _MARGIN - 10 * (columns - 1)) // columns
    return width, max(1, round(width * aspect))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _wrap(text: str, size: int) -> list[str]:
    """Break a text into lines that fit the sheet; a word that does not fit is broken too."""
    font, room = _font(size), _WIDTH - 2 * _MARGIN
    lines = [""]
    for word in text[:2000].split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= room:
            lines[-1] = longer
            continue
        lines.append("")
        for letter in word:
            if font.getlength(lines[-1] + letter) > room:
                lines.append("")
            lines[-1] += letter
    return [line for line in lines if line]
