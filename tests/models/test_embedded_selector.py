"""The selector that comes with the embedded model: it looks where the question points."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipe import import_recipe
from tiny_directory import photo, processed, write_checkpoint
from typer.testing import CliRunner

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ARRCOCQwen,
    EncodingCache,
    attach,
    create_selector,
    load_processor,
    prepare,
)
from arr_coc.cli import app
from arr_coc.config import EMBEDDED_MODEL, EMBEDDED_SELECTOR
from arr_coc.data.boxes import cells_inside
from arr_coc.data.worlds import draw_scene, make_example, split_seed
from arr_coc.evaluation.answers import exact_match
from arr_coc.inference.load import load_config, load_model, load_selector
from arr_coc.training.config import TrainConfig
from arr_coc.training.stage import open_layer
from arr_coc.training.trainer import train

ROOT = Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "recipes" / "selector" / "results" / "figures.json").read_text())
FIRST = 2 * 10**6  # of the test seeds used here


@pytest.fixture(scope="module", name="vlm")
def open_embedded():
    return ARRCOCQwen.from_pretrained()


def samples(world, count, size=(512, 512)):
    return [make_example(world, split_seed("test", FIRST + index), None, size) for index in range(count)]


def test_it_is_the_default_of_the_embedded_model_and_of_no_other(vlm):
    assert isinstance(vlm.selector, ARRCOCLayer)
    trained, named = (layer.state_dict() for layer in (vlm.selector, load_selector("arr-coc", vlm.model)))
    assert all(torch.equal(value, named[name]) for name, value in trained.items())
    untrained = load_selector("arr-coc-untrained", vlm.model).state_dict()
    assert any(not torch.equal(value, untrained[name]) for name, value in trained.items())


def test_it_is_small_and_names_its_base():
    files = {path.name: path.stat().st_size for path in Path(EMBEDDED_SELECTOR).iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert sum(files.values()) <= 2e6
    assert ARRCOCLayer.from_pretrained(EMBEDDED_SELECTOR).config.base_model_name_or_path == "embedded"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size", "least"), [("camouflage", 512, 0.75), ("pages", 768, 0.6)])
def test_answers_survive_where_an_untrained_layer_loses_them(vlm, world, size, least):
    some, cache = samples(world, 20, (size, size)), EncodingCache()  # both read the same pictures
    trained, untrained = (
        exact_match(some, [looking.answer(one.picture, one.question, budget=0.06, encoded=cache).text for one in some])
        for looking in (vlm, ARRCOCQwen(vlm.model, vlm.processor, load_selector("arr-coc-untrained", vlm.model)))
    )
    assert (cache.misses, cache.hits) == (20, 20)
    assert trained >= least
    assert trained > untrained


@pytest.mark.slow
def test_asked_gray_text_gets_the_tokens_and_not_the_bright_box(vlm):
    wins = 0
    for index, sample in enumerate(samples("camouflage", 10)):
        scene = draw_scene("camouflage", split_seed("test", FIRST + index), None, (512, 512))
        (_, rows, columns), cells = vlm.answer(sample.picture, sample.question, budget=0.25).kept[0]
        kept = torch.zeros(rows * columns, dtype=torch.bool)
        kept[torch.as_tensor(cells)] = True
        asked = cells_inside(sample.boxes, rows, columns).flatten()
        bright = [[side / 512 for side in thing.box] for thing in scene.things if thing.words == ("red",)]
        box = cells_inside(bright, rows, columns).flatten() & ~asked
        wins += int((kept & asked).sum()) > 2 * int((kept & box).sum())
    assert wins >= 8


def test_committed_figures_meet_the_bars_and_are_those_of_the_card():
    card = Path(EMBEDDED_SELECTOR, "README.md").read_text()
    assert FIGURES["samples"] >= 100
    for budget, least in (("0.25", 0.97), ("0.125", 0.95), ("0.06", 0.92)):
        row = FIGURES["answers"][budget]
        assert row["share of oracle"] >= least
        blind = ["arr-coc-untrained", "random", "grid", "centre", "downsample"]
        assert all(row["selector"]["all"] > row[name]["all"] for name in blind)
        assert f"{row['selector']['all']:.3f}" in card
    for budget in ("0.25", "0.125", "0.06"):
        assert FIGURES["camouflage"][budget]["wins"] >= 0.95
    for name in ("worlds", "photos"):
        row = FIGURES["overlap"][name]
        assert row["selector"] >= 2 * row["random"]
        assert row["selector"] > row["arr-coc-untrained"]
        early = FIGURES["overlap after 1,000 steps"][name]
        assert early >= 2 * row["random"]
        assert early > row["arr-coc-untrained"]
    assert FIGURES["expressions"]["pairs"] >= 0.65
    assert FIGURES["expressions"]["times the best blind rule"] >= 1.3
    assert f"{FIGURES['expressions']['pairs']:.1%}" in card


def test_committed_figures_of_the_gaze_meet_the_bars_and_are_those_of_the_docs():
    tables = json.loads((ROOT / "recipes" / "selector" / "results" / "gaze.json").read_text())["tables"]
    right = {row: {world: cell["right"] for world, cell in cells.items()} for row, cells in tables["rivals"].items()}
    needles = {row: cells["needles 2048"] for row, cells in right.items() if "needles 2048" in cells}
    assert needles["saccade"] >= 0.85 * needles["all tokens"]
    assert needles["saccade"] >= needles["downsample"] + 0.3
    assert {"half-and-half", "prune", "saccade, oracle"} <= set(needles)  # beside it; both encode all of the picture
    for world in ("scenes 1024", "pages 1024"):
        assert right["saccade"][world] >= right["all tokens"][world] - 0.02
    coc = {row: cells["needles 2048"]["right"] for row, cells in tables["coc"].items()}
    for how in ("pool", "merge", "conv"):
        assert coc[f"ARR-COC: {how} to 128, 128 saccades"] > coc[f"COC: {how} to 256"]
    docs = (ROOT / "docs" / "gaze.md").read_text()
    assert f"| saccade | {needles['saccade']:.2f} |" in docs


OTHER = "was trained for edition 1 of the embedded model, this is edition 2; train it again with `arr-coc train`"


def number_edition(directory, edition):
    """Make a model's directory this edition of the embedded model; None for a model that is none."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("arr_coc_edition", None)
    path.write_text(json.dumps(config | ({} if edition is None else {"arr_coc_edition": edition})))
    return directory


@pytest.fixture(name="second")
def make_second_edition(tmp_path):
    """A model that is edition 2, as far as its config says."""
    directory = tmp_path / "second"
    write_checkpoint(directory)
    return number_edition(directory, 2)


@pytest.fixture(name="old")
def save_old_selector(second, tmp_path):
    """A selector for edition 1 that does not say so, which is as wide as edition 2."""
    config = ARRCOCConfig.for_model(load_model(second), base_model_name_or_path="embedded", base_model_edition=None)
    directory = tmp_path / "old"
    ARRCOCLayer(config).save_pretrained(directory)
    values = json.loads((directory / "config.json").read_text())
    del values["base_model_edition"]
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_the_model_and_its_selector_are_of_one_edition(vlm):
    edition = json.loads(Path(EMBEDDED_MODEL, "config.json").read_text())["arr_coc_edition"]
    assert vlm.selector.config.base_model_edition == vlm.model.config.arr_coc_edition == edition


def refusals(model, inputs, layer, place):
    """Every way to use a selector with a model: what it is called in errors, and how it is done."""
    vlm = ARRCOCQwen(model, load_processor(model.config.name_or_path), create_selector("grid"))
    beside = create_selector("half-and-half")
    beside.beside = layer
    return [
        (f"the selector {place}", lambda: load_selector(place, model)),
        (f"the selector {place}", lambda: load_selector(str(place), model)),
        (f"the selector {place}", lambda: ARRCOCQwen.from_pretrained(model.config.name_or_path, place)),
        (f"the selector {place}", lambda: open_layer(model, place)),
        ("the selector", lambda: load_selector(layer, model)),
        ("the selector", lambda: load_selector(beside, model)),
        ("the selector", lambda: attach(model, layer).remove()),
        ("the selector", lambda: prepare(model, inputs, layer)),
        ("the selector", lambda: ARRCOCQwen(model, vlm.processor, layer)),
        ("the selector", lambda: setattr(vlm, "selector", layer)),
    ]


def test_a_selector_of_another_edition_is_refused_everywhere(second, old):
    model, layer = load_model(second), ARRCOCLayer.from_pretrained(old)
    inputs = processed(load_processor(second), [photo(64, 64)])
    for name, use in refusals(model, inputs, layer, old):
        with pytest.raises(ValueError, match="edition") as caught:
            use()
        assert str(caught.value) == f"{name} {OTHER}"
    for edition in (1, None):  # the control: the same edition, and a model that is none
        number_edition(second, edition)
        same = load_model(second)
        for _, use in refusals(same, inputs, layer, old):
            use()


def test_a_selector_of_another_model_is_not_asked_for_its_edition(second, old):
    elsewhere = replace(
        ARRCOCLayer.from_pretrained(old).config, base_model_name_or_path="someone/else", base_model_edition=None
    )
    ARRCOCLayer(elsewhere).save_pretrained(old)
    assert ARRCOCLayer.from_pretrained(old).config.base_model_edition is None
    load_selector(old, load_model(second))


def test_the_version_that_has_the_edition_is_named(second, old):
    values = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(values | {"arr_coc_version": "0.0.7"}))
    with pytest.raises(ValueError, match=r"arr-coc train`, or install arr-coc==0\.0\.7$"):
        load_selector(old, load_model(second))


def test_an_adapter_of_another_edition_is_refused_before_it_is_opened(second, old):
    (old / "adapter").mkdir()
    (old / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="edition 1 of the embedded model, this is edition 2"):
        ARRCOCQwen.from_pretrained(second, old)


def test_what_is_saved_says_for_which_edition(second, tmp_path):
    vlm = ARRCOCQwen.from_pretrained(second, "arr-coc-untrained")
    vlm.selector.config = replace(vlm.selector.config, base_model_edition=None)
    vlm.save_pretrained(tmp_path / "saved")
    assert ARRCOCLayer.from_pretrained(tmp_path / "saved").config.base_model_edition == 2
    ARRCOCQwen.from_pretrained(selector=tmp_path / "saved")


@pytest.mark.parametrize(
    "command",
    [
        ["ask", "photo.png", "what?"],
        ["look", "photo.png", "what?", "--out", "look.png"],
        ["compare", "grid", "OLD", "photo.png", "what?"],
        ["eval", "--tasks", "scenes/color", "--limit", "1", "--selectors", "OLD", "--out", "out"],
        ["train", "--data", "scenes/color", "--samples", "2", "--start", "OLD", "--out", "out", "--cache", "cache"],
    ],
)
def test_commands_refuse_another_edition_in_one_line(command, second, old, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo(64, 64).save("photo.png")
    command = [str(old) if word == "OLD" else word for word in command]
    command += ["--base" if command[0] == "train" else "--model", str(second)]
    command += ["--selector", str(old)] if command[0] in ("ask", "look") else []
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"error: the selector {old} {OTHER}"


def test_a_run_of_another_edition_is_not_continued(second, tmp_path):
    number_edition(second, 1)

    def run(resume):
        settings = {"base": str(second), "steps": 2, "batch_size": 2, "samples": 4, "save_every": 1}
        train(TrainConfig(["scenes/color"], tmp_path / "run", cache=tmp_path, resume=resume, **settings))

    run(resume=False)
    assert ARRCOCLayer.from_pretrained(tmp_path / "run").config.base_model_edition == 1
    run(resume=True)  # the control
    number_edition(second, 2)
    with pytest.raises(ValueError, match=r"^the run in .*run was trained for edition 1 .*; give another --out$"):
        run(resume=True)


def test_shipping_numbers_the_edition(tmp_path):
    ship = import_recipe("ship").ship
    write_checkpoint(tmp_path)
    before = load_config(tmp_path).to_dict()
    ship.number_edition(tmp_path / "config.json", 2)
    assert load_config(tmp_path).to_dict() == before | {"arr_coc_edition": 2}
