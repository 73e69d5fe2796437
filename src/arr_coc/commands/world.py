"""`arr-coc world`: samples of a world on one sheet."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from arr_coc.data.worlds import Sample, make_sample, split_seed
from arr_coc.drawing.sheet import check_target, save_image

TILE, CAPTION, COLUMNS = 320, 46, 4


def world(name: str, count: int, out: Path, kind: str | None, split: str, first: int) -> None:
    """Draw samples with their boxes, and write the sheet."""
    check_target(out)
    samples = [make_sample(name, split_seed(split, first + place), kind) for place in range(count)]  # type: ignore[arg-type]
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * (TILE + 10) + 10, rows * (TILE + CAPTION + 10) + 10), (250, 250, 248))
    for place, sample in enumerate(samples):
        corner = (10 + place % columns * (TILE + 10), 10 + place // columns * (TILE + CAPTION + 10))
        sheet.paste(_tile(sample), corner)
    save_image(sheet, out)


def _tile(sample: Sample) -> Image.Image:
    """A picture with its boxes, above its question and its answer."""
    tile = Image.new("RGB", (TILE, TILE + CAPTION), (250, 250, 248))
    width, height = sample.picture.size
    scale = TILE / max(width, height)
    shown = sample.picture.resize((max(1, round(width * scale)), max(1, round(height * scale))))
    pen = ImageDraw.Draw(shown)
    for left, top, right, bottom in sample.boxes:
        corners = [left * shown.width, top * shown.height, right * shown.width, bottom * shown.height]
        pen.rectangle(corners, outline=(255, 0, 200), width=2)
    tile.paste(shown, (0, 0))
    write = ImageDraw.Draw(tile)
    write.text((2, TILE + 4), sample.question, fill=(25, 25, 28), font=ImageFont.load_default(14))
    write.text((2, TILE + 22), sample.answer, fill=(25, 25, 28), font=ImageFont.load_default(16))
    return tile
