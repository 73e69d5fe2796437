"""Draw the pictures of README, docs/gaze.md, looks.md and own-attention.md: what was asked, looked at, read, answered.

python docs/images/draw.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from arr_coc import ARRCOCQwen
from arr_coc.data.worlds import draw_scene, split_seed
from arr_coc.drawing.looks import draw_looks
from arr_coc.drawing.overlay import draw_gaze, draw_overlay, show_heat, stretch
from arr_coc.families.family import open_family
from arr_coc.families.language_attention import attending_layers
from arr_coc.inference.messages import make_inputs, make_messages
from arr_coc.prompting.first_look.introspection import introspect
from arr_coc.prompting.layout import read_prompt

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "src" / "arr_coc" / "assets" / "examples"
ASKED = (
    ("shapes.png", "what does the purple text say?", 0.25),
    ("camouflage.png", "what does the gray text say?", 0.125),
    ("page.png", "which total is written here?", 0.06),
    ("needle.png", "what does the sign next to the black ring say?", 0.06),
)
HEIGHT, GAP, TEXT = 380, 18, 76
SCENE = 9_800_016  # a held-out one with rings and a text
QUESTIONS = ("which one is unusual?", "how many rings are there?", "what does the blue text say?")
PAGE = 7_000_000  # a held-out page with a title and a footnote
LOOKED = ("what is the title?", "what does the footnote say?")


def main() -> None:
    vlm = ARRCOCQwen.from_pretrained()
    draw_ask(vlm)
    draw_page(vlm)
    draw_layers(vlm)
    draw_questions(vlm)


def draw_questions(vlm: ARRCOCQwen) -> None:
    """Three questions about one picture in mode auto: how much each reads, where, and in how many looks."""
    picture = draw_scene("scenes", split_seed("test", SCENE), "count_shape", (512, 512)).picture
    tiles = []
    for question in QUESTIONS:
        answer = vlm.answer(picture, question)
        tiles.append((f"{question}\n{answer.text}", draw_looks(picture, answer)))
    width, top = 400, 62
    shown = [(text, tile.resize((width, round(tile.height * width / tile.width)), Image.Resampling.LANCZOS))
             for text, tile in tiles]  # fmt: skip
    page = Image.new("RGB", (GAP + len(shown) * (width + GAP), top + max(t.height for _, t in shown) + GAP), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(20)
    for place, (text, tile) in enumerate(shown):
        left = GAP + place * (width + GAP)
        pen.text((left, 8), text, fill="black", font=font)
        page.paste(tile, (left, top))
    page.save(HERE / "looks.jpg", quality=88)


def draw_layers(vlm: ARRCOCQwen) -> None:
    """What each layer of the language model looks at while it reads a pooled picture, and the mean of all."""
    family, rows = open_family(vlm.model), []
    for name, question, _ in ASKED[:2]:
        with Image.open(EXAMPLES / name) as file:
            picture = file.convert("RGB")
        inputs = make_inputs(vlm.processor, [make_messages(picture, question)], vlm.model.device, vlm.model.dtype)
        prompt = read_prompt(family, inputs)
        encoded, grid = {"image": family.encode(inputs, "image")}, prompt.spans[0].grid[1:]
        arguments = (family, inputs, prompt, family.positions(prompt.inputs), encoded)
        maps = [introspect(*arguments, layers=[number])[0] for number, _ in attending_layers(family)]
        maps.append(torch.stack(maps).mean(dim=0))
        shown = [picture, *(show_heat(picture, stretch(paid.float().view(grid).numpy())) for paid in maps)]
        captions = [question, *(f"layer {number + 1}" for number in range(len(maps) - 1)), "mean of all layers"]
        tiles = [tile.resize((280, 200), Image.Resampling.LANCZOS) for tile in shown]
        rows += [list(zip(captions, tiles, strict=True))[start : start + 4] for start in range(0, len(tiles), 4)]
    page = Image.new("RGB", (10 + 4 * 290, 10 + len(rows) * 240), "white")
    pen = ImageDraw.Draw(page)
    for row, tiles_of_row in enumerate(rows):
        for column, (caption, tile) in enumerate(tiles_of_row):
            left, top = 10 + column * 290, 10 + row * 240
            page.paste(tile, (left, top))
            pen.text((left, top + 206), caption, "black", ImageFont.load_default(16))
    page.save(HERE / "layers.jpg", quality=85)


def draw_page(vlm: ARRCOCQwen) -> None:
    """A page, its gestalt, and where two questions make the gaze go."""
    kinds = {"page_title", "page_footnote"}
    scenes = (draw_scene("pages", split_seed("test", PAGE + number), None, (1024, 1024)) for number in range(100))
    picture = next(scene.picture for scene in scenes if kinds <= {question.kind for question in scene.questions})
    small = picture.resize((512, 512), Image.Resampling.BOX).resize(picture.size, Image.Resampling.NEAREST)
    tiles = [("the page: 1,024 tokens", picture), ("its gestalt: 256 tokens", small)]
    for question in LOOKED:
        answer = vlm.answer(picture, question, mode="saccade")
        said = f"{question} {answer.text} ({answer.tokens.used} tokens)"
        print(said)
        tiles.append((said, draw_gaze(picture, answer)))
    side = 480
    page = Image.new("RGB", (2 * side + 3 * GAP, 2 * (side + 34) + 3 * GAP), "white")
    pen = ImageDraw.Draw(page)
    for place, (caption, tile) in enumerate(tiles):
        left, top = GAP + place % 2 * (side + GAP), GAP + place // 2 * (side + 34 + GAP)
        page.paste(tile.resize((side, side), Image.Resampling.LANCZOS), (left, top))
        pen.rectangle((left, top, left + side - 1, top + side - 1), outline=(200, 200, 200))
        pen.text((left, top + side + 6), caption, "black", ImageFont.load_default(18))
    page.save(HERE / "gaze.jpg", quality=88)


def draw_ask(vlm: ARRCOCQwen) -> None:
    """Bundled pictures and a question about each."""
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
