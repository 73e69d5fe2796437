"""`arr-coc world`: examples of a drawn world on one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arr_coc.cli.errors import one_line_errors

if TYPE_CHECKING:
    from PIL import Image

    from arr_coc.data.boxes import Box
    from arr_coc.data.example import Example

TILE, CAPTION, COLUMNS = 320, 46, 4
# A clip is as wide as two pictures, and has up to three rows of frames.
WIDE, FRAMES, FRAME = 2 * TILE + 10, 6, 101
PAPER, INK, BOX = (250, 250, 248), (25, 25, 28), (255, 0, 200)


def world(
    name: Annotated[
        str, typer.Argument(help="camouflage, clips, crowds, ends, forms, lines, needles, pages, scenes or void.")
    ],
    n: Annotated[int, typer.Option("--n", min=1, max=400, help="Number of examples.")] = 8,
    out: Annotated[Path, typer.Option(help="Where to write the sheet (PNG).")] = Path("world.png"),
    kind: Annotated[str | None, typer.Option(help="Only this kind of question.")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
    first: Annotated[int, typer.Option(min=0, help="Number of the first example.")] = 0,
) -> None:
    """Draw examples of a world: picture, question, answer, and boxes around what must be looked at.

    All frames of a clip are shown, row after row.
    """
    with one_line_errors():
        draw_world(name, n, out, kind, split, first)
    typer.echo(f"sheet     {out}")


def draw_world(name: str, count: int, out: Path, kind: str | None, split: str, first: int) -> None:
    """Draw `count` examples on one sheet and write it."""
    from PIL import Image

    from arr_coc.data.worlds import make_example, open_world, split_seed
    from arr_coc.drawing.png_file import check_target, save_image

    check_target(out)
    examples = [make_example(name, split_seed(split, first + number), kind) for number in range(count)]  # type: ignore[arg-type]
    tile, most = (WIDE, COLUMNS // 2) if open_world(name).moving else (TILE, COLUMNS)
    columns = min(most, count)
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * (tile + 10) + 10, rows * (TILE + CAPTION + 10) + 10), PAPER)
    for number, example in enumerate(examples):
        corner = (10 + number % columns * (tile + 10), 10 + number // columns * (TILE + CAPTION + 10))
        sheet.paste(_draw_tile(example), corner)
    save_image(sheet, out)


def _draw_tile(example: Example) -> Image.Image:
    """A picture with its boxes, or all frames of a clip, above its question and answer."""
    from PIL import Image, ImageDraw, ImageFont

    from arr_coc.drawing.frames import lay_frames

    opened = example.open()
    if isinstance(opened, Image.Image):
        width, picture = TILE, _draw_boxes(_fit(opened, TILE), example.boxes)
    else:
        width, picture = WIDE, lay_frames([_fit(frame, FRAME) for frame in opened], FRAMES)
    tile = Image.new("RGB", (width, TILE + CAPTION), PAPER)
    tile.paste(picture, (0, 0))
    pen = ImageDraw.Draw(tile)
    pen.text((2, TILE + 4), example.question, fill=INK, font=ImageFont.load_default(14))
    pen.text((2, TILE + 22), example.answer, fill=INK, font=ImageFont.load_default(16))
    return tile


def _fit(picture: Image.Image, side: int) -> Image.Image:
    """The picture with a longer side of so many pixels."""
    width, height = picture.size
    scale = side / max(width, height)
    return picture.resize((max(1, round(width * scale)), max(1, round(height * scale))))


def _draw_boxes(picture: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(picture)
    for left, top, right, bottom in boxes:
        corners = [left * picture.width, top * picture.height, right * picture.width, bottom * picture.height]
        pen.rectangle(corners, outline=BOX, width=2)
    return picture
