"""Model, processor and selector in one object, opened from a directory as a new user would."""

import copy
import inspect
import json
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_directory import photo, processed, write_checkpoint
from tiny_models import QWEN

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ARRCOCOutput,
    ARRCOCQwen,
    Gaze,
    TokenSelector,
    create_selector,
    load_processor,
    prepare,
)
from arr_coc.inference import load as loading
from arr_coc.inference.messages import make_messages
from arr_coc.pixels.files import as_picture

ROOT = Path(__file__).parents[2]
SHORT = {"max_new_tokens": 5, "min_new_tokens": 5}


@pytest.fixture(scope="module", name="directory")
def make_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="module", name="vlm")
def open_vlm(directory):
    return ARRCOCQwen.from_pretrained(directory, budget=0.25)


@pytest.fixture(scope="module", name="picture")
def save_picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "photo.png"
    photo(96, 64).save(path)
    return path


def test_an_answer_says_how_it_came_about(vlm, picture):
    answer = vlm.answer(picture, "what color is it?", budget=24, **SHORT)
    assert answer.text == str(answer)
    assert (answer.tokens.full, answer.tokens.used) == (96, 24)
    assert isinstance(answer.output, ARRCOCOutput)
    assert answer.output.relevance.shape == (1, 1, 8, 12)
    assert answer.strategy == "relevance"
    assert "24 of 96 tokens" in answer.reason
    assert list(answer.timings_ms) == ["encode", "select", "prefill", "decode"]
    assert all(time > 0 for time in answer.timings_ms.values())


def test_full_is_the_plain_model_and_pruning_is_not(vlm, picture):
    data = processed(vlm.processor, [photo(96, 64)], "what color is it?")
    plain = vlm.model.generate(**data, **SHORT, do_sample=False)[0, data["input_ids"].shape[1] :]
    answer = vlm.answer(picture, "what color is it?", mode="full", **SHORT)
    assert answer.text == vlm.processor.decode(plain, skip_special_tokens=True).strip()
    assert answer.output is None
    assert (answer.tokens.full, answer.tokens.used) == (96, 96)
    assert (answer.strategy, answer.reason) == ("all", "mode is full")
    assert vlm.answer(picture, "what color is it?", mode="weight", **SHORT).tokens.used == 96
    texts = {vlm.answer(picture, "what color is it?", budget=budget, **SHORT).text for budget in (4, 24, 96)}
    assert len(texts) > 1


@torch.no_grad()
def test_forward_and_generate_are_those_of_the_base(vlm):
    data = processed(vlm.processor, [photo(96, 64), photo(64, 64, 1)])
    prepared = prepare(vlm.model, data, vlm.selector, budget=0.25, chat=vlm._calls.session.settings.chat)
    assert torch.equal(vlm(**data).logits, vlm.model(**prepared).logits)
    assert len(vlm.output) == 2
    out = vlm.generate(**data, **SHORT, do_sample=False)
    assert torch.equal(out[:, : data["input_ids"].shape[1]], data["input_ids"])
    assert out.shape[1] == data["input_ids"].shape[1] + 5
    for name in ("forward", "generate"):
        assert inspect.signature(getattr(vlm, name)) == inspect.signature(getattr(vlm.model, name))
    strict = ARRCOCQwen(vlm.model, vlm.processor, vlm.selector, budget=0.25, on_error="raise")
    labelled = strict(**data, labels=data["input_ids"])
    assert labelled.loss.isfinite()
    assert labelled.logits.shape[1] < data["input_ids"].shape[1]
    ids = data.pop("input_ids")
    assert torch.equal(strict(ids, data.pop("attention_mask"), **data).logits, labelled.logits)


@torch.no_grad()
def test_a_copy_is_a_model_of_its_own(vlm):
    data = processed(vlm.processor, [photo(96, 64)])
    twin = copy.deepcopy(vlm)
    assert torch.equal(twin(**data).logits, vlm(**data).logits)
    for parameter in twin.model.parameters():
        parameter.zero_()
    assert twin(**data).logits.abs().max() == 0
    assert vlm(**data).logits.abs().max() > 0


def test_a_loaded_model_takes_what_a_made_one_takes(directory):
    settings = {"mode": "saccade", "gaze": Gaze(overlap="keep"), "graphs": False}
    loaded = ARRCOCQwen.from_pretrained(directory, **settings)
    made = ARRCOCQwen(loaded.model, loaded.processor, loaded.selector, **settings)
    assert loaded._calls.session.settings == made._calls.session.settings
    own = inspect.signature(ARRCOCQwen.__init__).parameters
    assert {*own} - {"self", "model", "processor"} <= {*inspect.signature(ARRCOCQwen.from_pretrained).parameters}


@torch.no_grad()
def test_the_selector_can_be_changed_and_the_base_shows_through(directory):
    opened = ARRCOCQwen.from_pretrained(directory, budget=9)
    assert not opened.training
    assert not any(parameter.requires_grad for parameter in opened.model.parameters())
    assert opened.config is opened.model.config
    assert opened.device == opened.model.device
    assert any(name.startswith("selector.") for name in opened.state_dict())
    opened.selector = create_selector("grid")
    assert not any(name.startswith("selector.") for name in opened.state_dict())
    data = processed(opened.processor, [photo(96, 64)])
    opened(**data)
    assert opened.output == [None]
    with pytest.raises(TypeError, match="`selector` must be a selector, got 'grid'; make one with create_selector"):
        opened.selector = "grid"


def test_several_pictures_conversations_and_text(vlm, picture):
    two = vlm.answer([picture, photo(64, 64)], "which is brighter?", budget=8, **SHORT)
    assert (two.tokens.full, two.tokens.used, len(two.outputs)) == (160, 16, 2)
    first = {"role": "user", "content": [{"type": "image", "image": str(picture)}, {"type": "text", "text": "what?"}]}
    chat = [first, {"role": "assistant", "content": "a dog"}]
    later = vlm.answer(chat, "what color is it?", budget=8, **SHORT)
    assert later.tokens.used == 8
    assert vlm.answer([first], budget=8, **SHORT).tokens.used == 8
    lazily = vlm.answer((one for one in (picture, photo(64, 64))), "which is brighter?", budget=8, **SHORT)
    assert lazily.tokens == two.tokens
    array = vlm.answer(np.asarray(photo(96, 64)), "what color is it?", budget=24, **SHORT)
    assert array.text == vlm.answer(photo(96, 64), "what color is it?", budget=24, **SHORT).text
    words = vlm.answer([{"role": "user", "content": "what color is the dog?"}], **SHORT)
    assert (words.tokens.full, words.strategy, words.reason) == (0, "all", "there is no picture")


def test_the_question_counts_and_not_the_template(vlm, picture):
    seen = []

    class Looking(TokenSelector):
        def select(self, queries, budget=None):
            seen.append(queries[0].words)
            return create_selector("grid").select(queries, budget)

    looking = ARRCOCQwen(vlm.model, vlm.processor, Looking(), on_error="raise")
    looking.answer(picture, "what color is the dog?", **SHORT)
    ids = vlm.processor.tokenizer.encode("what color is the dog?", add_special_tokens=False)
    assert torch.equal(seen[0], vlm.model.get_input_embeddings()(torch.tensor(ids)))


def test_a_streamer_gets_the_answer_as_it_is_written(vlm, picture):
    pieces = []

    class Pieces(transformers.TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            pieces.append(text)

    streamer = Pieces(vlm.processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    answer = vlm.answer(picture, "what color is it?", streamer=streamer, **SHORT)
    assert "".join(pieces).strip() == answer.text
    sampled = vlm.answer(picture, "what?", do_sample=True, logits_processor=None, **SHORT)
    assert isinstance(sampled.text, str)


@pytest.mark.parametrize("name", ["grid", "downsample", "half-and-half"])
def test_any_selector_by_name(directory, picture, name):
    answer = ARRCOCQwen.from_pretrained(directory, name, budget=24).answer(picture, "what?", **SHORT)
    assert answer.tokens.used == 24
    assert answer.output is None
    assert answer.strategy == name


def test_a_failing_selection_is_named_in_the_answer(vlm, picture, caplog):
    class Failing(TokenSelector):
        def select(self, queries, budget=None):
            raise RuntimeError("no idea")

    answer = ARRCOCQwen(vlm.model, vlm.processor, Failing()).answer(picture, "what?", **SHORT)
    assert answer.strategy == "all"
    assert answer.reason.endswith("selection failed: no idea")
    assert answer.tokens.used == answer.tokens.full == 96
    assert len(caplog.records) == 1


def test_a_selector_opens_the_base_it_records(vlm, directory, tmp_path):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(vlm.model, budget=7))
    assert layer.config.base_model_name_or_path == str(directory)
    layer.save_pretrained(tmp_path)
    for opened in (ARRCOCQwen.from_pretrained(selector=tmp_path), ARRCOCQwen.from_pretrained(tmp_path)):
        assert opened.selector.config == layer.config
        assert opened.answer(photo(96, 64), "what?", **SHORT).tokens.used == 7


def test_dtype_attention_and_device_pass_through(directory):
    opened = ARRCOCQwen.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager")
    assert opened.model.dtype == torch.bfloat16
    assert opened.model.config._attn_implementation == "eager"
    assert opened.answer(photo(96, 64), "what?", budget=9, **SHORT).tokens.used == 9


def test_that_the_layer_is_untrained_is_said_once(directory, caplog):
    loading._warn_untrained.cache_clear()
    with caplog.at_level(logging.WARNING, logger="arr_coc.inference.load"):
        for _ in range(2):
            ARRCOCQwen.from_pretrained(directory)
    assert [record.getMessage() for record in caplog.records if "untrained" in record.getMessage()] == [
        "no selector was given: using the untrained layer, which is a training-free selector"
    ]


def test_a_photo_is_the_same_as_a_file_and_as_an_image(vlm, tmp_path):
    turned = Image.Exif()
    turned[274] = 6  # orientation
    path = tmp_path / "turned.jpg"
    photo(96, 64).save(path, exif=turned, quality=95)
    with Image.open(path) as image:
        assert as_picture(image).size == as_picture(path).size == (64, 96)


@pytest.mark.parametrize("family", QWEN)
def test_every_processor_opens_from_a_directory(family, tmp_path):
    written = write_checkpoint(tmp_path, family)
    opened = load_processor(tmp_path)
    assert isinstance(opened, getattr(transformers, type(written).__name__))
    data, again = (processed(processor, [photo(96, 64)]) for processor in (written, opened))
    for name in data:
        torch.testing.assert_close(data[name], again[name])


def test_what_cannot_be_opened_is_said_in_one_line(directory, tmp_path):
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=32))
    layer.save_pretrained(tmp_path / "narrow")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "empty").mkdir()
    cases = [
        ({"base": tmp_path / "text"}, "bert is not supported; supported are .*qwen3_vl"),
        ({"base": tmp_path / "empty"}, "cannot be opened as a model"),
        ({"base": directory, "selector": tmp_path / "narrow"}, "made for models of width 32, this one has 64"),
        ({"selector": tmp_path / "narrow"}, "does not name its base model; name it too, as `base` or with --model"),
        ({"base": directory, "dtype": "float13"}, "`dtype` must be 'auto' or one of torch's, .* got 'float13'"),
        ({"base": directory, "mode": "best"}, "`mode` must be one of auto, prune, weight, saccade, got 'best'"),
    ]
    for kwargs, says in cases:
        with pytest.raises(ValueError, match=says) as caught:
            ARRCOCQwen.from_pretrained(local_files_only=True, **kwargs)
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="`selector` must be a name, a directory, a Hub id or a selector, got 3"):
        ARRCOCQwen.from_pretrained(selector=3)
    with pytest.raises(FileNotFoundError, match="neither a directory nor a selector"):
        ARRCOCQwen.from_pretrained(directory, "no/such-selector", local_files_only=True)


def test_what_cannot_be_asked_is_said_in_one_line(vlm, picture):
    cases = [
        ((picture, "  "), {}, "the question is empty"),
        ((picture,), {}, "there is no question"),
        (("missing.jpg", "what?"), {}, "missing.jpg"),
        ((picture, "what?"), {"mode": "best"}, "`mode` must be one of auto, full, prune, weight, saccade, got 'best'"),
        ((picture, "what?"), {"budget": 0}, "`budget` must be at least 1 token"),
        (([3], "what?"), {}, "a picture must be a path, a PIL image or an array of bytes, got int"),
        ((np.zeros((4, 4)), "what?"), {}, r"an array must be \[H, W, 3\] of uint8, got \[4, 4\] of float64"),
        (([], "what?"), {}, "there is no picture; give at least one"),
        (({"role": "user", "content": None},), {}, "`content` of a message must be a string or a list of parts, got N"),
        (({"role": "user", "content": ["hi"]},), {}, "a part of a message must be a dictionary, such as .* got str"),
        (({"role": "user", "content": [{"type": "image"}]},), {}, "must have its picture, as `image`, got none"),
        (({"text": "a"}, "what?"), {}, "a message needs `role` and `content`, got text"),
        (("https://example.com/a.jpg", "what?"), {}, "https://example.com/a.jpg is a URL; download"),
        ((picture, 3), {}, "the question must be a string, got int"),
        ((picture, "what?"), {"num_return_sequences": 3}, "takes no num_return_sequences; use `generate`"),
    ]
    for arguments, kwargs, says in cases:
        with pytest.raises((ValueError, TypeError, OSError), match=says) as caught:
            vlm.answer(*arguments, **kwargs)
        assert "\n" not in str(caught.value)


def test_messages_keep_their_order_and_open_their_pictures(picture):
    turn = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": str(picture)}]}
    [system, user] = make_messages([{"role": "system", "content": "be short"}, turn], None)
    assert system["content"] == [{"type": "text", "text": "be short"}]
    assert [part["type"] for part in user["content"]] == ["text", "image"]
    assert user["content"][1]["image"].size == (96, 64)
    assert turn["content"][1]["image"] == str(picture)  # the caller's own is untouched


def test_the_example_is_what_the_readme_shows_and_runs(directory, picture, monkeypatch, capsys):
    example = ROOT / "examples" / "attach_qwen.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(directory), str(picture), "what color is it?"])
    runpy.run_path(str(example), run_name="__main__")
    assert "24 of 96 tokens" in capsys.readouterr().out
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    body = example.read_text().split('"""')[2].strip()
    assert body in [block.strip() for block in shown]


@pytest.mark.slow
def test_it_works_with_no_network_and_no_torchvision_in_a_new_process(directory, picture):
    code = (
        "import sys; sys.modules['torchvision'] = None\n"
        "from arr_coc import ARRCOCQwen\n"
        f"print(ARRCOCQwen.from_pretrained({str(directory)!r}).answer({str(picture)!r}, 'what?', budget=0.25).tokens)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert "TokenCount(full=96, used=24)" in result.stdout, result.stderr
