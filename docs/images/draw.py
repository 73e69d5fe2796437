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
    ("shapes.png", "what does the purple text say?", 0.25),
    ("camouflage.png", "what does the gray text say?", 0.125),
    ("page.png", "which total is written here?", 0.06),
    ("needle.png", "what does the sign next to the black ring say?", 0.03),
)
HEIGHT, GAP, TEXT = 380, 18, 76


def main() -> None:
    vlm = ARRCOCQwen.from_pretrained()
    pairs, captions = [], []
    for name, question, budget in ASKED:
        with Image.open(EXAMPLES / name) as file:
            picture = file.convert("RGB")
        answer = vlm.answer(picture, question, budget=budget)
        size = (round(picture.width * HEIGHT / picture.height), HEIGHT)
        shown = [one.resize(size, Image.Resampling.LANCZOS) for one in (picture, draw_overlay(picture, answer))]
        pairs.append(shown)
        captions.append((question, f"{answer.text}, from {answer.tokens.used} of {answer.tokens.full} tokens"))
        print(f"{question} -> {captions[-1][1]}")
    width = sum(shown[0].width + GAP for shown in pairs) + GAP
    page = Image.new("RGB", (width, 2 * HEIGHT + TEXT + 3 * GAP), "white")
    draw, left = ImageDraw.Draw(page), GAP
    for (picture, seen), (question, said) in zip(pairs, captions, strict=True):
        page.paste(picture, (left, GAP))
        draw.text((left, GAP + HEIGHT + 10), _wrap(question, picture.width), "black", ImageFont.load_default(19))
        draw.text((left, GAP + HEIGHT + 56), said, (20, 90, 160), ImageFont.load_default(20))
        page.paste(seen, (left, 2 * GAP + HEIGHT + TEXT))
        for top in (GAP, 2 * GAP + HEIGHT + TEXT):
            draw.rectangle((left, top, left + picture.width - 1, top + HEIGHT - 1), outline=(200, 200, 200))
        left += picture.width + GAP
    page.save(HERE / "ask.jpg", quality=88)


def _wrap(text: str, width: int) -> str:
    """Text on two lines where one is too narrow."""
    font = ImageFont.load_default(19)
    words = text.split()
    for count in range(len(words), 0, -1):
        if font.getlength(" ".join(words[:count])) <= width:
            return "\n".join(part for part in (" ".join(words[:count]), " ".join(words[count:])) if part)
    return text


if __name__ == "__main__":
    main()
