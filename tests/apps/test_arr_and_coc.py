"""ARR, COC and both on the page: the small picture compressed, and three ways for one question side by side."""

import re
from dataclasses import replace
from importlib.resources import files

import pytest
from PIL import Image
from serving import serve

from arr_coc import ARRCOCLayer
from arr_coc.demo.arr_and_coc import ask_ways, list_ways, write_ways
from arr_coc.demo.ask import read_gaze
from arr_coc.demo.engine import Engine, Mistake
from arr_coc.demo.texts import compare_costs, write_costs
from arr_coc.gaze.plan import Gaze, plan_gaze

NEEDLE, SIGN = files("arr_coc") / "assets" / "examples" / "needle.png", "what does the sign next to the black ring say?"
SHAPES, PURPLE = files("arr_coc") / "assets" / "examples" / "shapes.png", "what does the purple text say?"


@pytest.fixture(scope="module")
def engine():
    return Engine.open()


@pytest.mark.parametrize("compress", ["pool", "merge", "conv"])
@pytest.mark.parametrize("side", [32, 64])
def test_the_three_are_those_of_the_recipe(side, compress):
    """`recipes/selector/gaze.py`, at 256 tokens."""
    arr, coc, both = list_ways((1, side, side), 256, compress)
    assert (arr.name, arr.tokens, arr.gaze) == ("ARR", 256, Gaze(gestalt=128))
    assert (coc.name, coc.tokens, coc.gaze) == ("COC", 256, Gaze(gestalt=256, compress=compress))
    assert (both.name, both.tokens, both.gaze) == ("ARR-COC", 256, Gaze(gestalt=128, compress=compress))


@pytest.mark.parametrize("compress", ["pool", "merge"])
@pytest.mark.parametrize("grid", [(1, 10, 14), (1, 13, 19), (1, 26, 20), (1, 33, 47), (1, 64, 64)])
def test_coc_alone_has_no_saccades_at_any_size(grid, compress):
    total, compressed = grid[1] * grid[2], 0
    for tokens in range(12, total // 2, max(1, total // 40)):
        arr, coc, both = (plan_gaze(grid, way.tokens, way.gaze) for way in list_ways(grid, tokens, compress))
        assert coc.saccades == 0
        assert coc.tokens == arr.tokens == both.tokens <= tokens
        assert arr.squeeze == 1
        assert min(arr.saccades, both.saccades) > 0
        compressed += coc.squeeze > 1 and both.squeeze > 1
    assert compressed > 5
    # control: a budget that the small picture does not fill leaves room for saccades
    assert plan_gaze((1, 13, 19), 62, Gaze(gestalt=62, compress="pool")).saccades > 0


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["pool", "merge"])
def test_a_question_is_asked_in_all_three_ways(engine, compress):
    opened = engine.check(NEEDLE, SIGN, "saccade", 0.25)
    asked = {way.name: (way, snapshot) for way, snapshot in ask_ways(engine, opened, SIGN, 0.25, compress)}
    assert list(asked) == ["ARR", "COC", "ARR-COC"]
    arr, coc, both = (snapshot for _, snapshot in asked.values())
    assert arr.answer == both.answer == "FTXDQB"
    assert arr.used == both.used == 256 >= coc.used > 200
    assert (arr.compress, coc.compress, both.compress) == (None, compress, compress)
    assert len(arr.cells) > 100 < len(both.cells)
    assert len(coc.cells) == 0
    assert coc.tokens.sum() == pytest.approx(coc.used, abs=0.1)
    assert coc.milliseconds["encode"] > arr.milliseconds["encode"]  # of a larger small picture
    page = write_ways(list(asked.values()))
    assert page.count("<figure>") == page.count("data:image/jpeg;base64,") == 3
    assert re.findall(r"<b>(\d+)</b> of 1,024 tokens", page) == [str(each.used) for each in (arr, coc, both)]
    assert page.count(f"compressed by {compress} from 1,024; no cells at full resolution") == 1
    assert page.count("at full resolution") == 3
    assert "with a budget of 256 tokens each" in page


def test_what_cannot_be_compared_is_said_before_anything_is_asked(engine):
    opened = engine.check(SHAPES, PURPLE, "saccade", 1.0)
    with pytest.raises(Mistake, match="a budget of 100% reads this picture whole"):
        next(ask_ways(engine, opened, PURPLE, 1.0, "pool"))
    large = engine.check(Image.new("RGB", (2048, 2048), "white"), PURPLE, "saccade", 0.25)
    with pytest.raises(Mistake, match="to compress it, 4,096 tokens of this picture are encoded, and 2,048 is the"):
        next(ask_ways(engine, large, PURPLE, 0.25, "pool"))
    opened = engine.check(SHAPES, PURPLE, "saccade", 0.25)
    ways = ask_ways(engine, opened, PURPLE, 0.25, "conv")
    with pytest.raises(Mistake, match=r"^the selector arr-coc has learned no compression by conv; use pool or merge$"):
        list(ways)


@pytest.mark.slow
def test_the_small_picture_is_compressed_on_the_page(engine):
    assert read_gaze("no") is None
    plain, pooled = (engine.ask(NEEDLE, SIGN, "saccade", 0.25, gaze=read_gaze(how)) for how in ("no", "pool"))
    assert (plain.compress, pooled.compress) == (None, "pool")
    assert "arr-coc, saccade, compressed by pool" in write_costs(pooled, None)
    assert "compressed" not in write_costs(plain, None)
    assert pooled.milliseconds["encode"] > plain.milliseconds["encode"]


@pytest.mark.parametrize(("mode", "share"), [("prune", 0.25), ("auto", 0.25), ("full", 0.25), ("saccade", 1.0)])
def test_it_is_said_if_nothing_was_compressed(engine, mode, share):
    snapshot = engine.ask(SHAPES, PURPLE, mode, share, gaze=Gaze(compress="pool"))
    assert snapshot.compress is None
    assert snapshot.notes == (f"nothing was compressed: {snapshot.mode} read no small picture",)
    assert snapshot.notes[0] in write_costs(snapshot, None)
    assert not engine.ask(SHAPES, PURPLE, mode, share).notes  # control


@pytest.mark.parametrize("mode", ["saccade", "auto"])
def test_conv_must_have_been_learned(engine, mode):
    with pytest.raises(Mistake, match="the selector arr-coc has learned no compression by conv"):
        engine.ask(SHAPES, PURPLE, mode, 0.25, gaze=Gaze(compress="conv"))
    levels = 1 + len(engine.vlm.model.config.vision_config.deepstack_visual_indexes)
    layer = ARRCOCLayer(replace(engine.vlm.selector.config, compressor_levels=levels)).eval()
    own = Engine(type(engine.vlm)(engine.vlm.model, engine.vlm.processor, layer), engine.name, "mine")
    assert own.ask(SHAPES, PURPLE, "saccade", 0.25, gaze=Gaze(compress="conv")).compress == "conv"


def test_more_tokens_than_all_are_said(engine):
    plain = engine.ask(SHAPES, PURPLE, "full", 1.0)
    assert compare_costs(replace(plain, used=175), plain) == "The same answer, 25% more tokens, as fast."


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_compresses_compares_and_shows_looks(tmp_path):
    from gradio_client import Client, handle_file

    with serve(tmp_path, HF_HUB_OFFLINE="1") as (address, _):
        client = Client(address, verbose=False)
        needle, hidden = handle_file(str(NEEDLE)), handle_file(str(NEEDLE.with_name("camouflage.png")))
        gray = "what does the gray text say?"
        *_, looks, _ = client.predict(hidden, gray, "auto", 12, False, 0.5, "no", api_name="/ask")
        assert looks.count("<figure") == 3
        _, stats, *_, looks, _ = client.predict(needle, SIGN, "saccade", 25, False, 0.5, "pool", api_name="/ask")
        assert "compressed by pool" in stats
        assert "read in one look" in looks
        said, _, *_ = client.predict(needle, SIGN, "saccade", 25, False, 0.5, "conv", api_name="/ask")
        assert "The selector arr-coc has learned no compression by conv" in said
        said, ways = client.predict(needle, SIGN, 25, "merge", api_name="/arr-and-coc")
        assert not said
        assert re.findall(r"<h4>(.*?)</h4>", ways) == ["ARR", "COC", "ARR-COC"]
        assert "compressed by merge" in ways
        said, ways = client.predict(needle, SIGN, 100, "no", api_name="/arr-and-coc")
        assert "reads this picture whole" in said
        assert not ways
