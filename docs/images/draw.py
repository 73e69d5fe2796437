"""Draw the README's first picture: bundled pictures, questions, what was read of them, and the answers.

python docs/images/draw.py
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from arr_coc import ARRCOCQwen
from arr_coc.commands.ask import draw_overlay

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "src" / "arr_coc" / "assets" / "examples"
ASKED = (
    ("shapes", "what does the purple text say?"),
    ("camouflage", "what does the gray text say?"),
    ("splatter", "what does the blue text say?"),
)
TILE, GAP, TEXT = (448, 320), 16, 64


def main() -> None:
    vlm = ARRCOCQwen.from_pretrained()
    width = len(ASKED) * (TILE[0] + GAP) + GAP
    page = Image.new("RGB", (width, 2 * (TILE[1] + GAP) + TEXT), "white")
    draw = ImageDraw.Draw(page)
    for place, (name, question) in enumerate(ASKED):
        with Image.open(EXAMPLES / f"{name}.png") as file:
            picture = file.convert("RGB")
        answer = vlm.answer(picture, question, budget=0.25)
        left = GAP + place * (TILE[0] + GAP)
        page.paste(picture, (left, 0))
        said = f"{answer.text}, from {answer.tokens.used} of {answer.tokens.full} tokens"
        draw.text((left, TILE[1] + GAP // 2), question, "black", ImageFont.load_default(26))
        draw.text((left, TILE[1] + GAP // 2 + 32), said, (20, 90, 160), ImageFont.load_default(26))
        page.paste(draw_overlay(picture, answer), (left, TILE[1] + TEXT + GAP))
        print(f"{question} -> {said}")
    page.save(HERE / "ask.jpg", quality=88)


if __name__ == "__main__":
    main()
