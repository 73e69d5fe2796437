"""One contact sheet: the picture, what was kept, the scores and every channel by name. Drawn with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from arr_coc.balancing import SCORES, TENSIONS
from arr_coc.runtime.atomic_files import set_aside
from arr_coc.selectors.output import ARRCOCOutput
from arr_coc.texture import CHANNELS

# Ten anchors of the viridis colormap: perceptually even, readable for the colour-blind.
_VIRIDIS = np.array(
    [
        *((68, 1, 84), (72, 40, 120), (62, 73, 137), (49, 104, 142), (38, 130, 142)),
        *((31, 158, 137), (53, 183, 121), (110, 206, 88), (181, 222, 43), (253, 231, 37)),
    ],
    dtype=np.float32,
)
_PAPER, _INK, _FAINT = (250, 250, 248), (25, 25, 28), (110, 110, 116)
_WIDTH, _MARGIN, _CAPTION = 1440, 24, 22
_LARGE, _SMALL = 3, 10
_NUMBERED = 12


def colour_map(values: np.ndarray) -> Image.Image:
    """Colour values in [0, 1] `[h, w]` as RGB, viridis.

    Example:

    ```python
    >>> import numpy as np
    >>> from arr_coc.drawing.sheet import colour_map
    >>> colour_map(np.array([[0.0, 1.0]])).getpixel((1, 0))
    (253, 231, 37)

    ```
    """
    place = np.clip(np.nan_to_num(values), 0, 1) * (len(_VIRIDIS) - 1)
    low = np.minimum(place.astype(int), len(_VIRIDIS) - 2)
    share = (place - low)[..., None]
    return Image.fromarray((_VIRIDIS[low] * (1 - share) + _VIRIDIS[low + 1] * share).round().astype(np.uint8))


def stretch(values: Tensor | np.ndarray) -> np.ndarray:
    """Map a channel to its own range, so that a faint one can be seen; a flat one stays flat."""
    array = values if isinstance(values, np.ndarray) else values.detach().float().cpu().numpy()
    low, high = float(array.min()), float(array.max())
    if high - low < 1e-3:
        return np.full_like(array, min(max(low, 0.0), 1.0))
    return (array - low) / (high - low)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _wrap(text: str, size: int) -> list[str]:
    """Lines of a text that fit the sheet; a word that does not is broken."""
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


def show_kept(image: Image.Image, kept: np.ndarray) -> Image.Image:
    """The picture with what was not kept `[h, w]` faded to a light gray."""
    mask = Image.fromarray((kept * 255).astype(np.uint8)).resize(image.size, Image.Resampling.NEAREST)
    faded = Image.blend(image.convert("L").convert("RGB"), Image.new("RGB", image.size, _PAPER), 0.82)
    return Image.composite(image, faded, mask)


def show_gaze(
    image: Image.Image, grid: tuple[int, int], cells: np.ndarray, cell: float, scale: int, most: int = 1400
) -> Image.Image:
    """The picture `scale` times blurred, sharp in the cells that were looked at; where the first third of them lies is
    outlined, each region numbered by its turn.

    Args:
        image (`PIL.Image.Image`): at full resolution.
        grid (`tuple[int, int]`): rows and columns of its cells.
        cells (`ndarray` of shape `[k]`): looked at, in order.
        cell (`float`): pixels a side of one of them.
        scale (`int`): pixels a side that become one where nothing was looked at.
        most (`int`, *optional*): pixels of the longer side of what is drawn.
    """
    share = min(1.0, most / max(image.size))
    size = (max(1, round(image.width * share)), max(1, round(image.height * share)))
    sharp = image.resize(size, Image.Resampling.LANCZOS)
    coarse = image.resize((max(1, image.width // scale), max(1, image.height // scale)), Image.Resampling.BOX)
    blurred = Image.blend(coarse.resize(size, Image.Resampling.BICUBIC), Image.new("RGB", size, _PAPER), 0.45)
    looked = find_regions(grid, cells) > 0
    reach = (grid[1] * cell * share, grid[0] * cell * share)  # the last cells may reach beyond the picture
    mask = Image.fromarray((looked * 255).astype(np.uint8)).resize(
        (round(reach[0]), round(reach[1])), Image.Resampling.NEAREST
    )
    step = (cell * share, cell * share)
    return mark_turns(Image.composite(sharp, blurred, mask.crop((0, 0, *size))), grid, cells, step)


def mark_turns(seen: Image.Image, grid: tuple[int, int], cells: np.ndarray, step: tuple[float, float]) -> Image.Image:
    """Outline where the first third of `cells` lies in a picture of `step` pixels (x, y) a cell; number each region."""
    regions = find_regions(grid, cells[: -(-len(cells) // 3)])
    pen, size = ImageDraw.Draw(seen), seen.size
    ink = tuple(int(value) for value in _VIRIDIS[0])
    for line in _outlines(regions > 0):
        pen.line([(x * step[0], y * step[1]) for x, y in line], fill=ink, width=2)
    for number in range(1, min(_NUMBERED, int(regions.max(initial=0))) + 1):
        rows, columns = (regions == number).nonzero()
        text, height = str(number), max(14, round(size[0] / 55))
        left, top = columns[rows == rows.min()].min() * step[0], max(0.0, rows.min() * step[1] - height - 4)
        width = pen.textlength(text, font=_font(height)) + 8
        pen.rectangle([left, top, left + width, top + height + 4], fill=ink)
        pen.text((left + 4, top), text, fill=_PAPER, font=_font(height))
    return seen


def _outlines(chosen: np.ndarray) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Edges between cells that were looked at and others, as lines `(x, y)` to `(x, y)` in cells."""
    framed = np.pad(chosen, 1)
    rows, columns = (framed[1:, 1:-1] != framed[:-1, 1:-1]).nonzero()
    lines = [((x, y), (x + 1, y)) for y, x in zip(rows.tolist(), columns.tolist(), strict=True)]
    rows, columns = (framed[1:-1, 1:] != framed[1:-1, :-1]).nonzero()
    return lines + [((x, y), (x, y + 1)) for y, x in zip(rows.tolist(), columns.tolist(), strict=True)]


def find_regions(grid: tuple[int, int], cells: np.ndarray) -> np.ndarray:
    """Regions `[h, w]` of cells that touch, numbered by the turn of their first cell; 0 where nothing was looked at.

    Example:

    ```python
    >>> import numpy as np
    >>> from arr_coc.drawing.sheet import find_regions
    >>> find_regions((2, 4), np.array([3, 0, 4])).tolist()
    [[2, 0, 0, 1], [2, 0, 0, 0]]

    ```
    """
    turn = np.full((grid[0] + 2, grid[1] + 2), np.inf)
    turn[1 + cells // grid[1], 1 + cells % grid[1]] = np.arange(len(cells))
    chosen = np.isfinite(turn)
    while True:  # the earliest turn spreads over its region
        first = np.minimum.reduce([turn, *(np.roll(turn, by, axis) for axis in (0, 1) for by in (-1, 1))])
        first = np.where(chosen, first, np.inf)
        if (first == turn).all():
            break
        turn = first
    numbers = np.unique(turn[chosen])
    return np.where(chosen, np.searchsorted(numbers, turn) + 1, 0)[1:-1, 1:-1]


def show_heat(image: Image.Image, values: np.ndarray, opacity: float = 0.65) -> Image.Image:
    """The picture under a map of values in [0, 1] `[h, w]`; in colours only where nothing lies over it."""
    heat = colour_map(values).resize(image.size, Image.Resampling.BILINEAR)
    return Image.blend(image.convert("L").convert("RGB") if opacity else image, heat, opacity)


def draw_sheet(
    image: Image.Image, question: str, output: ARRCOCOutput, channels: str, footnotes: tuple[str, ...] = ()
) -> Image.Image:
    """Draw the contact sheet of one picture; `output` comes from a call with `details=True`.

    Args:
        image (`PIL.Image.Image`): the picture that was looked at.
        question (`str`): what was asked.
        output (`ARRCOCOutput`): of one picture, with its texture.
        channels (`str`): the channel set of the texture.
        footnotes (`tuple[str, ...]`, *optional*): lines for the foot of the sheet.
    """
    if output.texture is None:
        raise ValueError("the sheet shows every channel: call the layer with `details=True`")
    relevance = output.relevance[0, 0]
    kept = output.kept_mask()[0, 0].cpu().numpy()
    cells = relevance.numel()
    large = [
        ("the picture", image),
        ("relevance", show_heat(image, stretch(relevance))),
        (f"kept: {int(kept.sum())} of {cells} tokens", show_kept(image, kept)),
    ]
    scored = [
        (f"{name}, weight {weight:.2f}", show_heat(image, stretch(output.scores[name][0, 0])))
        for name, weight in zip(SCORES, output.weights[0].tolist(), strict=True)
    ]
    texture = output.texture[0, 0]
    small = [(f"{index} {name}", colour_map(stretch(texture[index]))) for name, index in CHANNELS[channels].items()]
    tensions = ", ".join(f"{n} {v:.2f}" for n, v in zip(TENSIONS, output.tensions[0].tolist(), strict=True))
    lines = [f"strategy {output.strategy[0]}: {output.reason[0]}", f"tensions: {tensions}"]
    blocks = [(large, _LARGE), (scored, _LARGE), (small, _SMALL)]
    return _compose(question, lines, blocks, image.size[1] / image.size[0], footnotes)


def draw_comparison(
    image: Image.Image, question: str, looks: list[tuple[str, ARRCOCOutput | None, np.ndarray, str]]
) -> Image.Image:
    """Draw how several selectors looked at one picture, a column for each.

    Args:
        image (`PIL.Image.Image`): the picture.
        question (`str`): what was asked.
        looks (`list[tuple]`): name, output or None, kept cells `[h, w]`, and the answer of each.
    """
    maps, kepts, lines = [], [], []
    for name, output, kept, answer in looks:
        if output is None:
            maps.append((f"{name} has no relevance to show", image))
        else:
            maps.append((f"{name}: relevance", show_heat(image, stretch(output.relevance[0, 0]))))
            weights = ", ".join(f"{n} {v:.2f}" for n, v in zip(SCORES, output.weights[0].tolist(), strict=True))
            tensions = ", ".join(f"{n} {v:.2f}" for n, v in zip(TENSIONS, output.tensions[0].tolist(), strict=True))
            lines.append(f"{name}: {weights}; tensions {tensions}")
        kepts.append((f"{name}: {int(kept.sum())} of {kept.size} tokens; answer: {answer}", show_kept(image, kept)))
    blocks = [(maps, len(looks)), (kepts, len(looks))]
    return _compose(question, lines, blocks, image.size[1] / image.size[0], ())


def _compose(
    question: str,
    lines: list[str],
    blocks: list[tuple[list[tuple[str, Image.Image]], int]],
    aspect: float,
    footnotes: tuple[str, ...],
) -> Image.Image:
    aspect = min(max(aspect, 0.2), 2.0)  # very long pictures are squeezed: the sheet stays a sheet
    title = _wrap(question, 30)[:3]
    body = [part for line in lines for part in _wrap(line, 15)]
    notes = [part for line in footnotes for part in _wrap(line, 13)]
    heights = [_tile_size(columns, aspect)[1] + _CAPTION + 10 for _, columns in blocks]
    rows = [-(-len(tiles) // columns) for tiles, columns in blocks]
    height = _MARGIN * 2 + 40 * len(title) + 22 * len(body) + 16
    height += sum(h * r for h, r in zip(heights, rows, strict=True)) + 18 * len(notes)
    sheet = Image.new("RGB", (_WIDTH, height), _PAPER)
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


def check_target(path: str | Path) -> Path:
    """Refuse a place where no picture can be written, before any work is done."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"a PNG file is written; {path.name} should end in .png")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; give a file name")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    return path


def save_image(image: Image.Image, path: str | Path) -> None:
    """Write a PNG; an interrupted run leaves no half picture."""
    with set_aside(check_target(path)) as aside:
        image.save(aside, format="PNG")
