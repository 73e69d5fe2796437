import random

import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from arr_coc import standin
from arr_coc.pictures import to_tensor
from arr_coc.texture import generate_texture_array

# Everyday versions of the colours, not the very values that the stand-in compares with.
COLOURS = {
    "red": (210, 30, 30),
    "green": (40, 150, 50),
    "blue": (30, 60, 190),
    "yellow": (240, 215, 40),
    "purple": (128, 40, 150),
    "orange": (235, 110, 30),
    "cyan": (30, 205, 215),
    "pink": (245, 140, 180),
    "brown": (115, 70, 35),
    "gray": (128, 128, 128),
    "white": (250, 250, 250),
    "black": (8, 8, 8),
}
UNKNOWN = ["elephant", "qwertz", "warum", "7", "猫", "_"]


def checkerboard(names):
    """A 4x4 grid of coloured cells of 32 pixels."""
    image = Image.new("RGB", (128, 128))
    for place, name in enumerate(names):
        left, top = place % 4 * 32, place // 4 * 32
        image.paste(COLOURS[name], (left, top, left + 32, top + 32))
    return image


def embed(image, grid=(4, 4)):
    picture = to_tensor(image)
    return standin.embed_cells(picture, generate_texture_array(picture, grid, "full"))


def cosines(words, cells):
    """Cosine `[Q, N]` of every word with every cell of one picture `[1, N, 64]`."""
    return F.cosine_similarity(standin.embed_words(words)[:, None], cells, dim=-1)


@pytest.fixture(scope="module")
def noise_cells():
    picture = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    return standin.embed_cells(picture, generate_texture_array(picture, (4, 4), "full"))


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What does the RED sign say?", ["what", "does", "the", "red", "sign", "say"]),
        ("  red,\n\tgreen;blue ", ["red", "green", "blue"]),
        ("Wo ist die grüne Tür?", ["wo", "ist", "die", "grüne", "tür"]),
        ("what is it", ["what", "is", "it"]),
        ("猫はどこ", ["猫はどこ"]),
    ],
)
def test_question_is_split_into_lower_case_words(question, words):
    assert standin.split_words(question) == words


@pytest.mark.parametrize("question", ["", "   ", "\n\t", "?!...", "🙂"])
def test_question_without_words_is_refused(question):
    with pytest.raises(ValueError, match="no words"):
        standin.split_words(question)


def test_known_words_are_those_with_an_axis():
    words = ["what", "does", "the", "red", "sign", "say", "elephant"]
    assert standin.known_words(words) == ["red", "sign", "say"]
    assert standin.known_words(UNKNOWN) == []


def test_words_have_unit_length_and_the_stated_width():
    vectors = standin.embed_words(["red", "sign", *UNKNOWN])
    assert vectors.shape == (2 + len(UNKNOWN), standin.WIDTH)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))


def test_words_are_the_same_every_time_and_wherever_they_stand():
    words = ["red", "elephant", "sign", "qwertz"]
    torch.manual_seed(1)
    first = standin.embed_words(words)
    torch.manual_seed(2)
    assert torch.equal(first, standin.embed_words(words))
    assert torch.equal(first.flip(0), standin.embed_words(words[::-1]))


def test_words_leave_the_global_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    standin.embed_words(UNKNOWN)
    assert torch.equal(before, torch.get_rng_state())


def test_synonyms_share_an_axis_and_other_words_do_not():
    vectors = standin.embed_words(["gray", "grey", "text", "letters", "red", "elephant", "qwertz"])
    alike = vectors @ vectors.T
    assert alike[0, 1] == 1
    assert alike[2, 3] == 1
    assert alike[0, 2] == 0
    assert alike[0, 4] == 0
    assert abs(alike[5, 6]) < 0.99


# --- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_colour_words_match_a_cell_of_that_colour_best(seed):
    names = [*COLOURS, "red", "green", "blue", "white"]
    random.Random(seed).shuffle(names)
    found = cosines(list(COLOURS), embed(checkerboard(names))).argmax(dim=1).tolist()
    assert [names[cell] for cell in found] == list(COLOURS)


def test_one_coloured_cell_is_far_ahead_of_all_others():
    names = ["gray"] * 16
    names[9] = "red"
    match = cosines(["red"], embed(checkerboard(names)))[0]
    others = match[torch.arange(16) != 9]
    assert match.argmax() == 9
    assert match[9] > others.max() + 0.3


def test_thin_line_of_a_colour_counts():
    image = checkerboard(["gray"] * 16)
    ImageDraw.Draw(image).line([(40, 50), (56, 50)], fill=COLOURS["red"], width=4)  # inside the cell of row 1, column 1
    assert cosines(["red"], embed(image))[0].argmax() == 5


@pytest.mark.parametrize(
    ("word", "cells"),
    [("left", {0, 4, 8, 12}), ("right", {3, 7, 11, 15}), ("top", {0, 1, 2, 3}), ("bottom", {12, 13, 14, 15}),
     ("middle", {5, 6, 9, 10})],
)  # fmt: skip
def test_place_words_match_their_place_best(word, cells):
    match = cosines([word], embed(checkerboard(["gray"] * 16)))[0]
    inside = match[sorted(cells)]
    outside = match[[cell for cell in range(16) if cell not in cells]]
    assert inside.min() > outside.max()


@pytest.mark.parametrize(("word", "colour"), [("bright", "white"), ("dark", "black")])
def test_brightness_words_match_their_cell_best(word, colour):
    names = ["gray"] * 16
    names[6] = colour
    assert cosines([word], embed(checkerboard(names)))[0].argmax() == 6


def test_detail_matches_the_busy_cell_and_smooth_does_not():
    image = checkerboard(["gray"] * 16)
    for x in range(64, 96, 2):
        ImageDraw.Draw(image).line([(x, 32), (x, 63)], fill="black")
    match = cosines(["detail", "smooth"], embed(image))
    assert match[0].argmax() == 6
    assert match[1].argmin() == 6


def test_unknown_words_have_no_cosine_with_any_cell(noise_cells):
    for cells in (noise_cells, embed(checkerboard([*COLOURS, "red", "green", "blue", "white"]))):
        assert (cosines(UNKNOWN, cells) == 0).all()
        assert (cosines(["red", "left", "text"], cells) != 0).any()  # the control: known words do meet cells


def test_cells_are_the_same_every_time(noise_cells):
    picture = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(9)
    again = standin.embed_cells(picture, generate_texture_array(picture, (4, 4), "full"))
    assert torch.equal(noise_cells, again)
    other = standin.embed_cells(1 - picture, generate_texture_array(1 - picture, (4, 4), "full"))
    assert not torch.equal(noise_cells, other)


def test_cells_have_the_stated_shape_and_are_finite():
    for grid in ((1, 1), (1, 8), (8, 1), (3, 5)):
        image = Image.new("RGB", (grid[1] * 32, grid[0] * 32), "white")
        cells = embed(image, grid)
        assert cells.shape == (1, grid[0] * grid[1], standin.WIDTH)
        assert cells.isfinite().all()


def test_pictures_of_a_batch_do_not_see_each_other(noise_cells):
    picture = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    both = torch.cat([picture, torch.ones_like(picture)])
    cells = standin.embed_cells(both, generate_texture_array(both, (4, 4), "full"))
    torch.testing.assert_close(cells[:1], noise_cells)
