"""The frames of a clip on one picture."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from arr_coc.drawing.overlay import PAPER

_LINE = (190, 190, 190)


def lay_frames(frames: Sequence[Image.Image], columns: int, gap: int = 4) -> Image.Image:
    """Lay frames of one size side by side, row after row, with a thin line around each.

    Args:
        frames (`Sequence[PIL.Image.Image]`): at least one, in their order.
        columns (`int`): frames in a row.
        gap (`int`, *optional*, defaults to 4): pixels around each of them.

    Example:

    ```python
    >>> from PIL import Image
    >>> from arr_coc.drawing.frames import lay_frames
    >>> lay_frames([Image.new("RGB", (64, 48))] * 5, columns=3).size
    (208, 108)

    ```
    """
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    width, height = frames[0].size
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, frame in enumerate(frames):
        left, top = gap + number % columns * (width + gap), gap + number // columns * (height + gap)
        pen.rectangle((left - 1, top - 1, left + width, top + height), outline=_LINE)
        sheet.paste(frame, (left, top))
    return sheet
