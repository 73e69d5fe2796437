"""Forms: each key stands there once, its value lies where its box says, also on a sheet that was turned."""

import random
import re

import numpy as np
import pytest
from recipe import WORDS, import_recipe

from arr_coc.data.worlds import draw_scene, split_seed
from arr_coc.data.worlds import forms as forms_world
from arr_coc.data.worlds.forms import choose_keys, draw_form
from arr_coc.data.worlds.tools import sheet as sheet_tools
from arr_coc.data.worlds.tools.drawing import CHARACTERS, choose_font
from arr_coc.data.worlds.tools.fields import FORM_KEYS, KEYS
from arr_coc.data.worlds.tools.sheet import MOST_SKEW, Sheet

pytestmark = pytest.mark.slow


def key_of(question):
    wordings = (
        "what is the (.+)[?]",
        "which (.+) is written here[?]",
        "read the (.+)[.]",
        "what .+ form say for (.+)[?]",
    )
    [key] = {found.group(1) for form in wordings if (found := re.fullmatch(form, question.text))}
    return key


def darkness(picture, box):
    """How much darker than its brightest quarter each pixel of a box is."""
    left, top, right, bottom = (round(side) for side in box)
    gray = np.asarray(picture.convert("L"), dtype=float)[max(0, top) : bottom, max(0, left) : right]
    return np.clip(np.quantile(gray, 0.75) - gray, 0, None)


def test_a_seed_gives_one_form():
    first, again, other = (draw_form(random.Random(seed), (420, 520)) for seed in (3, 3, 4))
    assert first.picture.tobytes() == again.picture.tobytes()
    assert (first.questions, first.things) == (again.questions, again.things)
    assert first.picture.tobytes() != other.picture.tobytes()


@pytest.mark.parametrize("size", [(128, 128), (256, 160), (384, 384), (700, 384), (600, 1200), (1200, 1200)])
def test_forms_of_every_size_have_their_fields_inside(size):
    for seed in range(3):
        for angle in (-MOST_SKEW, MOST_SKEW):
            scene = draw_form(random.Random(seed), size, angle=angle)
            assert scene.picture.size == size
            assert scene.picture.mode == "RGB"
            boxes = [box for question in scene.questions for box in question.boxes]
            assert all(0 <= left < right <= size[0] for left, _, right, _ in boxes)
            assert all(0 <= top < bottom <= size[1] for _, top, _, bottom in boxes)


def test_large_forms_have_more_fields():
    counts = {
        side: [len(draw_form(random.Random(seed), (side, side)).questions) for seed in range(8)] for side in (256, 800)
    }
    assert min(counts[800]) >= 8
    assert max(counts[800]) <= 30
    assert np.mean(counts[256]) < 0.6 * np.mean(counts[800])


def test_keys_differ_and_none_contains_another():
    for seed in range(40):
        keys = choose_keys(random.Random(seed), 38)
        assert len(keys) == len(set(keys)) == 38
        assert not [(key, other) for key in keys for other in keys if key != other and key in other]
    every = [*KEYS, *FORM_KEYS]
    assert [(key, other) for key in every for other in every if key != other and key in other]  # there are such pairs


def test_each_key_is_printed_once_and_asked_once():
    for seed in range(10):
        scene = draw_scene("forms", split_seed("validation", seed), None, (512, 640))
        asked = [key_of(question) for question in scene.questions]
        labels = [" ".join(thing.words[1:]) for thing in scene.things if thing.words[0] == "text"]
        assert len(set(asked)) == len(asked)
        assert all(labels.count(key) == 1 for key in asked)
        assert all(question.kind == "form_value" for question in scene.questions)


def test_nothing_else_on_a_form_names_a_key():
    names = ("_TITLES", "_HEADINGS", "_PROSE", "_BLANKS", "_OPTIONS", "_STAMPS")
    printed = [text.lower() for name in names for text in getattr(forms_world, name)] + ["signature"]

    def found(texts):
        return [(key, text) for key in (*KEYS, *FORM_KEYS) for text in texts if re.search(rf"\b{key}\b", text)]

    assert not found(printed)
    assert found([*printed, "due date"])


def test_letters_are_things_in_reading_order():
    for seed in range(6):
        scene = draw_form(random.Random(seed), (512, 512), angle=0.0)
        for question in scene.questions:
            left, top, right, bottom = question.boxes[1]
            inside = [
                thing.words[0]
                for thing in sorted(scene.things, key=lambda thing: thing.box[0])
                if len(thing.words) == 1 and thing.words[0] != "text"
                and left - 1 <= thing.box[0] and thing.box[2] <= right + 1
                and top - 1 <= thing.box[1] and thing.box[3] <= bottom + 1
            ]  # fmt: skip
            assert inside == re.findall(r"[A-Z0-9]|[a-z]+", question.answer), question


def test_there_is_ink_where_a_value_is_said_to_be():
    checked = 0
    for seed in range(8):
        scene = draw_form(random.Random(seed), (512, 512))
        for question in scene.questions:
            for box in question.boxes:
                assert np.quantile(darkness(scene.picture, box), 0.95) > 60, question
                checked += 1
    assert checked > 60
    blank = Sheet(random.Random(0), (200, 200), (30, 30, 30), 2.0).finish((240, 240, 240), None, (0, 0, 0))[0]
    assert np.quantile(darkness(blank, (60, 60, 140, 80)), 0.95) < 30


def test_letters_of_a_typewriter_do_not_cover_each_other():
    font, pitch = choose_font(random.Random(0), 20, False), 0.66 * 20

    def widest(*narrowed):
        return max(sheet_tools._glyph(font, letter, False, False, *narrowed).cover.shape[1] for letter in CHARACTERS)

    assert widest(pitch) < pitch + 1 < widest()  # an empty column is part of each


@pytest.fixture(scope="module", name="tokenizer")
def make_tokenizer():
    return import_recipe("parts").parts.make_tokenizer()


def test_answers_survive_the_tokenizer(tokenizer):
    rng, marks = random.Random(0), set()

    def through(text):
        return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))

    for key, make in {**KEYS, **FORM_KEYS}.items():
        assert set(key.split()) <= WORDS, key
        for value in (make(rng) for _ in range(40)):
            assert through(value) == value
            assert set(re.findall("[a-z]+", value)) <= WORDS, value
            marks |= set(re.findall("[^A-Za-z0-9]", value))
    assert marks == set(" '#$%()+,-./:@")
    assert through("Ada 7") != "Ada 7"  # a name in small letters would not


def test_sheets_are_turned_to_both_sides_and_sometimes_not():
    angles = []

    class Watched(Sheet):
        def __init__(self, rng, size, ink, angle):
            super().__init__(rng, size, ink, angle)
            if size == (256, 256):
                angles.append(angle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms_world, "Sheet", Watched)
        for seed in range(60):
            draw_form(random.Random(seed), (256, 256))
    assert -MOST_SKEW <= min(angles) < -2
    assert 2 < max(angles) <= MOST_SKEW
    assert 2 < angles.count(0.0) < 25


@pytest.mark.parametrize("angle", [-MOST_SKEW, MOST_SKEW])
def test_boxes_follow_the_skew(angle):
    """Far from the middle a turned box holds the ink that the straight one held; the straight box no longer does."""
    straight_ink, turned_ink, left_behind = [], [], []
    for seed in range(6):
        straight, turned = (draw_form(random.Random(seed), (900, 900), angle=degrees) for degrees in (0.0, angle))
        assert [question.answer for question in straight.questions] == [
            question.answer for question in turned.questions
        ]
        for before, after in zip(straight.questions, turned.questions, strict=True):
            box, moved = before.boxes[1], after.boxes[1]
            middles = [((sides[0] + sides[2]) / 2, (sides[1] + sides[3]) / 2) for sides in (box, moved)]
            assert np.allclose(middles[1], turn_by_hand(*middles[0], angle, 450), atol=1e-6)
            if np.hypot(*np.subtract(*middles)) > 14:
                straight_ink.append(darkness(straight.picture, box).sum())
                turned_ink.append(darkness(turned.picture, moved).sum())
                left_behind.append(darkness(turned.picture, box).sum())
    assert len(straight_ink) > 15
    kept = np.divide(turned_ink, straight_ink)
    assert np.quantile(kept, 0.1) > 0.9
    assert np.median(np.divide(left_behind, straight_ink)) < 0.5


def turn_by_hand(x, y, degrees, middle):
    """Against the clock, as Pillow turns; y grows downwards."""
    turned = (complex(x, -y) - complex(middle, -middle)) * np.exp(1j * np.radians(degrees))
    return turned.real + middle, middle - turned.imag
