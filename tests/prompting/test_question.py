"""The last question of a chat, found by the markers of the model's own tokenizer."""

import logging

import numpy as np
import pytest
import torch
from tiny_models import (
    CHAT_END,
    CHAT_START,
    FAMILIES,
    IMAGE,
    LLAVA_SIDE,
    NEWLINE,
    QWEN,
    RELATIVES,
    USER,
    VISION_END,
    VISION_START,
    VOCAB,
    inputs_for,
    tiny_model,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from arr_coc import ChatTokens, attach, create_selector, load_processor, prepare
from arr_coc.config import EMBEDDED_MODEL
from arr_coc.inference.load import load_model
from arr_coc.prompting import question
from arr_coc.selectors.rules import GridSelector

ASSISTANT = 11
QUESTION = [41, 42, 43]
UNKNOWN = "looks like a chat, but its markers are unknown"


class Looking(GridSelector):
    """Remembers the words it is asked about."""

    def __init__(self):
        self.words = None

    def select(self, queries, budget=None):
        self.words = queries[0].words
        return super().select(queries, budget)


def own_tokenizer():
    """A tokenizer with the markers of the tiny models."""
    words = {f"word{place}": place for place in range(VOCAB)}
    named = {"<|im_start|>": CHAT_START, "<|im_end|>": CHAT_END, "user": USER, "\n": NEWLINE, "<unk>": 0}
    words = {word: place for word, place in words.items() if place not in named.values()} | named
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    made.encode = lambda text, **_: [words[text]]  # the splitter drops line breaks
    return made


def two_turns(family):
    """A picture and a question, an answer, and another question."""
    picture = [IMAGE] * (LLAVA_SIDE**2 if family == "llava" else 4)
    if family != "llava":
        picture = [VISION_START, *picture, VISION_END]
    turns = [(USER, [*picture, 31, 32, 33, 34]), (ASSISTANT, [51, 52]), (USER, QUESTION)]
    ids = [id for role, text in turns for id in (CHAT_START, role, NEWLINE, *text, CHAT_END, NEWLINE)]
    ids = torch.tensor([[*ids, CHAT_START, ASSISTANT, NEWLINE]])
    data = inputs_for(family, [("image", (1, 4, 4))]) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    data.pop("mm_token_type_ids", None)
    return data


def asked(model, data, call=attach, **options):
    """Embeddings of the words that the selector is asked about."""
    looking = Looking()
    with torch.no_grad():
        if call is prepare:
            prepare(model, data, looking, budget=2, on_error="raise", **options)
        else:
            with attach(model, looking, budget=2, on_error="raise", **options):
                model(**data)
    return looking.words


@pytest.fixture(autouse=True)
def _warn_anew():
    question._warn_once.cache_clear()


@pytest.fixture(scope="module")
def embedded():
    return load_model("embedded"), load_processor("embedded")


def chat_inputs(processor, last="what color?"):
    picture = np.zeros((64, 96, 3), dtype=np.uint8)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what does the red text say?"}]},
        {"role": "assistant", "content": "nothing at all"},
        {"role": "user", "content": last},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor(images=[picture], text=[text], return_tensors="pt")


@pytest.mark.parametrize("given", ["nothing", "processor", "tokenizer", "chat"])
@pytest.mark.parametrize("call", [attach, prepare])
def test_the_embedded_models_markers_are_found(embedded, call, given, caplog):
    model, processor = embedded
    data = dict(chat_inputs(processor))
    options = {
        "nothing": {},
        "processor": {"processor": processor},
        "tokenizer": {"processor": processor.tokenizer},
        "chat": {"chat": ChatTokens.from_tokenizer(processor.tokenizer)},
    }[given]
    wanted = processor.tokenizer.encode("what color?", add_special_tokens=False)
    assert len(wanted) == 3
    assert torch.equal(asked(model, data, call, **options), model.get_input_embeddings()(torch.tensor(wanted)))
    assert UNKNOWN not in caplog.text


def test_the_embedded_models_markers_are_not_those_of_qwen(embedded, caplog):
    """The control: with the markers of another vocabulary everything after the picture counts, and that is said."""
    model, processor = embedded
    assert len(asked(model, dict(chat_inputs(processor)), chat=ChatTokens())) > 20
    assert UNKNOWN in caplog.text


@pytest.mark.parametrize("call", [attach, prepare])
@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
def test_a_processor_tells_the_markers(family, call):
    model, data = tiny_model(family), two_turns(family)
    words = asked(model, data, call, processor=own_tokenizer())
    assert torch.equal(words, model.get_input_embeddings()(torch.tensor(QUESTION)))


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
def test_given_markers_win_over_the_processors(family):
    model, data = tiny_model(family), two_turns(family)
    chat = ChatTokens(start=CHAT_START, end=CHAT_END, user=(ASSISTANT,), newline=NEWLINE)
    words = asked(model, data, chat=chat, processor=own_tokenizer())
    assert words.shape[0] > 0
    assert not torch.equal(words, model.get_input_embeddings()(torch.tensor(QUESTION)))


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
def test_a_chat_that_is_not_understood_is_told_once(family, caplog):
    model, data = tiny_model(family), two_turns(family)
    model.generation_config.eos_token_id = [CHAT_END, 2]
    for _ in range(3):
        assert len(asked(model, data)) > len(QUESTION)
    assert caplog.text.count(UNKNOWN) == 1
    assert "pass `processor`" in caplog.text


@pytest.mark.parametrize("family", QWEN)
def test_a_prompt_without_turns_is_no_chat(family, caplog):
    model = tiny_model(family)
    asked(model, inputs_for(family, [("text", 4), ("image", (1, 4, 4)), ("text", 6)]))
    data = inputs_for(family, [("text", 4), ("image", (1, 4, 4)), ("text", 6)])
    data["input_ids"][0, -1] = model.generation_config.eos_token_id  # an answer to learn from
    asked(model, data)
    assert UNKNOWN not in caplog.text


def test_qwens_own_vocabulary_needs_no_tokenizer(monkeypatch):
    """Its markers are known: nothing is read from disk."""
    model = tiny_model("qwen3_vl")
    family = question.Family(model)
    monkeypatch.setattr(question, "_read_chat", lambda *_: pytest.fail("read a tokenizer"))
    model.config.image_token_id, model.config.name_or_path = 151655, "somewhere"
    assert question.find_chat(family) == ChatTokens()


def test_a_model_of_another_vocabulary_asks_the_tokenizer_beside_it(tmp_path, caplog):
    model = tiny_model("qwen3_5")
    family = question.Family(model)
    model.config.name_or_path = EMBEDDED_MODEL
    assert question.find_chat(family) == ChatTokens(1, 2, (1845,), 8)
    model.config.name_or_path = str(tmp_path)  # no tokenizer there
    with caplog.at_level(logging.DEBUG):
        assert question.find_chat(family) == ChatTokens()
    assert "no tokenizer beside" in caplog.text


def test_what_is_no_processor_is_refused():
    model, data = tiny_model("qwen3_vl"), two_turns("qwen3_vl")
    with pytest.raises(TypeError, match="`processor` must be the model's processor or tokenizer, got int"):
        prepare(model, data, create_selector("grid"), processor=3)
    with pytest.raises(TypeError, match="got str"):
        attach(model, create_selector("grid"), processor="Qwen/Qwen3-VL-2B-Instruct")
