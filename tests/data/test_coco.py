"""Questions about photographs in COCO's format: true, balanced, and refused in one line where the data is wrong."""

import gzip
import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from recipe import WORDS, import_recipe

from arr_coc.data.coco import class_names, photo_examples, presence_examples, read_photos
from arr_coc.data.photo_questions import Photo, ask_presence, photo_scene
from arr_coc.data.pope import read_pope

CATEGORIES = {1: "person", 17: "cat", 18: "dog", 62: "chair", 35: "skis"}
# picture -> (category, x, y, width, height, crowd)
THINGS = {
    1: [(18, 5, 10, 30, 40, 0), (1, 60, 10, 30, 80, 0), (1, 30, 10, 20, 80, 0)],
    2: [(17, 60, 20, 30, 30, 0), (62, 10, 10, 20, 20, 0)],
    3: [(1, 0, 0, 90, 90, 1), (18, 50, 50, 2, 2, 0)],
    4: [(35, 10, 10, 50, 50, 0), (17, 40, 20, 20, 30, 0), (18, 5, 10, 30, 40, 0)],
    5: [],
}


@pytest.fixture(name="folder")
def write_folder(tmp_path):
    images, annotations = [], []
    for number, things in THINGS.items():
        Image.new("RGB", (100, 100), (20 * number, 90, 90)).save(tmp_path / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 100, "height": 100})
        annotations += [
            {"image_id": number, "category_id": category, "bbox": box, "iscrowd": crowd}
            for category, *box, crowd in things
        ]
    categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "instances_all.json").write_text(json.dumps(content))
    return tmp_path


def asked(photo, kind, absent=()):
    scene = photo_scene(photo, random.Random(0), absent)
    wanted = [question for question in scene.questions if question.kind == kind]
    return {question.text: (question.answer, len(question.boxes)) for question in wanted}


def words(questions):
    """Answers by the words that matter, whatever the wording."""
    names = (*CATEGORIES.values(), "people", "dogs", "chairs", "cats")
    return {
        next(word for word in text.rstrip("?").split() if word in names): found for text, found in questions.items()
    }


def test_a_photograph_is_asked_what_its_boxes_answer(folder):
    first, second, third, fourth, empty = read_photos(folder)
    assert words(asked(first, "presence", ("cat", "dog"))) == {
        "dog": ("yes", 1),
        "person": ("yes", 2),
        "cat": ("no", 0),
    }
    assert words(asked(first, "photo_count")) == {"people": ("2", 2), "dogs": ("1", 1)}
    assert [answer for answer, _ in asked(first, "photo_side").values()] == ["dog"]
    assert [answer for answer, _ in asked(second, "photo_side").values()] == ["cat"]
    # a crowd is neither counted nor denied, and what is too small to see is not asked for
    assert asked(third, "presence", ("person",)) == {}
    assert asked(third, "photo_count") == {}
    assert (third.crowds, third.unclear) == ({"person"}, (("person", (0, 0, 90, 90)),))
    assert "are there skis?" in asked(fourth, "presence")
    assert asked(fourth, "photo_side") == {}  # the cat stands in the middle
    assert photo_scene(empty, random.Random(0)).questions == ()


def test_presence_is_balanced_by_class(folder):
    photos = read_photos(folder)
    samples = presence_examples(photos, 0)
    assert [sample.answer for sample in samples] == ["yes", "no"] * 3
    for yes, no in zip(samples[::2], samples[1::2], strict=True):
        assert words({yes.question: 0}).keys() == words({no.question: 0}).keys()
        assert yes.boxes
        assert all(0 <= side <= 1 for box in yes.boxes for side in box)
        assert not no.boxes
    again = presence_examples(photos, 0)
    assert [(one.question, one.answer) for one in samples] == [(one.question, one.answer) for one in again]
    assert Counter(class_names(photos)) == Counter(CATEGORIES.values())
    assert class_names(photos)[0] == "dog"


# Questions and answers of seeds 0 and 1 in our own wordings, on which published figures depend.
OWN = {
    0: [
        ("is there a person?", "yes"),
        ("is there a person in the picture?", "no"),
        ("is there a cat?", "yes"),
        ("is there a cat?", "no"),
        ("can you see a cat?", "yes"),
        ("is there a cat in the picture?", "no"),
    ],
    1: [
        ("is there a person?", "yes"),
        ("is there a person?", "no"),
        ("is there a chair?", "yes"),
        ("is there a chair?", "no"),
        ("are there skis?", "yes"),
        ("are there skis?", "no"),
    ],
}


@pytest.mark.parametrize("seed", OWN)
def test_the_wording_changes_nothing_else(folder, seed):
    photos = read_photos(folder)
    own, pope, people = (presence_examples(photos, seed, wording) for wording in ("own", "pope", "all"))
    assert [(sample.question, sample.answer) for sample in own] == OWN[seed]
    assert [sample.question for sample in presence_examples(photos, seed)] == [question for question, _ in OWN[seed]]
    for first, second, third in zip(own, pope, people, strict=True):
        [name] = words({first.question: 0})
        assert second.question == f"Is there a {name} in the image?"
        assert name in third.question or name.replace("person", "people") in third.question
        for other in (second, third):
            assert (other.id, other.answer, other.boxes, other.kind) == (
                first.id, first.answer, first.boxes, first.kind,
            )  # fmt: skip
            assert other.picture.tobytes() == first.picture.tobytes()
    with pytest.raises(ValueError, match="no wording is named 'loud'; there are own, pope, all"):
        presence_examples(photos, seed, "loud")


def test_people_ask_in_many_ways():
    rng = random.Random(0)
    asked = {ask_presence(rng, "dog", "all") for _ in range(3000)}
    assert {
        "Is there a dog in the image?", "is there a dog in the picture?", "Is there any dog in the photo?",
        "Are there any dogs in this image?", "Does the image contain a dog?", "Does this picture show a dog?",
        "Can you see a dog here?", "is a dog visible?", "Is there a dog? Answer yes or no.",
        "Is there a dog in the image? Please answer yes or no.", "Is there a dog in the image? Answer with yes or no.",
        "Is there a dog in the image?\nAnswer the question using a single word or phrase.",
    } <= asked  # fmt: skip
    assert all("dog" in text and text[-1] in "?." for text in asked)
    assert ask_presence(rng, "orange", "pope") == "Is there an orange in the image?"
    # "is there any skis" is nothing that people ask; POPE does ask for "a skis"
    many = {ask_presence(rng, "skis", "all").split("?")[0].lower() for _ in range(1000)}
    assert {text for text in many if "any skis" in text} == {"are there any skis in this image"}
    assert {text for text in many if "a skis" in text} == {"is there a skis in the image"}


def photo_of(*things, crowds=(), unclear=()):
    return Photo(Path("a.png"), (100, 100), things, frozenset(crowds), tuple(unclear))


def ask(photo, kind, seed=0, wording="all", absent=()):
    scene = photo_scene(photo, random.Random(seed), absent, Image.new("RGB", (100, 100)), wording)
    return [question for question in scene.questions if question.kind == kind]


def test_counts_go_to_four_and_the_common_ones_are_asked_less():
    dogs = [("dog", (10.0 * place, 10.0, 10.0 * place + 8, 40.0)) for place in range(7)]
    for count in range(1, 8):
        own = ask(photo_of(*dogs[:count]), "photo_count", wording="own")
        assert [question.answer for question in own] == [str(count)] * (count <= 6)
        asked = [question for seed in range(60) for question in ask(photo_of(*dogs[:count]), "photo_count", seed)]
        assert {question.answer for question in asked} == ({str(count)} if count <= 4 else set())
        assert len(asked) == 60 * (2 <= count <= 4) or (count == 1 and 5 < len(asked) < 40)
    texts = {question.text for seed in range(200) for question in ask(photo_of(*dogs[:2]), "photo_count", seed)}
    assert {
        "How many dogs are there?", "How many dogs are in the image?", "What is the number of dogs in the picture?",
    } <= texts  # fmt: skip
    none = [question for seed in range(60) for question in ask(photo_of(), "photo_count", seed, absent=("mouse",))]
    assert {question.answer for question in none} == {"0"}
    assert all("mice" in question.text for question in none)
    assert not [one for seed in range(60) for one in ask(photo_of(*dogs[:2], crowds=("dog",)), "photo_count", seed)]


DOG, CAT = ("dog", (60.0, 30.0, 80.0, 70.0)), ("cat", (10.0, 30.0, 30.0, 70.0))


def sides(photo):
    """Answers by side and thing, whatever the wording."""
    found = {}
    for question in ask(photo, "photo_relation"):
        side = next(side for side in ("left of", "right of", "above", "below") if side in question.text)
        found[side, re.search(r"(?:of|above|below) the (\w+)", question.text)[1]] = question.answer
        assert question.boxes[0] in [box for _, box in photo.things]
    return found


def test_what_is_beside_a_thing_is_asked_where_there_is_one_answer():
    both = {("left of", "dog"): "cat", ("right of", "cat"): "dog"}
    assert sides(photo_of(DOG, CAT)) == both
    assert ask(photo_of(DOG, CAT), "photo_relation", wording="own") == []
    assert sides(
        photo_of(*[(name, (top, left, bottom, right)) for name, (left, top, right, bottom) in (DOG, CAT)])
    ) == {
        ("above", "dog"): "cat",
        ("below", "cat"): "dog",
    }
    # two cats are cats too, but then "the cat" is none of them
    assert sides(photo_of(DOG, CAT, ("cat", (5.0, 32.0, 25.0, 72.0)))) == {("left of", "dog"): "cat"}
    texts = {question.text for seed in range(300) for question in ask(photo_of(DOG, CAT), "photo_relation", seed)}
    assert {
        "what is left of the dog?", "What is to the left of the dog?", "which thing is to the right of the cat?",
    } <= texts  # fmt: skip


@pytest.mark.parametrize(
    ("photo", "why"),
    [
        (photo_of(DOG, ("cat", (45.0, 30.0, 65.0, 70.0))), "their centres are too near"),
        (photo_of(DOG, ("cat", (10.0, 80.0, 30.0, 99.0))), "it is not on the same height"),
        (photo_of(DOG, ("cat", (10.0, 65.0, 30.0, 99.0))), "it is hardly on the same height"),
        (photo_of(DOG, CAT, ("cat", (20.0, 30.0, 75.0, 70.0))), "a cat is before the dog"),
        (photo_of(DOG, ("cat", (10.0, 30.0, 14.0, 38.0))), "it is small"),
        (photo_of(DOG, CAT, ("cow", (30.0, 75.0, 50.0, 95.0))), "a cow is almost there"),
        (photo_of(DOG, CAT, ("cow", (36.0, 25.0, 100.0, 100.0))), "a cow is all around"),
        (photo_of(DOG, CAT, DOG), "there are two dogs"),
        (photo_of(DOG, CAT, crowds=("cow",)), "there are cows, nobody knows where"),
        (photo_of(DOG, CAT, crowds=("cow",), unclear=[("cow", (0.0, 30.0, 9.0, 70.0))]), "there is half a cow"),
        (photo_of(DOG, CAT, crowds=("cat",), unclear=[("cat", (0.0, 0.0, 9.0, 9.0))]), "there is a crowd of cats"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_beside_a_thing_is_not_asked_in_doubt(photo, why):
    assert ("left of", "dog") not in sides(photo), why


def test_a_doubtful_thing_far_from_there_is_no_doubt():
    cows = [("cow", (85.0, 30.0, 99.0, 70.0))]
    assert sides(photo_of(DOG, CAT, crowds=("cow",), unclear=cows)) == {("left of", "dog"): "cat"}


@pytest.fixture(scope="module", name="recipe")
def open_recipe():
    return import_recipe("courses", "data")


COLOURS = {"dog": (255, 0, 0), "cat": (0, 255, 0), "cow": (0, 0, 255)}
PLACES = {"cat": (20, 70, 60, 130), "dog": (120, 60, 170, 120), "cow": (130, 150, 180, 185)}


@pytest.fixture(name="painted")
def paint(tmp_path):
    """A cat left of a dog above a cow, in colours that no change of light confuses."""
    picture = Image.new("RGB", (192, 192), (128, 128, 128))
    for name, place in PLACES.items():
        picture.paste(COLOURS[name], place)
    picture.save(tmp_path / "a.png")
    return Photo(tmp_path / "a.png", (192, 192), tuple((name, tuple(map(float, box))) for name, box in PLACES.items()))


def where_painted(picture):
    """Pixels of each thing that is to be seen, by their coordinates (x, y)."""
    pixels = np.asarray(picture).astype(int)
    found = {}
    for name, colour in COLOURS.items():
        channel = int(np.argmax(colour))
        others = np.delete(pixels, channel, axis=2).max(axis=2)
        y, x = np.nonzero(pixels[:, :, channel] - others > 40)
        if len(x):
            found[name] = np.stack([x, y], axis=1)
    return found


def check_painted(photo, picture, rng):
    """Compare all answers with what is to be seen; returns them by side, thing and answer."""
    pixels = where_painted(picture)
    scene = photo_scene(photo, rng, tuple(COLOURS), picture, "all")
    related = []
    for name, box in photo.things:
        x, y = pixels[name].T
        assert np.allclose((x.min(), y.min(), x.max() + 1, y.max() + 1), box, atol=1.5)
    for question in scene.questions:
        names = re.findall("dog|cat|cow", question.text)
        if question.kind == "presence":
            shown = len(pixels.get(names[0], ())) / np.prod(np.subtract(PLACES[names[0]][2:], PLACES[names[0]][:2]))
            assert shown >= 0.49 if question.answer == "yes" else shown == 0
        elif question.kind == "photo_count":
            assert question.answer == str(int(names[0] in pixels))
        elif question.kind == "photo_relation":
            apart = pixels[question.answer].mean(axis=0) - pixels[names[0]].mean(axis=0)
            side = next(side for side in ("left of", "right of", "above", "below") if side in question.text)
            axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[side]
            assert sign * apart[axis] >= 0.19 * picture.size[axis]
            related.append((side, names[0], question.answer))
    return related


def test_answers_follow_flips_and_crops(recipe, painted):
    courses = recipe.courses
    related, gone, cut = Counter(), 0, 0
    for seed in range(100):
        rng = random.Random(seed)
        part, picture = courses.augment(painted, rng)
        related.update(check_painted(part, picture, rng))
        gone += len(where_painted(picture)) < 3
        cut += bool(part.crowds)
    # the cat is on both sides of the dog, which is always above the cow
    for side, name, answer in (("left of", "dog", "cat"), ("right of", "dog", "cat"), ("above", "cow", "dog")):
        assert related[side, name, answer] > 10
    assert not related["below", "cow", "dog"]
    assert gone > 10
    assert cut > 10
    # the check fails where boxes did not follow
    rng = random.Random(
        next(seed for seed in range(9) if len(courses.augment(painted, random.Random(seed))[0].things) > 1)
    )
    part, picture = courses.augment(painted, rng)
    with pytest.raises(AssertionError):
        check_painted(part, picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT), rng)


def test_things_of_a_crowd_stay_where_they_are_when_a_photograph_is_cut(recipe, painted):
    courses = recipe.courses
    crowd = Photo(painted.path, painted.size, painted.things[:1], frozenset(["dog"]), painted.things[1:2])
    for seed in range(30):
        part, picture = courses.augment(crowd, random.Random(seed))
        assert "dog" in part.crowds
        assert "dog" not in dict(part.things)
        x, y = where_painted(picture).get("dog", np.empty((0, 2))).T
        boxes = [box for name, box in part.unclear if name == "dog"]
        assert len(boxes) == bool(len(x))
        for box in boxes:
            assert np.allclose((x.min(), y.min(), x.max() + 1, y.max() + 1), box, atol=1.5)


def test_nothing_that_is_to_be_seen_is_forgotten_when_one_of_two_is_cut(recipe, tmp_path):
    courses = recipe.courses
    boxes = ((10.0, 60.0, 50.0, 110.0), (130.0, 70.0, 180.0, 120.0))
    picture = Image.new("RGB", (192, 192), (128, 128, 128))
    for box in boxes:
        picture.paste(COLOURS["dog"], tuple(map(int, box)))
    picture.save(tmp_path / "two.png")
    photo = Photo(tmp_path / "two.png", (192, 192), tuple(("dog", box) for box in boxes))
    unclear = 0
    for seed in range(40):
        part, shown = courses.augment(photo, random.Random(seed))
        left = np.asarray(shown).copy()
        for _, (x0, y0, x1, y1) in (*part.things, *part.unclear):
            left[round(y0) : round(y1), round(x0) : round(x1)] = 128
        assert where_painted(left) == {}
        unclear += len(part.unclear) == 2  # one is cut, and "the dogs" are not counted by the other
        assert not (part.unclear and part.things)
    assert unclear > 3


def test_four_photographs_in_one_keep_what_is_unclear(recipe, painted):
    courses = recipe.courses
    unclear = 0
    for seed in range(20):
        whole, picture = courses.mosaic([painted], random.Random(seed))
        assert whole.size == picture.size
        assert whole.crowds == {name for name, _ in whole.unclear}
        for name, (left, top, right, bottom) in (*whole.things, *whole.unclear):
            unclear += name in whole.crowds
            if right - left > 8 and bottom - top > 8:
                inside = picture.crop((round(left) + 3, round(top) + 3, round(right) - 3, round(bottom) - 3))
                assert len(where_painted(inside)[name]) == inside.width * inside.height
    assert unclear > 10


def test_examples_of_a_kind_are_one_a_photograph(painted):
    samples = photo_examples([painted] * 20, "photo_relation", 0)
    assert len(samples) == 20
    assert {sample.kind for sample in samples} == {"photo_relation"}
    assert {sample.answer for sample in samples} == {"cat", "dog", "cow"}
    assert all(len(sample.boxes) == 2 and sample.picture.size == (192, 192) for sample in samples)
    again = photo_examples([painted] * 20, "photo_relation", 0)
    assert [sample.question for sample in samples] == [sample.question for sample in again]
    assert photo_examples([painted], "photo_side", 0)[0].answer in ("cat", "dog")
    assert photo_examples([painted], "color", 0) == []


def test_every_word_is_whole_in_the_tokenizer(recipe):
    data = recipe.data
    rng = random.Random(0)
    texts = []
    for name in data.CLASSES:
        texts += [ask_presence(rng, name, "all") for _ in range(60)]
        photo = photo_of((name, DOG[1]), ("bird" if name != "bird" else "cat", CAT[1]))
        for seed in range(8):
            scene = photo_scene(photo, random.Random(f"{name} {seed}"), (), Image.new("RGB", (100, 100)), "all")
            texts += [f"{question.text} {question.answer}" for question in scene.questions]
    words = {word for text in texts for word in re.findall("[a-z]+", text.lower())}
    assert words - WORDS == set()
    assert {"knives", "buses", "toothbrushes", "phrase", "contain"} <= words


def test_pope_keeps_its_wording(tmp_path):
    texts = [
        "Is there a snowboard in the image?",
        "Is there an umbrella in the image?",
        "Is there a skis in the image?",
    ]
    rows = [
        {"question_id": number, "image": "a.jpg", "text": text, "label": "yes"} for number, text in enumerate(texts, 1)
    ]
    (tmp_path / "coco_pope_random.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_pope(tmp_path / "coco_pope_random.json", tmp_path)
    assert [sample.question for sample in read] == texts
    rng = random.Random(0)
    assert [ask_presence(rng, name, "pope") for name in ("snowboard", "umbrella", "skis")] == texts


def test_wrong_data_is_named_in_one_line(folder, tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        read_photos(tmp_path / "nowhere")
    (folder / "3.png").unlink()
    with pytest.raises(ValueError, match=r"3\.png is missing; the annotations name it"):
        read_photos(folder)
    packed = folder / "instances_packed.json.gz"
    packed.write_bytes(gzip.compress(b'{"images": []}'))
    with pytest.raises(ValueError, match="has 2 files named instances"):
        read_photos(folder)
    with pytest.raises(ValueError, match="is not COCO's JSON; it needs images, annotations and categories"):
        read_photos(folder, packed)
    packed.write_bytes(b"no json")
    with pytest.raises(ValueError, match="cannot be read as COCO's JSON"):
        read_photos(folder, packed)


def test_a_pipe_in_the_place_of_annotations_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "instances.json")
    with pytest.raises(ValueError, match="is not a file; give COCO's JSON"):
        read_photos(tmp_path)
