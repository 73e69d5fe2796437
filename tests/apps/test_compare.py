"""Two selectors side by side."""

import json
from pathlib import Path

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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("arr-coc", "oracle", PICTURE, QUESTION), "oracle must be told where to look"),
        (("arr-coc", "magic", PICTURE, QUESTION), "no selector is named 'magic'"),
        (("arr-coc", "grid", "nowhere.png", QUESTION), "nowhere.png"),
        (("arr-coc", "grid", PICTURE, " "), "the question is empty"),
        (("arr-coc", "grid", PICTURE, QUESTION, "--out", "a.jpg"), "the output is a PNG file"),
        (("arr-coc", "grid", PICTURE, QUESTION, "--budget", "2.0"), "`budget` must be in (0, 1]"),
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
