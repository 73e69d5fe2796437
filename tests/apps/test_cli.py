import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

import arr_coc
from arr_coc import CHANNELS, ARRCOCConfig, ARRCOCLayer, ARRCOCQwen
from arr_coc.cli import app
from arr_coc.cli.errors import one_line_errors
from arr_coc.config import EMBEDDED_MODEL
from arr_coc.inference.load import SCOPE, load_selector

QUESTION = "where is the red square?"
SCORES = {"information", "perspectival", "participatory"}
TENSIONS = {"detail", "explore", "variety"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A scene of 10x10 cells with one red square, noise, and files that are no pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    ramp = np.linspace(90, 170, 320, dtype=np.uint8)
    scene = Image.fromarray(np.repeat(np.broadcast_to(ramp, (320, 320))[:, :, None], 3, axis=2).copy())
    scene.paste((210, 30, 30), (64, 192, 128, 256))  # cells (6, 2) to (7, 3)
    scene.save(folder / "scene.png")
    noise = np.random.default_rng(0).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    (folder / "cut.png").write_bytes((folder / "noise.png").read_bytes()[:5000])
    (folder / "random.png").write_bytes(np.random.default_rng(1).bytes(3000))
    (folder / "empty.png").write_bytes(b"")
    scene.save(folder / "whole.tiff")
    (folder / "cut.tiff").write_bytes((folder / "whole.tiff").read_bytes()[:60])
    return folder


@pytest.fixture(autouse=True)
def inside_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, [str(argument) for argument in arguments])


def look(*arguments):
    result = invoke("look", *arguments)
    assert result.exit_code == 0, result.stderr or repr(result.exception)
    return result


def look_json(*arguments):
    return json.loads(look(*arguments, "--json").stdout)


def run_process(*arguments, **environment):
    """The command as users start it, in a process of its own."""
    source = str(Path(arr_coc.__file__).parents[1])
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return subprocess.run(
        [sys.executable, "-m", "arr_coc", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**inherited, "PYTHONPATH": paths, **environment},
    )


def rows_of(stdout):
    """The printed table as a dictionary; notes are left out."""
    pairs = [line.split(None, 1) for line in stdout.splitlines()]
    return {name: value.strip() for name, value in pairs if name != "note"}


# --- what is printed and written -------------------------------------------------------------------------------------


def test_look_writes_a_png_and_prints_what_was_decided(pictures, tmp_path):
    result = look(pictures / "scene.png", QUESTION, "--out", "drawn.png")
    rows = rows_of(result.stdout)
    assert rows["tokens"] == "25 of 100 (budget 0.25)"
    assert re.match(r"(relevance|grid|all): \w+", rows["strategy"])
    for row, names in (("weights", SCORES), ("tensions", TENSIONS)):
        assert set(re.findall(r"(\w+) [01]\.\d\d", rows[row])) == names
    assert rows["words"] == "where is the red square ?"
    assert rows["sheet"] == "drawn.png"
    assert result.stderr == ""
    assert os.listdir() == ["drawn.png"]
    with Image.open("drawn.png") as sheet:
        sheet.load()
        assert sheet.format == "PNG"
        assert sheet.width > 1000


def test_sheet_goes_to_the_current_folder_by_default(pictures):
    assert rows_of(look(pictures / "scene.png", QUESTION).stdout)["sheet"] == "sheet.png"
    assert os.listdir() == ["sheet.png"]


def test_printed_numbers_are_those_of_the_json(pictures):
    facts = look_json(pictures / "scene.png", QUESTION)
    rows = rows_of(look(pictures / "scene.png", QUESTION).stdout)
    assert rows["strategy"] == f"{facts['strategy']}: {facts['reason']}"
    for name in ("weights", "tensions"):
        assert rows[name] == ", ".join(f"{key} {value:.2f}" for key, value in facts[name].items())


@pytest.mark.parametrize("channels", ["core", "full"])
def test_json_is_one_object_alone_and_no_sheet_is_written(pictures, channels):
    result = look(pictures / "scene.png", QUESTION, "--json", "--channels", channels)
    assert result.stdout.endswith("}\n")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert os.listdir() == []
    facts = json.loads(result.stdout)
    assert facts["question"] == QUESTION
    assert facts["grid"] == [10, 10]
    assert facts["tokens"] == {"full": 100, "used": 25}
    assert set(facts["weights"]) == SCORES
    assert set(facts["tensions"]) == TENSIONS
    assert all(0 <= value <= 1 for value in [*facts["weights"].values(), *facts["tensions"].values()])
    assert facts["words"] == ["where", "is", "the", "red", "square", "?"]
    assert facts["sheet"] is None
    assert facts["reason"]


def test_json_with_out_writes_the_sheet_and_still_prints_only_json(pictures):
    result = look(pictures / "scene.png", QUESTION, "--json", "--out", "drawn.png")
    assert json.loads(result.stdout)["sheet"] == "drawn.png"
    assert result.stdout.count("\n") == 1
    assert os.listdir() == ["drawn.png"]


@pytest.mark.slow
def test_sheet_of_the_full_set_is_taller_than_that_of_the_core_set(pictures):
    heights = []
    for channels in CHANNELS:
        look(pictures / "scene.png", QUESTION, "--channels", channels, "--out", f"{channels}.png")
        with Image.open(f"{channels}.png") as sheet:
            heights.append(sheet.height)
    assert heights == sorted(set(heights))


@pytest.mark.parametrize("channels", ["core", "full"])
def test_the_red_square_is_kept_when_asked_for(pictures, channels):
    facts = look_json(pictures / "scene.png", QUESTION, "--channels", channels, "--budget", 8)
    assert facts["strategy"] == "relevance"
    assert {(6, 2), (6, 3), (7, 2), (7, 3)} & {tuple(cell) for cell in facts["kept"]}


@pytest.mark.parametrize(
    ("budget", "used"), [("64", 64), ("0.5", 50), ("1", 1), ("1.0", 100), ("100", 100), ("999", 100)]
)
def test_budget_is_what_is_kept(pictures, budget, used):
    facts = look_json(pictures / "scene.png", QUESTION, "--budget", budget)
    assert facts["tokens"]["used"] == used
    assert facts["budget"] == json.loads(budget)
    assert (facts["strategy"] == "all") == (used == 100)
    cells = [tuple(cell) for cell in facts["kept"]]
    assert len(set(cells)) == len(cells) == used
    assert all(0 <= row < 10 and 0 <= column < 10 for row, column in cells)


def test_automatic_budget_decides_within_its_bounds(pictures):
    facts = look_json(pictures / "scene.png", QUESTION, "--budget", "auto")
    assert facts["budget"] == "auto"
    assert 64 <= facts["tokens"]["used"] == len(facts["kept"]) <= 100


def test_noise_falls_back_to_an_even_grid_with_a_reason_and_a_scene_does_not(pictures):
    facts = look_json(pictures / "noise.png", "where is the elephant?")
    assert facts["strategy"] == "grid"
    assert "no structure" in facts["reason"]
    rows, columns = np.array(facts["kept"]).T
    assert np.bincount(rows // 5 * 2 + columns // 5).min() >= 4  # every quarter has its share of the 25
    assert look_json(pictures / "scene.png", "where is the elephant?")["strategy"] == "relevance"


@pytest.mark.slow
def test_same_call_gives_the_same_json_and_the_same_sheet(pictures):
    calls = [look(pictures / "scene.png", QUESTION, "--json", "--out", "drawn.png").stdout for _ in range(2)]
    assert calls[0] == calls[1]
    look(pictures / "scene.png", QUESTION, "--json", "--out", "again.png")
    assert Path("drawn.png").read_bytes() == Path("again.png").read_bytes()
    other = look_json(pictures / "scene.png", "what is at the top right?")
    assert other["kept"] != json.loads(calls[0])["kept"]


def test_conversions_are_told(pictures):
    Image.new("RGBA", (100, 70), (255, 0, 0, 128)).save("clear.png")
    notes = " ".join(look_json("clear.png", QUESTION)["notes"])
    assert "The picture is transparent and was laid on white." in notes
    assert "resized from 100x70 to 160x128" in notes
    Image.new("L", (64, 64), 128).save("gray.png")
    assert "The picture was converted from L." in look_json("gray.png", QUESTION)["notes"]
    assert len(look_json(pictures / "scene.png", QUESTION)["notes"]) == 1  # where the words come from, nothing else


@pytest.mark.slow
@pytest.mark.parametrize("question", ["red sign " * 2222 + "ab", "x" * 20_000, "猫" * 20_000, "a " * 10_000])
def test_question_of_twenty_thousand_characters_works(pictures, question):
    assert len(question) == 20_000
    facts = look_json(pictures / "scene.png", question, "--out", "drawn.png")
    assert facts["question"] == question
    assert facts["tokens"]["used"] == 25
    assert Path("drawn.png").stat().st_size > 0


@pytest.mark.parametrize(
    "size", [(1, 1), (190, 1), (3, 500), (31, 33), pytest.param((3000, 2000), marks=pytest.mark.slow)]
)
def test_pictures_of_odd_shapes_work(size):
    Image.new("RGB", size, "red").save("odd.png")
    facts = look_json("odd.png", QUESTION, "--out", "drawn.png")
    assert facts["tokens"]["full"] == facts["grid"][0] * facts["grid"][1]
    assert Path("drawn.png").stat().st_size > 0


def test_a_picture_that_no_model_reads_is_one_line():
    Image.new("RGB", (2048, 1), "red").save("line.png")
    for command in ("look", "ask"):
        result = invoke(command, "line.png", QUESTION)
        assert_one_line(result)
        assert "long side must be less than 200 times the short one; crop it" in result.stderr
        assert os.listdir() == ["line.png"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["[bold].png", "s[a].png", "a[", ":smile:.png", "x y.png"])
def test_name_of_the_sheet_is_printed_as_it_is(pictures, name):
    if not name.endswith(".png"):  # the closing tag of a markup that was never opened
        Path(name).mkdir()
        name = f"{name}/b].png"
    result = look(pictures / "scene.png", QUESTION, "--out", name)
    assert Path(name).exists()
    assert rows_of(result.stdout)["sheet"] == name


# --- mistakes --------------------------------------------------------------------------------------------------------


def assert_one_line(result):
    assert result.exit_code == 2, repr(result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.endswith("\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("picture", "question", "options", "said"),
    [
        ("missing.png", QUESTION, [], "does not exist"),
        ("a name\nof two lines.png", QUESTION, [], "a name of two lines.png does not exist"),
        (".", QUESTION, [], "is a folder"),
        ("empty.png", QUESTION, [], "is empty"),
        ("cut.png", QUESTION, [], "is damaged"),
        ("random.png", QUESTION, [], "is not a picture"),
        ("cut.tiff", QUESTION, [], "cut.tiff"),
        ("scene.png", "", [], "question has no words"),
        ("scene.png", " \n\t ", [], "question has no words"),
        ("scene.png", "?!", [], "question has no words"),
        *(("scene.png", QUESTION, ["--budget", text], "`budget`") for text in
          ("0", "-3", "1.5", "0.0", "-0.5", "nan", "inf", "abc", "", "AUTO", "0.5x")),
        ("scene.png", QUESTION, ["--channels", "all"], "`channels` must be one of core, full"),
        ("scene.png", QUESTION, ["--channels", ""], "`channels` must be one of core, full"),
    ],
)  # fmt: skip
def test_mistake_is_one_line_and_nothing_is_written(pictures, picture, question, options, said, as_json):
    result = invoke("look", pictures / picture, question, "--out", "drawn.png", *options, *["--json"] * as_json)
    assert_one_line(result)
    assert said in result.stderr
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("out", "said"),
    [("nowhere/drawn.png", "there is no folder nowhere"), ("drawn.jpg", "end in .png"), ("drawn", "end in .png")],
)
def test_place_where_no_sheet_can_go_is_refused(pictures, out, said):
    result = invoke("look", pictures / "scene.png", QUESTION, "--out", out)
    assert_one_line(result)
    assert said in result.stderr
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["look", "scene.png", QUESTION, "--out", "file/drawn.png"], "there is no folder file"),
        (["ask", "scene.png", QUESTION, "--overlay", "file/drawn.png"], "there is no folder file"),
        (["eval", "--limit", "1", "--out", "file/out"], "file is no folder, so nothing can be written into file/out"),
        (["train", "--data", "scenes", "--out", "file/run"], "file is no folder, so nothing can be written"),
        (["bench", "--out", "file/times.json"], "file is no folder; give another"),
        (["bench", "--out", "."], "cannot write .: it is a folder; give a file name"),
        (["bench", "--selectors", "oracle"], "oracle must be told where to look, so it is not timed"),
        (["bench", "--model", "nowhere"], "'nowhere' is neither a directory nor a Hub id, which has a slash, nor one"),
        (["ask", "scene.png", QUESTION, "--model", "file"], "it is a file; give the directory of the model"),
        (["ask", "scene.png", QUESTION, "--model", "./empty"], "it has no config.json"),
        (["ask", "scene.png", QUESTION, "--selector", "./empty"], "it has no config.json"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_any_work(pictures, arguments, said):
    shutil.copy(pictures / "scene.png", "scene.png")
    Path("file").write_bytes(b"")
    Path("empty").mkdir()
    result = invoke(*arguments)
    assert_one_line(result)
    assert said in result.stderr
    assert "[Errno" not in result.stderr
    assert sorted(os.listdir()) == ["empty", "file", "scene.png"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "out/records.jsonl"), "error: out/records.jsonl: permission denied"),
        (OSError(28, "No space left on device"), "error: No space left on device"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "error: not enough memory",
        ),
        (MemoryError(), "error: not enough memory"),
    ],
)
def test_what_the_system_refuses_is_one_line(monkeypatch, error, said, capsys):
    with pytest.raises(typer.Exit), one_line_errors():
        raise error
    written = capsys.readouterr().err
    assert written.startswith(said)
    assert len(written.splitlines()) == 1
    with pytest.raises(RuntimeError, match="another"), one_line_errors():  # a defect keeps its traceback
        raise RuntimeError("another")


def test_folder_in_the_place_of_the_sheet_is_refused(pictures):
    Path("drawn.png").mkdir()
    assert_one_line(invoke("look", pictures / "scene.png", QUESTION, "--out", "drawn.png"))
    assert os.listdir("drawn.png") == []


def test_mistake_keeps_the_sheet_of_an_earlier_run(pictures):
    Path("drawn.png").write_bytes(b"earlier")
    assert_one_line(invoke("look", pictures / "cut.png", QUESTION, "--out", "drawn.png"))
    assert Path("drawn.png").read_bytes() == b"earlier"


def test_full_disk_is_one_line_and_leaves_nothing(pictures, monkeypatch):
    def fail(self, place, *_, **__):
        Path(place).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    result = invoke("look", pictures / "scene.png", QUESTION, "--out", "drawn.png")
    assert_one_line(result)
    assert "No space left" in result.stderr
    assert os.listdir() == []


@pytest.mark.parametrize("options", [["--out", "sheet.png"], []])
def test_sheet_never_replaces_the_picture_it_shows(pictures, options):
    shutil.copy(pictures / "scene.png", "sheet.png")
    assert_one_line(invoke("look", "sheet.png", QUESTION, *options))
    assert Path("sheet.png").read_bytes() == (pictures / "scene.png").read_bytes()


@pytest.mark.parametrize(
    "arguments", [["look"], ["look", "a.png"], ["look", "a.png", "b", "c"], ["look", "--nope"], ["see"]]
)
def test_wrong_usage_is_exit_code_two_without_a_traceback(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert os.listdir() == []


# --- the rest --------------------------------------------------------------------------------------------------------


def test_version_is_that_of_the_package():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"arr-coc {arr_coc.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["look", "--help"]])
def test_help_names_what_there_is(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    for name in (
        ("look",) if len(arguments) == 1 else ("--out", "--channels", "--budget", "--selector", "--mode", "--json")
    ):
        assert name in result.stdout


@pytest.mark.slow
def test_process_gives_the_json_of_this_process(pictures):
    result = run_process("look", pictures / "scene.png", QUESTION, "--json", PYTHONHASHSEED="7")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == look(pictures / "scene.png", QUESTION, "--json").stdout


@pytest.mark.slow
def test_process_ends_with_one_line_and_exit_code_two(pictures):
    # libtiff would write to the process's own stderr; other errors are seen without a process
    result = run_process("look", pictures / "cut.tiff", QUESTION, "--out", "drawn.png")
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
    assert os.listdir() == []


@pytest.fixture(scope="module", name="checkpoint")
def write_tiny_model(tmp_path_factory):
    from tiny_directory import write_checkpoint

    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint(directory)
    return directory


def ask(checkpoint, *arguments):
    return invoke("ask", *arguments, "--model", checkpoint)


def test_ask_answers_and_says_what_it_cost(pictures, checkpoint):
    result = ask(checkpoint, pictures / "scene.png", QUESTION, "--budget", "0.25", "--overlay", "seen.png")
    assert result.exit_code == 0, result.stderr or repr(result.exception)
    lines = result.stdout.splitlines()
    assert any(line.startswith("tokens") and "64 of 256 (budget 0.25)" in line for line in lines)
    assert any(line.startswith("time") and "prefill" in line for line in lines)
    assert lines[-1] == "overlay   seen.png"
    with Image.open("seen.png") as overlay:
        assert overlay.size == (320, 320)
        faded = np.asarray(overlay).min(axis=2) > 150
    assert 0.6 < faded.mean() < 0.9  # three quarters were not read


@pytest.mark.slow
def test_ask_as_json_has_these_fields(pictures, checkpoint):
    facts = json.loads(ask(checkpoint, pictures / "scene.png", QUESTION, "--json", "--budget", "40").stdout)
    assert list(facts) == [
        *("answer", "mode", "looks", "tokens", "budget", "strategy", "reason", "weights", "tensions", "timings_ms"),
        *("model", "selector"),
    ]
    assert facts["tokens"] == {"full": 256, "used": 40}
    assert (facts["mode"], facts["budget"], facts["selector"]) == ("prune", 40, "arr-coc-untrained")
    assert set(facts["weights"]) == SCORES
    assert set(facts["tensions"]) == TENSIONS
    assert set(facts["timings_ms"]) == {"encode", "select", "prefill", "decode"}
    assert facts["model"] == str(checkpoint)
    full = json.loads(ask(checkpoint, pictures / "scene.png", QUESTION, "--json", "--mode", "full").stdout)
    assert (full["tokens"], full["budget"], full["weights"]) == ({"full": 256, "used": 256}, None, None)
    short = ("--json", "--budget", "0.25")
    grid = json.loads(ask(checkpoint, pictures / "scene.png", QUESTION, *short, "--selector", "grid").stdout)
    assert (grid["strategy"], grid["selector"], grid["tokens"]["used"]) == ("grid", "grid", 64)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.png", "what?"], "missing.png does not exist"),
        (["scene.png", " "], "the question is empty"),
        (["scene.png", "what?", "--budget", "0"], "`budget` must be at least 1 token"),
        (
            ["scene.png", "what?", "--mode", "best"],
            "`mode` must be one of auto, full, prune, weight, saccade, got 'best'",
        ),
        (["scene.png", "what?", "--selector", "no/such"], "no/such is neither a directory nor a selector"),
        (["scene.png", "what?", "--overlay", "seen.jpg"], "should end in .png"),
        (["random.png", "what?"], "random.png is not a picture"),
    ],
)
def test_mistakes_in_ask_are_one_line(pictures, checkpoint, arguments, says, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first = pictures / arguments[0] if arguments[0] != "missing.png" else arguments[0]
    result = ask(checkpoint, first, *arguments[1:])
    assert result.exit_code == 2
    assert says in result.stderr
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


def test_verbose_says_what_can_be_asked(pictures, checkpoint):
    result = ask(checkpoint, pictures / "scene.png", QUESTION, "-v")
    assert f"what {checkpoint} can be asked is in its own model card" in result.stderr


def test_look_with_a_model_uses_its_tokens_and_words(pictures, checkpoint):
    facts = look_json(pictures / "scene.png", QUESTION, "--model", checkpoint, "--out", "sheet.png")
    assert facts["tokens"] == {"full": 256, "used": 64}  # its processor reads at most 128x128 pixels
    assert facts["grid"] == [16, 16]
    assert "".join(facts["words"]).replace(" ", "") == QUESTION.replace(" ", "")
    assert str(checkpoint) in facts["notes"][0]
    assert "resized from 320x320 to 128x128" in facts["notes"][1]
    with Image.open("sheet.png") as sheet:
        assert sheet.size[0] > 1000


# --- ask with the embedded model -------------------------------------------------------------------------------------

SHAPES = Path(arr_coc.__file__).parent / "assets" / "examples" / "shapes.png"
PURPLE = "what does the purple text say?"
NEEDLE, SIGN = SHAPES.with_name("needle.png"), "what does the sign next to the black ring say?"


def ask_embedded(*arguments):
    result = invoke("ask", SHAPES, PURPLE, *arguments)
    assert result.exit_code == 0, result.stderr or repr(result.exception)
    return result


@pytest.mark.slow
def test_ask_says_what_happened_in_every_mode():
    pruned = ask_embedded("--overlay", "seen.png", "-v")
    assert pruned.stdout.startswith("WZZTC\n")
    assert rows_of(pruned.stdout[6:])["model"] == "embedded, selector arr-coc"
    assert pruned.stderr == SCOPE + "\n"
    full = ask_embedded("--mode", "full")
    assert full.stdout.startswith("WZZTC\n")
    assert rows_of(full.stdout[6:])["tokens"] == "140 of 140"
    assert rows_of(full.stdout[6:])["model"] == "embedded, no selector"
    weighed = json.loads(ask_embedded("--mode", "weight", "--budget", "5", "--json").stdout)
    assert (weighed["strategy"], weighed["budget"]) == ("weight", None)
    assert weighed["reason"] == "all 140 tokens stay, scaled by their relevance"
    assert weighed["tokens"] == {"full": 140, "used": 140}


@pytest.mark.slow
def test_ask_tells_of_conversions_beside_its_output(pictures):
    Image.new("RGBA", (1600, 800), (255, 0, 0, 128)).save("clear.png")
    result = invoke("ask", "clear.png", QUESTION, "--budget", "0.25", "--json")
    assert json.loads(result.stdout)["model"] == "embedded"
    assert result.stderr.splitlines() == [
        "The picture is transparent and was laid on white.",
        "The picture was resized from 1600x800 to 1440x704 pixels, whole tokens.",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((SHAPES, PURPLE, "--selector", "rondom"), "no selector is named 'rondom'; use .*, centre, .*random"),
        ((SHAPES, PURPLE, "--selector", ""), "no selector is named ''"),
        ((SHAPES, PURPLE, "--selector", "oracle"), "oracle must be told where to look"),
        ((SHAPES, PURPLE, "--model", "Qwen3"), "there is no directory 'Qwen3', and a Hub id has a slash"),
        (("http://x/y.png", PURPLE), "is a web address"),
        ((SHAPES, PURPLE, "--model", "cut"), "cut cannot be opened as a model"),
        ((SHAPES, PURPLE, "--model", "wide"), "wide cannot be opened as a model"),
    ],
)
def test_mistakes_with_the_embedded_model_are_one_line(arguments, says):
    for name in ("cut", "wide"):  # a copy that was damaged, and one whose weights do not fit
        shutil.copytree(EMBEDDED_MODEL, name)
    shard = Path("cut/model-00002-of-00003.safetensors")
    shard.write_bytes(shard.read_bytes()[:1000])
    config = Path("wide/config.json")
    config.write_text(config.read_text().replace('"hidden_size": 256', '"hidden_size": 128'))
    begin = time.time()
    result = invoke("ask", *arguments)
    assert_one_line(result)
    assert re.search(says, result.stderr)
    assert time.time() - begin < 15  # the Hub is not asked for what cannot be there


# --- look shows what ask reads ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sparing(tmp_path_factory):
    """A selector whose own budget is a tenth of the tokens."""
    folder = tmp_path_factory.mktemp("selectors") / "sparing"
    config = ARRCOCConfig(hidden_size=256, base_model_name_or_path="embedded", budget=0.1)
    ARRCOCLayer(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_budget_saved_with_a_selector_is_used_unless_another_is_given(sparing):
    own = ask_embedded("--selector", sparing)
    assert rows_of(own.stdout.split("\n", 1)[1])["tokens"] == "14 of 140 (budget 0.1)"
    for command, facts in (
        ("ask", json.loads(ask_embedded("--selector", sparing, "--json").stdout)),
        ("look", look_json(SHAPES, PURPLE, "--selector", sparing)),
    ):
        assert (facts["tokens"]["used"], facts["budget"]) == (14, 0.1), command
    given = json.loads(ask_embedded("--selector", sparing, "--budget", "0.5", "--json").stdout)
    assert (given["tokens"]["used"], given["budget"]) == (70, 0.5)


@pytest.mark.slow
def test_saccades_have_a_budget_of_their_own(sparing):
    facts = json.loads(invoke("ask", NEEDLE, SIGN, "--mode", "saccade", "--selector", sparing, "--json").stdout)
    assert (facts["tokens"], facts["budget"]) == ({"full": 1024, "used": 529}, 529)


@pytest.fixture(scope="module")
def embedded():
    return ARRCOCQwen.from_pretrained()


@pytest.mark.parametrize(
    ("selector", "mode", "budget"),
    [
        (None, "prune", None),
        pytest.param(None, "prune", "20", marks=pytest.mark.slow),
        pytest.param(None, "saccade", None, marks=pytest.mark.slow),
        (None, "saccade", "0.3"),
        pytest.param(None, "weight", None, marks=pytest.mark.slow),
        pytest.param("visionzip", "prune", None, marks=pytest.mark.slow),
        ("fastv", "prune", "0.1"),
    ],
)
def test_look_keeps_the_cells_that_ask_reads(embedded, selector, mode, budget):
    # the budget of saccades covers all of a small picture
    asked_about = (NEEDLE, SIGN) if (mode, budget) == ("saccade", None) else (SHAPES, PURPLE)
    options = ["--mode", mode]
    options += ["--selector", selector] if selector else []
    options += ["--budget", budget] if budget else []
    facts = look_json(*asked_about, *options, "--out", "drawn.png")
    asked = json.loads(invoke("ask", *asked_about, *options, "--json").stdout)
    for name in ("tokens", "budget", "strategy", "reason", "weights", "tensions"):
        assert facts[name] == asked[name], name
    vlm = ARRCOCQwen(embedded.model, embedded.processor, load_selector(selector, embedded.model))
    answer = vlm.answer(*asked_about, mode=mode, budget=None if budget is None else json.loads(budget))
    assert answer.text == asked["answer"]
    (_, rows, columns), cells = answer.kept[0]
    assert facts["grid"] == [rows, columns]
    assert [row * columns + column for row, column in facts["kept"]] == cells.tolist()
    assert Path("drawn.png").exists()


def test_look_with_a_model_keeps_the_cells_that_ask_reads(pictures, checkpoint):
    """A model that was trained with a chat template reads its question inside of it."""
    facts = look_json(pictures / "scene.png", QUESTION, "--model", checkpoint)
    vlm = ARRCOCQwen.from_pretrained(checkpoint)
    (_, _, columns), cells = vlm.answer(pictures / "scene.png", QUESTION, budget=0.25, max_new_tokens=1).kept[0]
    assert [row * columns + column for row, column in facts["kept"]] == cells.tolist()


def test_look_says_that_a_selector_has_no_relevance():
    result = look(SHAPES, PURPLE, "--selector", "visionzip")
    assert rows_of(result.stdout)["weights"] == "none: this selector gives no relevance"
    facts = look_json(SHAPES, PURPLE, "--selector", "visionzip")
    assert (facts["weights"], facts["tensions"]) == (None, None)
    assert len(facts["kept"]) == 35
    result = look(SHAPES, PURPLE, "--mode", "saccade", "--budget", "1.0")
    assert rows_of(result.stdout)["weights"] == "none: all tokens were read, without a choice"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--selector", "oracle"], "oracle must be told where to look"),
        (["--selector", "downsample"], "downsample shrinks the picture instead of choosing cells"),
        (["--selector", "rondom"], "no selector is named 'rondom'"),
        (["--selector", "visionzip", "--channels", "core"], "visionzip does not read the channels 'core'"),
        (["--selector", "visionzip", "--mode", "weight"], "weight"),
        (["--mode", "full"], "`--mode` must be one of prune, saccade, weight, got 'full'"),
    ],
)
def test_what_look_cannot_show_is_refused(options, said):
    result = invoke("look", SHAPES, PURPLE, *options)
    assert_one_line(result)
    assert said in result.stderr
    assert os.listdir() == []
