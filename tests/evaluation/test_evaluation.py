"""`arr-coc eval` and `arr-coc bench`: the same report whatever happens, honest sums, and mistakes in one line."""

import base64
import importlib.util
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from arr_coc import ARRCOCConfig, ARRCOCLayer, VisualQuery, create_selector, list_selectors
from arr_coc.cli import app
from arr_coc.data.boxes import cells_inside
from arr_coc.data.example import Example
from arr_coc.data.worlds import make_example, split_seed
from arr_coc.drawing.charts import line_chart
from arr_coc.drawing.origin import is_current, name_origin
from arr_coc.evaluation.answers import LONGEST_ANSWER, answer_examples, show_example
from arr_coc.evaluation.contenders import OURS, known_contenders, open_contenders, parse_budgets
from arr_coc.evaluation.records import MISSING, RECORDS, WORK, Record, Store
from arr_coc.evaluation.report.sections import make_sections, write_budget
from arr_coc.evaluation.report.summary import SUCCESSES, attribute, find_best, summarise
from arr_coc.evaluation.report.write import draw_charts, find_worst, write_report
from arr_coc.evaluation.run import Opened, measure_looking, read_bits, run_contender, share_encodings
from arr_coc.evaluation.tasks import Task, open_task
from arr_coc.evaluation.timing import time_per_token
from arr_coc.families.family import open_family
from arr_coc.inference.load import load_model, load_processor, load_selector
from arr_coc.runtime.machine import find_revision
from arr_coc.selectors.rules import OracleSelector

ROOT = Path(__file__).parents[2]
SELECTORS = "arr-coc,downsample,visionzip,fastv,oracle"
ARGUMENTS = [
    *("eval", "--tasks", "scenes", "--tasks", "camouflage", "--selectors", SELECTORS, "--budgets", "0.25,16"),
    *("--limit", "3", "--size", "256", "--batch", "2"),
]


def call(*arguments):
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module", name="finished")
def make_finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "out"
    result = call(*ARGUMENTS, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_question_is_asked_of_every_selector_at_every_budget(finished):
    rows = read_lines(finished / RECORDS)
    by = {(row["selector"], row["budget"]) for row in rows}
    others = SELECTORS.split(",")
    assert by == {("full", "full"), *((name, budget) for name in others for budget in ("0.25", "16"))}
    assert len(rows) == 2 * 3 * len(by)
    for row in rows:
        assert row["full"] == 64
        most = {"full": 64, "0.25": 16, "16": 16}[row["budget"]]
        assert 0 < row["tokens"] <= most
        assert row["tokens"] == most or row["selector"] == "downsample"
        assert row["encoded"] == (row["tokens"] if row["selector"] == "downsample" else 64)
        assert row["processed"] == row["tokens"] or (
            row["selector"] == "fastv" and row["tokens"] < row["processed"] < 64
        )
        assert 0 <= row["score"] <= 1
        if row["selector"] not in ("downsample",):
            assert len(read_bits(row["kept"], row["grid"]).flatten()) == 64
            assert read_bits(row["kept"], row["grid"]).sum() == row["tokens"]
            assert 0 <= row.get("coverage", 0) <= 1
        assert "overlap" not in row or row["selector"] == "arr-coc"
    assert sum("coverage" in row for row in rows) > 10  # not where nothing had to be looked at
    assert sum("overlap" in row for row in rows) > 2


@pytest.mark.slow
def test_answers_are_those_of_asking_one_by_one(finished):
    model, processor = load_model("embedded", dtype=torch.float32), load_processor("embedded")
    samples = [make_example("scenes", split_seed("test", number), None, (256, 256)) for number in range(3)]
    rows = [row for row in read_lines(finished / RECORDS) if row["task"] == "scenes" and row["budget"] == "0.25"]
    for name, selector in (
        ("arr-coc", load_selector("arr-coc", model)),
        ("downsample", create_selector("downsample")),
    ):
        expected = answer_examples(model, processor, samples, selector, 0.25, batch_size=1)
        assert [row["answer"] for row in rows if row["selector"] == name] == expected


@pytest.mark.slow
def test_times_have_every_stage_and_the_cache_is_as_long_as_what_was_read(finished):
    rows = {(row["selector"], row["budget"]): row for row in read_lines(finished / "times.jsonl")}
    assert ("oracle", "16") not in rows
    for row in rows.values():
        parts = row["encode_ms"] + row["select_ms"] + row["prefill_ms"]
        assert row["first_token_ms"] == pytest.approx(parts, rel=0.5)
        assert row["first_token_ms"] > 0
    full, ours, fast = (rows[key]["kv_bytes"] for key in (("full", "full"), ("arr-coc", "16"), ("fastv", "16")))
    assert ours < fast < full


@pytest.mark.slow
def test_work_is_counted_for_every_row_also_where_times_are_not(finished):
    rows = {(row["selector"], row["budget"]): row for row in read_lines(finished / WORK)}
    assert rows.keys() == {(row["selector"], row["budget"]) for row in read_lines(finished / RECORDS)}
    full = rows["full", "full"]
    ours, small, fast = (rows[name, "16"] for name in ("arr-coc", "downsample", "fastv"))
    assert small["encoder_gmacs"] < ours["encoder_gmacs"] == full["encoder_gmacs"]
    assert ours["language_gmacs"] < fast["language_gmacs"] < full["language_gmacs"]
    assert full["choosing_gmacs"] == 0 < ours["choosing_gmacs"]


@pytest.mark.slow
def test_the_report_needs_nothing_else_and_says_what_it_stands_on(finished):
    page, text = (finished / "report.html").read_text(), (finished / "report.md").read_text()
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert page.count("<svg") == 3
    for words in ("At a glance", "Against arr-coc", "Task scenes", "Looking, camouflage", "Work", "Cost", "holds to"):
        assert words in page or words in text
        assert words in text
    assert "Command: `arr-coc" in text
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["items"] == {"camouflage": 3, "scenes": 3}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0.3, 0.8])
def test_a_run_that_was_killed_goes_on_and_reports_the_same(finished, tmp_path, cut):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    whole = (out / RECORDS).read_bytes()
    (out / RECORDS).write_bytes(whole[: int(cut * len(whole))])  # in the middle of a line
    work = (out / WORK).read_bytes()
    (out / WORK).write_bytes(work[: int(cut * len(work))])
    for name in ("report.html", "report.md", "summary.json"):
        (out / name).unlink()
    result = call(*ARGUMENTS, "--out", out)
    assert result.exit_code == 0, result.output
    key = lambda row: (row["task"], row["item"], row["selector"], row["budget"])  # noqa: E731
    assert sorted(read_lines(out / RECORDS), key=key) == sorted(read_lines(finished / RECORDS), key=key)
    assert (out / "report.md").read_text() == (finished / "report.md").read_text()


@pytest.mark.slow
def test_a_finished_run_asks_nothing_again(finished, monkeypatch, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    monkeypatch.setattr("arr_coc.evaluation.run.run_contender", lambda *_: pytest.fail("asked again"))
    monkeypatch.setattr("arr_coc.evaluation.timing.time_contenders", lambda *_: pytest.fail("timed again"))
    monkeypatch.setattr("arr_coc.evaluation.arithmetic.count_work", lambda *_: pytest.fail("counted again"))
    assert call(*ARGUMENTS, "--out", out).exit_code == 0


@pytest.mark.slow
def test_a_directory_that_was_begun_otherwise_is_refused(finished):
    result = call(*ARGUMENTS[:-2], "--batch", "3", "--out", finished)
    assert result.exit_code == 2
    assert "was started with batch 2, got 3; use the same value, or give another --out" in result.stderr


def picture(path, colour=(200, 0, 0)):
    Image.new("RGB", (96, 96), colour).save(path)


def write_questions(folder, *names):
    lines = [{"image": name, "question": "what color is the circle?", "answer": "red"} for name in names]
    (folder / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"jsonl:{folder / 'q.jsonl'}"


def test_a_missing_picture_is_counted_and_the_rest_is_measured(tmp_path):
    picture(tmp_path / "here.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    spec = write_questions(tmp_path, "here.png", "gone.png", "broken.png")
    out = tmp_path / "out"
    result = call("eval", "--tasks", spec, "--selectors", "grid", "--budgets", "4", "--no-times", "--out", out)
    assert result.exit_code == 0, result.output
    assert "2 pictures could not be read and are left out" in result.stderr
    assert len(read_lines(out / MISSING)) == 2
    assert len(read_lines(out / RECORDS)) == 2
    assert "could not be read and are left out" in (out / "report.md").read_text()


def test_nothing_readable_never_becomes_a_report(tmp_path):
    spec, out = write_questions(tmp_path, "gone.png"), tmp_path / "out"
    result = call("eval", "--tasks", spec, "--selectors", "grid", "--budgets", "4", "--no-times", "--out", out)
    assert result.exit_code == 2
    assert "there is nothing to report" in result.stderr
    assert not (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--selectors", "visionzap"), "no selector is named 'visionzap'; use arr-coc,"),
        (("--tasks", "scene"), "scenes"),
        (("--budgets", "0.25,x"), "`budgets` must be shares such as 0.25, numbers such as 64, or auto, got 'x'"),
        (("--budgets", "0"), "at least 1 token"),
        (("--budgets", ","), "`budgets` is empty"),
        (("--selectors", ","), "`--selectors` is empty"),
        (("--selectors", "visionzip@saccade"), "visionzip has no saccade mode, got 'visionzip@saccade'"),
        (("--dtype", "int8"), "`--dtype` must be float32, bfloat16 or float16, got 'int8'"),
        (("--tasks", "scenes", "--tasks", "scenes"), "a task was named twice"),
        (("--device", "gpu"), "`device` must be cpu or cuda, got 'gpu'"),
        (("--tasks", "clips", "--selectors", "arr-coc@saccade"), "arr-coc@saccade reads no clips; leave it out"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path):
    result = call("eval", "--limit", "1", *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert said in lines[0]
    assert not (tmp_path / "out" / "report.html").exists()


def test_all_is_every_registered_selector():
    assert set(known_contenders()) == {*list_selectors(), "arr-coc", "arr-coc@saccade", "arr-coc@wrong"}
    forms = {"arr-coc-untrained@saccade", "arr-coc-untrained@wrong"}
    assert set(known_contenders(embedded=False)) == {*list_selectors(), *forms}
    assert parse_budgets("0.5,64") == ["0.5", "64"]
    assert write_budget("0.125") == "12.5 %"


def test_shared_encodings_give_what_encoding_alone_gives():
    opened = Opened(load_model("embedded", dtype=torch.float32), load_processor("embedded"))
    task = open_task("scenes", 2, 256)
    inputs = opened.ask([item.question for item in task], [item.open() for item in task])
    contenders = open_contenders(["visionzip", "grid", "downsample"], opened.model)
    family, calls = open_family(opened.model), []
    plain = type(family).run_encoder

    def counted(self, *arguments):
        calls.append(1)
        return plain(self, *arguments)

    family.run_encoder = counted.__get__(family)
    alone = {one.name: run_contender(opened, family, inputs, one, "0.25", True) for one in contenders}
    calls.clear()
    with share_encodings(family, contenders):
        shared = {one.name: run_contender(opened, family, inputs, one, "0.25", True) for one in contenders}
    assert len(calls) == 2  # the picture, and the smaller one of `downsample`
    for name, one in alone.items():
        assert torch.equal(one.generated, shared[name].generated)
        assert one.used == shared[name].used
    assert "encode" not in vars(family)


# clips


@pytest.fixture(name="mixed")
def draw_mixed():
    """A clip, a picture, and a shorter clip."""
    clips = [
        make_example("clips", split_seed("test", seed), kind, (128, 128))
        for seed, kind in ((1, "clip_cut"), (4, "clip_direction"))
    ]
    assert len(clips[0].open()) != len(clips[1].open())
    return [clips[0], make_example("scenes", 3, "color", (128, 160)), clips[1]]


class Telling(OracleSelector):
    """An oracle that tells which boxes it had for which picture or clip."""

    def __init__(self):
        super().__init__()
        self.told = []

    def select(self, queries, budget=None):
        selections = super().select(queries, budget)
        self.told += [(query.grid, boxes) for query, boxes in zip(queries, self.boxes, strict=True)]
        return selections


def test_clips_and_pictures_are_answered_together_as_one_by_one(mixed):
    model, processor = load_model("embedded", dtype=torch.float32), load_processor("embedded")
    selector = Telling()
    together = answer_examples(model, processor, mixed, selector, 0.5, batch_size=3, max_new_tokens=4)
    assert together == answer_examples(model, processor, mixed, selector, 0.5, batch_size=1, max_new_tokens=4)
    grids = [(len(mixed[0].open()) // 2, 4, 4), (1, 5, 4), (len(mixed[2].open()) // 2, 4, 4)]
    wanted = [(grid, list(example.boxes)) for grid, example in zip(grids, mixed, strict=True)]
    assert selector.told == [wanted[1], wanted[0], wanted[2], *wanted]  # selectors see pictures before clips
    with pytest.raises(ValueError, match="mode 'saccade' takes still pictures only; for clips use mode 'prune'"):
        answer_examples(model, processor, mixed, load_selector("arr-coc", model), mode="saccade")


def test_the_longest_answers_have_room():
    tokenizer = load_processor("embedded").tokenizer
    lines = [make_example("lines", split_seed("test", seed), None, (256, 256)).answer for seed in range(40)]
    longest = max(len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in lines)
    assert 16 < longest + 1 < LONGEST_ANSWER  # and the token that ends it


def test_a_clip_is_shown_at_its_own_pace():
    frames = [Image.new("RGB", (96, 96), color) for color in ("red", "blue")] * 4
    opened = Opened(None, load_processor("embedded"))
    stamps = {}
    for fps in (2.0, 8.0):
        part = show_example(Example("what?", frames.copy, fps=fps))
        assert part == {"type": "video", "video": frames, "fps": fps}
        opened = replace(opened, model=SimpleNamespace(device="cpu", dtype=torch.float32))
        stamps[fps] = opened.ask(["what?"], [part])["input_ids"].tolist()
    assert stamps[2.0] != stamps[8.0]


def test_boxes_of_a_clip_hold_in_all_its_frames():
    item = Example("what?", list, boxes=((0.0, 0.0, 0.5, 0.5),))
    kept = lambda *cells: ((2, 2, 2), torch.tensor(cells).numpy())  # noqa: E731
    assert measure_looking(item, kept(0, 4), None) == {"precision": 1.0, "coverage": 1.0, "seen": 1.0}
    assert measure_looking(item, kept(0, 7), None) == {"precision": 0.5, "coverage": 0.5, "seen": 1.0}
    assert measure_looking(item, kept(3, 7), None) == {"precision": 0.0, "coverage": 0.0, "seen": 0.0}


@pytest.mark.slow
def test_clips_are_evaluated_and_drawn(tmp_path):
    out = tmp_path / "out"
    arguments = ("--selectors", "arr-coc,random,oracle", "--budgets", "0.25", "--limit", "3", "--batch", "2")
    result = call("eval", "--tasks", "clips", *arguments, "--size", "128", "--out", out)
    assert result.exit_code == 0, result.output
    rows = read_lines(out / RECORDS)
    frames = {item.id: len(item.open()) for item in open_task("clips", 3, 128)}
    assert len(rows) == 3 * 4
    for row in rows:
        assert row["grid"] == [frames[row["item"]] // 2, 4, 4]
        assert row["full"] == frames[row["item"]] // 2 * 16
        assert row["tokens"] == (row["full"] if row["selector"] == "full" else row["full"] // 4)
        assert read_bits(row["kept"], row["grid"]).sum() == row["tokens"]
    assert {row["selector"] for row in read_lines(out / "times.jsonl")} == {"full", "arr-coc", "random"}
    assert "cells kept by random" in (out / "report.html").read_text()


# what is said of records


def record(selector, item, score, budget="0.25", task="t", **facts):
    facts = {"tokens": 25 if budget != "full" else 100, "full": 100, **facts}
    return Record(task, str(item), selector, budget, score=score, answer="x", **facts)


def test_sums_are_those_made_by_hand():
    records = [record("full", n, 1.0, "full") for n in range(400)]
    records += [record(OURS, n, float(n < 398)) for n in range(400)]
    records += [record("downsample", n, float(n < 100)) for n in range(400)]
    times = [
        {"selector": "full", "budget": "full", "first_token_ms": 10.0, "of_full": 1.0, "select_ms": 1.0},
        {"selector": OURS, "budget": "0.25", "first_token_ms": 5.0, "of_full": 0.5, "select_ms": 2.0},
        {"selector": "visionzip", "budget": "0.25", "first_token_ms": 5.0, "of_full": 0.5, "select_ms": 1.0},
    ]
    summary = summarise(records, times, ["full", OURS, "downsample"], ["0.25"])
    rows = {row["selector"]: row for row in summary["rows"]}
    assert rows[OURS]["accuracy"] == 0.995
    assert rows["downsample"]["minus_arr-coc"][0] == pytest.approx(-0.745)
    assert rows["downsample"]["minus_arr-coc"][2] < 0
    assert rows[OURS]["successes"] == list(SUCCESSES)  # two of 400 are certainly less than 0.02
    assert [rows[name].get("verdict") for name in ("full", OURS, "downsample")] == [None, "not worse", "falls short"]
    assert rows["downsample"]["successes"] == []
    assert summary["gives_in"] == {OURS: 0.25, "downsample": None}
    assert summary["select_percentile"] == {"0.25": 1.0}
    assert summary["tasks"]["t"]["best"] == {"0.25": [OURS]}


@pytest.mark.parametrize(
    ("questions", "lost", "verdict"),
    [
        (8, 3, "too few to tell"),  # 0.625 against 1.000
        (8, 0, "too few to tell"),
        (99, 0, "too few to tell"),
        (100, 0, "not worse"),
        (1000, 8, "not worse"),  # 0.008, the interval reaches 0.014
        (1000, 15, "too few to tell"),  # 0.015, but the interval reaches 0.023
        (1000, 25, "too few to tell"),
        (1000, 40, "falls short"),  # 0.040, the interval begins at 0.028
    ],
)
def test_a_success_needs_enough_questions_and_at_most_a_small_loss(questions, lost, verdict):
    records = [record("full", n, 1.0, "full") for n in range(questions)]
    records += [record(OURS, n, float(n >= lost)) for n in range(questions)]
    records += [record("downsample", n, 0.0) for n in range(questions)]
    times = [{"selector": OURS, "budget": "0.25", "of_full": 0.5, "select_ms": 1.0}]
    summary = summarise(records, times, ["full", OURS, "downsample"], ["0.25"])
    [row] = [row for row in summary["rows"] if row["selector"] == OURS]
    assert (row["verdict"], row["questions"]) == (verdict, questions)
    claimed = SUCCESSES[:2] if verdict == "not worse" else ()
    assert row["successes"] == [*claimed, *(["better"] if questions >= 100 else [])]
    summary["rows"] = [{**row, "times": {}} for row in summary["rows"]]
    [glance] = [section for section in make_sections(summary, ["0.25"]) if section.title == "At a glance"]
    [shown] = [cells[-1] for cells in glance.rows if OURS in cells[0]]
    assert (verdict in shown) == (verdict != "not worse")
    assert ("fewer tokens" in shown) == (verdict == "not worse")


def test_all_that_tie_as_shown_are_bold():
    scores = {OURS: 0.9, "grid": 0.9, "random": 0.9004, "centre": 0.899}
    records = [record("full", n, 0.9, "full") for n in range(4)]
    records += [record(name, n, score) for name, score in scores.items() for n in range(4)]
    summary = summarise(records, [], ["full", *scores], ["0.25"])
    for section in make_sections(summary, ["0.25"])[:3:2]:  # at a glance, and the task
        bold = {row[0].strip("*"): row[1].startswith("**") for row in section.rows}
        assert section.title in ("At a glance", "Task t")
        assert bold == {"full": False, OURS: True, "grid": True, "random": True, "centre": False}, section.title
    assert find_best({"full": 1.0, "oracle": 1.0, "grid": 0.5, "linear": None}) == ["grid"]
    assert find_best({"full": 1.0}) == []


def test_tokens_and_sharp_cells_are_both_counted():
    read = {OURS: (529, 400), "random@saccade": (529, 273), "downsample": (529, None)}
    records = [record("full", n, 1.0, "full", tokens=1024, sharp=1024, full=1024) for n in range(2)]
    for name, (tokens, sharp) in read.items():
        records += [record(name, n, 1.0, tokens=tokens, sharp=sharp, full=1024) for n in range(2)]
    spent = dict.fromkeys(("encode_ms", "select_ms", "prefill_ms", "first_token_ms", "select_ms_iqr"), 1.0)
    spent |= {"kv_bytes": 1000, "peak_mb": None, "decode_ms": None, "budget": "0.25"}
    times = [{**spent, "selector": name} for name in read]
    sections = {
        section.title: section
        for section in make_sections(summarise(records, times, ["full", *read], ["0.25"]), ["0.25"])
    }
    assert sections["Tokens and sharp cells"].rows == [[OURS, "529 / 400"], ["random@saccade", "529 / 273"]]
    header = sections["Cost"].header
    for row in sections["Cost"].rows:
        shown = dict(zip(header, row, strict=True))
        tokens, sharp = read[shown["selector"]]
        assert (shown["tokens"], shown["sharp cells"]) == (str(tokens), "" if sharp is None else str(sharp))
        assert shown["decode ms/token"] == ""  # it could not be told
        assert shown["prefill ms"] == "1.00"


def test_work_is_shown_if_it_was_counted():
    """Results of an earlier version have neither counts nor arithmetic, and no section of it."""
    old = [record("full", n, 1.0, "full") for n in range(2)] + [record(OURS, n, 1.0, sharp=25) for n in range(2)]
    before = summarise(old, [], ["full", OURS], ["0.25"])
    assert not {"encoded", "processed", "encoder_gmacs"} & set().union(*before["rows"])
    assert "Work" not in [section.title for section in make_sections(before, ["0.25"])]
    assert list(draw_charts(before)) == ["Accuracy over tokens"]
    new = [replace(each, encoded=100, processed=each.tokens + 4.5 * int(each.item)) for each in old]
    counted = {"samples": 2, "encoder_gmacs": 1234.5, "language_gmacs": 8.724, "choosing_gmacs": 0.0005}
    work = [{**counted, "selector": OURS, "budget": "0.25"}]
    summary = summarise(new, [], ["full", OURS], ["0.25"], work)
    [section] = [section for section in make_sections(summary, ["0.25"]) if section.title == "Work"]
    assert section.rows == [
        ["full", "all", "100", "", "100", "102", "", "", ""],
        [OURS, "25 %", "25", "25", "100", "27", "1234", "8.72", "0.0005"],
    ]
    assert list(draw_charts(summary)) == ["Accuracy over tokens", "Accuracy over arithmetic"]
    mixed = summarise([*new[:-1], old[-1]], [], ["full", OURS], ["0.25"])["rows"]  # a run that an older one began
    assert ["encoded" in row for row in mixed] == [True, False]


def test_a_saccade_without_an_order_reads_fewer_sharp_cells_and_says_so(tmp_path):
    out = tmp_path / "out"
    selectors = ("--selectors", "arr-coc@saccade,grid@saccade", "--budgets", "0.5", "--limit", "1", "--size", "512")
    result = call("eval", "--tasks", "scenes", *selectors, "--no-times", "--out", out)
    assert result.exit_code == 0, result.output
    rows = {row["selector"]: row for row in read_lines(out / RECORDS)}
    ours, blind = rows["arr-coc@saccade"], rows["grid@saccade"]
    assert blind["sharp"] < ours["sharp"] < ours["tokens"] == 128
    assert rows["full"]["sharp"] == rows["full"]["tokens"] == 256
    assert f"| grid@saccade | {blind['tokens']} / {blind['sharp']} |" in (out / "report.md").read_text()


def test_a_token_costs_the_median_of_what_it_adds():
    alone = [(50.0, 1)] * 5
    slow_spell = [(90.0, 9), (91.0, 9), (40.0, 9), (92.0, 9), (900.0, 9)]  # 40: a spell hit the short answer
    assert time_per_token(alone, slow_spell) == 5.125
    noise = [(49.0, 9), (90.0, 9), (48.0, 9), (92.0, 9), (49.5, 9)]
    assert time_per_token(alone, noise) is None
    assert time_per_token(alone, [(90.0, 1)] * 5) is None  # the answer ended at once
    assert time_per_token(alone, [(90.0, 5)] * 5) == 10


def test_only_questions_that_all_were_asked_count():
    records = [record("full", n, 1.0, "full") for n in range(4)]
    records += [record(OURS, n, 1.0) for n in range(4)] + [record("grid", n, 0.0) for n in range(2)]
    assert summarise(records, [], ["full", OURS, "grid"], ["0.25"])["items"] == {"t": 2}


def test_a_wrong_answer_was_not_seen_or_misread():
    assert attribute(record(OURS, 0, 0.0, coverage=0.2, seen=0.0, misled="perspectival")) == (
        "not seen, misled by perspectival"
    )
    assert attribute(record(OURS, 0, 0.0, coverage=0.9, seen=0.49)) == "not seen"  # the label alone was read
    assert attribute(record(OURS, 0, 0.0, coverage=0.1, seen=0.5)) == "seen but misread"
    assert attribute(record(OURS, 0, 0.0)) == "no boxes to tell by"
    assert attribute(record(OURS, 0, 0.0, coverage=0.9)) == "not recorded"  # in results of an earlier version


def test_a_label_that_was_read_is_not_the_answer():
    value = open_task("needles", 1, 256)[0]
    cells = cells_inside(value.boxes[:1], 8, 8).flatten().nonzero().flatten().numpy()
    found = measure_looking(value, ((1, 8, 8), cells), None)
    assert found["coverage"] >= 0.5  # of mark and sign together
    assert found["seen"] == 0


def test_what_was_seen_is_told_from_the_kept_cells_if_it_was_not_recorded():
    label, value = (0.0, 0.0, 1.0, 0.75), (0.0, 0.75, 1.0, 1.0)
    for clues, why in (((label, value), "not seen"), ((value, label), "seen but misread")):
        item = Example("what?", Image.new("RGB", (64, 64)).copy, "0", ("x",), clues, clues=1)
        kept = record(OURS, 0, 0.0, coverage=0.75, grid=[4, 1], kept="e0")  # all but the last row
        [wrong] = find_worst([kept], [Task("t", "exact", [item])], ["0.25"])
        assert wrong.why == why


def test_the_scorer_that_misled_is_the_one_that_preferred_other_places():
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=32))
    generator = torch.Generator().manual_seed(0)
    tokens, words = torch.randn(16, 32, generator=generator), torch.randn(3, 32, generator=generator)
    with torch.no_grad():
        [selection] = layer.select([VisualQuery(tokens, (1, 4, 4), words, picture=torch.rand(1, 3, 128, 128))], 2)
    output, item = selection.output, open_task("scenes", 1, 256)[0]
    with torch.no_grad():
        for name, score in output.scores.items():
            score.zero_()
            if name == "perspectival":
                score[..., 2:, 2:] = 1.0
        output.relevance.zero_()
        output.relevance[..., 2:, 2:] = 0.9
    box = ((0.0, 0.0, 0.24, 0.24),)
    found = measure_looking(replace(item, boxes=box), ((1, 4, 4), torch.tensor([10, 15]).numpy()), output)
    assert found == {
        "precision": 0.0,
        "coverage": 0.0,
        "seen": 0.0,
        "overlap": 0.0,
        "pointing": 0.0,
        "misled": "perspectival",
    }


def test_an_empty_store_is_no_report(tmp_path):
    with pytest.raises(ValueError, match="there is nothing to report"):
        write_report(Store(tmp_path, {}), [], ["full"], ["0.25"], {})


def heights_of_names(chart, names):
    """Where the names at the right edge stand, from the top."""
    found = re.findall(
        r'translate\(([\d.]+) ([\d.]+)\)[^>]*>([^<]+)</text>|x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)</text>', chart
    )
    return {a or b: float(y or z) for _, y, a, _, z, b in found if (a or b) in names}


def test_a_chart_has_every_line_and_names_do_not_lie_on_each_other():
    lines = {f"method {n}": [(6.0, 0.5), (50.0, 0.9)] for n in range(25)}
    drawn = line_chart(lines, "tokens, %", "accuracy", "method 3", (0.8, "level"))
    assert [drawn.count(f"<title>{name}</title>") for name in (*lines, "level")] == [1] * 26
    heights = sorted(heights_of_names(drawn, {*lines, "level"}).values())
    assert len(heights) == 26
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 12
    bottom = float(re.search(r'viewBox="0 0 \d+ ([\d.]+)"', drawn)[1])
    assert 0 < heights[0] < heights[-1] < bottom
    with pytest.raises(ValueError, match="at least one point"):
        line_chart({}, "x", "y")


def test_a_chart_is_the_same_every_time_and_has_no_letters_as_paths_and_no_useless_ids():
    lines = {"a$b$": [(6.0, 0.5), (50.0, 0.9)], "<i>": [(5.0, 0.4)], "x" * 40: [(7.0, 0.4)], "none": []}
    drawn = line_chart(lines, "tokens, %", "accuracy", "a$b$")
    assert drawn == line_chart(lines, "tokens, %", "accuracy", "a$b$")
    assert drawn != line_chart(lines, "tokens, %", "accuracy", "<i>")  # the control: another is strong
    shown = heights_of_names(drawn, {"a$b$", "&lt;i&gt;", "x" * 19 + "…", "none"})
    assert set(shown) == {"a$b$", "&lt;i&gt;", "x" * 19 + "…"}
    assert f"<title>{'x' * 40}</title>" in drawn
    assert "currentColor" in drawn
    assert "currentColor" not in line_chart(lines, "x", "y", ink="#666")
    ids = re.findall(r' id="([^"]+)"', drawn)
    assert ids
    assert all(f"#{name}" in drawn for name in ids)
    assert not re.search(r"<(metadata|dc:date)|svg [^>]* (width|height)=", drawn)


def test_lines_keep_their_look_where_another_has_no_points():
    points = [(6.0, 0.5), (50.0, 0.9)]
    colours = [
        re.search(r"<title>b</title>.*?stroke: (#\w+)", line_chart({"a": first, "b": points}, "x", "y"), re.DOTALL)[1]
        for first in (points, [])
    ]
    assert colours[0] == colours[1]
    alone = line_chart({"b": points}, "x", "y")
    assert re.search(r"<title>b</title>.*?stroke: (#\w+)", alone, re.DOTALL)[1] != colours[0]


def write_small_page(folder, selectors, title="t", question="what?"):
    """A report of one question that all selectors got wrong."""
    item = Example(question, Image.new("RGB", (640, 320), "red").copy, "0", ("x",), ((0.0, 0.0, 1.0, 1.0),))
    kept = {"coverage": 0.75, "seen": 0.75, "grid": [4, 1], "kept": "e0"}
    records = [record(name, 0, 0.0, "full" if name == "full" else "0.25", task=title, **kept) for name in selectors]
    store = Store(folder, {"model": "x"})
    store.add(records)
    write_report(store, [Task(title, "exact", [item])], selectors, ["0.25"], {"command": "a <b> & *c*"})
    return (folder / "report.html").read_text()


def test_a_page_has_contents_that_lead_somewhere_and_the_original_beside_ours(tmp_path):
    page = write_small_page(tmp_path, ["full", "grid", OURS], title="a<b>/c", question="<script>1</script>")
    links, anchors = re.findall(r'<a [^>]*href="#([^"]+)"', page), re.findall(r'<h[12] id="([^"]+)"', page)
    assert set(links) == set(anchors)
    assert len(anchors) == len(set(anchors)) >= 5
    assert {"charts", "at-a-glance", "worst-examples"} < set(anchors)
    assert '<meta name="viewport"' in page
    assert page.count('<div class="table"') == page.count("<table>") >= 3
    assert "<script>" not in page
    assert "<b>/c" not in page
    assert "&lt;script&gt;1&lt;/script&gt;" in page
    pictures = re.findall(r'<img alt="([^"]+)" src="data:image/jpeg;base64,([^"]+)"', page)
    assert [name for name, _ in pictures] == ["the original picture", f"cells kept by {OURS}", "cells kept by grid"]
    opened = [Image.open(io.BytesIO(base64.b64decode(data))) for _, data in pictures]
    assert [picture.size for picture in opened] == [(480, 240), (480, 240), (160, 80)]
    assert opened[0].getpixel((240, 230))[0] > 200  # nothing is darkened
    assert opened[1].getpixel((240, 230))[0] < 100  # the last row was not kept
    assert opened[1].getpixel((240, 10))[0] > 200


def test_what_the_report_needs_is_named_if_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("arr_coc.cli.evaluate.find_spec", lambda name: None if name in ("scipy", "jinja2") else name)
    result = call("eval", "--limit", "1", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == 'error: arr-coc eval needs scipy, jinja2; pip install "arr-coc[eval]"\n'
    assert not (tmp_path / "out").exists()


WITHOUT = """
import sys
for name in ("scipy", "rapidfuzz", "matplotlib"):
    sys.modules[name] = None
import arr_coc.drawing.sheet, arr_coc.evaluation.run, arr_coc.evaluation.timing, arr_coc.cli
{}
arr_coc.cli.app(["ask", {!r}, "what does the purple text say?"])
"""


@pytest.mark.slow
def test_questions_are_answered_without_what_the_report_needs():
    example = str(ROOT / "src" / "arr_coc" / "assets" / "examples" / "shapes.png")
    for more, code in (("", 0), ("import arr_coc.evaluation.report.statistics", 1)):  # the control needs scipy
        run = [sys.executable, "-c", WITHOUT.format(more, example)]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert ("scipy" in done.stderr) == bool(code)


# times alone


@pytest.mark.slow
def test_the_bench_times_a_shape_and_writes_what_it_printed(tmp_path):
    out = tmp_path / "times.json"
    arguments = ("--model", "tiny Qwen3-VL", "--selectors", "arr-coc-untrained,divprune,downsample", "--size", "256")
    result = call("bench", *arguments, "--repeats", "2", "--budget", "16", "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["tokens"] == 64
    assert [row["selector"] for row in found["rows"]] == ["full", "arr-coc-untrained", "divprune", "downsample"]
    assert found["rows"][0]["of_full"] == 1.0
    assert "of full" in result.output
    for mistake in (("--model", "Qwen3-VL-3B"), ("--budget", "0.25,64"), ("--device", "gpu"), ("--budget", "0")):
        wrong = call("bench", *mistake)
        assert wrong.exit_code == 2
        assert len(wrong.stderr.strip().splitlines()) == 1


# what is committed


def test_the_committed_results_say_what_the_docs_say_of_them():
    summary = json.loads(load_benchmark("accuracy").RESULTS.read_text())
    rows = {(row["selector"], row["budget"]): row for row in summary["rows"]}
    for budget in ("0.25", "0.125", "0.06"):
        others = {name for name, at in rows if at == budget} - {OURS, "oracle"}
        assert len(others) >= 16
        for name in others:
            assert rows[name, budget][f"minus_{OURS}"][0] < 0, name  # ours is first
        unsure = {name for name in others if rows[name, budget][f"minus_{OURS}"][2] >= 0}
        assert unsure == ({"mmtok"} if budget == "0.25" else set())  # and certainly so, as the docs say
        assert summary["select_percentile"][budget] <= 0.67
    assert min(summary["items"].values()) >= 500


def load_benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_committed_summaries_are_those_of_their_records():
    benchmark = load_benchmark("reports")
    for folder in benchmark.RESULTS.glob("eval-*"):
        found = json.loads(json.dumps(benchmark.make_summary(folder, benchmark.read_records(folder))))
        assert found == benchmark.read_summary(folder), "run `python benchmarks/reports.py`"


def test_figures_are_drawn_from_the_results_as_they_are():
    """A figure that is older than its results does not have their digest."""
    results = ROOT / "benchmarks" / "results"
    drawn = [(load_benchmark("accuracy").FIGURE, load_benchmark("accuracy").RESULTS)]
    drawn += [(ROOT / "docs" / "images" / "answers.svg", results / "gaze-h200.json")]
    drawn += [(report, report.parent / "summary.json") for report in results.glob("eval-*/report.*")]
    assert len(drawn) >= 5
    for figure, source in drawn:
        shown, facts = figure.read_text(), json.loads(source.read_text())
        assert is_current(shown, facts), f"{figure} is older than {source}: run the script in benchmarks that made it"
        assert not is_current(shown, {**facts, "rows": facts["rows"][1:]})  # the control: other results
        assert name_origin(facts.get("about") or facts["machine"]) in shown


def test_a_report_says_which_commit_made_it_and_no_folder_of_the_machine(tmp_path):
    about = {"arr_coc": "0.1.0", "revision": "0123456789abcdef0123456789abcdef01234567"}
    about |= {
        "command": f"arr-coc eval --tasks 'jsonl:{tmp_path}/a b.jsonl' --out {tmp_path / 'out'}",
        "model": "/home/me/m",
    }
    store = Store(tmp_path / "out", {"model": "x"}, about)
    store.add([record("full", 0, 1.0, "full"), record(OURS, 0, 1.0)])
    task = Task("t", "exact", [])
    write_report(store, [task], ["full", OURS], ["0.25"], about)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for name in ("report.html", "report.md"):
        text = (tmp_path / "out" / name).read_text()
        assert "arr-coc 0.1.0, commit 0123456" in text
        assert str(tmp_path) not in text
        assert "/home/me" not in text
        assert is_current(text, summary)
        assert not is_current(text, {**summary, "items": {}})
    [chart] = draw_charts(summary).values()
    assert "arr-coc 0.1.0, commit 0123456</text>" in chart
    assert "commit not recorded</text>" in "".join(draw_charts({**summary, "about": {}}).values())


def test_changes_that_are_not_committed_are_said(tmp_path):
    folder = tmp_path / "src" / "package" / "runtime"
    assert find_revision(tmp_path) is None
    folder.mkdir(parents=True)
    (folder.parent / "code.py").write_text("1\n")
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "one")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = find_revision(folder)
    assert re.fullmatch("[0-9a-f]{40}", clean)
    assert name_origin({"arr_coc": "1", "revision": clean}) == f"arr-coc 1, commit {clean[:7]}"
    (folder.parent / "code.py").write_text("2\n")
    assert find_revision(folder) == f"{clean}+changes"
    assert name_origin({"arr_coc": "1", "revision": find_revision(folder)}).endswith(f"{clean[:7]}+changes")


def test_a_run_that_goes_on_at_another_commit_names_both(tmp_path):
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        store = Store(tmp_path, {}, {"revision": commit})
    assert store.about["revision"] == f"{'a' * 40}, {'b' * 40}"
    assert name_origin(store.about) == "arr-coc, commit aaaaaaa and bbbbbbb"
