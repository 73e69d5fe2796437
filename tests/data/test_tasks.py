"""Tasks by name: the right items in the same order every time, and one clear line where a file is wrong."""

import gzip
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from arr_coc.data.example import MissingPicture
from arr_coc.data.worlds import list_worlds, make_example, split_seed
from arr_coc.data.worlds import world as worlds
from arr_coc.data.worlds.numbered import WorldExamples
from arr_coc.evaluation.tasks import list_tasks, open_task


def draw(path, size=(40, 20)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "red").save(path)


def write_lines(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def write_photos(folder, name="instances_val.json"):
    """Three photographs: two classes and a crowd, one class with a box that leaves the picture, one that is missing."""
    things = [
        (1, 18, [0, 0, 20, 10], 0),
        (1, 1, [20, 0, 10, 20], 0),
        (1, 18, [30, 10, 10, 10], 0),
        (1, 62, [0, 0, 40, 20], 1),
        (1, 62, [0, 0, 4, 2], 0),
        (2, 1, [30, 0, 20, 20], 0),
        (3, 18, [0, 0, 10, 10], 0),
        (3, 1, [50, 0, 10, 10], 0),
    ]
    content = {
        "images": [{"id": number, "file_name": f"{number}.png", "width": 40, "height": 20} for number in (1, 2, 3)],
        "annotations": [
            {"image_id": image, "category_id": category, "bbox": box, "iscrowd": crowd}
            for image, category, box, crowd in things
        ],
        "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}, {"id": 62, "name": "chair"}],
    }
    for number in (1, 2):
        draw(folder / f"{number}.png")
    (folder / name).write_text(json.dumps(content))


EXPRESSIONS = [
    {"image": "a.png", "expression": "left one", "box": [0, 0, 0.5, 1]},
    {"image": "a.png", "expression": "right one", "box": [0.5, 0, 1, 1]},
    {"image": "b.png", "expression": "the dog", "box": [0.1, 0.2, 0.3, 0.4]},
]


@pytest.mark.parametrize("world", list_worlds())
def test_worlds_are_drawn_from_their_test_seeds(world):
    task = open_task(world, limit=2, size=160)
    assert (task.name, task.metric, len(task)) == (world, "exact", 2)
    for index, item in enumerate(task):
        sample = make_example(world, split_seed("test", index), None, (160, 160))
        assert (item.question, item.answers, item.boxes) == (sample.question, (sample.answer,), sample.boxes)
        assert item.open().mode == "RGB"
        assert np.array_equal(item.open(), sample.picture)


def test_clips_are_drawn_from_their_test_seeds():
    task = open_task("clips/clip_cut", limit=2)
    assert (task.name, task.metric, len(task), task.moving) == ("clips/clip_cut", "exact", 2, True)
    for index, item in enumerate(task):
        sample = make_example("clips", split_seed("test", index), "clip_cut", (256, 256))
        assert (item.question, item.answers, item.id) == (
            *(sample.question, (sample.answer,)),
            f"clips/clip_cut#{index}@256",
        )
        assert all(np.array_equal(*pair) for pair in zip(item.open(), sample.open(), strict=True))
    assert open_task("clips", limit=1, size=130)[0].open()[0].size == (130, 130)
    assert not open_task("scenes", limit=1).moving


def test_a_world_has_one_size_one_kind_and_as_many_items_as_asked_for():
    assert len(open_task("scenes")) == 500
    assert open_task("scenes", limit=1)[0].open().size == (512, 512)
    task = open_task("scenes/count_color", limit=3, size=128)
    assert task.name == "scenes/count_color"
    assert all(item.answers[0].isdigit() for item in task)
    assert [item.id for item in task] == [f"scenes/count_color#{index}@128" for index in range(3)]
    assert task[-1].id == task[2].id
    with pytest.raises(IndexError):
        task[3]


@pytest.mark.parametrize("world", ["lines", "pages", "clips"])
def test_a_size_without_room_for_a_question_is_refused(world):
    with pytest.raises(ValueError, match=f"{world} must have sides of at least 96 pixels, got 64x64"):
        make_example(world, 0, size=(64, 64))
    assert make_example(world, 0, size=(96, 96)).answer


def test_what_is_done_to_a_picture_does_not_reach_the_next_one():
    item = open_task("scenes", limit=1, size=128)[0]
    first = item.open()
    first.paste("black", (0, 0, 128, 128))
    assert not np.array_equal(first, item.open())


def test_a_batch_of_a_world_draws_each_example_once(monkeypatch):
    drawn = []
    draw_scene = worlds.draw_scene
    monkeypatch.setattr(worlds, "draw_scene", lambda *args: drawn.append(args[1]) or draw_scene(*args))
    task = open_task("void", limit=20, size=130)
    batch = [task[number] for number in range(16)]
    pictures = [example.picture for example in batch]
    again = [example.picture for example in batch]
    assert drawn == [split_seed("test", number) for number in range(16)]
    assert all(np.array_equal(one, other) for one, other in zip(pictures, again, strict=True))


@pytest.mark.slow
def test_ids_questions_and_pictures_are_the_same_in_another_process(tmp_path):
    write_photos(tmp_path)
    code = (
        "import sys, zlib; from arr_coc.evaluation.tasks import open_task\n"
        "for spec in sys.argv[1:]:\n"
        "    for item in open_task(spec, limit=2, size=128):\n"
        "        print(item.id, item.question, item.answers, item.boxes, zlib.crc32(item.open().tobytes()))"
    )
    command = [sys.executable, "-c", code, "pages", f"photos:{tmp_path}"]
    runs = [
        subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].splitlines()) == 4


def test_items_can_be_sent_to_other_processes(tmp_path):
    write_photos(tmp_path)
    for spec in ("scenes", f"photos:{tmp_path}"):
        item = open_task(spec, limit=1, size=128)[0]
        copy = pickle.loads(pickle.dumps(item))
        facts = [(one.id, one.question, one.answers, one.boxes) for one in (copy, item)]
        assert facts[0] == facts[1]
        assert np.array_equal(copy.open(), item.open())


def test_photographs_ask_for_classes_one_picture_after_the_other(tmp_path):
    write_photos(tmp_path)
    task = open_task(f"photos:{tmp_path}")
    assert task.metric is None
    # one class of each picture, then the next; no chair, of which there is a crowd; no person outside of the picture
    assert [item.id for item in task] == ["1.png#dog", "2.png#person", "3.png#dog", "1.png#person"]
    assert [item.question for item in task] == ["dog", "person", "dog", "person"]
    assert task[0].boxes == ((0, 0, 0.5, 0.5), (0.75, 0.5, 1, 1))
    assert task[1].boxes == ((0.75, 0, 1, 1),)
    assert {item.answers for item in task} == {()}
    assert task[0].open().size == (40, 20)
    assert [item.id for item in open_task(f"photos:{tmp_path}", limit=2)] == ["1.png#dog", "2.png#person"]


def test_what_was_held_out_is_measured(tmp_path):
    write_photos(tmp_path / "validation", "instances_all.json")
    write_photos(tmp_path / "train", "instances_train.json")
    assert open_task(f"photos:{tmp_path}")[0].open().size == (40, 20)
    write_photos(tmp_path, "instances_train.json")
    (tmp_path / "1.png").unlink()
    assert open_task(f"photos:{tmp_path}")[0].open().size == (40, 20)  # of the folder validation
    with pytest.raises(ValueError, match="not for training; name a file"):
        open_task(f"photos:{tmp_path / 'train'}")
    assert len(open_task(f"photos:{tmp_path / 'train' / 'instances_train.json'}")) == 4


def test_expressions_are_asked_with_their_boxes(tmp_path):
    draw(tmp_path / "a.png")
    write_lines(tmp_path / "train.jsonl", EXPRESSIONS[:1])
    with gzip.open(tmp_path / "val.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in EXPRESSIONS))
    task = open_task(f"refexp:{tmp_path}")
    assert task.metric is None
    assert [(item.id, item.question) for item in task] == [
        ("a.png#0", "left one"),
        ("b.png#0", "the dog"),
        ("a.png#1", "right one"),
    ]
    assert task[1].boxes == ((0.1, 0.2, 0.3, 0.4),)
    assert task[0].open().size == (40, 20)
    write_lines(tmp_path / "validation.jsonl", EXPRESSIONS)
    with pytest.raises(ValueError, match="several files"):
        open_task(f"refexp:{tmp_path}")


def test_json_lines_have_one_answer_or_several(tmp_path):
    draw(tmp_path / "pictures" / "a.png")
    rows = [
        {"image": "pictures/a.png", "question": "what?", "answer": "Größe"},
        "",
        {"image": "pictures/a.png", "question": "how many?", "answers": [2, "two"], "boxes": [[0.5, 0, 1.2, 1]]},
        {"image": "pictures/a.png", "question": "who?", "answer": "he", "id": 7},
    ]
    path = write_lines(tmp_path / "asked.jsonl", rows)
    task = open_task(f"jsonl:{path}")
    assert (task.name, task.metric) == ("jsonl:asked", "exact")
    assert [item.id for item in task] == ["line 1", "line 3", "7"]
    assert [item.answers for item in task] == [("Größe",), ("2", "two"), ("he",)]
    assert [item.boxes for item in task] == [(), ((0.5, 0, 1, 1),), ()]
    assert task[0].open().size == (40, 20)


def test_a_metric_and_a_name_are_chosen_behind_a_question_mark(tmp_path):
    path = write_lines(tmp_path / "what?.jsonl", [{"image": "a", "question": "b", "answer": "c"}])
    task = open_task(f"jsonl:{path}?metric=anls&name=docvqa")
    assert (task.name, task.metric) == ("docvqa", "anls")
    assert open_task(f"jsonl:{path}").metric == "exact"
    assert open_task("scenes?metric=vqa", limit=1).metric == "vqa"


def write_vqa(folder):
    questions = [
        {"question_id": 10, "image_id": 1, "question": "how many?"},
        {"question_id": 11, "image_id": 2, "question": "who?"},
        {"question_id": 12, "image_id": 2, "question": "nobody answered"},
        {"question_id": 13, "image_id": 3, "question": "where?"},
    ]
    annotations = [
        {"question_id": number, "answers": [{"answer": "2", "answer_id": one} for one in range(10)]}
        for number in (13, 11, 10)
    ]
    (folder / "questions.json").write_text(json.dumps({"questions": questions}))
    (folder / "annotations.json").write_text(json.dumps({"annotations": annotations}))
    draw(folder / "pictures" / "COCO_val2014_000000000001.jpg")
    draw(folder / "pictures" / "000000000002.jpg", (30, 30))
    return f"vqav2:{folder / 'questions.json'},{folder / 'annotations.json'},{folder / 'pictures'}"


def test_vqav2_is_read_as_published(tmp_path):
    task = open_task(write_vqa(tmp_path))
    assert (task.name, task.metric) == ("vqav2:questions", "vqa")
    assert [(item.id, item.question) for item in task] == [("10", "how many?"), ("11", "who?"), ("13", "where?")]
    assert task[0].answers == ("2",) * 10
    assert [item.open().size for item in (task[0], task[1])] == [(40, 20), (30, 30)]
    with pytest.raises(MissingPicture, match=r"000000000003.*does not exist"):
        task[2].open()


def test_pope_is_read_as_published(tmp_path):
    draw(tmp_path / "COCO_val2014_000000000001.jpg")
    rows = [
        {"question_id": 1, "image": "COCO_val2014_000000000001.jpg", "text": "Is there a dog?", "label": "yes"},
        {"question_id": 2, "image": "COCO_val2014_000000000001.jpg", "text": "Is there a cat?", "label": "no"},
    ]
    path = write_lines(tmp_path / "coco_pope_random.json", rows)
    task = open_task(f"pope:{path},{tmp_path}")
    assert (task.name, task.metric) == ("pope:coco_pope_random", "yes-no")
    assert [(item.id, item.question, item.answers) for item in task] == [
        ("1", "Is there a dog?", ("yes",)),
        ("2", "Is there a cat?", ("no",)),
    ]
    assert task[0].open().size == (40, 20)


def test_missing_and_broken_pictures_are_found_only_when_they_are_opened(tmp_path):
    draw(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])
    (tmp_path / "empty.png").write_bytes(b"")
    rows = [
        {"image": name, "question": "what?", "answer": "red"}
        for name in ("good.png", "gone.png", "broken.png", "empty.png")
    ]
    task = open_task(f"jsonl:{write_lines(tmp_path / 'asked.jsonl', rows)}")
    assert task[0].open().mode == "RGB"
    for item, reason in zip(list(task)[1:], ("does not exist", "damaged|not a picture", "is empty"), strict=True):
        with pytest.raises(MissingPicture, match=reason):
            item.open()


GOOD = {"image": "a.png", "question": "what?", "answer": "red"}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "nothing to ask"),
        ([GOOD, "{"], "asked.jsonl, line 2 is not JSON"),
        ([GOOD, "[1]"], "line 2 has no 'image'"),
        ([{"image": "a.png", "answer": "red"}], "line 1 has no 'question'"),
        ([{"image": "a.png", "question": "what?"}], "line 1 has no 'answer'"),
        ([GOOD | {"image": 3}], "line 1: 'image' must be a text, got 3"),
        ([GOOD | {"question": " "}], "line 1: 'question' must be a text"),
        ([GOOD | {"answers": []}], "line 1: answers must be texts or numbers, at least one"),
        ([GOOD | {"answer": True}], "line 1: answers must be texts or numbers"),
        ([GOOD | {"answers": "red"}], "line 1: answers must be texts or numbers"),
        ([GOOD | {"boxes": [[10, 20, 30, 40]]}], "line 1: boxes are lists of four shares"),
        ([GOOD | {"boxes": [0, 0, 1, 1]}], "line 1: boxes are lists of four shares"),
        ([GOOD | {"id": "x"}, GOOD | {"id": "x"}], "two items with the id 'x'"),
        ([GOOD, GOOD | {"id": "line 1"}], "two items with the id 'line 1'"),
    ],
)
def test_json_lines_that_are_wrong_are_refused_by_their_number(tmp_path, rows, reason):
    path = write_lines(tmp_path / "asked.jsonl", rows)
    with pytest.raises(ValueError, match=reason) as error:
        open_task(f"jsonl:{path}")
    assert "\n" not in str(error.value)


def test_files_that_are_no_text_are_refused_by_their_name(tmp_path):
    (tmp_path / "asked.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "asked.jsonl.gz").write_bytes(b"no gzip")
    for name in ("asked.jsonl", "asked.jsonl.gz"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            open_task(f"jsonl:{tmp_path / name}")
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            open_task(f"refexp:{tmp_path / name}")


@pytest.mark.parametrize("key", ["question_id", "image", "text", "label"])
def test_pope_without_a_key_is_refused(tmp_path, key):
    row = {"question_id": 1, "image": "a.jpg", "text": "Is there a dog?", "label": "yes"}
    for wrong, reason in (
        ({name: value for name, value in row.items() if name != key}, f"line 1 has no '{key}'"),
        (row | {"label": "maybe"}, "line 1: a label is yes or no, got 'maybe'"),
    ):
        path = write_lines(tmp_path / "pope.json", [wrong])
        with pytest.raises(ValueError, match=reason):
            open_task(f"pope:{path},{tmp_path}")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("questions.json", {"questions": [{"question_id": 10, "question": "?"}]}, "has no 'image_id'"),
        ("questions.json", {"questions": [{"image_id": 10, "question": "?"}]}, "has no 'question_id'"),
        ("questions.json", {"questions": []}, "nothing to ask"),
        ("questions.json", {"annotations": []}, "not VQAv2's JSON with 'questions'"),
        ("questions.json", {"questions": [3]}, "not VQAv2's JSON"),
        ("annotations.json", {"annotations": [{"question_id": 10}]}, "has no 'answers'"),
        ("annotations.json", {"annotations": []}, "nothing to ask"),
    ],
)
def test_vqav2_that_is_wrong_is_refused(tmp_path, name, content, reason):
    spec = write_vqa(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason):
        open_task(spec)


def test_photographs_without_what_is_needed_are_refused(tmp_path):
    write_photos(tmp_path)
    path = tmp_path / "instances_val.json"
    content = json.loads(path.read_text())
    for change, reason in (
        ({"annotations": [{"image_id": 1, "category_id": 1}]}, "without 'bbox'"),
        ({"annotations": []}, "nothing to ask"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=reason):
            open_task(f"photos:{tmp_path}")


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        ("scenery", {}, "no task is named 'scenery'; there are camouflage, .*, pope:FILE,IMAGE_DIR"),
        ("", {}, "no task is named ''"),
        ("photos", {}, "photos is named as photos:DIR"),
        ("vqav2:a,b", {}, r"vqav2 is named as vqav2:.*, got 'vqav2:a,b' with 2 paths"),
        ("jsonl:gone.jsonl", {}, "gone.jsonl is not a file"),
        ("photos:gone", {}, "gone is neither a folder nor a file"),
        ("pope:gone.json,gone", {}, "gone is not a folder of pictures"),
        ("scenes/dance", {}, "scenes asks no 'dance'"),
        ("scenes:", {}, "no task is named 'scenes:'"),
        ("scenes?metric=luck", {}, "no metric is named 'luck'; there are exact, anls, vqa, yes-no"),
        ("scenes?part=test", {}, "options of a task are metric=... and name=..., got 'part=test'"),
        ("photos:gone?metric=exact", {}, "photos has no answers to score"),
        ("scenes", {"limit": 0}, "`limit` must be at least 1, got 0"),
        ("scenes", {"size": 64}, "`size` must be at least 128 pixels a side, got 64"),
        ("scenes", {"limit": 10**9}, "must be at least 0 and below"),
    ],
)
def test_what_names_no_task_is_refused(spec, options, reason):
    with pytest.raises(ValueError, match=reason):
        open_task(spec, **options)


def test_every_task_that_is_listed_is_known():
    for name in list_tasks():
        if ":" not in name:
            assert isinstance(open_task(name, limit=1).examples, WorldExamples)
        else:
            with pytest.raises(ValueError, match=r"is not a f|neither a folder"):
                open_task(name)
