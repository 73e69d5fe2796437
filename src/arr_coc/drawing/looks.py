"""The looks behind an answer: what each could use, and by its number, which cells each was the first to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from arr_coc.drawing.overlay import PAPER, find_regions, find_scale, fit_to_cells, outline, show_kept, show_sharp
from arr_coc.gaze.loop import FOLLOWED, Look

if TYPE_CHECKING:
    from arr_coc.inference.answer import Answer

# Dark enough for a white number, and told apart by the colour-blind; further looks begin anew.
_COLOURS = ((179, 71, 0), (0, 92, 158), (0, 107, 72), (128, 44, 122), (70, 70, 74))
_LEAST, _MOST = 720, 1400  # pixels of the longest side of a drawing
_INK = (25, 25, 28)


def name_look(number: int, look: Look) -> str:
    """What a look read and how sure its answer was, in words.

    Example:

    ```python
    >>> from arr_coc.drawing.looks import name_look
    >>> from arr_coc.gaze.loop import Look
    >>> name_look(1, Look(17, 17, 0.62, "again"))
    'look 1: 17 tokens, 0.62 sure'
    >>> name_look(2, Look(62, 62, 0.9862, "last"))
    'look 2: 62 tokens, 0.986 sure'

    ```
    """
    # three digits where two would round an unsure answer up to the usual 0.99
    sure = f"{look.sure:.2f}" if look.sure < 0.98 else f"{look.sure:.3f}"
    return f"look {number}: {look.tokens:,} token{'' if look.tokens == 1 else 's'}, {sure} sure"


def explain_end(look: Look) -> str:
    """What followed a look, in words.

    Example:

    ```python
    >>> from arr_coc.drawing.looks import explain_end
    >>> from arr_coc.gaze.loop import Look
    >>> explain_end(Look(17, 17, 0.62, "last"))
    'no further look was allowed'

    ```
    """
    return FOLLOWED[look.then]


def seen_cells(look: Look) -> np.ndarray:
    """Mask `[h, w]` of the cells of the first picture that a look could use at full resolution, in any frame."""
    (_, rows, columns), cells = look.kept[0]
    seen = np.zeros(rows * columns, dtype=bool)
    seen[cells % (rows * columns)] = True
    return seen.reshape(rows, columns)


def number_cells(looks: Sequence[Look]) -> np.ndarray:
    """The number of the look that first saw each cell of the first picture: `[h, w]`, 0 where none did.

    Example:

    ```python
    >>> import numpy as np
    >>> from arr_coc.drawing.looks import number_cells
    >>> from arr_coc.gaze.loop import Look
    >>> first = Look(1, 1, 0.5, "again", [((1, 1, 3), np.array([2]))])
    >>> second = Look(2, 2, 1.0, "sure", [((1, 1, 3), np.array([1, 2]))])
    >>> number_cells([first, second]).tolist()
    [[0, 2, 1]]

    ```
    """
    masks = [seen_cells(look) for look in looks]
    numbers = np.zeros(masks[-1].shape, dtype=np.int64)
    for number, mask in reversed(list(enumerate(masks, start=1))):
        if mask.shape == numbers.shape:  # after a failure the picture may have been read on another grid
            numbers[mask] = number
    return numbers


def show_look(image: Image.Image, seen: np.ndarray, number: int, blur: int | None = None) -> Image.Image:
    """The picture as one look saw it: the cells it could use framed and bright, the rest dimmed.

    Args:
        image (`PIL.Image.Image`): the picture, exactly as large as its cells.
        seen (`ndarray` of shape `[h, w]`): mask of the cells that were seen at full resolution.
        number (`int`): of the look, which has a colour of its own.
        blur (`int`, *optional*): how many times coarser the rest was seen; None if it was not seen at all.
    """
    drawn = _dim(image, seen, blur)
    _frame(drawn, seen, number)
    return drawn


def show_looks(image: Image.Image, numbers: np.ndarray, blur: int | None = None, least: float = 14.0) -> Image.Image:
    """The picture with every cell that was seen framed and marked by the number of the look that first saw it.

    Args:
        image, blur: as in [`show_look`].
        numbers (`ndarray` of shape `[h, w]`): from [`number_cells`].
        least (`float`, *optional*, defaults to 14): least height of a number in pixels, if cells are large enough.
    """
    drawn = _dim(image, numbers > 0, blur)
    rows, columns = numbers.shape
    step = drawn.width / columns, drawn.height / rows
    # no more of a cell than half its side, but never too small to read
    height = max(9.0, min(max(least, 0.36 * min(step)), 0.5 * min(step), 24.0))
    busy = _busy_corners(drawn, numbers.shape, 1.2 * height)
    looks = range(int(numbers.max(initial=0)), 0, -1)  # where two share an edge, it has the colour of the earlier one
    for number in looks:
        _frame(drawn, numbers == number, number)
    for number in looks:
        regions = find_regions((rows, columns), (numbers == number).flatten().nonzero()[0])
        for region in range(1, int(regions.max(initial=0)) + 1):
            places = (regions == region).flatten().nonzero()[0]
            row, column = divmod(int(places[busy.flatten()[places].argmin()]), columns)  # where it hides least
            _tag(ImageDraw.Draw(drawn), (column * step[0], row * step[1]), number, height)
    return drawn


def _dim(image: Image.Image, seen: np.ndarray, blur: int | None) -> Image.Image:
    """The picture with the cells that were not seen faded, or blurred if they were seen small."""
    if blur is None:
        return show_kept(image, seen)
    return show_sharp(image, seen.shape, seen.flatten().nonzero()[0], image.width / seen.shape[1], blur, _MOST)


def _frame(drawn: Image.Image, mask: np.ndarray, number: int) -> None:
    """Frame the cells of a mask `[h, w]` in the colour of a look."""
    step, pen = (drawn.width / mask.shape[1], drawn.height / mask.shape[0]), ImageDraw.Draw(drawn)
    thick = max(2, round(max(drawn.size) / 360))
    for line in outline(mask):
        # a line on the picture's own edge would be cut in half
        ends = [(min(x * step[0], drawn.width - 1), min(y * step[1], drawn.height - 1)) for x, y in line]
        pen.line(ends, fill=_colour(number), width=thick)


def _busy_corners(drawn: Image.Image, grid: tuple[int, int], side: float) -> np.ndarray:
    """How much a tag in the upper left corner of each cell would hide: the spread of brightness there, `[h, w]`."""
    gray = np.asarray(drawn.convert("L")).astype(np.float32)  # [H, W]
    rows, columns = grid
    reach, busy = max(1, round(side)), np.zeros(grid, dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            top, left = round(row * drawn.height / rows), round(column * drawn.width / columns)
            busy[row, column] = gray[top : top + reach, left : left + reach].std().round()
    return busy


def draw_looks(picture: Image.Image, answer: Answer, cell: int = 32) -> Image.Image:
    """The first picture with its cells marked by the look that first saw them, and what each look read below it.

    Args:
        picture (`PIL.Image.Image`): the picture that was asked about.
        answer (`Answer`): with at least one look, as of mode `"auto"`.
        cell (`int`, *optional*, defaults to 32): side of a token in pixels.

    Example:

    ```python
    >>> from importlib.resources import files
    >>> from PIL import Image
    >>> from arr_coc import ARRCOCQwen, Looks
    >>> from arr_coc.drawing.looks import draw_looks
    >>> picture = Image.open(files("arr_coc") / "assets" / "examples" / "camouflage.png")
    >>> answer = ARRCOCQwen.from_pretrained().answer(picture, "what does the gray text say?", looks=Looks(), budget=17)
    >>> [(look.tokens, look.then) for look in answer.looks]
    [(2, 'again'), (17, 'sure')]
    >>> draw_looks(picture, answer).size
    (720, 588)

    ```
    """
    if not answer.looks:
        raise ValueError("this answer has no looks to draw; ask with `mode='auto'` or `looks=Looks()`")
    return _add_legend(mark_looks(fit_to_cells(picture.convert("RGB"), answer, cell), answer), answer.looks)


def mark_looks(image: Image.Image, answer: Answer) -> Image.Image:
    """The first picture with its cells marked by the look that first saw them, at a size at which they can be read.

    Args:
        image (`PIL.Image.Image`): the picture at the size of its cells, see [`fit_to_cells`].
        answer (`Answer`): with at least one look.
    """
    share = min(max(1.0, _LEAST / max(image.size)), _MOST / max(image.size))
    size = (max(1, round(image.width * share)), max(1, round(image.height * share)))
    blur = max(1, round(find_scale(answer) * share)) if answer.mode == "saccade" else None
    return show_looks(image.resize(size, Image.Resampling.LANCZOS), number_cells(answer.looks), blur)


def _add_legend(drawn: Image.Image, looks: Sequence[Look]) -> Image.Image:
    """A strip below a drawing with a line for each look, in letters that fit it."""
    lines = [f"{name_look(number, look)}; {explain_end(look)}" for number, look in enumerate(looks, start=1)]
    size = 20
    while size > 9 and max(ImageFont.load_default(size).getlength(line) for line in lines) > drawn.width - 3 * size:
        size -= 1
    step = round(1.6 * size)
    sheet = Image.new("RGB", (drawn.width, drawn.height + step * len(lines) + size // 2), PAPER)
    sheet.paste(drawn, (0, 0))
    pen = ImageDraw.Draw(sheet)
    for place, line in enumerate(lines):
        top = drawn.height + size // 2 + place * step
        _tag(pen, (size // 2, top), place + 1, size)
        pen.text((2 * size, top + size * 0.6), line, fill=_INK, font=ImageFont.load_default(size), anchor="lm")
    return sheet


def _tag(pen: ImageDraw.ImageDraw, corner: tuple[float, float], number: int, height: float) -> None:
    """A number in the colour of its look, with its upper left corner here."""
    font, text = ImageFont.load_default(height), str(number)
    width = max(0.8 * height, pen.textlength(text, font=font) + 0.4 * height)
    box = [corner[0], corner[1], corner[0] + width, corner[1] + 1.2 * height]
    pen.rectangle(box, fill=_colour(number))
    pen.text(((box[0] + box[2]) / 2, (box[1] + box[3]) / 2), text, fill=PAPER, font=font, anchor="mm")


def _colour(number: int) -> tuple[int, int, int]:
    return _COLOURS[(number - 1) % len(_COLOURS)]
