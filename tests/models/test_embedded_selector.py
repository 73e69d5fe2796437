"""The selector that comes with the embedded model: it looks where the question points."""

import json
from pathlib import Path

import pytest
import torch

from arr_coc import ARRCOCLayer, ARRCOCQwen, EncodingCache
from arr_coc.config import EMBEDDED_SELECTOR
from arr_coc.data.boxes import cells_inside
from arr_coc.data.worlds import draw_scene, make_example, split_seed
from arr_coc.evaluation.answers import exact_match
from arr_coc.inference.load import load_selector

ROOT = Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "recipes" / "selector" / "figures.json").read_text())
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
    tables = json.loads((ROOT / "recipes" / "selector" / "gaze.json").read_text())["tables"]
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
