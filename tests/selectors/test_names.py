"""`arr-coc` is the selector that was trained for the model, `arr-coc-untrained` the layer before training."""

import json

import pytest
import torch
from recipe import import_recipe
from tiny_directory import photo, write_checkpoint
from tiny_models import tiny_model
from typer.testing import CliRunner

from arr_coc import ARRCOCConfig, ARRCOCLayer, ARRCOCQwen, create_selector, list_selectors, register_selector
from arr_coc.cli import app
from arr_coc.config import EMBEDDED_SELECTOR
from arr_coc.demo.engine import Engine, Mistake
from arr_coc.evaluation.contenders import find_ours, open_contenders
from arr_coc.evaluation.records import RECORDS, TIMES, Record, Store
from arr_coc.evaluation.report.summary import summarise
from arr_coc.families.family import open_family
from arr_coc.inference.load import find_base, find_names, load_selector, selector_names
from arr_coc.inference.messages import make_inputs, make_messages
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.training.stage import open_layer

pytestmark = pytest.mark.slow

NAMES = ["arr-coc", "arr-coc-untrained"]
REFUSED = r"no selector was trained for .*; use arr-coc-untrained, or give the directory or Hub id of a trained one"


@pytest.fixture(scope="module", name="vlm")
def open_embedded():
    return ARRCOCQwen.from_pretrained()


@pytest.fixture(scope="module", name="other")
def save_other(tmp_path_factory):
    directory = tmp_path_factory.mktemp("other")
    write_checkpoint(directory)
    return directory


@pytest.fixture(name="opened_once")
def share_the_model(vlm, monkeypatch):
    """The model is opened once for all."""
    monkeypatch.setattr("arr_coc.inference.vlm.load_model", lambda *args, **kwargs: vlm.model)
    monkeypatch.setattr("arr_coc.inference.vlm.load_processor", lambda *args, **kwargs: vlm.processor)


@pytest.fixture(name="asked")
def note_selectors(opened_once, monkeypatch):
    """The selectors that answered or looked, in order."""
    found = []
    for method in ("answer", "inspect"):
        original = getattr(ARRCOCQwen, method)

        def noting(self, *args, original=original, **kwargs):
            found.append(self.selector)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(ARRCOCQwen, method, noting)
    return found


@pytest.fixture(name="picture")
def save_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo(128, 96).save("photo.png")
    return "photo.png"


def equal(one, other):
    values = other.state_dict()
    return all(torch.equal(value, values[name]) for name, value in one.state_dict().items())


def which(layer, model):
    """The name of a layer by its weights."""
    fresh, shipped = ARRCOCLayer(ARRCOCConfig.for_model(model)), ARRCOCLayer.from_pretrained(EMBEDDED_SELECTOR)
    assert not equal(fresh, shipped)
    return {(True, False): "arr-coc", (False, True): "arr-coc-untrained"}[equal(layer, shipped), equal(layer, fresh)]


def call(*arguments):
    return CliRunner(env={"COLUMNS": "1000"}).invoke(app, [str(argument) for argument in arguments])


def one_line(result):
    assert result.exit_code == 2, result.output
    [line] = [line for line in result.stderr.splitlines() if line.strip()]
    return line


# each entry opens the right one


@pytest.mark.parametrize("name", NAMES)
def test_python_opens_the_right_one(vlm, opened_once, name):
    layers = [
        load_selector(name, vlm.model),
        ARRCOCQwen.from_pretrained(selector=name).selector,
        ARRCOCQwen.from_pretrained("embedded", name).selector,
        open_layer(vlm.model, name),
        *(one.selector for one in open_contenders([name, f"{name}@saccade"], vlm.model)[1:]),
        Engine.open(None, name, device="cpu").vlm.selector,
        Engine(vlm, "embedded", "grid")._find_selector(name),
    ]
    assert [which(layer, vlm.model) for layer in layers] == [name] * len(layers)


def test_without_a_name_it_is_the_trained_one_of_the_embedded_model(vlm, opened_once, other):
    for layer in (vlm.selector, load_selector(None, vlm.model), Engine.open(device="cpu").vlm.selector):
        assert which(layer, vlm.model) == "arr-coc"
    assert which(open_layer(vlm.model, None), vlm.model) == "arr-coc-untrained"  # training starts from the beginning
    assert find_names(None, None) == ("embedded", "arr-coc")
    assert find_names(other, None) == (str(other), "arr-coc-untrained")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["ask", "look"])
def test_commands_open_the_right_one(vlm, asked, picture, command, name):
    result = call(command, picture, "what is it?", "--selector", name, "--json")
    assert result.exit_code == 0, result.stderr
    assert [which(layer, vlm.model) for layer in asked] == [name]
    facts = json.loads(result.stdout)
    said = facts["selector"] if command == "ask" else facts["notes"][0].split("Selector: ")[1].rstrip(".")
    assert said == name


def test_compare_opens_both(vlm, asked, picture):
    result = call("compare", *NAMES, picture, "what is it?", "--json")
    assert result.exit_code == 0, result.stderr
    assert [which(layer, vlm.model) for layer in asked] == NAMES
    assert [row["selector"] for row in json.loads(result.stdout)["selectors"]] == NAMES


def test_a_file_of_questions_is_answered_by_the_right_one_and_continued_under_its_older_name(asked, picture, tmp_path):
    (tmp_path / "questions.jsonl").write_text(json.dumps({"image": picture, "question": "what is it?"}) + "\n")
    assert call("ask", "--batch", "questions.jsonl", "--out", "answers.jsonl").exit_code == 0
    row = json.loads((tmp_path / "answers.jsonl").read_text())
    assert row["selector"] == "arr-coc"
    for older, exit_code in (("embedded", 0), ("grid", 2)):
        (tmp_path / "answers.jsonl").write_text(json.dumps({**row, "selector": older}) + "\n")
        assert call("ask", "--batch", "questions.jsonl", "--out", "answers.jsonl").exit_code == exit_code


def test_channels_that_the_trained_one_does_not_read_need_the_untrained(vlm, asked, picture):
    said = one_line(call("look", picture, "what is it?", "--selector", "arr-coc", "--channels", "core"))
    assert "arr-coc does not read the channels 'core'; leave out --channels, or use arr-coc-untrained" in said
    for named in ((), ("--selector", "arr-coc-untrained")):
        result = call("look", picture, "what is it?", "--channels", "core", "--json", *named)
        assert json.loads(result.stdout)["notes"][0].endswith("Selector: arr-coc-untrained.")
    assert [layer.config.channels for layer in asked] == ["core", "core"]


def test_a_run_says_which_one_chose(vlm):
    inputs = make_inputs(vlm.processor, [make_messages(photo(128, 96), "what is it?")], "cpu", torch.float32)
    for name in NAMES:
        session = Session(open_family(vlm.model), load_selector(name, vlm.model), Settings(budget=4))
        assert session.prepare(inputs).selector == name


# other models


def test_a_model_without_a_trained_selector_refuses_arr_coc_in_one_line(other, picture):
    model = tiny_model("qwen3_vl")
    for refused in (
        lambda: load_selector("arr-coc", model),
        lambda: find_base(other, "arr-coc"),
        lambda: find_names(other, "arr-coc"),
        lambda: open_layer(model, "arr-coc"),
        lambda: open_contenders(["arr-coc@saccade"], model),
        lambda: Engine.open(str(other), "arr-coc", device="cpu"),
    ):
        with pytest.raises(ValueError, match=REFUSED) as caught:
            refused()
        assert "\n" not in str(caught.value)
    for command in (
        ("ask", picture, "what?", "--selector", "arr-coc"),
        ("look", picture, "what?", "--selector", "arr-coc"),
        ("compare", "grid", "arr-coc", picture, "what?"),
        ("eval", "--selectors", "arr-coc", "--tasks", "scenes", "--limit", 1, "--out", "out"),
        ("bench", "--selectors", "arr-coc"),
        ("demo", "--selector", "arr-coc"),
    ):
        assert f"no selector was trained for {other}; use arr-coc-untrained" in one_line(
            call(*command, "--model", other)
        )


def test_other_models_are_refused_before_their_weights_are_read(other, monkeypatch):
    monkeypatch.setattr("arr_coc.inference.vlm.load_model", lambda *args, **kwargs: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=REFUSED):
        ARRCOCQwen.from_pretrained(other, "arr-coc")


def test_other_models_have_the_untrained_one_by_both_ways(other):
    for selector in ("arr-coc-untrained", None):
        vlm = ARRCOCQwen.from_pretrained(other, selector)
        assert equal(vlm.selector, ARRCOCLayer(ARRCOCConfig.for_model(vlm.model)))


# the alias, and lists


def test_the_trained_one_of_the_embedded_model_may_be_called_embedded(vlm, asked, picture):
    assert which(load_selector("embedded", vlm.model), vlm.model) == "arr-coc"
    assert which(open_layer(vlm.model, "embedded"), vlm.model) == "arr-coc"
    assert find_names(None, "embedded") == find_names("embedded", "embedded") == ("embedded", "arr-coc")
    assert [one.name for one in open_contenders(["embedded", "arr-coc", "untrained"], vlm.model)] == ["full", *NAMES]
    assert Engine.open(None, "embedded", device="cpu").selector == "arr-coc"
    assert Engine(vlm, "embedded", "arr-coc").ask(picture, "what?", selector="embedded").selector == "arr-coc"
    result = call("compare", "embedded", "grid", picture, "what?", "--json")
    assert [row["selector"] for row in json.loads(result.stdout)["selectors"]] == ["arr-coc", "grid"]


def test_lists_have_both_names_where_both_can_be_opened(vlm, other, picture):
    assert "arr-coc-untrained" in list_selectors()
    assert not {"arr-coc", "embedded", "untrained"} & set(list_selectors())  # no model is at hand
    assert set(selector_names()) == {"arr-coc", *list_selectors()}
    assert selector_names(embedded=False) == list_selectors()
    assert Engine(vlm, "embedded", "arr-coc").selectors[:2] == NAMES
    assert "arr-coc" not in Engine(vlm, "other", "arr-coc-untrained").selectors
    with pytest.raises(Mistake, match="no selector is named 'best' here; there are arr-coc, arr-coc-untrained, "):
        Engine(vlm, "embedded", "arr-coc", private=False).ask(picture, "what?", selector="best")
    for refused in (lambda: load_selector("best", vlm.model), lambda: open_contenders(["best"], vlm.model)):
        with pytest.raises(ValueError, match="no selector is named 'best'; use arr-coc, arr-coc") as caught:
            refused()
        assert "embedded" not in str(caught.value)
    others = [one.name for one in open_contenders(["all"], tiny_model("qwen3_vl"))]
    assert {"arr-coc-untrained", "arr-coc-untrained@saccade"} <= set(others)
    assert not {"arr-coc", "arr-coc@saccade"} & set(others)


def test_the_registry_has_the_untrained_one_and_says_where_the_other_is():
    config = ARRCOCConfig(hidden_size=8)
    assert equal(create_selector("arr-coc-untrained", config=config), ARRCOCLayer(config))
    for refused in (
        lambda: create_selector("arr-coc", config=config),
        lambda: create_selector("half-and-half", selector="arr-coc"),
    ):
        with pytest.raises(ValueError, match=r"'arr-coc' was trained for a model .*'arr-coc-untrained'"):
            refused()
    with pytest.raises(ValueError, match="choose another name"):
        register_selector("arr-coc")(ARRCOCLayer)


# results


@pytest.mark.parametrize(
    ("model", "written", "today"),
    [
        ("embedded", ("arr-coc", "untrained", "arr-coc@saccade"), ("arr-coc", "arr-coc-untrained", "arr-coc@saccade")),
        ("a/model", ("arr-coc", "arr-coc@saccade"), ("arr-coc-untrained", "arr-coc-untrained@saccade")),
    ],
)
def test_older_results_are_read_by_the_names_of_today(tmp_path, model, written, today):
    lines = [Record("t", "1", name, "0.25", 1, 4).to_line() for name in written]
    (tmp_path / RECORDS).write_text("\n".join(lines) + "\n")
    times = [json.dumps({"selector": name, "budget": "0.25"}) for name in written]
    (tmp_path / TIMES).write_text("\n".join(times) + "\n")
    store = Store(tmp_path, {"model": model})
    assert tuple(record.selector for record in store.records.values()) == today
    assert tuple(name for name, _ in store.times) == tuple(row["selector"] for row in store.times.values()) == today


def test_a_report_on_another_model_compares_with_the_untrained_one():
    assert find_ours(["full", "grid", *NAMES]) == find_ours(["grid"]) == "arr-coc"
    assert find_ours(["full", "grid", "arr-coc-untrained"]) == "arr-coc-untrained"
    scores = {"full": 1.0, "arr-coc-untrained": 1.0, "grid": 0.0}
    records = [
        Record("t", str(item), name, "full" if name == "full" else "0.25", 25, 100, score=score)
        for name, score in scores.items()
        for item in range(4)
    ]
    rows = {row["selector"]: row for row in summarise(records, [], list(scores), ["0.25"])["rows"]}
    assert rows["grid"]["minus_arr-coc-untrained"][0] == -1.0


def test_older_figures_of_the_recipe_are_read_by_the_names_of_today(tmp_path):
    check = import_recipe("check").check
    older = {"read, arr-coc, 0.25": 0.1, "read, embedded, 0.25": 0.2, "read, random, 0.25": 0.3}
    today = {"read, arr-coc-untrained, 0.25": 0.1, "read, arr-coc, 0.25": 0.2, "read, random, 0.25": 0.3}
    for pruned in (older, today):
        (tmp_path / "figures.json").write_text(json.dumps({"pruned": pruned}))
        assert check.read_figures(tmp_path / "figures.json") == {"pruned": today}
    assert check.SELECTORS == ("arr-coc-untrained", "arr-coc", "random", "oracle")
