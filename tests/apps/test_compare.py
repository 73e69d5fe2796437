"""Two selectors side by side."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from arr_coc import ARRCOCConfig, ARRCOCLayer
from arr_coc.cli import app

PICTURE = Path(__file__).parents[2] / "src" / "arr_coc" / "assets" / "examples" / "camouflage.png"
QUESTION = "what does the gray text say?"


@pytest.fixture(autouse=True)
def inside_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compare(*arguments):
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["compare", *map(str, arguments)])


def test_both_are_asked_and_drawn(tmp_path):
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=256, base_model_name_or_path="embedded"))
    layer.save_pretrained(tmp_path / "mine")
    result = compare(tmp_path / "mine", "centre", PICTURE, QUESTION, "--budget", 20)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'mine'}: LSNHZ  (20 of 140)  information")
    assert lines[1].startswith("centre: ")
    assert "LSNHZ" not in lines[1]
    assert lines[3] == "drawing   compare.png"
    with Image.open("compare.png") as sheet:
        # two columns: relevance above what was kept, so that left and right differ
        left, right = sheet.crop((0, 100, 700, sheet.height)), sheet.crop((740, 100, 1440, sheet.height))
        assert left.resize((70, 70)).tobytes() != right.resize((70, 70)).tobytes()


def test_facts_come_as_json_and_nothing_is_drawn():
    result = compare("arr-coc", "grid", PICTURE, QUESTION, "--json")
    facts = json.loads(result.stdout)
    assert [one["selector"] for one in facts["selectors"]] == ["arr-coc", "grid"]
    assert facts["selectors"][0]["weights"].keys() == {"information", "perspectival", "participatory"}
    assert facts["selectors"][1]["weights"] is None
    assert 0 < facts["kept_by_both"] < 35
    assert not list(Path().iterdir())


def test_the_same_twice_keeps_the_same():
    facts = json.loads(compare("grid", "grid", PICTURE, QUESTION, "--json").stdout)
    assert facts["kept_by_both"] == facts["selectors"][0]["tokens"]["used"]


@pytest.mark.slow
def test_both_are_asked_in_the_mode(tmp_path):
    facts = json.loads(compare("arr-coc", "grid", PICTURE, QUESTION, "--mode", "saccade", "--json").stdout)
    assert [row["mode"] for row in facts["selectors"]] == ["saccade", "saccade"]
    assert [row["tokens"]["used"] for row in facts["selectors"]] == [35, 35]
    assert 0 < facts["kept_by_both"] < 20
    result = compare("arr-coc", "grid", PICTURE, QUESTION, "--mode", "auto", "--budget", "0.12")
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith("arr-coc: LSNHZ  (35 of 140)")  # 15 to ask where to look, 3, then 17
    assert second.startswith("grid: ")
    with Image.open("compare.png") as sheet:
        drawn = np.asarray(sheet.convert("RGB"))
    assert (drawn == (179, 71, 0)).all(axis=2).any()  # the first look's cells are framed
    facts = json.loads(
        compare("arr-coc", "grid", PICTURE, QUESTION, "--mode", "auto", "--budget", "0.12", "--json").stdout
    )
    assert [look["tokens"] for look in facts["selectors"][0]["looks"]] == [18, 17]


@pytest.mark.slow
def test_compression_is_of_both_or_of_one():
    command = ("arr-coc", "arr-coc", PICTURE, QUESTION, "--mode", "saccade", "--json")
    plain, pooled = (json.loads(compare(*command, *more).stdout) for more in ((), ("--compress", "pool")))
    one = json.loads(compare("arr-coc@saccade", "arr-coc@pool", PICTURE, QUESTION, "--json").stdout)
    assert one["selectors"][0] == {**plain["selectors"][0], "selector": "arr-coc@saccade"}
    assert one["selectors"][1] == {**pooled["selectors"][0], "selector": "arr-coc@pool"}
    assert plain["selectors"][0]["weights"] != pooled["selectors"][0]["weights"]  # control: it saw something else
    assert pooled["selectors"][0] == pooled["selectors"][1]


def test_an_ending_goes_before_the_mode():
    facts = json.loads(
        compare("grid@saccade", "grid", PICTURE, QUESTION, "--mode", "auto", "--compress", "merge", "--json").stdout
    )
    assert [row["mode"] for row in facts["selectors"]] == ["saccade", "prune"]
    plain = json.loads(compare("grid@saccade", "grid", PICTURE, QUESTION, "--json").stdout)
    assert facts["selectors"][0] == plain["selectors"][0]  # not compressed


@pytest.mark.slow
def test_cells_of_two_sizes_are_not_counted(tmp_path):
    """A gaze cuts cells from the picture as it is; pruning reads it as the processor made it."""
    with Image.open(PICTURE) as picture:
        picture.convert("RGB").resize((500, 80)).save(tmp_path / "flat.png")
    result = compare("grid@saccade", "grid", tmp_path / "flat.png", QUESTION)
    assert result.exit_code == 0, result.stderr
    assert "kept by both: not counted, their cells differ in size" in result.stdout
    assert Path("compare.png").exists()
    facts = json.loads(compare("grid@saccade", "grid", tmp_path / "flat.png", QUESTION, "--json").stdout)
    assert facts["kept_by_both"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("arr-coc", "oracle", PICTURE, QUESTION), "oracle must be told where to look"),
        (("arr-coc", "magic", PICTURE, QUESTION), "no selector is named 'magic'"),
        (("arr-coc", "grid", "nowhere.png", QUESTION), "nowhere.png"),
        (("arr-coc", "grid", PICTURE, " "), "the question is empty"),
        (("arr-coc", "grid", PICTURE, QUESTION, "--out", "a.jpg"), "the output is a PNG file"),
        (("arr-coc", "grid", PICTURE, QUESTION, "--budget", "2.0"), "`budget` must be in (0, 1]"),
        (("arr-coc", "all", PICTURE, QUESTION), "no selector is named 'all'"),
        (("arr-coc", "grid", PICTURE, QUESTION, "--mode", "full"), "must be one of prune, saccade, auto, weight, got"),
        (("arr-coc", "grid", PICTURE, QUESTION, "--compress", "pool"), "--compress belongs to mode saccade, got mode"),
        (("arr-coc", "grid", PICTURE, QUESTION, "--mode", "saccade", "--compress", "zip"), "`compress` must be one of"),
        (("arr-coc", "visionzip", PICTURE, QUESTION, "--mode", "saccade"), "visionzip has no saccade mode; use --mode"),
        (("arr-coc", "visionzip@pool", PICTURE, QUESTION), "visionzip has no saccade mode, got 'visionzip@pool'"),
        (("arr-coc@conv", "grid", PICTURE, QUESTION), "arr-coc has learned no compression, got 'arr-coc@conv'"),
        (
            ("arr-coc", "grid", PICTURE, QUESTION, "--mode", "saccade", "--compress", "conv"),
            "arr-coc has learned no compression by conv; use --compress pool or merge",
        ),
        (("arr-coc@wrong", "grid", PICTURE, QUESTION), "are asked the same question, got 'arr-coc@wrong'; use arr-coc"),
        (("arr-coc", "downsample@saccade", PICTURE, QUESTION), "downsample shrinks the picture"),
        (("a", "b", PICTURE, QUESTION), "were made for different models, one and two"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path):
    for name, base in (("a", "one"), ("b", "two")):
        ARRCOCLayer(ARRCOCConfig(hidden_size=256, base_model_name_or_path=base)).save_pretrained(tmp_path / name)
    result = compare(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr
