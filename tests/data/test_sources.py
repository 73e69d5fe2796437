"""What `--data` names: examples with places or with answers, upright pictures; bad data is skipped or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from arr_coc.data.boxes import cells_inside, clip_box, is_box
from arr_coc.data.coco import read_class_questions
from arr_coc.data.example import Example, MissingPicture, group_by_picture
from arr_coc.data.gaze_maps import read_map
from arr_coc.data.sources import CROWD, CrowdedScenes, open_answers, open_places, take_readable, world_size
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.data.worlds import world as worlds
from arr_coc.pixels.files import open_picture

TURN_RIGHT = 6  # how a camera marks a picture that was taken upright


def write_turned(path):
    """A picture 64 wide and 32 high as stored, 32 wide and 64 high as meant, red above and blue below."""
    picture = Image.new("RGB", (64, 32), "blue")
    picture.paste("red", (0, 0, 32, 32))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = TURN_RIGHT
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, exif=exif, quality=95)


def is_upright(picture):
    above, below = np.asarray(picture)[8, 16], np.asarray(picture)[56, 16]
    return picture.size == (32, 64) and above[0] > 200 and below[2] > 200


def write_coco(folder):
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 32, "height": 64}],
        "categories": [{"id": 1, "name": "dog"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 32, 32]}],
    }
    (folder / "instances.json").write_text(json.dumps(content))
    return folder


def write_expressions(folder):
    (folder / "e.jsonl").write_text(json.dumps({"image": "a.jpg", "expression": "red", "box": [0, 0, 1, 0.5]}))
    return folder / "e.jsonl"


def write_gaze(folder):
    write_turned(folder / "map.jpg")
    (folder / "g.jsonl").write_text(json.dumps({"image": "a.jpg", "question": "what?", "map": "map.jpg"}))
    return folder / "g.jsonl"


@pytest.mark.parametrize("write", [write_coco, write_expressions, write_gaze])
def test_training_sees_photographs_as_they_were_taken(write, tmp_path):
    write_turned(tmp_path / "a.jpg")
    example = next(open_places(str(write(tmp_path)), 1))
    assert is_upright(example.picture)
    assert np.array_equal(example.picture, open_picture(tmp_path / "a.jpg").image)


def write_vqa(folder):
    asked = {"question_id": 1, "image_id": 42, "question": "What color is it?"}
    answers = {"question_id": 1, "image_id": 42, "multiple_choice_answer": "red", "answers": [{"answer": "red"}]}
    path = folder / "v2_OpenEnded_mscoco_train2014_questions.json"
    path.write_text(json.dumps({"questions": [asked, {**asked, "question_id": 2}]}))
    (folder / "v2_mscoco_train2014_annotations.json").write_text(json.dumps({"annotations": [answers]}))
    write_turned(folder / "train2014" / "COCO_train2014_000000000042.jpg")
    return path


def test_vqa_is_found_by_its_published_names(tmp_path):
    path = write_vqa(tmp_path)
    source = open_answers(str(path), 1, 0)
    assert len(source) == 1  # nobody answered the other
    assert (source[0].question, source[0].answers) == ("What color is it?", ("red",))
    assert is_upright(source[0].picture)
    assert is_upright(take_readable(source, 0).picture)
    Path(tmp_path / "train2014" / "COCO_train2014_000000000042.jpg").unlink()
    with pytest.raises(MissingPicture, match=r"COCO_train2014_000000000042\.jpg does not exist"):
        source[0].open()
    with pytest.raises(ValueError, match="20 pictures in a row cannot be read"):
        take_readable(source, 0)
    Path(tmp_path / "v2_mscoco_train2014_annotations.json").unlink()
    with pytest.raises(ValueError, match=r"v2_mscoco_train2014_annotations\.json is missing"):
        open_answers(str(path), 1, 0)


def test_a_picture_that_cannot_be_read_is_skipped_and_named(caplog):
    def gone():
        raise MissingPicture("b.jpg does not exist")

    picture = Image.new("RGB", (8, 8))
    source = [Example("a", picture.copy), Example("b", gone), Example("c", picture.copy)]
    assert take_readable(source, 1).question == "c"
    assert "b.jpg does not exist" in caplog.text


def test_hard_examples_count_double_and_crowds_are_crowded():
    assert open_answers("camouflage", 5, 0, hard=True)[0].weight == 2.0
    assert open_answers("camouflage", 5, 0)[0].weight == 1.0
    assert open_answers("scenes", 5, 0, hard=True)[0].weight == 1.0
    crowds = open_answers("crowded", 3, 0)
    assert isinstance(crowds, CrowdedScenes)
    assert all(crowds.count_things(crowds.place(number)) >= CROWD for number in range(3))
    assert not all(crowds.count_things(place) >= CROWD for place in range(10))  # ordinary scenes are not
    place = crowds.place(1)
    example = make_example("scenes", split_seed("train", place), None, world_size("scenes", place))
    assert crowds[1].question == example.question


def test_worlds_to_learn_from_are_drawn_once_and_name_what_distracts(monkeypatch):
    drawn = []
    draw_scene = worlds.draw_scene
    monkeypatch.setattr(worlds, "draw_scene", lambda *args: drawn.append(args[1]) or draw_scene(*args))
    examples = [*open_places("camouflage", 4), *open_places("pages", 2)]
    assert [example.picture.mode for example in examples] == ["RGB"] * 6
    assert len(drawn) == 6
    assert all(example.distractors for example in examples[:4])
    assert not any(example.distractors for example in examples[4:])  # there the answer could be


def test_boxes_outside_are_cut_and_classes_without_boxes_never_asked(tmp_path):
    assert clip_box((-1, -1, -0.5, 0.5)) is None
    assert is_box([0, 0.5, 1, 1])
    assert not is_box([0, 0, 32, 32])
    assert cells_inside([(0.5, 0.5, 1, 1)], 2, 2).tolist() == [[False, False], [False, True]]
    Image.new("RGB", (100, 50)).save(tmp_path / "a.png")
    boxes = [(50, 10, 100, 100), (200, 0, 10, 10)]
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 100, "height": 50}],
        "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}, {"id": 3, "name": "cow"}],
        "annotations": [{"image_id": 1, "category_id": 1 + n, "bbox": box} for n, box in enumerate(boxes)],
    }
    (tmp_path / "instances.json").write_text(json.dumps(content))
    examples = list(read_class_questions(tmp_path))
    [present] = [example for example in examples if example.boxes]
    assert present.boxes == ((0.5, 0.2, 1.0, 1.0),)
    assert "dog" in present.question
    assert not any("cow" in example.question for example in examples)
    assert [len(group) for group in group_by_picture(examples)] == [len(examples)]


def test_a_map_is_gray_and_its_most_looked_at_cell_is_one(tmp_path):
    looked = Image.new("L", (4, 2), 40)
    looked.paste(80, (0, 0, 2, 1))
    looked.save(tmp_path / "map.png")
    assert read_map(tmp_path / "map.png", 2, 2).tolist() == [[1.0, 0.5], [0.5, 0.5]]
    with pytest.raises(MissingPicture, match=r"gone\.png does not exist"):
        read_map(tmp_path / "gone.png", 2, 2)


def test_a_clip_is_not_one_picture():
    clip = Example("what moves?", lambda: [Image.new("RGB", (8, 8))] * 3, "clip 1")
    with pytest.raises(ValueError, match="'clip 1' is a clip of 3 frames, not one picture"):
        clip.picture  # noqa: B018
    assert clip.answer == ""


@pytest.mark.parametrize("clip", [False, True])
def test_what_is_held_is_read_once_and_given_as_copies(clip):
    read = []

    def open_it():
        read.append(1)
        pictures = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
        return pictures if clip else pictures[0]

    held = Example("what?", open_it, fps=4.0).hold()
    assert held.fps == 4.0
    for _ in range(2):
        opened = held.open()
        frames = opened if clip else [opened]
        assert [frame.getpixel((0, 0)) for frame in frames] == [(255, 0, 0), (0, 0, 255)][: 1 + clip]
        frames[0].paste("black", (0, 0, 8, 8))
    assert len(read) == 1


@pytest.mark.parametrize("name", ["clips", "clips/clip_cut"])
def test_stages_learn_from_no_clips(name):
    for open_source in (lambda: open_places(name, 1), lambda: open_answers(name, 1, 0)):
        with pytest.raises(ValueError, match=r"^'clips' draws clips, and stages learn from pictures; use camouflage,"):
            open_source()
