"""`arr-coc ask --batch`: a file of questions, stopped and continued, with bad lines among them."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partialmethod
from pathlib import Path

import pytest
from tiny_directory import photo, write_checkpoint
from typer.testing import CliRunner

import arr_coc
from arr_coc import ARRCOCQwen
from arr_coc.cli import app
from arr_coc.inference import batches
from arr_coc.runtime import atomic_files

ROWS = [
    {"image": "pictures/wide.png", "question": "what color is it?", "answer": "not read"},
    {"image": ["pictures/wide.png", "pictures/tall.png"], "question": "which is the dog?", "id": "two"},
    {"question": "who are you?"},
    {"image": "pictures/tall.png", "question": "what is on the left?", "id": 4},
    {"image": "pictures/square.png", "question": "what?"},
]
IDS = ["line 1", "two", "line 3", "4", "line 5"]


@pytest.fixture(scope="module", name="checkpoint")
def make_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    return directory


@pytest.fixture(autouse=True)
def inside_a_folder_of_questions(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    for name, size in (("wide", (96, 48)), ("tall", (40, 88)), ("square", (64, 64))):
        photo(*size).save(folder / "pictures" / f"{name}.png")
    write_rows(folder / "questions.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    # short answers: a random model does not stop by itself
    monkeypatch.setattr(ARRCOCQwen, "answer", partialmethod(ARRCOCQwen.answer, max_new_tokens=6))
    monkeypatch.setattr(ARRCOCQwen, "answer_many", partialmethod(ARRCOCQwen.answer_many, max_new_tokens=6))


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["ask", *map(str, arguments)])


@pytest.fixture(name="ask")
def make_ask(checkpoint):
    def ask(*arguments, file="data/questions.jsonl"):
        return invoke("--batch", file, "--model", checkpoint, "--budget", "9", *arguments)

    return ask


@pytest.mark.slow
def test_every_line_is_answered_as_if_it_were_asked_alone(ask, checkpoint, tmp_path):
    result = ask("--out", "answers.jsonl", "--batch-size", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "answers   answers.jsonl (5 of 5 questions)\n"
    rows = read_rows(tmp_path / "answers.jsonl")
    assert [row["id"] for row in rows] == IDS
    assert [(row["image"], row["question"]) for row in rows] == [(r.get("image"), r["question"]) for r in ROWS]
    for place, name in ((0, "wide"), (3, "tall"), (4, "square")):
        picture = tmp_path / "data" / "pictures" / f"{name}.png"
        alone = invoke(picture, ROWS[place]["question"], "--model", checkpoint, "--budget", "9", "--json")
        facts = json.loads(alone.stdout)
        shared = set(facts) & set(rows[place])
        assert shared >= {"answer", "tokens", "strategy", "reason", "budget", "mode", "selector"}
        assert {key: facts[key] for key in shared} == {key: rows[place][key] for key in shared}
    assert [row["tokens"]["used"] for row in rows] == [9, 18, 0, 9, 9]
    assert len({row["answer"] for row in rows}) > 1


def test_without_out_the_answers_are_the_output(ask):
    result = ask("--mode", "saccade")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["id"] for row in rows] == IDS
    assert {row["mode"] for row in rows} == {"saccade"}


@pytest.mark.parametrize("left", ["0 lines", "1 line", "3 lines", "half a line", "all"])
def test_a_killed_run_continues_to_the_same_file(ask, tmp_path, left, monkeypatch):
    out = tmp_path / "answers.jsonl"
    asked = []
    answer_batch = batches._answer_batch

    def record(conversations, *rest):
        asked.append(len(conversations))
        return answer_batch(conversations, *rest)

    monkeypatch.setattr(batches, "_answer_batch", record)
    assert ask("--out", out, "--batch-size", 2).exit_code == 0
    assert asked == [2, 2, 1]
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept, expected = {
        "0 lines": (b"", [2, 2, 1]),
        "1 line": (lines[0], [2, 2, 1]),
        "3 lines": (b"".join(lines[:3]), [2, 1]),
        "half a line": (b"".join(lines[:4]) + lines[4][:30], [1]),
        "all": (whole, []),
    }[left]
    out.write_bytes(kept)
    asked.clear()
    assert ask("--out", out, "--batch-size", 2).exit_code == 0
    assert out.read_bytes() == whole
    assert asked == expected


def test_stopping_leaves_whole_lines_and_says_how_to_go_on(ask, tmp_path, monkeypatch):
    assert ask("--out", "whole.jsonl").exit_code == 0
    written, append = [], atomic_files.append_lines

    def stop_after_two(path, lines):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        append(path, lines)

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "append_lines", stop_after_two)
        result = ask("--out", "answers.jsonl")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "stopped; the same command continues answers.jsonl"
    assert len(read_rows(tmp_path / "answers.jsonl")) == 2
    assert ask("--out", "answers.jsonl").exit_code == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_a_real_process_stops_at_once_and_in_order(checkpoint, tmp_path):
    write_rows(tmp_path / "data" / "questions.jsonl", [{**ROWS[number % 2], "id": number} for number in range(40)])
    command = [sys.executable, "-m", "arr_coc", "ask", "--batch", "data/questions.jsonl", "--batch-size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(arr_coc.__file__).parents[1])}
    out = tmp_path / "answers.jsonl"
    process = subprocess.Popen(
        [*command, "--model", checkpoint, "--out", out], env=environment, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    while process.poll() is None and not out.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1] == f"stopped; the same command continues {out}"
    assert "Traceback" not in said
    assert [row["id"] for row in read_rows(out)] == [str(number) for number in range(len(read_rows(out)))]
    assert len(read_rows(out)) < 40


def test_a_picture_that_cannot_be_read_costs_its_own_line_only(ask, tmp_path):
    assert ask("--out", "whole.jsonl").exit_code == 0
    tall = tmp_path / "data" / "pictures" / "tall.png"
    saved = tall.read_bytes()
    tall.write_bytes(saved[:40])
    result = ask("--out", "answers.jsonl", "--batch-size", "2")
    assert result.exit_code == 1
    assert result.stdout == "answers   answers.jsonl (3 of 5 questions)\n"
    assert result.stderr.splitlines()[-1] == (
        "2 of 5 questions could not be asked: their lines have an error; to ask them again, remove these lines"
    )
    rows, whole = (read_rows(tmp_path / name) for name in ("answers.jsonl", "whole.jsonl"))
    assert ["error" in row for row in rows] == [False, True, False, True, False]
    assert "tall.png is not a picture in a known format" in rows[1]["error"]
    assert [row["answer"] for row in rows[::2]] == [row["answer"] for row in whole[::2]]
    assert ask("--out", "answers.jsonl").exit_code == 1  # they stay failed until their lines are removed
    tall.write_bytes(saved)
    write_rows(tmp_path / "answers.jsonl", rows[::2])
    assert ask("--out", "answers.jsonl").exit_code == 0
    # the file has the order of answering
    assert read_rows(tmp_path / "answers.jsonl") == [*whole[::2], *whole[1::2]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no question; give one a line"),
        ('{"question": "what?"}\nno json\n', "line 2 is not JSON"),
        ('{"image": "a.png"}\n', "line 1 has no 'question'"),
        ('\n{"question": " "}\n', "line 2: 'question' must be a text"),
        ('{"image": 3, "question": "what?"}\n', "line 1: 'image' must be a path or a list of paths, got 3"),
        ('{"question": "a", "id": 1}\n{"question": "b", "id": "1"}\n', "line 2: the id '1' was there before"),
    ],
)
def test_mistakes_in_the_file_are_one_line_with_their_number(ask, tmp_path, content, says):
    (tmp_path / "wrong.jsonl").write_text(content)
    result = ask("--out", "answers.jsonl", file="wrong.jsonl")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: wrong.jsonl")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--out", "data/questions.jsonl"), "is the file of questions itself; give another --out"),
        (("--out", "data"), "cannot be written: it is a folder"),
        (("--out", "nowhere/answers.jsonl"), "cannot be written: its folder is missing"),
        (("--out", "notes.txt"), "notes.txt is damaged"),
        (("--out", "note.txt"), "note.txt is damaged (a line is no JSON object); remove it, or give another --out"),
        (("--out", "other.jsonl"), "answers other questions than data/questions.jsonl (id 'line 1')"),
        (("--overlay", "seen.png"), "drop --overlay"),
        (("--json",), "drop --json"),
        (("picture.png", "what?"), "drop IMAGE"),
        (("--device", "tpu"), "`device` must be cpu or cuda, got 'tpu'"),
        (("--selector", "oracle"), "oracle must be told where to look"),
    ],
)
def test_mistakes_in_the_command_are_one_line_and_change_no_file(ask, tmp_path, arguments, says):
    (tmp_path / "notes.txt").write_text("dear diary\nyesterday")
    (tmp_path / "note.txt").write_text("one line without an end")
    write_rows(tmp_path / "other.jsonl", [{"id": "line 1", "question": "another?", "answer": "no"}])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = ask(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_answers_of_other_settings_are_not_mixed(ask, tmp_path):
    assert ask("--out", "answers.jsonl").exit_code == 0
    result = ask("--out", "answers.jsonl", "--mode", "full")
    assert result.exit_code == 2
    assert "answers.jsonl was started with selector 'arr-coc-untrained', got None" in result.stderr
    result = ask("--out", "answers.jsonl", "--introspect", "on")
    assert result.exit_code == 2
    assert "answers.jsonl was started with introspect None, got 'on'" in result.stderr


def test_a_question_needs_a_picture_or_a_file():
    assert "IMAGE is missing; give a picture file and a question" in invoke().stderr
    assert "QUESTION is missing" in invoke("data/pictures/wide.png").stderr
    assert "--out belongs to --batch" in invoke("data/pictures/wide.png", "what?", "--out", "a.jsonl").stderr
