"""Worlds that ask to look in different ways: at two ends, along a line, at everything in a crowd."""

import itertools
import random
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from recipe import WORDS, import_recipe

from arr_coc.data.worlds import draw_scene, make_example, open_world, split_seed
from arr_coc.data.worlds.crowds import _gather
from arr_coc.data.worlds.ends import _two_looks, _two_texts
from arr_coc.data.worlds.tools.drawing import CHARACTERS, COLOURS, SHAPES

pytestmark = pytest.mark.slow

WORLDS = {"ends": "two_ends", "lines": "long_line", "crowds": "any"}
SIZES = ((256, 128), (128, 256), (272, 256))
ENDS = {"left": (0, min), "right": (0, max), "top": (1, min), "bottom": (1, max)}
# One example of each kind of the worlds that were there before: kind -> question and answer for seed 7.
BEFORE = {
    "camouflage": {"camouflage": ("what does the gray text say?", "TORYO")},
    "needles": {"needle": ("what does the sign next to the gray cross say?", "QEVNNP")},
    "pages": {
        "page_value": ("what is the author?", "AWZ"),
        "page_cell": ("what is the size of the apple?", "913"),
        "page_title": ("what is the title?", "GWIC"),
        "page_footnote": ("what does the footnote say?", "HUFG"),
    },
    "scenes": {
        "color": ("what color is the diamond?", "purple"),
        "count_shape": ("how many circles are there?", "1"),
        "count_color": ("how many gray things are there?", "0"),
        "relation": ("what is left of the green cross?", "red star"),
        "read": ("what does the cyan text say?", "HDR3"),
        "unusual": ("what is unusual?", "cyan star"),
        "overview": ("what do you see?", "triangle, diamond, circle"),
    },
    "void": {
        "void_count": ("how many triangles are in the picture?", "0"),
        "void_read": ("what does the red text say?", "MRIE"),
    },
}


@pytest.fixture(scope="module", name="scenes")
def draw_scenes():
    """Scenes of each world, wide, tall and almost square; of `lines` fewer, as no answer there is to be balanced."""
    counts = {"ends": 200, "lines": 60, "crowds": 200}
    return {
        world: [draw_scene(world, split_seed("validation", index), None, SIZES[index % 3]) for index in range(count)]
        for world, count in counts.items()
    }


@pytest.fixture(scope="module", name="tokenizer")
def make_tokenizer():
    return import_recipe("parts").parts.make_tokenizer()


def texts_of(scene):
    return [thing for thing in scene.things if thing.words[0] == "text"]


def shapes_of(scene):
    return [thing for thing in scene.things if thing.words[0] in SHAPES]


def characters_in(scene, box):
    """The characters within a box, from left to right."""
    inside = [
        thing
        for thing in scene.things
        if thing.words[0] in CHARACTERS
        and all(box[axis] <= (thing.box[axis] + thing.box[axis + 2]) / 2 <= box[axis + 2] for axis in (0, 1))
    ]
    return sorted(inside, key=lambda thing: thing.box)


def read(scene, box):
    return "".join(thing.words[0] for thing in characters_in(scene, box))


def accuracy(guesses):
    """How often a rule or its opposite is right."""
    right = sum(guess == answer for guess, answer in guesses) / len(guesses)
    return max(right, 1 - right)


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_gives_one_scene_of_any_size(world):
    for index, size in enumerate(((128, 128), (128, 256), (256, 128), (160, 257), (300, 300))):
        first, again = (draw_scene(world, index, None, size, varied=True) for _ in range(2))
        assert first.picture.size == size
        assert np.array_equal(np.asarray(first.picture), np.asarray(again.picture))
        assert (first.questions, first.things) == (again.questions, again.things)
        assert not np.array_equal(first.picture, draw_scene(world, index + 9, None, size).picture)


@pytest.mark.parametrize("world", WORLDS)
def test_questions_are_few_and_different_and_boxes_lie_in_the_picture(world, scenes):
    for scene in scenes[world]:
        width, height = scene.picture.size
        assert 1 <= len(scene.questions) <= 5
        assert {question.kind for question in scene.questions} == {WORLDS[world]}
        assert len({question.text for question in scene.questions}) == len(scene.questions)
        for left, top, right, bottom in (box for question in scene.questions for box in question.boxes):
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
    asked = [len(scene.questions) for scene in scenes[world]]
    assert max(asked) == {"ends": 2, "lines": 1, "crowds": 5}[world]


@pytest.mark.parametrize("world", WORLDS)
def test_the_recipe_knows_every_word_and_reads_answers_back(world, scenes, tokenizer):
    for question in (question for scene in scenes[world] for question in scene.questions):
        assert set(re.findall("[a-z]+", f"{question.text} {question.answer}")) <= WORDS
        ids = tokenizer.encode(question.answer, add_special_tokens=False)
        assert tokenizer.decode(ids) == question.answer
        assert len(ids) == (1 if question.answer in ("yes", "no") else len(question.answer))


def at_the_ends(scene, question):
    """What stands farthest at both ends that a question names, from the things alone."""
    words = re.findall("left|right|top|bottom", question.text)
    of_signs = "shape" not in question.text
    things = texts_of(scene) if of_signs else shapes_of(scene)
    ends = [ENDS[word][1](things, key=lambda thing: thing.box[ENDS[word][0]]) for word in words]
    return ends, [read(scene, thing.box) if of_signs else thing.words for thing in ends]


def test_ends_are_alike_if_the_answer_is_yes(scenes):
    asked = [(scene, question) for scene in scenes["ends"] for question in scene.questions]
    for scene, question in asked:
        things, looks = at_the_ends(scene, question)
        assert question.answer == ("yes" if looks[0] == looks[1] else "no")
        assert sorted(question.boxes) == sorted(thing.box for thing in things)
    assert {word for _, question in asked for word in re.findall("left|right|top|bottom", question.text)} == set(ENDS)
    answers = Counter(question.answer for _, question in asked)
    assert 0.4 < answers["yes"] / answers.total() < 0.6


def test_no_question_leaves_open_what_counts(scenes):
    """Two circles of different colours are alike in one sense; a gray ground is no gray thing."""
    of_shapes = [q.text for scene in scenes["ends"] for q in scene.questions if "sign" not in q.text]
    of_shapes = [text for text in of_shapes if "written" not in text]
    of_colours = [q.text for scene in scenes["crowds"] for q in scene.questions if asked_for(q)[0] is None]
    for texts, told in ((of_shapes, "shape and color?"), (of_colours, " thing")):
        assert len(set(texts)) > 8
        assert all(told in text for text in texts)


def test_one_end_does_not_give_the_answer_away(scenes):
    """A rule learned from half of the questions; what it sees is one end, and whether something between is like it."""
    features = defaultdict(list)
    for scene in scenes["ends"]:
        for question in scene.questions:
            things, looks = at_the_ends(scene, question)
            signs = "shape" not in question.text
            others = [thing for thing in (texts_of if signs else shapes_of)(scene) if thing not in things]
            between = [read(scene, thing.box) if signs else thing.words for thing in others]
            for place, look in enumerate(looks):
                seen = (len(look), any(letter in "0123456789" for letter in look)) if signs else look[0]
                features[place, "look"].append((seen, question.answer))
                features[place, "color"].append((None if signs else look[1], question.answer))
                features[place, "between"].append((look in between, question.answer))
            features["both"].append((looks[0] == looks[1], question.answer))
    for name, pairs in features.items():
        learned = defaultdict(Counter)
        for seen, answer in pairs[::2]:
            learned[seen][answer] += 1
        guesses = [(max(learned[seen], key=learned[seen].get, default="no"), answer) for seen, answer in pairs[1::2]]
        right = sum(guess == answer for guess, answer in guesses) / len(guesses)
        assert right == 1.0 if name == "both" else right <= 0.6, (name, right)


def test_different_ends_differ_by_little_or_by_much():
    rng = random.Random(0)
    texts = [_two_texts(rng, 6, same=False) for _ in range(400)]
    changed = [
        sum(one != other for one, other in zip(*pair, strict=True)) for pair in texts if len(pair[0]) == len(pair[1])
    ]
    assert 0.4 < sum(1 <= count <= 2 for count in changed) / len(texts) < 0.75
    assert sum(len(one) != len(other) for one, other in texts) > 80
    hardly = [(one, other) for one, other in texts if one.replace("O", "0") == other.replace("O", "0")]
    assert not hardly  # nobody could tell
    looks = [_two_looks(rng, list(COLOURS), same=False) for _ in range(200)]
    differences = Counter((one[0] != other[0], one[1] != other[1]) for one, other in looks)
    assert differences[False, False] == 0
    assert all(differences[case] > 40 for case in ((True, False), (False, True), (True, True)))


def test_the_line_says_what_is_written_with_a_space_at_each_gap(scenes):
    for scene in scenes["lines"]:
        [question] = scene.questions
        [box] = question.boxes
        characters = characters_in(scene, box)
        spelled = characters[0].words[0]
        for before, after in itertools.pairwise(characters):
            spelled += (" " if after.box[0] - before.box[2] > 1 else "") + after.words[0]
        assert spelled == question.answer
        assert re.fullmatch("[A-Z0-9]{2,5}( [A-Z0-9]{2,5})+", question.answer)
        assert box[3] - box[1] >= 12  # capitals of letters of 18 pixels, without their descenders


def test_a_line_is_long_for_its_picture_and_much_longer_than_any_other_text(scenes):
    for scene in scenes["lines"]:
        [question] = scene.questions
        others = [thing.box for thing in texts_of(scene) if thing.box not in question.boxes]
        assert len(question.answer.replace(" ", "")) >= 8
        assert all(len(read(scene, box)) <= 6 for box in others)
        width = question.boxes[0][2] - question.boxes[0][0]
        assert all(box[2] - box[0] < 0.6 * width for box in others)
    wide = [make_example("lines", split_seed("validation", index), None, (512, 256)) for index in range(30)]
    assert all(12 <= len(sample.answer.replace(" ", "")) <= 20 for sample in wide)
    narrow = [make_example("lines", split_seed("validation", index), None, (128, 128)) for index in range(10)]
    assert all(8 <= len(sample.answer.replace(" ", "")) < 12 for sample in narrow)


def asked_for(question):
    """Shape and colour that a question names; None for what it leaves open."""
    shape = re.search("|".join(SHAPES), question.text)
    color = re.search(r"\b(" + "|".join(COLOURS) + r")\b", question.text)
    return shape and shape.group(), color and color.group()


def test_a_crowd_has_any_if_the_answer_is_yes(scenes):
    answers = defaultdict(Counter)
    for scene in scenes["crowds"]:
        things = shapes_of(scene)
        assert 4 <= len(things) <= 25
        for question in scene.questions:
            shape, color = asked_for(question)
            matching = [thing.box for thing in things if shape in (None, thing.words[0])]
            coloured = [thing.box for thing in things if color in (None, thing.words[1])]
            both = sorted(set(matching) & set(coloured))
            assert sorted(question.boxes) == both
            assert question.answer == ("yes" if both else "no")
            answers[shape is not None, color is not None][question.answer] += 1
    assert set(answers) == {(True, True), (True, False), (False, True)}
    for counted in answers.values():
        assert 0.4 < counted["yes"] / counted.total() < 0.6
    assert len(shapes_of(max(scenes["crowds"], key=lambda scene: len(scene.things)))) > 18


def test_shape_or_color_alone_does_not_give_the_answer_away(scenes):
    guesses = defaultdict(list)
    for scene in scenes["crowds"]:
        looks = [thing.words for thing in shapes_of(scene)]
        for question in scene.questions:
            shape, color = asked_for(question)
            if shape is None or color is None:
                continue
            answer = question.answer == "yes"
            for least in (1, 2, 3, 4):
                guesses["shape", least].append((sum(look[0] == shape for look in looks) >= least, answer))
                guesses["color", least].append((sum(look[1] == color for look in looks) >= least, answer))
            guesses["many"].append((len(looks) > 10, answer))
            guesses["both"].append(((shape, color) in looks, answer))
    assert accuracy(guesses.pop("both")) == 1.0
    for rule, pairs in guesses.items():
        assert accuracy(pairs) <= 0.6, rule


class Coin(random.Random):
    """A coin that always falls on one side; everything else as its seed has it."""

    def __init__(self, seed, side):
        super().__init__(seed)
        self.side = side

    def random(self):
        return self.side

    def getrandbits(self, bits):
        return super().getrandbits(bits)


@pytest.mark.parametrize("count", [4, 9, 25])
def test_as_many_stars_and_as_many_red_things_whether_there_is_a_red_star_or_not(count):
    for seed in range(40):
        (missing, asked), (there, same) = (_gather(Coin(seed, side), list(COLOURS), count) for side in (0.0, 0.9))
        assert asked == same
        assert len(there) == len(missing) == count
        assert not set(asked) & set(missing)
        assert set(asked) <= set(there)
        for part in (0, 1):
            assert Counter(look[part] for look in missing) == Counter(look[part] for look in there)


def test_a_missing_look_mostly_has_its_parts_there(scenes):
    """A no to a red star: mostly stars and red things are there, now and then one of them is not."""
    parts = []
    for scene in scenes["crowds"]:
        words = {word for thing in shapes_of(scene) for word in thing.words}
        for shape, color in (asked_for(question) for question in scene.questions if question.answer == "no"):
            if shape is not None and color is not None:
                parts.append({shape, color} <= words)
    assert 0.7 < sum(parts) / len(parts) < 0.95


@pytest.mark.parametrize("world", BEFORE)
def test_the_worlds_that_were_there_draw_what_they_drew(world):
    assert open_world(world).kinds == tuple(BEFORE[world])
    for kind, wanted in BEFORE[world].items():
        sample = make_example(world, 7, kind, (384, 320))
        assert (sample.question, sample.answer) == wanted
