import dataclasses
import os
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import standin
import torch
from PIL import Image, ImageDraw

from arr_coc import CHANNELS, Answer, ARRCOCConfig, ARRCOCLayer
from arr_coc.drawing.overlay import colour_map, show_heat, show_kept
from arr_coc.drawing.png_file import check_target, save_image
from arr_coc.drawing.sheet import draw_sheet
from arr_coc.inference.answer import TokenCount
from arr_coc.pixels.files import to_tensor
from arr_coc.texture import generate_texture_array

CELL = 16
LOWEST, HIGHEST = (68, 1, 84), (253, 231, 37)  # of viridis


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@lru_cache
def looked_at(rows, columns, channels, colour=None, budget=0.25):
    """A picture and what an untrained layer makes of it, as an answer without text."""
    size = (columns * CELL, rows * CELL)
    image = noise(*size) if colour is None else Image.new("RGB", size, colour)
    picture = to_tensor(image)
    with torch.inference_mode():
        cells = standin.embed_cells(picture, generate_texture_array(picture, (rows, columns), "full"))
        layer = ARRCOCLayer(ARRCOCConfig(hidden_size=standin.WIDTH, channels=channels)).eval()
        words = standin.embed_words(["red", "sign"])[None]
        output = layer(cells, words, grid=(rows, columns), picture=picture, budget=budget, details=True)
    return image, answer_of(output)


def answer_of(output):
    _, _, rows, columns = output.relevance.shape
    kept = output.indices[0].numpy()
    tokens = TokenCount(rows * columns, len(kept))
    return Answer("", (output,), (((1, rows, columns), kept),), tokens, output.strategy[0], output.reason[0], {})


@pytest.fixture
def written(monkeypatch):
    """Every text that is drawn, with its place and width."""
    texts = []
    draw = ImageDraw.ImageDraw.text

    def note(self, xy, text, *args, **options):
        texts.append((xy, text, self.textlength(text, font=options["font"])))
        return draw(self, xy, text, *args, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", note)
    return texts


# --- colours ---------------------------------------------------------------------------------------------------------


def test_colour_map_ends_are_those_of_viridis():
    image = colour_map(np.array([[0.0, 1.0]]))
    assert (image.mode, image.size) == ("RGB", (2, 1))
    assert image.getpixel((0, 0)) == LOWEST
    assert image.getpixel((1, 0)) == HIGHEST


def test_colour_map_holds_what_is_out_of_range_at_its_ends():
    image = colour_map(np.array([[-5.0, 7.0, float("-inf"), float("inf"), float("nan")]]))
    assert [image.getpixel((x, 0)) for x in range(5)] == [LOWEST, HIGHEST, LOWEST, HIGHEST, LOWEST]


def test_colour_map_gets_brighter_all_the_way():
    gray = np.asarray(colour_map(np.linspace(0, 1, 200)[None]).convert("L")).astype(int)[0]
    assert (np.diff(gray) >= 0).all()
    assert gray[-1] - gray[0] > 150


def test_heat_has_the_size_of_the_picture_and_follows_the_values():
    image = Image.new("RGB", (64, 32), "gray")
    heat = np.asarray(show_heat(image, np.array([[0.0, 1.0]])).convert("L")).astype(int)
    assert heat.shape == (32, 64)
    assert heat[:, -4:].min() > heat[:, :4].max() + 50


# --- what was kept ---------------------------------------------------------------------------------------------------


def test_kept_cells_are_untouched_and_others_fade():
    image = noise(64, 48)
    kept = np.random.default_rng(1).random((3, 4)) < 0.5
    assert kept.any()
    assert not kept.all()
    before, after = np.asarray(image).astype(int), np.asarray(show_kept(image, kept)).astype(int)
    for row in range(3):
        for column in range(4):
            place = np.s_[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
            if kept[row, column]:
                assert np.array_equal(after[place], before[place])
            else:
                assert after[place].min() >= 200  # light
                assert (after[place].max(axis=-1) - after[place].min(axis=-1)).max() <= 3  # gray
                assert after[place].std() < before[place].std() / 3


@pytest.mark.parametrize("share", [0, 1])
def test_all_kept_is_the_picture_and_none_kept_is_all_faded(share):
    image = noise(32, 32)
    after = np.asarray(show_kept(image, np.full((2, 2), bool(share))))
    assert np.array_equal(after, np.asarray(image)) == bool(share)
    assert (after.min() >= 200) == (not share)


def test_showing_leaves_the_picture_itself_alone():
    image = noise(32, 32)
    show_kept(image, np.zeros((2, 2), dtype=bool))
    show_heat(image, np.zeros((2, 2)))
    assert np.array_equal(np.asarray(image), np.asarray(noise(32, 32)))


# --- the sheet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", ["core", "full"])
@pytest.mark.parametrize("grid", [(4, 4), (1, 64), (64, 1), (1, 1), (3, 7)])
def test_sheet_of_any_shape_has_one_width_and_a_sane_height(grid, channels):
    image, answer = looked_at(*grid, channels)
    sheet = draw_sheet(image, "where is the red sign?", answer, ("a footnote",))
    assert sheet.mode == "RGB"
    assert sheet.width == 1440
    assert 400 < sheet.height < 4000


def test_sheet_of_forty_channels_is_taller_than_that_of_thirteen():
    heights = [
        draw_sheet(image, "red", answer).height for name in CHANNELS for image, answer in [looked_at(4, 4, name)]
    ]
    assert heights[0] < heights[1]


@pytest.mark.parametrize("channels", ["core", "full"])
def test_every_channel_score_and_number_is_named_once(written, channels):
    image, answer = looked_at(4, 4, channels)
    output = answer.output
    draw_sheet(image, "where is the red sign?", answer, ("first footnote", "second footnote"))
    texts = [text for _, text, _ in written]
    expected = [f"{index} {name}" for name, index in CHANNELS[channels].items()]
    expected += [
        f"{name}, weight {weight:.2f}" for name, weight in zip(output.scores, output.weights[0].tolist(), strict=True)
    ]
    expected += ["the picture", "relevance", "kept: 4 of 16 tokens", "where is the red sign?"]
    expected += ["first footnote", "second footnote"]
    for text in expected:
        assert texts.count(text) == 1, text
    everything = " ".join(texts)
    assert f"strategy {output.strategy[0]}: " in everything
    assert output.reason[0] in everything
    for name, value in zip(("detail", "explore", "variety"), output.tensions[0].tolist(), strict=True):
        assert f"{name} {value:.2f}" in everything


def test_where_the_model_itself_looks_is_shown_if_it_was_asked(written):
    image, answer = looked_at(4, 4, "core")
    plain = draw_sheet(image, "where is the red sign?", answer)
    assert not any("itself looks" in text for _, text, _ in written)
    voice = torch.zeros(1, 1, 4, 4)
    voice[0, 0, 1, 2] = 1
    asked = draw_sheet(image, "where is the red sign?", answer_of(replace(answer.output, voice=voice)))
    [((x, y), _, _)] = [each for each in written if each[1] == "where the model itself looks"]
    assert x > plain.width / 2  # beside the three scores, in their row
    assert len({place for (_, place), text, _ in written if "weight" in text and place == y}) == 1
    assert asked.size != plain.size  # four maps in the row are smaller than three


@pytest.mark.parametrize("channels", ["core", "full"])
@pytest.mark.parametrize("grid", [(4, 4), (1, 64), (64, 1)])
def test_all_text_lies_on_the_sheet_and_captions_do_not_overlap(written, grid, channels):
    image, answer = looked_at(*grid, channels)
    question = "what is written on the small red sign to the left of the door? " * 4
    footnotes = ("a long footnote that says where the words come from. " * 8,)
    sheet = draw_sheet(image, question, answer, footnotes)
    lines = {}
    for (x, y), text, width in written:
        assert x >= 0
        assert x + width <= sheet.width, text
        assert 0 <= y <= sheet.height - 12, text
        lines.setdefault(y, []).append((x, x + width, text))
    for line in lines.values():
        line.sort()
        for (_, end, text), (start, _, _) in pairwise(line):
            assert end <= start, text


def test_picture_and_kept_cells_are_on_the_sheet():
    image, answer = looked_at(4, 4, "core", colour=(255, 0, 0), budget=16)
    sheet = np.asarray(draw_sheet(image, "red", answer))
    red = (sheet == (255, 0, 0)).all(axis=-1)
    half, other = red[:, :480].sum(), red[:, 960:].sum()
    assert half > 400 * 400  # the picture, first of three tiles
    assert other > 400 * 400  # all of it was kept, last of three tiles
    image, answer = looked_at(4, 4, "core", colour=(255, 0, 0), budget=8)
    red = (np.asarray(draw_sheet(image, "red", answer)) == (255, 0, 0)).all(axis=-1)
    assert red[:, :480].sum() == half
    assert 0.4 * other < red[:, 960:].sum() < 0.6 * other


@pytest.mark.parametrize("question", ["x", "word " * 4000, "x" * 20_000, "two\nlines\tand a tab", "猫 🙂 ñ"])
def test_any_question_fits_in_three_title_lines(question):
    image, answer = looked_at(4, 4, "core")
    short = draw_sheet(image, "x", answer).height
    assert short <= draw_sheet(image, question, answer).height <= short + 2 * 40


def test_footnotes_add_their_height():
    image, answer = looked_at(4, 4, "core")
    assert draw_sheet(image, "x", answer, ("a", "b")).height > draw_sheet(image, "x", answer).height


def test_sheet_is_the_same_every_time():
    image, answer = looked_at(4, 4, "full")
    first, second = (draw_sheet(image, "red", answer) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_sheet_needs_the_details():
    image, answer = looked_at(4, 4, "core")
    with pytest.raises(ValueError, match="details=True"):
        draw_sheet(image, "red", answer_of(dataclasses.replace(answer.output, texture=None)))


def test_without_relevance_the_sheet_says_so_in_one_line(written):
    image, answer = looked_at(4, 4, "core")
    draw_sheet(image, "red", dataclasses.replace(answer, outputs=(None,), strategy="visionzip"), ("a footnote",))
    texts = [text for _, text, _ in written]
    assert texts.count("this selector gives no relevance, so there are no maps to show") == 1
    assert "kept: 4 of 16 tokens" in texts
    assert "relevance" not in texts
    grid = answer.kept[0][0]
    everything = dataclasses.replace(
        answer, outputs=(None,), kept=((grid, np.arange(16)),), tokens=TokenCount(16, 16), strategy="saccade"
    )
    draw_sheet(image, "red", everything)
    assert "all 16 tokens were read, without a choice, so there are no maps to show" in [text for _, text, _ in written]


def test_saccades_are_drawn_sharp_on_a_blurred_picture(written):
    image, answer = looked_at(6, 6, "core")
    gaze = dataclasses.replace(answer, strategy="saccade", tokens=TokenCount(36, len(answer.kept[0][1]) + 4))
    sheet = draw_sheet(image, "red", gaze)
    assert "read: gestalt of 4 tokens, 9 of 36 cells sharp" in [text for _, text, _ in written]
    assert sheet.tobytes() != draw_sheet(image, "red", answer).tobytes()


def test_weighted_tokens_all_stay(written):
    image, answer = looked_at(4, 4, "core", budget=16)
    draw_sheet(image, "red", dataclasses.replace(answer, strategy="weight"))
    assert "kept: all 16 tokens, scaled by relevance" in [text for _, text, _ in written]


# --- where it goes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sheet.jpg", "sheet", "sheet.png.txt", "sheet.pngx"])
@pytest.mark.parametrize("function", [check_target, lambda path: save_image(noise(4, 4), path)])
def test_other_endings_are_refused(tmp_path, name, function):
    with pytest.raises(ValueError, match=r"should end in \.png"):
        function(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", [check_target, lambda path: save_image(noise(4, 4), path)])
def test_missing_folder_is_refused_and_not_made(tmp_path, function):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        function(tmp_path / "nowhere" / "sheet.png")
    assert list(tmp_path.iterdir()) == []


def test_folder_of_that_name_is_refused(tmp_path):
    (tmp_path / "sheet.png").mkdir()
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save_image(noise(4, 4), tmp_path / "sheet.png")
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]


@pytest.mark.parametrize("name", ["sheet.png", "SHEET.PNG", "a b.c.png", "[bold].png"])
def test_saved_image_reads_back_and_nothing_else_is_left(tmp_path, name):
    save_image(noise(8, 6), str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with Image.open(tmp_path / name) as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image), np.asarray(noise(8, 6)))


def test_relative_name_is_saved_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_image(noise(8, 6), "sheet.png")
    assert os.listdir() == ["sheet.png"]


@pytest.mark.parametrize("old", [None, b"an older sheet"])
@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_failed_save_leaves_no_file_and_keeps_the_old_one(tmp_path, monkeypatch, error, old):
    target = tmp_path / "sheet.png"
    if old is not None:
        target.write_bytes(old)
    places = []

    def fail(self, place, *_, **__):
        places.append(Path(place))
        Path(place).write_bytes(b"\x89PNG half a pic")
        raise error

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(type(error)):
        save_image(noise(8, 6), target)
    assert len(places) == 1
    assert places[0] != target
    assert places[0].parent == tmp_path  # a rename across file systems would not be atomic
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if old is None else [old])


def test_old_sheet_is_there_until_the_new_one_is_whole(tmp_path, monkeypatch):
    target = tmp_path / "sheet.png"
    target.write_bytes(b"old")
    seen = []
    save = Image.Image.save

    def note(self, place, *args, **options):
        save(self, place, *args, **options)
        seen.append(target.read_bytes())

    monkeypatch.setattr(Image.Image, "save", note)
    save_image(noise(8, 6), target)
    assert seen == [b"old"]
    assert target.read_bytes().startswith(b"\x89PNG")


def test_name_as_long_as_the_file_system_allows_is_saved(tmp_path):
    target = tmp_path / ("s" * 251 + ".png")
    try:
        target.write_bytes(b"")
    except OSError:
        pytest.skip("this file system has shorter names")
    save_image(noise(8, 6), target)
    assert target.stat().st_size > 0
