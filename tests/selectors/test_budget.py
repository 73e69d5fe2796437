"""The budget of a whole prompt: `{"total": n}` is shared among its pictures, and `"auto"` counts frames."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, HIDDEN, MIXED, QWEN, SMALL, TEXT, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import ARRCOCConfig, ARRCOCLayer, ARRCOCQwen, attach, create_selector, prepare
from arr_coc.config import EMBEDDED_MODEL
from arr_coc.families import open_family
from arr_coc.prompting.sharing import share_total

THREE = [("text", 2), ("image", (1, 4, 4)), ("text", 1), ("image", (1, 8, 12)), ("image", (1, 12, 16)), ("text", 3)]


def layer():
    return ARRCOCLayer(ARRCOCConfig(hidden_size=HIDDEN))


def kept_counts(model, data, selector, **options):
    with torch.no_grad(), attach(model, selector, on_error="raise", **options) as run:
        model(**data)
    return [len(cells) for _, cells in run.kept]


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=8), extra=st.integers(0, 400))
def test_shares_are_exact_and_proportional(counts, extra):
    total = len(counts) + extra
    shares = share_total(total, counts)
    assert sum(shares) == min(total, sum(counts))
    assert all(1 <= share <= count for share, count in zip(shares, counts, strict=True))
    if total < sum(counts) and min(counts) * total >= sum(counts):  # nobody had to be given more than a share
        ideal = [total * count / sum(counts) for count in counts]
        assert all(abs(share - wanted) < 1 for share, wanted in zip(shares, ideal, strict=True))


def test_sizes_decide_the_shares():
    assert share_total(20, [24, 96]) == [4, 16]
    assert share_total(3, [1, 1, 500]) == [1, 1, 1]
    assert share_total(10, [1, 1, 500]) == [1, 1, 8]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in FAMILIES for name in ("arr-coc-untrained", "grid", "random")),
        *((family, "half-and-half") for family in QWEN),  # LLaVA reads every picture at one size
    ],
)
def test_pictures_share_a_total(family, name):
    model, data = tiny_model(family), inputs_for(family, THREE)
    selector = layer() if name == "arr-coc-untrained" else create_selector(name)
    counts = kept_counts(model, data, selector, budget={"total": 24})
    assert sum(counts) == 24
    assert counts == ([8, 8, 8] if family == "llava" else share_total(24, [4, 24, 48]))
    # the same prompt with a budget for each picture keeps another number
    assert sum(kept_counts(model, data, selector, budget=24)) > 24


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_has_its_own_total(family):
    model, data = tiny_model(family), inputs_for(family, TWO_IMAGES, SMALL, TEXT)
    prepared = prepare(model, data, layer(), budget={"total": 12}, on_error="raise")
    visual = (prepared["input_ids"] == open_family(model).token_id("image")) & prepared["attention_mask"].bool()
    small = 8 if family != "llava" else 12  # the second row's picture has no more
    assert visual.sum(dim=1).tolist() == [12, small, 0]


@pytest.mark.parametrize("family", QWEN)
def test_a_clip_and_a_picture_share_a_total(family):
    model, data = tiny_model(family), inputs_for(family, MIXED)
    assert kept_counts(model, data, layer(), budget={"total": 16}) == [8, 8]
    assert kept_counts(model, data, layer(), budget={"total": 5}) in ([2, 3], [3, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_total_above_all_tokens_keeps_all(family):
    model, data = tiny_model(family), inputs_for(family, TWO_IMAGES)
    with torch.no_grad():
        plain = model(**data).logits
        with attach(model, layer(), budget={"total": 512}, on_error="raise"):
            assert torch.equal(model(**data).logits, plain)


@pytest.mark.parametrize("family", QWEN)
def test_saccades_share_a_total(family):
    model, data = tiny_model(family), inputs_for(family, THREE)
    made = prepare(model, data, layer(), mode="saccade", budget={"total": 24}, on_error="raise")
    visual = (made["input_ids"] == open_family(model).token_id("image")).sum()
    assert visual == 24
    everything = prepare(model, data, layer(), mode="saccade", budget={"total": 512}, on_error="raise")
    assert (everything["input_ids"] == open_family(model).token_id("image")).sum() == 76


def test_tokens_dropped_inside_the_model_share_a_total():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", THREE)
    assert kept_counts(model, data, create_selector("fastv", layer=1), budget={"total": 24}) == share_total(
        24, [4, 24, 48]
    )


@pytest.mark.parametrize("name", ["grid", "fastv"])
def test_a_total_below_one_token_each_is_refused_whatever_on_error_says(name):
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", THREE)
    options = {"layer": 1} if name == "fastv" else {}
    with (
        torch.no_grad(),
        attach(model, create_selector(name, **options), budget={"total": 2}),
        pytest.raises(ValueError, match="a total of 2 is too small for 3 pictures"),
    ):
        model(**data)


@pytest.mark.parametrize("mode", ["prune", "saccade"])
def test_answers_take_a_total(mode):
    vlm = ARRCOCQwen.from_pretrained(EMBEDDED_MODEL)
    pictures = [torch.randint(0, 255, size, dtype=torch.uint8).numpy() for size in ((320, 320, 3), (160, 320, 3))]
    answer = vlm.answer(pictures, "what is this?", budget={"total": 45}, mode=mode, max_new_tokens=2)
    assert (answer.tokens.used, answer.budget) == (45, {"total": 45})
    assert "failed" not in answer.reason


@pytest.mark.parametrize("family", QWEN)
def test_auto_counts_the_frames_of_a_clip(family):
    """A long clip keeps more than the most of one picture."""
    model = tiny_model(family)
    selector = ARRCOCLayer(ARRCOCConfig(hidden_size=HIDDEN, min_tokens=2, max_tokens=4))
    data = inputs_for(family, [("text", 3), ("video", (4, 8, 8)), ("text", 5)])
    [kept] = kept_counts(model, data, selector, budget="auto")
    assert 2 * 4 <= kept <= 4 * 4
    still = inputs_for(family, [("text", 3), ("image", (1, 8, 8)), ("text", 5)])
    assert 2 <= kept_counts(model, still, selector, budget="auto")[0] <= 4
