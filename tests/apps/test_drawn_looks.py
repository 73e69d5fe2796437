"""The looks behind an answer as they are drawn: on the page, and by `arr-coc ask --mode auto --overlay`."""

import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from arr_coc.cli import app
from arr_coc.demo.drawings import draw_all_looks, draw_look
from arr_coc.demo.engine import Engine
from arr_coc.demo.looks import write_looks
from arr_coc.drawing.looks import draw_looks, name_look, number_cells, show_look, show_looks
from arr_coc.gaze.loop import Look
from arr_coc.inference.answer import Answer, TokenCount

EXAMPLES = files("arr_coc") / "assets" / "examples"
PAGE, TOTAL = EXAMPLES / "page.png", "what is the total?"
HIDDEN, GRAY = EXAMPLES / "camouflage.png", "what does the gray text say?"  # with few tokens it looks twice
FIRST, SECOND = (179, 71, 0), (0, 92, 158)  # the colours of the first two looks


@pytest.fixture(scope="module")
def engine():
    return Engine.open()


@pytest.fixture(scope="module")
def snapshot(engine):
    return engine.ask(HIDDEN, GRAY, "auto", 0.12)


def make_look(cells, then="again", grid=(1, 2, 4), seen=None):
    return Look(len(cells), len(cells) if seen is None else seen, 0.5, then, ((grid, np.array(cells)),))


def make_answer(looks, mode="prune"):
    used = sum(look.tokens for look in looks)
    return Answer("", (), tuple(looks[-1].kept), TokenCount(8, used), "", "", {}, mode=mode, looks=tuple(looks))


def has(image, colour):
    return (np.asarray(image) == colour).all(axis=2).any()


def cell_of(image, row, column, grid=(2, 4)):
    height, width = image.height / grid[0], image.width / grid[1]
    inset = 12  # past the frames
    left, top = round(column * width), round(row * height)
    return image.crop((left + inset, top + inset, round(left + width) - inset, round(top + height) - inset))


def test_a_cell_has_the_number_of_the_look_that_first_saw_it():
    looks = [make_look([2]), make_look([1, 5]), make_look([1, 2, 7])]
    assert number_cells(looks).tolist() == [[0, 2, 1, 0], [0, 2, 0, 3]]  # also where a later look left it out
    clip = make_look([2, 8 + 5], grid=(2, 2, 4))
    assert number_cells([clip]).tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
    other = make_look(range(6), grid=(1, 2, 3))  # after a failure, the picture may be read on another grid
    assert number_cells([other, make_look([0])]).tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]


def test_seen_cells_are_bright_and_framed_in_the_colour_of_their_look():
    picture = Image.new("RGB", (720, 360), (20, 160, 40))
    numbers = np.array([[0, 1, 0, 0], [0, 0, 2, 0]])
    drawn = show_looks(picture, numbers)
    assert drawn.size == picture.size
    assert cell_of(drawn, 0, 1).getpixel((150, 150)) == (20, 160, 40)
    assert cell_of(drawn, 1, 0).getpixel((100, 100))[0] > 150  # faded
    assert has(drawn.crop((170, 0, 370, 190)), FIRST)
    assert not has(drawn.crop((170, 0, 350, 170)), SECOND)
    assert has(drawn.crop((350, 170, 550, 360)), SECOND)
    alone = show_look(picture, numbers == 2, 2)
    assert has(alone, SECOND)
    assert not has(alone, FIRST)


def test_a_number_hides_nothing_if_its_region_has_a_plain_cell():
    picture = Image.new("RGB", (720, 360), "white")
    busy = np.asarray(picture).copy()
    busy[:180:2, :180] = 0  # stripes in the first cell
    numbers = np.array([[1, 1, 0, 0], [0, 0, 0, 0]])
    drawn = show_looks(Image.fromarray(busy), numbers)
    tag = (np.asarray(drawn) == FIRST).all(axis=2)
    assert tag[10:40, 190:200].any()
    assert not tag[10:40, 10:170].any()
    plain = show_looks(picture, numbers)  # control: where there is nothing to hide, it is in the first cell
    assert (np.asarray(plain) == FIRST).all(axis=2)[10:40, 10:20].any()


def test_what_was_seen_small_is_blurred_and_not_faded():
    picture = Image.fromarray(np.indices((360, 720)).sum(axis=0).astype(np.uint8) % 2 * 255).convert("RGB")
    seen = np.array([[True, False, False, False], [False] * 4])
    blurred, faded = (np.asarray(show_look(picture, seen, 1, blur))[250:300, 400:450] for blur in (6, None))
    assert blurred.std() < 10 < faded.std()
    assert has(show_look(picture, seen, 1, 6).crop((0, 0, 190, 190)), FIRST)


def test_the_still_version_has_a_line_for_each_look():
    picture = Image.new("RGB", (128, 64), "teal")
    two, three = (
        draw_looks(picture, make_answer([*[make_look([1])] * count, make_look([1, 2], "last")])) for count in (1, 2)
    )
    assert (two.width, three.width) == (720, 720)
    assert three.height > two.height > 360  # the picture, and lines below it
    assert has(two.crop((0, 360, 720, two.height)), SECOND)
    with pytest.raises(ValueError, match="no looks to draw; ask with `mode='auto'`"):
        draw_looks(picture, Answer("", (), (((1, 2, 4), np.array([1])),), TokenCount(8, 1), "", "", {}))


def test_sureness_is_never_rounded_up_to_enough():
    assert name_look(1, Look(17, 17, 0.62, "again")) == "look 1: 17 tokens, 0.62 sure"
    assert name_look(2, Look(1, 1, 0.9862, "again")) == "look 2: 1 token, 0.986 sure"


def test_a_snapshot_has_the_looks_and_the_tokens_of_the_last_one(snapshot):
    assert [look.then for look in snapshot.looks] == ["again", "sure"]
    assert snapshot.used == sum(look.tokens for look in snapshot.looks)
    assert snapshot.tokens.sum() == snapshot.looks[-1].seen < snapshot.used
    first, second = (draw_look(snapshot, number) for number in (1, 2))
    assert has(first, FIRST)
    assert not has(first, SECOND)
    assert has(second, SECOND)
    assert has(draw_all_looks(snapshot), FIRST)
    assert has(draw_all_looks(snapshot), SECOND)


def test_a_gaze_shows_what_a_look_saw_small(engine):
    gazed = engine.ask(EXAMPLES / "needle.png", "what does the sign next to the black ring say?", "saccade", 0.25)
    cells = ((1, *gazed.grid), gazed.cells[:40])
    looked = replace(gazed, looks=(Look(160, 160, 0.5, "again", (cells,)), Look(256, 256, 1.0, "sure", (cells,))))
    whole = np.asarray(draw_look(looked, 1).convert("L")).astype(float)
    pruned = np.asarray(draw_look(replace(looked, mode="prune"), 1).convert("L")).astype(float)
    assert np.abs(whole - pruned).max() > 50  # blurred shapes where pruning shows paper


@pytest.mark.slow
def test_the_page_has_a_tile_for_each_look(engine, snapshot):
    page = write_looks(snapshot)
    assert page.count("<figure") == 3
    assert page.count("data:image/jpeg;base64,") == 3
    captions = re.findall(r"<b>(.*?)</b>", page)
    assert captions == [*(name_look(number, look) for number, look in enumerate(snapshot.looks, 1)), "all looks"]
    widths = [float(width) / 100 for width in re.findall(r"width:([\d.]+)%", page)]
    assert widths == pytest.approx([look.sure for look in snapshot.looks], abs=0.0006)
    ends = re.findall(r"<small>(.*?)</small>", page)
    assert ends[:2] == ["not sure enough, so it looked again", "sure enough"]
    once = write_looks(engine.ask(PAGE, "what is the title?", "auto", 0.25))
    assert once.count("<figure") == 1  # nothing to tell apart
    none = write_looks(engine.ask(PAGE, TOTAL, "prune", 0.12))
    assert "<figure" not in none
    assert "read in one look" in none


@pytest.mark.slow
def test_ask_draws_all_looks_and_one_look_as_before(tmp_path):
    twice, once, pruned = (tmp_path / f"{name}.png" for name in ("twice", "once", "pruned"))
    for target, options in (
        (twice, ["--mode", "auto", "--budget", "0.12"]),
        (once, ["--mode", "auto", "--budget", "0.25"]),
        (pruned, ["--mode", "prune", "--budget", "0.0625"]),
    ):
        result = CliRunner().invoke(app, ["ask", str(HIDDEN), GRAY, *options, "--overlay", str(target)])
        assert result.exit_code == 0, result.stderr
    drawn = {path.stem: Image.open(path).convert("RGB") for path in (twice, once, pruned)}
    assert has(drawn["twice"], FIRST)
    assert has(drawn["twice"], SECOND)
    assert not has(drawn["once"], FIRST)
    assert drawn["twice"].height > drawn["once"].height
    assert drawn["once"].size == drawn["pruned"].size
