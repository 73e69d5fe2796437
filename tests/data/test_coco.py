"""Questions about photographs in COCO's format: true, balanced, and refused in one line where the data is wrong."""

import gzip
import json
import os
import random
from collections import Counter

import pytest
from PIL import Image

from arr_coc.data.coco import class_names, photo_scene, presence_examples, read_photos

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
