"""Worlds: the same seed gives the same sample, answers are true, boxes lie where they should."""

import itertools
import os
import random
import re
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from arr_coc.cli import app
from arr_coc.data.worlds import draw_scene, list_worlds, make_example, open_world, split_seed
from arr_coc.data.worlds.scenes import Shape, _ask_counts, _ask_relations
from arr_coc.data.worlds.tools.drawing import CHARACTERS, COLOURS, SHAPES, Canvas, distance, draw_shape, make_ground
from arr_coc.data.worlds.world import register_world

KINDS = [(world, kind) for world in list_worlds() for kind in open_world(world).kinds]


def test_there_are_these_worlds_and_kinds():
    assert list_worlds() == ["camouflage", "crowds", "ends", "forms", "lines", "needles", "pages", "scenes", "void"]
    assert {kind for _, kind in KINDS} == {
        *("color", "count_shape", "count_color", "relation", "read", "unusual", "overview"),
        *("camouflage", "void_count", "void_read"),
        *("page_value", "page_cell", "page_title", "page_footnote", "needle", "form_value"),
        *("two_ends", "long_line", "any"),
    }


@pytest.mark.parametrize(("world", "kind"), KINDS)
def test_a_seed_gives_one_sample_of_the_kind_asked_for(world, kind):
    shortest, longest = open_world(world).sides
    for index in range(3 if longest > 1024 else 12):
        seed = split_seed("validation", index)
        sample, again = make_example(world, seed, kind), make_example(world, seed, kind)
        assert np.array_equal(np.asarray(sample.picture), np.asarray(again.picture))
        assert (sample.question, sample.answer, sample.boxes) == (again.question, again.answer, again.boxes)
        assert (sample.kind, sample.id) == (kind, f"{world}#{seed}")
        width, height = sample.picture.size
        assert min(width, height) >= shortest
        assert max(width, height) <= longest
        assert max(width, height) <= 2 * min(width, height)
        assert all(0 <= left < right <= 1 and 0 <= top < bottom <= 1 for left, top, right, bottom in sample.boxes)
    assert make_example(world, 5, kind, (256, 160)).picture.size == (256, 160)


@pytest.mark.parametrize(("world", "kind"), KINDS)
def test_answers_have_their_form(world, kind):
    colours, shapes = "|".join(COLOURS), "|".join(SHAPES)
    form = {
        "color": colours,
        "count_shape": r"\d",
        "count_color": r"\d",
        "void_count": r"\d",
        "relation": f"({colours}) ({shapes})",
        "unusual": f"({colours}) ({shapes})",
        "overview": f"({shapes})(, ({shapes})){{1,3}}",
        "page_value": rf"[A-Z0-9]+|\$?\d+\.\d\d|\d+([-./]\d+){{1,2}}|\d+:\d\d|{colours}",
        "page_cell": r"[A-Z0-9]+|\$?\d+\.\d\d",
        "page_title": "[A-Z0-9]+( [A-Z0-9]+)?",
        "page_footnote": "[A-Z0-9]+( [A-Z0-9]+)?",
        "form_value": rf"[A-Z0-9#$%()+,.'/:@-]+( [A-Z0-9.'-]+){{0,2}}|{colours}|yes|no|cash|card|check|bank",
        "two_ends": "yes|no",
        "any": "yes|no",
        "long_line": "[A-Z0-9]{2,5}( [A-Z0-9]{2,5})+",
    }.get(kind, "[A-Z0-9]{2,6}")
    for index in range(12):
        sample = make_example(world, split_seed("train", index), kind, (512, 384) if world == "needles" else None)
        assert re.fullmatch(form, sample.answer), sample.answer
        assert sample.question == sample.question.lower()
        assert sample.question[-1] in "?."
        if kind not in ("count_shape", "count_color", "void_count", "any"):
            assert sample.boxes


def test_splits_never_meet():
    ends = {"test": 10**8 - 1, "validation": 9 * 10**8 - 1, "train": 10**15 - 1}
    ranges = {split: (split_seed(split, 0), split_seed(split, last)) for split, last in ends.items()}
    in_order = sorted(ranges.values())
    assert all(before[1] < after[0] for before, after in itertools.pairwise(in_order))
    with pytest.raises(ValueError, match="`index` must be at least 0 and below"):
        split_seed("test", 10**8)
    with pytest.raises(ValueError, match="`split` must be one of"):
        split_seed("rest", 0)
    first = [make_example("scenes", split_seed(split, 0)).picture.tobytes() for split in ends]
    assert len(set(first)) == 3


def test_what_is_in_a_box_is_what_was_asked():
    """The asked color is in the box of the asked shape, and what surrounds the box is something else."""
    for index in range(20):
        sample = make_example("scenes", split_seed("validation", index), "color")
        [(left, top, right, bottom)] = sample.boxes
        width, height = sample.picture.size
        inside = sample.picture.crop((left * width, top * height, right * width, bottom * height))
        pixels = np.asarray(inside, dtype=float).reshape(-1, 3)
        far = np.linalg.norm(pixels - np.array(COLOURS[sample.answer]), axis=1)
        assert (far < 90).mean() > 0.15, (index, sample.answer)


def box_of(x, y, radius=10):
    return (x - radius, y - radius, x + radius, y + radius)


def test_relations_are_asked_only_where_one_thing_is_clearly_on_that_side():
    red, blue, green = (
        Shape("circle", "red", 10, box_of(50, 50)),
        Shape("star", "blue", 10, box_of(120, 52)),
        Shape("ring", "green", 10, box_of(200, 49)),
    )
    asked = {q.text: q.answer for q in _ask_relations(FirstWording(), [red, blue, green])}
    assert asked == {
        "what is right of the blue star?": "green ring",
        "what is left of the blue star?": "red circle",
    }
    twins = [red, Shape("circle", "red", 10, box_of(50, 200)), blue]
    assert all("red circle" not in q.text for q in _ask_relations(FirstWording(), twins))
    near = Shape("ring", "green", 10, box_of(58, 120))  # hardly to the right
    assert {q.text for q in _ask_relations(FirstWording(), [red, near])} == {
        "what is above the green ring?",
        "what is below the red circle?",
    }


class FirstWording(random.Random):
    """Always the plain wording."""

    def random(self):
        return 0.0


def test_counts_are_counts():
    shapes = [Shape("star", "red", 9, box_of(x, 50)) for x in (20, 60, 100)] + [
        Shape("ring", "red", 9, box_of(150, 50))
    ]
    asked = {
        q.text: (q.answer, len(q.boxes))
        for shape in ("star", "ring", "cross")
        for q in _ask_counts(FirstWording(), shapes, ["red", "blue"], {"blue"}, (shape, "red"))
    }
    assert asked["how many stars are there?"] == ("3", 3)
    assert asked["how many rings are there?"] == ("1", 1)
    assert asked["how many crosses are there?"] == ("0", 0)
    assert asked["how many red things are there?"] == ("4", 4)
    assert "how many blue things are there?" not in asked  # a text is blue


@pytest.mark.slow
def test_counts_are_spread_and_no_answer_can_be_guessed():
    for kind in ("count_shape", "count_color"):
        counted = [make_example("scenes", split_seed("validation", index), kind).answer for index in range(150)]
        assert max(counted.count(answer) for answer in set(counted)) < 0.5 * len(counted)
        assert sum(int(answer) >= 3 for answer in counted) > 0.15 * len(counted)
    voids = [make_example("void", split_seed("validation", index), "void_count").answer for index in range(150)]
    assert 0.05 < sum(answer != "0" for answer in voids) / 150 < 0.4


@pytest.mark.slow
def test_a_seed_gives_one_sample_in_every_process():
    code = (
        "import hashlib; from arr_coc.data.worlds import *; "
        "seen = [make_example(w, 7 + i, k) for w in list_worlds() for k in open_world(w).kinds for i in range(4)]; "
        "print(hashlib.sha256(repr([(s.question, s.answer, s.boxes) for s in seen]).encode()).hexdigest(), "
        "hashlib.sha256(b''.join(s.picture.tobytes() for s in seen)).hexdigest())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(printed) == 1


def test_an_overview_goes_from_large_to_small_and_one_thing_is_odd():
    for index in range(20):
        sample = make_example("scenes", split_seed("validation", index), "overview")
        width, height = sample.picture.size
        areas = [(right - left) * width * (bottom - top) * height for left, top, right, bottom in sample.boxes]
        assert areas == sorted(areas, reverse=True)
        assert len(sample.boxes) == len(sample.answer.split(", "))
        scene = draw_scene("scenes", split_seed("validation", index), "unusual")
        [question] = [question for question in scene.questions if question.kind == "unusual"]
        names = [" ".join(reversed(thing.words)) for thing in scene.things]
        assert names.count(question.answer) == 1
        assert len(set(names)) == 2


def test_camouflage_hardly_shows_and_the_red_box_does():
    for index in range(10):
        sample = make_example("camouflage", split_seed("validation", index))
        [(left, top, right, bottom)] = sample.boxes
        pixels = np.asarray(sample.picture, dtype=float)
        height, width, _ = pixels.shape
        text = pixels[int(top * height) : int(bottom * height) + 1, int(left * width) : int(right * width) + 1]
        assert text.std(axis=(0, 1)).max() < 40
        redness = pixels[..., 0] - pixels[..., 1:].mean(axis=-1)
        assert redness.max() > 100
        assert (text[..., 0] - text[..., 1:].mean(axis=-1)).max() < 60


def test_nothing_covers_anything():
    rng = random.Random(0)
    canvas = Canvas(rng, (256, 256), *make_ground(rng, (256, 256)))
    boxes = [box for _ in range(30) if (box := canvas.add_shape("circle", "red", 14)) is not None]
    assert len(boxes) > 8
    for place, one in enumerate(boxes):
        for other in boxes[:place]:
            apart = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
            assert apart
    assert canvas.add_shape("circle", "red", 200) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_fill_their_boxes_and_differ(shape):
    from PIL import ImageDraw

    def drawn(name):
        image = Image.new("L", (64, 64))
        draw_shape(ImageDraw.Draw(image), name, 32, 32, 24, 255)
        return np.asarray(image) > 0

    own = drawn(shape)
    rows, columns = own.any(axis=1).nonzero()[0], own.any(axis=0).nonzero()[0]
    # a star does not reach its box on every side
    assert min(np.ptp(rows), np.ptp(columns)) >= 40
    assert all((own != drawn(other)).mean() > 0.03 for other in SHAPES if other != shape)


def test_colours_can_be_told_apart():
    names = list(COLOURS)
    for place, one in enumerate(names):
        for other in names[:place]:
            assert distance(COLOURS[one], COLOURS[other]) > 70


def test_characters_are_things_in_reading_order():
    for index in range(10):
        scene = draw_scene("scenes", split_seed("validation", index), "read")
        [question] = [question for question in scene.questions if question.kind == "read"][:1]
        [box] = question.boxes
        inside = [thing for thing in scene.things if thing.words[0] in CHARACTERS and thing.box[1] == box[1]]
        inside = [thing for thing in inside if box[0] - 4 <= thing.box[0] <= box[2]]
        assert "".join(thing.words[0] for thing in sorted(inside, key=lambda one: one.box)) == question.answer


@pytest.mark.parametrize("kind", open_world("pages").kinds)
def test_a_page_says_each_key_once_and_what_is_asked_stands_in_its_boxes(kind):
    for index in range(12):
        scene = draw_scene("pages", split_seed("validation", index), kind, (512, 512))
        texts = [question.text for question in scene.questions]
        named = [word for thing in scene.things if "text" in thing.words for word in thing.words if word != "text"]
        assert len(set(named)) == len(named), named  # a key, an item or a column stands there once
        assert len(texts) == len(set(texts)) or kind in ("page_value", "page_cell")
        for question in scene.questions:
            left, top, right, bottom = question.boxes[-1]  # where the answer stands
            inside = [
                thing.words[0]
                for thing in sorted(scene.things, key=lambda thing: thing.box[0])
                if len(thing.words) == 1
                and thing.words[0] != "text"
                and left - 1 <= (thing.box[0] + thing.box[2]) / 2 <= right + 1
                and top - 1 <= (thing.box[1] + thing.box[3]) / 2 <= bottom + 1
            ]
            wanted = re.findall(r"[A-Z0-9]|[a-z]+", question.answer)
            assert inside == wanted, (question, inside)


def characters_inside(scene, box):
    """What is written inside a box, without spaces."""
    left, top, right, bottom = box
    inside = [
        thing
        for thing in scene.things
        if len(thing.words) == 1
        and re.fullmatch(r"[A-Z0-9]|[a-z]+", thing.words[0])
        and thing.words[0] != "text"
        and left - 1 <= (thing.box[0] + thing.box[2]) / 2 <= right + 1
        and top - 1 <= (thing.box[1] + thing.box[3]) / 2 <= bottom + 1
    ]
    return [thing.words[0] for thing in sorted(inside, key=lambda thing: thing.box[0])]


@pytest.mark.parametrize(("world", "clues"), [("needles", {1}), ("pages", {0, 1, 2}), ("forms", {1}), ("lines", {0})])
def test_the_last_box_is_that_of_the_answer_and_those_before_it_are_not(world, clues):
    found = set()
    for index in range(5):
        scene = draw_scene(world, split_seed("validation", index), None, (512, 512))
        for question in scene.questions:
            wanted = re.findall(r"[A-Z0-9]|[a-z]+", question.answer)
            assert len(question.boxes) == question.clues + 1
            assert characters_inside(scene, question.boxes[-1]) == wanted
            assert all(characters_inside(scene, box) != wanted for box in question.boxes[: question.clues])
            found.add(question.clues)
    assert found == clues


@pytest.mark.parametrize(
    ("world", "kind", "clues", "any_box"),
    [
        ("scenes", "count_shape", 0, False),  # all are needed to count them
        ("scenes", "color", 0, False),
        ("scenes", "relation", 1, False),
        ("crowds", "any", 0, True),  # one is enough
        ("ends", "two_ends", 0, False),
        ("clips", "clip_appears", 0, True),
        ("clips", "clip_direction", 0, False),
    ],
)
def test_boxes_that_only_lead_to_an_answer_are_counted(world, kind, clues, any_box):
    for index in range(3):
        asked = make_example(world, split_seed("validation", index), kind, (256, 256))
        assert (asked.clues, asked.any_box) == (clues, any_box)
        assert asked.answer_boxes == asked.boxes[clues:]


def test_what_differs_and_what_is_left_of_another_comes_last():
    for kind in ("unusual", "relation"):
        for index in range(4):
            scene = draw_scene("scenes", split_seed("validation", index), kind, (512, 512))
            for question in (question for question in scene.questions if question.kind == kind):
                words = {thing.box: set(thing.words) for thing in scene.things}
                answer = set(question.answer.split())
                assert answer <= words[question.boxes[-1]]
                assert question.clues == len(question.boxes) - 1
                assert kind == "relation" or all(not answer <= words[box] for box in question.boxes[:-1])


def test_the_answer_of_a_page_that_passes_by_comes_last():
    asked = [make_example("clips", split_seed("validation", index), "clip_pan", (256, 256)) for index in range(4)]
    for example in asked:
        sizes = {(round(b[2] - b[0], 4), round(b[3] - b[1], 4)) for b in example.answer_boxes}
        assert len(sizes) == 1  # one text at several places
        assert len(example.answer_boxes) >= 2
        assert example.any_box
    assert max(example.clues for example in asked) >= 2


def test_a_needle_is_too_small_to_survive_and_its_mark_is_not():
    for index in range(4):
        sample = make_example("needles", split_seed("validation", index), None, (1024, 1024))
        mark, sign = sample.boxes
        assert 0.04 < mark[2] - mark[0] < 0.1
        assert 0.008 < sign[3] - sign[1] < 0.03  # letters of 18 to 24 pixels, without their descenders
        gap = max(sign[0] - mark[2], mark[0] - sign[2], sign[1] - mark[3], mark[1] - sign[3])
        assert 0 < gap * 1024 < 30
    large = make_example("needles", split_seed("validation", 0), None, (2048, 2048))
    assert large.boxes[0][2] - large.boxes[0][0] > 0.04
    assert large.boxes[1][3] - large.boxes[1][1] < 0.015


def test_unknown_names_are_refused_with_the_known():
    with pytest.raises(
        ValueError, match="no world is named 'mars'; there are camouflage, crowds, ends, forms, lines, needles"
    ):
        make_example("mars", 0)
    with pytest.raises(ValueError, match="void asks no 'color'; it asks void_count, void_read"):
        make_example("void", 0, "color")
    with pytest.raises(ValueError, match="'void' is already registered"):
        register_world("void")(type(open_world("void")))


def test_the_command_draws_a_sheet(tmp_path):
    out = tmp_path / "sheet.png"
    result = CliRunner().invoke(app, ["world", "scenes", "--n", "5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    with Image.open(out) as sheet:
        assert sheet.size[0] > 1300
    wrong = CliRunner().invoke(app, ["world", "mars", "--out", str(out)])
    assert wrong.exit_code == 2
    assert wrong.stderr == "error: no world is named 'mars'; there are " + ", ".join([*list_worlds(), "clips"]) + "\n"


def test_the_sheet_shows_every_frame_of_a_clip(tmp_path):
    out = tmp_path / "sheet.png"
    result = CliRunner().invoke(app, ["world", "clips", "--n", "3", "--kind", "clip_blink", "--out", str(out)])
    assert result.exit_code == 0, result.output
    lines = np.all(np.asarray(Image.open(out)) == 190, axis=2)  # around the frames
    for number in range(3):
        frames = make_example("clips", split_seed("train", number), "clip_blink").open()
        top, left = 10 + number // 2 * 376, 10 + number % 2 * 660
        tile = lines[top : top + 320, left : left + 650]
        runs = [int((np.diff(np.flatnonzero(line)) > 1).sum()) for line in tile]
        rows = [row for row in range(1, 320) if tile[row].sum() > 60 and not tile[row - 1].any()]
        assert len(rows) == -(-len(frames) // 6)
        assert sum(runs[row] + 1 for row in rows) == len(frames)


@pytest.mark.parametrize(
    ("name", "world", "kind", "index", "size"),
    [
        ("shapes", "scenes", "read", 702, (448, 320)),
        ("camouflage", "camouflage", "camouflage", 706, (448, 320)),
        ("splatter", "void", "void_read", 704, (448, 320)),
        ("page", "pages", None, 710, (640, 832)),
        ("needle", "needles", None, 700, (1024, 1024)),
    ],
)
def test_the_example_pictures_are_what_their_seeds_draw(name, world, kind, index, size):
    drawn = make_example(world, split_seed("validation", index), kind, size).picture
    with Image.open(files("arr_coc") / "assets" / "examples" / f"{name}.png") as kept:
        difference = np.abs(np.asarray(kept, dtype=int) - np.asarray(drawn, dtype=int))
    assert difference.mean() < 1
