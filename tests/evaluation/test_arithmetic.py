"""Multiply-adds, against formulas worked by hand."""

from functools import partial

import pytest
import torch
from tiny_models import CHAT_END, CHAT_START, IMAGE_PROMPT, NEWLINE, USER, VOCAB, inputs_for, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from arr_coc import ChatTokens, create_selector
from arr_coc.evaluation.arithmetic import COUNTED, PARTS, count_operations, count_parts, count_work
from arr_coc.evaluation.contenders import open_contenders
from arr_coc.evaluation.run import Opened, take_samples
from arr_coc.evaluation.tasks import open_task
from arr_coc.families.family import open_family
from arr_coc.inference.load import load_model, load_processor
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings

CHAT = ChatTokens(CHAT_START, CHAT_END, (USER,), NEWLINE)
TOKENS, TEXT = 24, 12  # of IMAGE_PROMPT, with the two markers of its picture
HIDDEN, HEADS, WIDTH, KEY_HEADS, INNER, LAYERS = 64, 4, 16, 2, 128, 3  # of the tiny models
ENCODER, ENCODER_HEADS, ENCODER_INNER, BLOCKS, PATCH = 32, 2, 64, 4, 3 * 2 * 4 * 4


def count_language(tokens, text=TEXT, layers=LAYERS, keys=None, inner=INNER):
    """Multiply-adds of decoder layers over a prompt; `keys` is the number of tokens attended to, if it is another."""
    length = tokens + text
    projections = HIDDEN * WIDTH * (2 * HEADS + 2 * KEY_HEADS)
    attention = HEADS * length * (keys or length) * 2 * WIDTH
    return layers * (length * (projections + 3 * HIDDEN * inner) + attention)


HEAD = HIDDEN * VOCAB  # at the last token only


def count_encoder(tokens, deepstack=0, gated=False):
    """Multiply-adds of the encoder over one picture, whose patches all attend to each other."""
    patches = 4 * tokens
    matrices = ENCODER * 4 * ENCODER + (3 if gated else 2) * ENCODER * ENCODER_INNER
    attention = ENCODER_HEADS * patches**2 * 2 * (ENCODER // ENCODER_HEADS)
    merger = tokens * (4 * ENCODER) * (4 * ENCODER + HIDDEN)
    return patches * PATCH * ENCODER + BLOCKS * (patches * matrices + attention) + (1 + deepstack) * merger


@torch.no_grad()
def count(family, name="full", budget=None, attention="sdpa", spec=IMAGE_PROMPT, mode="prune"):
    model = tiny_model(family, attention)
    selector = create_selector(name) if isinstance(name, str) else name
    session = Session(open_family(model), selector, Settings(mode, budget, chat=CHAT, on_error="raise"))
    inputs = {**inputs_for(family, spec, seed=5), "logits_to_keep": 1}
    counts = count_parts(session.family, lambda: session.forward(inputs))
    assert list(counts) == list(PARTS)
    assert all(value % 2 == 0 for value in counts.values())
    return {part: value // 2 for part, value in counts.items()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_full_prompt_is_what_the_formulas_say(attention):
    counts = count("qwen3_vl", attention=attention)
    assert counts["language"] == count_language(TOKENS) + HEAD
    assert counts["encoder"] == count_encoder(TOKENS, deepstack=2)
    assert counts["choosing"] == 0
    assert count("qwen2_vl", attention=attention)["encoder"] == count_encoder(TOKENS)


def test_attention_is_counted_on_the_cpu_where_torch_would_not():
    """The control: without our formulas, its operator there counts as nothing."""
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT, seed=5)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            model(**inputs)
        ours = count_operations(lambda: model(**inputs))
    pairs = LAYERS * HEADS * (TOKENS + TEXT) ** 2 * 2 * WIDTH + BLOCKS * ENCODER_HEADS * (4 * TOKENS) ** 2 * ENCODER
    assert ours - counter.get_total_flops() == 2 * pairs


def test_windows_attend_to_less():
    counts = count("qwen2_5_vl")
    everywhere = count_encoder(TOKENS, gated=True)
    assert 0.5 * everywhere < counts["encoder"] < everywhere


def test_experts_count_where_they_are_asked():
    """Each token asks two experts of four, and the router."""
    counts = count("qwen3_vl_moe")
    router = LAYERS * (TOKENS + TEXT) * HIDDEN * 4
    assert counts["language"] == count_language(TOKENS, inner=2 * 32) + router + HEAD


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava"])
def test_fewer_tokens_cost_the_language_model_less_and_the_encoder_the_same(family):
    full, fewer = count(family), count(family, "grid", 4)
    assert fewer["encoder"] == full["encoder"]
    assert fewer["choosing"] == 0
    if family != "llava":
        assert fewer["language"] == count_language(4) + HEAD
    assert fewer["language"] < full["language"]


def test_choosing_is_what_is_neither():
    assert count("qwen3_vl", "divprune", 4)["choosing"] >= HIDDEN * TOKENS  # cosines of the first token at least
    recorded = count("qwen3_vl", "visionzip", 4)
    assert recorded["encoder"] == count_encoder(TOKENS, deepstack=2)
    assert recorded["choosing"] > 0  # the attention of an encoder layer is computed again


def test_looks_and_smaller_pictures_count_where_they_happen():
    small = count("qwen3_vl", "downsample", 6)
    assert small["encoder"] == count_encoder(6, deepstack=2)
    both = count("qwen3_vl", "half-and-half", 12)
    assert both["encoder"] == count_encoder(TOKENS, deepstack=2) + small["encoder"]
    unsure = create_selector("downsample-auto", sure=1.0)
    twice = count("qwen3_vl", unsure, 24)
    assert twice["encoder"] > small["encoder"]
    sure = count("qwen3_vl", create_selector("downsample-auto", sure=0.0), 24)
    assert sure["encoder"] == small["encoder"]
    assert sure["language"] == 2 * small["language"]  # read to decide, and again to answer


def test_tokens_that_leave_inside_the_model_count_until_they_do():
    counts = count("qwen3_vl", "fastv", 4)
    layers = count_language(TOKENS, layers=2) + count_language(4, layers=1) + HEAD
    # the last token's query, all keys, and their products, once more; then the mean over one token
    length = TOKENS + TEXT
    choice = HIDDEN * WIDTH * (HEADS + length * KEY_HEADS) + HEADS * length * WIDTH + HEADS * length
    assert counts["language"] == layers + choice
    assert counts["choosing"] == 0


@pytest.fixture(scope="module", name="opened")
def open_embedded():
    return Opened(load_model("embedded", dtype=torch.float32), load_processor("embedded"))


@pytest.mark.slow
def test_what_is_encoded_once_for_all_is_charged_to_each(opened):
    names = "arr-coc,arr-coc@saccade,arr-coc@wrong,visionzip,prumerge,scope,crop,downsample,half-and-half,fastv,oracle"
    contenders = open_contenders(names.split(","), opened.model)
    samples = take_samples(opened, [open_task("scenes", 2, 128), open_task("clips", 1, 128)], COUNTED)
    assert [isinstance(sample.shown, dict) for sample in samples] == [False, True, False]  # the tasks in turn
    samples = samples[::2]  # mode `saccade` reads no clips
    calls = [(one, "full" if one.name == "full" else "0.5") for one in contenders]
    together = list(count_work(opened, samples, calls))
    alone = [row for call in calls for row in count_work(opened, samples, [call])]
    assert together == alone
    assert "encode" not in vars(open_family(opened.model))
    rows = {row["selector"]: row for row in together}
    assert rows["visionzip"]["encoder_gmacs"] == rows["full"]["encoder_gmacs"] > 0
    assert rows["visionzip"]["choosing_gmacs"] > 0
    assert rows["arr-coc@wrong"] == {**rows["arr-coc"], "selector": "arr-coc@wrong"}
    family, by_hand = open_family(opened.model), []
    for sample in samples:
        session = opened.session(family, contenders[0], "full")
        by_hand.append(count_parts(family, partial(session.forward, {**sample.inputs, "logits_to_keep": 1})))
    for part in PARTS:
        mean = sum(counts[part] for counts in by_hand) / 2e9 / len(samples)
        assert rows["full"][f"{part}_gmacs"] == pytest.approx(mean, abs=1e-6)
