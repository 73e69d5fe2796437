"""Many questions in batches: the same answers as one by one, whatever the pictures; one bad question costs no other."""

import gc
import logging
import threading
import time
from importlib.resources import files

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_directory import photo, write_checkpoint
from tiny_models import FAMILIES, IMAGE_PROMPT, QWEN, SMALL, TEXT, TWO_IMAGES, inputs_for, prompt_row, tiny_model
from tiny_models import collate as collate_rows

from arr_coc import Answer, ARRCOCConfig, ARRCOCLayer, ARRCOCQwen, TokenSelector, create_selector
from arr_coc.families.family import open_family
from arr_coc.gaze.plan import Gaze, plan_gaze
from arr_coc.gaze.source import NativeSource
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.runtime.read_ahead import read_ahead
from arr_coc.selectors.contract import InvalidSelectorError

CPU = torch.device("cpu")
SHORT = {"max_new_tokens": 6, "min_new_tokens": 6}
MODES = ("full", "prune", "weight", "saccade")


@pytest.fixture(scope="module", name="open_family_of")
def make_opener(tmp_path_factory):
    opened = {}

    def open_model(family):
        if family not in opened:
            directory = tmp_path_factory.mktemp(family)
            write_checkpoint(directory, family)
            opened[family] = ARRCOCQwen.from_pretrained(directory, budget=16)
        return opened[family]

    return open_model


@pytest.fixture(name="vlm")
def open_vlm(open_family_of):
    return open_family_of("qwen3_vl")


def mixed():
    """One picture, two of other sizes, none, and a conversation about a wide one."""
    turns = [
        {"role": "user", "content": [{"type": "image", "image": photo(160, 40, 3)}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "a small dog"},
        {"role": "user", "content": "what color is it?"},
    ]
    return [
        (photo(96, 64), "what color is it?"),
        ([photo(64, 64, 1), photo(40, 120, 2)], "which is the dog on the left?"),
        (None, "who are you?"),
        turns,
    ]


def ask_alone(vlm, asked, **options):
    if isinstance(asked, tuple) and asked[0] is not None:
        return vlm.answer(*asked, **options)
    return vlm.answer([{"role": "user", "content": asked[1]}] if isinstance(asked, tuple) else asked, **options)


def assert_same(together, alone):
    for name in ("text", "tokens", "strategy", "reason", "words", "budget"):
        assert getattr(together, name) == getattr(alone, name), name
    assert [grid for grid, _ in together.kept] == [grid for grid, _ in alone.kept]
    assert all(np.array_equal(one[1], two[1]) for one, two in zip(together.kept, alone.kept, strict=True))
    assert [output is None for output in together.outputs] == [output is None for output in alone.outputs]
    for one, two in zip(together.outputs, alone.outputs, strict=True):
        if one is not None:
            assert torch.allclose(one.relevance, two.relevance, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", QWEN)
def test_answers_are_those_of_the_questions_asked_one_by_one(open_family_of, family, mode):
    vlm = open_family_of(family)
    together = list(vlm.answer_many(mixed(), batch_size=4, mode=mode, **SHORT))
    alone = [ask_alone(vlm, asked, mode=mode, **SHORT) for asked in mixed()]
    for one, two in zip(together, alone, strict=True):
        assert_same(one, two)
    assert len({answer.text for answer in together}) > 1  # the rows could not be swapped unnoticed
    assert together[0].timings_ms == together[1].timings_ms
    assert [len(answer.kept) for answer in together] == [1, 2, 0, 1]
    if mode in ("prune", "saccade"):
        used = [answer.tokens.used for answer in together]
        assert all(0 < tokens <= most for tokens, most in zip(used[:2], (16, 32), strict=True))
        assert used[2] == 0


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_generate_the_tokens_they_generate_alone(family):
    model = tiny_model(family)
    session = Session(open_family(model), create_selector("grid"), Settings(budget=5, on_error="raise"))
    specs = [IMAGE_PROMPT, TEXT, TWO_IMAGES, SMALL]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    rows = session.generate({**inputs_for(family, *specs), **options}).split(len(specs))
    for place, spec in enumerate(specs):
        alone = session.generate({**collate_rows(family, [prompt_row(family, spec, place)]), **options})
        assert torch.equal(rows[place].generated, alone.generated)
        assert rows[place].used_counts == alone.used_counts
        assert rows[place].full_counts == alone.full_counts
    assert not torch.equal(rows[0].generated, rows[2].generated)


@pytest.mark.parametrize("selector", ["downsample", "fastv", "half-and-half"])
def test_selectors_of_other_kinds_count_each_row(vlm, selector):
    opened = ARRCOCQwen(vlm.model, vlm.processor, create_selector(selector), budget=16)
    together = list(opened.answer_many(mixed()[:2], **SHORT))
    alone = [ask_alone(opened, asked, **SHORT) for asked in mixed()[:2]]
    for one, two in zip(together, alone, strict=True):
        assert_same(one, two)
    assert together[0].tokens != together[1].tokens


@pytest.mark.parametrize(("mode", "calls"), [("prune", 1), ("saccade", 2)])
def test_a_batch_is_encoded_and_read_at_once(vlm, mode, calls, monkeypatch):
    family, seen = vlm._calls.session.family, []
    for name in ("run_encoder", "encode_cells"):
        plain = getattr(family, name)
        monkeypatch.setattr(family, name, lambda *a, plain=plain, **k: seen.append("encoder") or plain(*a, **k))
    generate = vlm.model.generate
    monkeypatch.setattr(vlm.model, "generate", lambda **k: seen.append("model") or generate(**k))
    asked = [(photo(96 + 8 * n, 64), "what?") for n in range(4)]
    list(vlm.answer_many(asked, batch_size=4, mode=mode, **SHORT))
    assert seen == ["encoder"] * calls + ["model"]
    list(vlm.answer_many(asked, batch_size=3, mode=mode, **SHORT))
    assert len(seen) == 3 * (calls + 1)


def test_prompts_are_padded_on_the_left_whatever_the_tokenizer_does(vlm, monkeypatch):
    asked = [(None, "who are you?"), (None, "what color is the small dog on the left?")]
    alone = [ask_alone(vlm, one, **SHORT).text for one in asked]
    monkeypatch.setattr(vlm.processor.tokenizer, "padding_side", "right")
    assert [answer.text for answer in vlm.answer_many(asked, **SHORT)] == alone


class Delicate(TokenSelector):
    """Keeps the first cells, and fails on tall pictures."""

    def select(self, queries, budget=None):
        if any(query.grid[1] > query.grid[2] for query in queries):
            raise RuntimeError("a tall picture")
        return create_selector("grid").select(queries, budget)


def test_a_failing_selection_costs_only_its_own_question(vlm, caplog):
    asked = [(photo(96, 64), "what?"), (photo(64, 96), "what?"), (photo(80, 80), "which dog?")]
    opened = ARRCOCQwen(vlm.model, vlm.processor, Delicate(), budget=16)
    with caplog.at_level(logging.WARNING):
        together = list(opened.answer_many(asked, **SHORT))
    assert [record.getMessage() for record in caplog.records] == [
        "selection failed, all visual tokens are kept: a tall picture"
    ]
    assert opened.fallbacks == 1
    assert [answer.tokens.used for answer in together] == [16, 96, 16]
    assert together[1].reason == "selection failed: a tall picture"
    for one, two in zip(together, [opened.answer(*question, **SHORT) for question in asked], strict=True):
        assert_same(one, two)
    told = []
    telling = ARRCOCQwen(vlm.model, vlm.processor, Delicate(), budget=16, on_error=told.append)
    assert [answer.tokens.used for answer in telling.answer_many(asked, **SHORT)] == [16, 96, 16]
    assert [str(error) for error in told] == ["a tall picture"]


def refuse(error):
    raise KeyError("refused") from error


@pytest.mark.parametrize(("on_error", "expected"), [("raise", RuntimeError), (refuse, KeyError)])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_an_error_of_a_selection_takes_the_place_of_its_answer(vlm, on_error, expected, batch_size):
    asked = [(photo(96, 64), "what?"), (photo(64, 96), "what?"), (photo(80, 80), "which dog?")]
    strict = ARRCOCQwen(vlm.model, vlm.processor, Delicate(), budget=16, on_error=on_error)
    answers = list(strict.answer_many(asked, batch_size=batch_size, return_exceptions=True, **SHORT))
    assert [type(answer) for answer in answers] == [Answer, expected, Answer]
    stream = strict.answer_many(asked, batch_size=batch_size, **SHORT)
    assert next(stream).text == answers[0].text
    with pytest.raises(expected):
        next(stream)


def test_errors_that_belong_to_no_question_end_a_batch(vlm):
    wide = ARRCOCLayer(ARRCOCConfig(hidden_size=vlm.selector.config.hidden_size * 2))
    opened = ARRCOCQwen(vlm.model, vlm.processor, wide, budget=16, on_error="raise")
    with pytest.raises(InvalidSelectorError, match="made for models of width"):
        list(opened.answer_many([(photo(96, 64), "what?")] * 2, return_exceptions=True, **SHORT))


def test_a_question_that_cannot_be_asked_costs_no_other(vlm, tmp_path):
    (tmp_path / "cut.png").write_bytes(b"\x89PNG no picture")
    good = [(photo(96, 64), "what?"), (photo(64, 64), "which dog?"), (photo(72, 64), "who?")]
    thin = (photo(2, 600), "what?")  # refused by the processor
    asked = [good[0], (tmp_path / "cut.png", "what?"), good[1], thin, (photo(8, 8), " "), "what?", good[2]]
    answers = list(vlm.answer_many(asked, batch_size=5, return_exceptions=True, **SHORT))
    said = [str(answer) if isinstance(answer, Exception) else None for answer in answers]
    assert "cut.png is not a picture" in said[1]
    assert "too long and thin" in said[3]
    assert said[4].startswith("the question is empty")
    assert said[5] == "a question must be a pair (pictures, text) or a list of messages, got str"
    for place, question in zip((0, 2, 6), good, strict=True):
        assert_same(answers[place], vlm.answer(*question, **SHORT))
    stream = vlm.answer_many(asked, batch_size=1, **SHORT)
    assert next(stream).text == answers[0].text
    with pytest.raises(ValueError, match="is not a picture"):
        next(stream)


def test_wrong_arguments_are_refused_before_anything_is_read(vlm):
    def untouched():
        pytest.fail("read too early")
        yield

    for options, message in (
        ({"batch_size": 0}, "`batch_size` must be a whole number of at least 1, got 0"),
        ({"mode": "half"}, "`mode` must be one of auto, full, prune, weight, saccade, got 'half'"),
        ({"budget": 0}, "`budget`"),
        ({"num_return_sequences": 2}, "takes no num_return_sequences"),
        ({"streamer": object()}, "a streamer follows one answer; use `answer`"),
    ):
        with pytest.raises(ValueError, match=message):
            vlm.answer_many(untouched(), **options)
    assert list(vlm.answer_many([])) == []


def test_questions_are_read_one_batch_ahead_and_no_further(vlm):
    read = []

    def questions():
        for number in range(9):
            read.append(threading.current_thread().name)
            yield photo(64, 64, number), "what?"

    stream = vlm.answer_many(questions(), batch_size=2, **SHORT)
    assert not read
    next(stream)
    until = time.monotonic() + 10
    while len(read) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(read) == 4  # also the next batch, and no more
    assert set(read) == {"read-ahead"}
    assert len(list(stream)) == 8
    assert len(read) == 9
    assert "read-ahead" not in [thread.name for thread in threading.enumerate()]


def test_reading_ahead_keeps_order_and_errors_and_ends_when_closed():
    def numbers():
        yield from range(3)
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(read_ahead(numbers(), 2))
    reading = read_ahead(iter(int, 1), 3)  # without end
    assert next(reading) == 0
    assert any(thread.name == "read-ahead" for thread in threading.enumerate())
    reading.close()
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


def test_saccades_hold_statistics_of_a_batch_but_no_picture_as_floats():
    height, width = 3008, 4032
    cut = {"patch_size": 16, "merge_size": 2}
    sources = [NativeSource(Image.new("RGB", (width, height), color), cut, CPU) for color in ("red", "gray")]
    maps = [source.measure(plan_gaze(source.grid, None, Gaze())) for source in sources]
    for tensors in (one.tensors for one in maps):
        assert sum(tensor.nbytes for tensor in tensors if tensor is not None) <= 1.5 * height * width
    control = torch.zeros(3, height, width)
    alive = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.numel() >= height * width]
    assert [one is control for one in alive if one.is_floating_point()] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_embedded_model_answers_a_mixed_batch_as_one_by_one(mode):
    vlm = ARRCOCQwen.from_pretrained()
    examples = files("arr_coc") / "assets" / "examples"
    page, shapes, hidden = (examples / f"{name}.png" for name in ("page", "shapes", "camouflage"))
    star = [{"type": "image", "path": str(shapes)}, {"type": "text", "text": "what color is the star?"}]
    asked = [
        (hidden, "what does the gray text say?"),
        (page, "what is the total?"),
        (None, "what is this?"),
        ([shapes, hidden], "what does the purple text say?"),
        [{"role": "user", "content": star}],
    ]
    together = list(vlm.answer_many(asked, batch_size=5, mode=mode))
    alone = [ask_alone(vlm, one, mode=mode) for one in asked]
    for one, two in zip(together, alone, strict=True):
        assert_same(one, two)
    assert (together[0].text, together[1].text) == ("LSNHZ", "$20.10")
