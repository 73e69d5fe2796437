"""The counts of a run, against what hooks see: visual tokens that the encoder made, and that each layer processed."""

from contextlib import contextmanager

import pytest
import torch
from tiny_models import (
    CHAT_END,
    CHAT_START,
    CLIP,
    FAMILIES,
    IMAGE,
    IMAGE_PROMPT,
    MERGE,
    MIXED,
    NEWLINE,
    QWEN,
    RELATIVES,
    SMALL,
    TEXT,
    TWO_IMAGES,
    USER,
    VIDEO,
    inputs_for,
    tiny_model,
)

from arr_coc import ChatTokens, Gaze, create_selector, list_selectors
from arr_coc.families.family import open_family
from arr_coc.inference.load import load_selector
from arr_coc.inference.run import Run
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.selectors.papers.crop import CropSelector
from arr_coc.selectors.rules import OracleSelector
from arr_coc.selectors.smaller_picture import AutoDownsampleSelector

pytestmark = pytest.mark.slow

CHAT = ChatTokens(CHAT_START, CHAT_END, (USER,), NEWLINE)
LARGE = [("text", 3), ("image", (1, 32, 32)), ("text", 5)]  # 256 tokens
REFUSED = {  # these families encode whole pictures of one size, or have layers without full attention
    "llava": {"crop", "downsample", "downsample-auto", "half-and-half", "pixelprune"},
    "qwen3_5": {"fastv"},
    "qwen3_5_moe": {"fastv"},
}


class Boxed(OracleSelector):
    """Has a box for every picture, however many there are."""

    def check(self, queries):
        self.boxes = [[(0.1, 0.2, 0.4, 0.5)]] * len(queries)


def broken(name):
    """A selector that fails when it is asked."""
    selector = create_selector(name)
    asked = selector.beside if name == "half-and-half" else selector
    setattr(asked, "plan" if name == "crop" else "select", lambda *_: 1 / 0)
    return selector


@pytest.fixture(scope="module", params=[*FAMILIES, *RELATIVES], name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


@contextmanager
def seen_tokens(model, texts):
    """Tokens that leave the encoder's blocks, and visual tokens that enter each layer, of prompts without padding.

    `texts` is the number of tokens of the prompt that are not visual; every pass over it has them.
    """
    inner = model.model
    qwen = hasattr(inner, "visual")
    blocks = inner.visual.blocks if qwen else inner.vision_tower.encoder.layers
    layers = inner.language_model.layers
    encoded, processed = [0] * len(blocks), [0] * len(layers)

    def encode(number, hidden):
        if qwen:
            encoded[number] += hidden.shape[-2] // MERGE**2
        else:
            encoded[number] += hidden.shape[0] * (hidden.shape[1] - 1)  # without the class token of each picture

    def read(number, hidden):
        processed[number] += hidden.shape[1] - texts

    handles = [
        # after the layer: what hooks before it have changed is what it got
        module.register_forward_hook(
            lambda module, args, output, number=number, look=look: look(
                number, output[0] if isinstance(output, tuple) else output
            )
        )
        for modules, look in ((blocks, encode), (layers, read))
        for number, module in enumerate(modules)
    ]
    try:
        yield encoded, processed
    finally:
        for handle in handles:
            handle.remove()


def make_session(model, selector, budget, mode="prune", on_error="raise", **settings):
    if isinstance(selector, str):
        selector = Boxed() if selector == "oracle" else load_selector(selector, model)
    return Session(open_family(model), selector, Settings(mode, budget, chat=CHAT, on_error=on_error, **settings))


@torch.no_grad()
def compare(model, session, family, spec, seed=5):
    """Run one prompt and compare the run's counts with what was seen; return the run."""
    inputs = inputs_for(family, spec, seed=seed)
    ids = inputs["input_ids"]
    with seen_tokens(model, int(((ids != IMAGE) & (ids != VIDEO)).sum())) as (encoded, processed):
        run = session.forward({**inputs, "logits_to_keep": 1})
    assert set(encoded) == {run.encoded}
    assert run.processed(len(processed)) == processed
    return run


@pytest.mark.parametrize("name", list_selectors())
def test_every_selector_is_charged_for_what_went_through(opened, name):
    family, model = opened
    for spec, budget in ((IMAGE_PROMPT, 0.4), (TWO_IMAGES, 7), (SMALL, 1), (IMAGE_PROMPT, 1.0)):
        if name in REFUSED.get(family, ()):
            with pytest.raises(ValueError, match=r"full attention|one size|cells"):
                compare(model, make_session(model, name, budget), family, spec)
        else:
            run = compare(model, make_session(model, name, budget), family, spec)
            assert run.full >= run.used > 0
            assert run.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("name", list_selectors())
@pytest.mark.parametrize("family", QWEN)
def test_clips_are_charged_too(family, name):
    model = tiny_model(family)
    for spec in (CLIP, MIXED):
        if name == "pixelprune":
            with pytest.raises(ValueError, match="still pictures only"):
                compare(model, make_session(model, name, 0.4), family, spec)
        else:
            compare(model, make_session(model, name, 0.4), family, spec)


@pytest.mark.parametrize(
    "gaze",
    [
        Gaze(),
        Gaze(overlap="keep"),
        Gaze(overlap="drop", fixation=1),
        Gaze(gestalt=4, compress="pool"),
        Gaze(gestalt=4, compress="merge"),
    ],
    ids=["default", "keep", "drop", "pool", "merge"],
)
@pytest.mark.parametrize("budget", [0.3, 40, "auto", 1.0])
def test_saccades_are_charged_for_gestalt_and_cells(opened, gaze, budget):
    family, model = opened
    session = make_session(model, "arr-coc-untrained", budget, "saccade", gaze=gaze)
    if family == "llava":
        with pytest.raises(ValueError, match="cells"):
            compare(model, session, family, LARGE)
        return
    run = compare(model, session, family, LARGE)
    if budget in (0.3, 40):
        assert run.used < run.full
    if gaze.compress and budget == 40:
        assert run.encoded > run.used  # the gestalt before it was compressed
    compare(model, session, family, TWO_IMAGES)


def test_scaled_tokens_are_all_read(opened):
    family, model = opened
    run = compare(model, make_session(model, "arr-coc-untrained", None, "weight"), family, TWO_IMAGES)
    assert run.encoded == run.used == run.full


@pytest.mark.parametrize("family", QWEN)
def test_looks_that_are_thrown_away_are_charged(family):
    model = tiny_model(family)

    def runs(selector, budget=32):
        run = compare(model, make_session(model, selector, budget), family, LARGE)
        return run, run.processed(1)[0]

    sure, read_twice = runs(AutoDownsampleSelector(sure=0.0))
    assert (sure.encoded, read_twice) == (sure.used, 2 * sure.used)
    unsure, read_both = runs(AutoDownsampleSelector(sure=1.0))
    assert unsure.used < unsure.encoded == read_both <= 32
    once, read = runs(CropSelector(relative=False))
    again, read_again = runs(CropSelector())  # a second glance, with the question hidden
    glance = read - once.used
    assert 0 < glance == read_again - again.used - glance
    assert once.encoded == again.encoded == once.used


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "prune") for name in ("grid", "half-and-half", "crop", "pixelprune", "fastv")), ("grid", "saccade")],
)
def test_a_selection_that_failed_is_charged_for_what_was_encoded_and_read_before(family, name, mode):
    model = tiny_model(family)
    run = compare(model, make_session(model, broken(name), 40, mode, on_error="full"), family, LARGE)
    assert run.failure == "division by zero"
    before = {"grid": 16 if mode == "saccade" else 256, "half-and-half": 276, "crop": 20}.get(name, 0)
    assert run.used == run.full == run.encoded - before


@pytest.mark.parametrize("name", [*list_selectors(), "saccade"])
@torch.no_grad()
def test_rows_of_a_batch_are_charged_as_if_alone(name):
    family, model = "qwen3_vl", tiny_model("qwen3_vl")
    mode = "saccade" if name == "saccade" else "prune"
    session = make_session(model, "arr-coc-untrained" if mode == "saccade" else name, 0.4, mode)
    specs = [IMAGE_PROMPT, TEXT, TWO_IMAGES]
    run = session.forward({**inputs_for(family, *specs, seed=5), "logits_to_keep": 1})
    rows = run.split(3)
    assert sum(row.encoded for row in rows) == run.encoded
    totals = [sum(layer) for layer in zip(*(row.processed(3) for row in rows), strict=True)]
    assert totals == run.processed(3)
    assert (rows[1].encoded, rows[1].processed(3)) == (0, [0, 0, 0])
    for number in (0, 2):
        alone = compare(model, session, family, specs[number], seed=5 + number)
        if name != "downsample-auto":  # rounding decides whether it is sure
            assert (rows[number].encoded, rows[number].processed(3)) == (alone.encoded, alone.processed(3))


def test_a_wrong_count_would_be_noticed(monkeypatch):
    model = tiny_model("qwen3_vl")
    monkeypatch.setattr(Run, "encoded", property(lambda run: run.used))
    for name, right in (("downsample", True), ("grid", False), ("half-and-half", False)):
        session = make_session(model, name, 0.4)
        if right:
            compare(model, session, "qwen3_vl", IMAGE_PROMPT)
        else:
            with pytest.raises(AssertionError):
                compare(model, session, "qwen3_vl", IMAGE_PROMPT)
