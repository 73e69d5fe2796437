import copy
import ctypes
import functools
import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from simple_selector import GREEDY, ByScore, state_of
from tiny_models import (
    CHAT_END,
    CHAT_START,
    FAMILIES,
    HIDDEN,
    IMAGE,
    IMAGE_PROMPT,
    NEWLINE,
    PAD,
    SMALL,
    TEXT,
    TWO_IMAGES,
    USER,
    VISION_END,
    VISION_START,
    inputs_for,
    tiny_model,
)
from transformers import GenerationConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ChatTokens,
    Selection,
    TokenSelector,
    attach,
    create_selector,
    prepare,
)
from arr_coc.families import open_family
from arr_coc.prompting.question import find_question

CHAT = ChatTokens(start=CHAT_START, end=CHAT_END, user=(USER,), newline=NEWLINE)


@pytest.fixture(scope="module", params=FAMILIES, name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


@torch.no_grad()
def test_attached_calls_are_prepared_calls_and_the_model_comes_back(opened):
    family, model = opened
    data = inputs_for(family, TWO_IMAGES)
    plain = model(**data).logits
    before = state_of(model)
    expected = model(**prepare(model, data, ByScore([5, 4]))).logits
    handle = attach(model, ByScore([5, 4]))
    assert torch.equal(model(**data).logits, expected)
    assert torch.equal(model(data["input_ids"], **{k: v for k, v in data.items() if k != "input_ids"}).logits, expected)
    handle.remove()
    handle.remove()
    assert state_of(model) == before
    assert torch.equal(model(**data).logits, plain)


@torch.no_grad()
def test_the_prompt_is_glued_back_on(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    prepared = prepare(model, data, ByScore(), budget=4)
    answers = model.generate(**prepared, **GREEDY)[:, prepared["input_ids"].shape[1] :]
    with attach(model, ByScore(), budget=4):
        out = model.generate(**data, **GREEDY)
        assert torch.equal(out[:, data["input_ids"].shape[1] :], answers)
        full = model.generate(**data, **GREEDY, return_dict_in_generate=True)
        assert torch.equal(full.sequences, out)
        length = data["input_ids"].shape[1] + 4
        limited = model.generate(**data, max_length=length, do_sample=False, suppress_tokens=list(range(7)))
        assert limited.shape[1] == length


@torch.no_grad()
def test_text_passes_untouched(opened):
    family, model = opened
    data = inputs_for(family, TEXT)
    plain, out = model(**data).logits, model.generate(**data, **GREEDY)
    with attach(model, ByScore(), budget=1) as run:
        assert torch.equal(model(**data).logits, plain)
        assert torch.equal(model.generate(**data, **GREEDY), out)
        assert run.output == []


@torch.no_grad()
def test_a_call_without_pictures_kept_none(opened):
    family, model = opened
    data, text = inputs_for(family, IMAGE_PROMPT), inputs_for(family, TEXT)
    with attach(model, ByScore(), budget=1) as run:
        for call in (model, functools.partial(model.generate, **GREEDY)):
            cache = model(**data, use_cache=True).past_key_values
            assert len(run.kept) == 1
            model(input_ids=torch.tensor([[40]]), past_key_values=cache)  # the same prompt goes on
            assert len(run.kept) == 1
            call(**text)
            assert (run.kept, run.output) == ([], [])


@torch.no_grad()
def test_an_error_inside_leaves_the_model_as_it_was(opened):
    _, model = opened
    before = state_of(model)
    with pytest.raises(RuntimeError, match="mine"), attach(model, ByScore()):
        raise RuntimeError("mine")
    assert state_of(model) == before


def test_attaching_twice_is_refused(opened):
    _, model = opened
    with attach(model, ByScore()), pytest.raises(ValueError, match="already attached"):
        attach(model, ByScore())
    attach(model, ByScore()).remove()


class Failing(TokenSelector):
    def select(self, queries, budget=None):
        raise RuntimeError("no idea")


@torch.no_grad()
def test_a_model_is_not_looked_through_nor_kept(monkeypatch):
    """Only wrappers around it are: they may hold another one the next time."""

    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    seen = []
    walk = torch.nn.Module.modules

    def modules(self):
        for part in walk(self):
            seen.append(part)
            yield part

    monkeypatch.setattr(torch.nn.Module, "modules", modules)
    model = tiny_model("qwen3_vl")
    wrapper = Wrapper(model)
    for found, passed in ((model, [model]), (wrapper, [wrapper, model])) * 2:
        seen.clear()
        assert open_family(found).target is model
        assert seen == passed
        with attach(found, ByScore(), budget=5):
            assert "forward" in vars(model)
    wrapper.model = other = tiny_model("qwen3_vl")
    with attach(wrapper, ByScore(), budget=5):
        assert "forward" in vars(other)
    kept = weakref.ref(model)
    seen.clear()
    del model, found, wrapper, passed
    gc.collect()
    assert kept() is None


def test_a_failing_selection_keeps_all_tokens_and_says_so_once(opened, caplog):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    plain = model(**data).logits
    with attach(model, Failing()):
        assert torch.equal(model(**data).logits, plain)
    assert [record.getMessage() for record in caplog.records] == [
        "selection failed, all visual tokens are kept: no idea"
    ]
    with attach(model, Failing(), on_error="raise"), pytest.raises(RuntimeError, match="no idea"):
        model(**data)


def test_wrong_settings_raise_whatever_on_error_says(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    before = state_of(model)
    for settings, says in (
        ({"budget": 0}, "at least 1 token"),
        ({"mode": "crop"}, "`mode` must be one of auto, prune, weight, saccade, got 'crop'"),
        ({"on_error": "ignore"}, "'full' or 'raise', got 'ignore'"),
    ):
        with pytest.raises(ValueError, match=says):
            attach(model, ByScore(), **settings)
        with pytest.raises(ValueError, match=says):
            prepare(model, data, ByScore(), **settings)
    assert state_of(model) == before


def test_other_models_are_refused_with_the_list():
    with pytest.raises(
        ValueError,
        match="Linear is not supported; supported are llava, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl",
    ):
        attach(torch.nn.Linear(2, 2), ByScore())


@torch.no_grad()
def test_placeholders_that_do_not_fit_the_pictures_are_said(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    data["input_ids"] = data["input_ids"].clone()
    data["input_ids"][data["input_ids"] == IMAGE] = 50
    with pytest.raises(ValueError, match="the prompt has 0 image placeholders"):
        prepare(model, data, ByScore(), on_error="full")


@torch.no_grad()
def test_saving_while_attached_saves_the_plain_model(opened, tmp_path):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    plain = model(**data).logits
    with attach(model, ByScore(), budget=3):
        model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).eval()(**data).logits, plain)


@torch.no_grad()
def test_two_models_in_two_threads_do_not_mix():
    models = {family: tiny_model(family) for family in ("qwen2_vl", "qwen3_vl")}
    data = {family: inputs_for(family, IMAGE_PROMPT) for family in models}
    expected = {f: m(**prepare(m, data[f], ByScore(), budget=4)).logits for f, m in models.items()}
    results, errors = {}, []

    def work(family):
        try:
            with torch.no_grad(), attach(models[family], ByScore(), budget=4):
                for _ in range(10):
                    results[family] = models[family](**data[family]).logits
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(family,)) for family in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for family in models:
        assert torch.equal(results[family], expected[family])


def chat_row(*turns):
    """Ids of a chat; a turn is a list of words, with IMAGE for a picture of four tokens."""
    ids = [CHAT_START, 60, NEWLINE, 61, 62, CHAT_END, NEWLINE]  # a system prompt
    for role, parts in turns:
        ids += [CHAT_START, role, NEWLINE]
        for part in parts:
            ids += [VISION_START, *[IMAGE] * 4, VISION_END] if part == IMAGE else [part]
        ids += [CHAT_END, NEWLINE]
    return [*ids, CHAT_START, 63, NEWLINE]


@pytest.mark.parametrize(
    ("turns", "asked"),
    [
        ([(USER, [IMAGE, 30, 31])], [30, 31]),
        ([(USER, [40, IMAGE, 30, 31])], [30, 31]),
        ([(USER, [40, 41, IMAGE])], [40, 41]),
        ([(USER, [IMAGE, 33, IMAGE, 30, 31])], [30, 31]),
        ([(USER, [IMAGE, 30, 31]), (63, [50, 51]), (USER, [32, 33])], [32, 33]),
    ],
    ids=["after", "around", "before", "two", "later"],
)
def test_the_question_is_found_by_the_structure_of_the_chat(turns, asked):
    ids = np.array([chat_row(*turns)])
    found = find_question(ids, np.ones_like(ids, dtype=bool), ids == IMAGE, {VISION_START, VISION_END, IMAGE}, CHAT)
    assert ids[found].tolist() == asked


def test_answers_padding_and_plain_prompts():
    ids = np.array([[0, 0, 20, VISION_START, IMAGE, VISION_END, 30, 31, 40, 41]])
    mask, special = ids > 0, {VISION_START, VISION_END, IMAGE}
    found = find_question(ids, mask, ids == IMAGE, special, CHAT)
    assert ids[found].tolist() == [30, 31, 40, 41]
    labels = np.full_like(ids, -100)
    labels[0, -2:] = ids[0, -2:]
    found = find_question(ids, mask, ids == IMAGE, special, CHAT, labels)
    assert ids[found].tolist() == [30, 31]


@torch.no_grad()
def test_the_question_reaches_the_selector_and_can_be_overridden():
    model = tiny_model("qwen3_vl")
    ids = torch.tensor([chat_row((USER, [IMAGE, 30, 31]))])
    data = inputs_for("qwen3_vl", [("image", (1, 4, 4))]) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    del data["mm_token_type_ids"]
    seen = []

    class Looking(ByScore):
        def select(self, queries, budget=None):
            seen.append(queries[0])
            return super().select(queries, budget)

    embed = model.get_input_embeddings()
    prepare(model, data, Looking(), chat=CHAT)
    assert torch.equal(seen[-1].words, embed(torch.tensor([30, 31])))
    assert seen[-1].picture.shape == (1, 3, 16, 16)
    prepare(model, data, Looking(), query=[torch.tensor([99])])
    assert torch.equal(seen[-1].words, embed(torch.tensor([99])))


@torch.no_grad()
def test_words_may_be_read_by_the_first_layers(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    ids = torch.tensor([30, 31, 32])
    seen = []

    class Looking(ByScore):
        def select(self, queries, budget=None):
            seen.append(queries[0].words)
            return super().select(queries, budget)

    states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    before = state_of(model)
    for layers in (0, 1, 2):
        prepare(model, data, Looking(), query=[ids], query_layers=layers)
        torch.testing.assert_close(seen[-1], states[layers][0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(seen[-1], seen[-2], atol=1e-2)
    with attach(model, Looking(), query_layers=2):
        model(**data)
    assert seen[-1].shape[0] == 6
    assert state_of(model) == before
    with pytest.raises(ValueError, match="`query_layers` must be at most 3"):
        prepare(model, data, ByScore(), query_layers=4)
    with pytest.raises(ValueError, match="`query` must have the ids of one question per row, got 2 for 1 rows"):
        prepare(model, data, ByScore(), query=[ids, ids])


def resident_bytes():
    """Of this process, after the allocator gave back what it only kept at hand."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_many_calls_leave_nothing_behind():
    model = tiny_model("qwen2_vl")
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=HIDDEN))
    data = inputs_for("qwen2_vl", IMAGE_PROMPT)
    kept = []

    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    def work(times, leak=False):
        for _ in range(times):
            with attach(model, layer, budget=5, on_error="raise"):
                logits = model(**data).logits
            if leak:
                kept.append(logits.repeat(1, 1, 100))

    work(20)
    before, hooks, memory = tensors(), state_of(model), resident_bytes()
    work(200)
    assert tensors() <= before + 2
    assert resident_bytes() - memory < 8e6
    assert state_of(model) == hooks
    work(20, leak=True)  # what a leak would look like
    assert tensors() >= before + 20
    assert resident_bytes() - memory > 8e6


@torch.no_grad()
def test_labels_of_the_whole_prompt_hide_no_question(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    with attach(model, ByScore(), budget=4, on_error="raise"):
        out = model(**data, labels=data["input_ids"])
    assert out.logits.shape[1] < data["input_ids"].shape[1]


@torch.no_grad()
def test_arguments_may_be_given_by_place(opened):
    family, model = opened
    data, text = inputs_for(family, IMAGE_PROMPT), inputs_for(family, TEXT)
    plain = model(text["input_ids"]).logits
    with attach(model, ByScore(), budget=4):
        expected = model(**data).logits
        ids, others = data["input_ids"], {name: data[name] for name in data if name != "input_ids"}
        assert torch.equal(model(ids, **others).logits, expected)
        assert torch.equal(model(text["input_ids"]).logits, plain)
        config = GenerationConfig(**GREEDY, pad_token_id=0, eos_token_id=2)
        assert torch.equal(model.generate(ids, config, **others), model.generate(**data, generation_config=config))


@torch.no_grad()
def test_a_deep_copy_made_while_attached_is_a_plain_model_of_its_own(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    plain = model(**data).logits
    with attach(model, ByScore(), budget=4):
        twin = copy.deepcopy(model)
    assert torch.equal(twin(**data).logits, plain)
    for parameter in twin.parameters():
        parameter.zero_()
    assert twin(**data).logits.abs().max() == 0


@torch.no_grad()
def test_limits_in_a_generation_config_count_the_full_prompt(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    length = data["input_ids"].shape[1] + 4
    config = GenerationConfig(max_length=length, do_sample=False, pad_token_id=0, suppress_tokens=list(range(7)))
    with attach(model, ByScore(), budget=4):
        assert model.generate(**data, generation_config=config).shape[1] == length
    assert config.max_length == length


def test_handles_remove_only_themselves_and_methods_set_by_others_come_back(opened):
    _, model = opened
    first = attach(model, ByScore())
    first.remove()
    with pytest.raises(ValueError, match="this handle was removed"), first:
        pass
    second = attach(model, ByScore())
    first.remove()
    with pytest.raises(ValueError, match="already attached"):
        attach(model, ByScore())
    second.remove()
    other = functools.partial(type(model).forward, model)
    model.forward = other  # as accelerate does
    try:
        with attach(model, ByScore()):
            assert model.forward is not other
        assert model.__dict__["forward"] is other
    finally:
        del model.forward


class Fixed(TokenSelector):
    def __init__(self, *selections):
        self.selections = selections

    def select(self, queries, budget=None):
        return list(self.selections)


@pytest.mark.parametrize(
    ("selections", "says"),
    [
        ([], "0 selections for 1 pictures"),
        ([torch.tensor([1, 0])], "must ascend, each cell once"),
        ([torch.tensor([1, 1])], "must ascend, each cell once"),
        ([torch.tensor([-1, 0])], "must name at least one of 24 cells, and none beyond"),
        ([torch.tensor([3, 24])], "must name at least one of 24 cells, and none beyond"),
        ([torch.tensor([], dtype=torch.long)], "must name at least one of 24 cells"),
        ([torch.ones(24, dtype=torch.bool)], "one-dimensional tensor of int64"),
    ],
)
@torch.no_grad()
def test_selections_that_break_the_contract_are_failures(selections, says):
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)
    selector = Fixed(*(Selection(indices=indices) for indices in selections))
    with pytest.raises(ValueError, match=says):
        prepare(model, data, selector, on_error="raise")
    assert torch.equal(model(**prepare(model, data, selector)).logits, model(**data).logits)


def test_selectors_made_for_something_else_raise_whatever_on_error_says():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)
    cases = [
        (ARRCOCLayer(ARRCOCConfig(hidden_size=32)), "the layer was made for models of width 32, this one has 64"),
        (create_selector("oracle"), "`oracle` has boxes for 0 pictures, the call has 1"),
        (create_selector("oracle", boxes=[[(0, 0, 64, 64)]]), "divide pixels by the picture's sides"),
    ]
    for selector, says in cases:
        with pytest.raises(ValueError, match=says):
            prepare(model, data, selector)
    for selector in ("grid", Fixed, None):
        with pytest.raises(TypeError, match="`selector` must be a selector, got"):
            attach(model, selector)
    with pytest.raises(ValueError, match="at least one id"):
        prepare(model, data, ByScore(), query=[torch.tensor([], dtype=torch.long)])


def test_inputs_that_say_too_little_are_refused():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT, SMALL)
    without_mask = {name: data[name] for name in data if name != "attention_mask"}
    with pytest.raises(ValueError, match="a batch with padding needs its `attention_mask`"):
        prepare(model, without_mask, ByScore())
    with pytest.raises(ValueError, match="`image_grid_thw` is missing"):
        prepare(model, {name: data[name] for name in data if name != "image_grid_thw"}, ByScore())
    embeds = model.get_input_embeddings()(data["input_ids"])
    with pytest.raises(ValueError, match="pass `input_ids`"):
        prepare(model, {**data, "input_ids": None, "inputs_embeds": embeds}, ByScore())
    open_ended = inputs_for("llava", [("text", 2), ("image", (1, 1, 1))])
    llava = tiny_model("llava")
    with attach(llava, ByScore()), pytest.raises(ValueError, match="the prompt ends in a picture"):
        llava.generate(**open_ended)
    llava.generation_config.use_cache = False
    with attach(llava, ByScore()), pytest.raises(ValueError, match="only with a cache"):
        llava.generate(**inputs_for("llava", SMALL))
    llava.config.vision_config.model_type = "siglip_vision_model"
    with pytest.raises(ValueError, match="LLaVA is supported with CLIP and the strategy 'default', got siglip"):
        attach(llava, ByScore())


ARGUMENTS = {
    "position_ids": (lambda data: torch.zeros(3, *data["input_ids"].shape, dtype=torch.long), "drop `position_ids`"),
    "attention_mask": (
        lambda data: torch.ones(1, 1, 8, 8),
        "must have shape .* to be shortened, got",
    ),
    "logits_to_keep": (lambda data: torch.tensor([0, 3]), "`logits_to_keep` names columns of the full prompt"),
    "mm_encoder_outputs": (lambda data: {"image": None}, "pass the pictures alone"),
    "inputs_embeds": (lambda data: torch.zeros(*data["input_ids"].shape, 64), "pass `input_ids`"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_a_shorter_prompt_cannot_honour_are_refused(opened, name):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    make, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        prepare(model, {**data, name: make(data)}, ByScore())
    with attach(model, ByScore(), budget=3):
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=message):
                call(**{**data, name: make(data)})
        without = {key: value for key, value in data.items() if key != "pixel_values"}
        if name == "mm_encoder_outputs":
            with pytest.raises(ValueError, match="`mm_encoder_outputs` cannot be shortened; pass the pictures"):
                model(**without, mm_encoder_outputs=make(data))
        with pytest.raises(ValueError, match="prefill_chunk_size loses the pictures"):
            model.generate(**data, prefill_chunk_size=4)


@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_processors_and_criteria_see_the_full_prompt(opened, beams):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    prompt, seen = data["input_ids"], []

    def check(ids):
        rows = prompt.repeat_interleave(len(ids) // len(prompt), dim=0)
        seen.append(torch.equal(ids[:, : prompt.shape[1]], rows))

    def process(input_ids, scores):
        check(input_ids)
        return scores

    def stop(input_ids, scores, **kwargs):
        check(input_ids)
        return torch.full((len(input_ids),), input_ids.shape[1] >= prompt.shape[1] + 2)

    with attach(model, ByScore(), budget=3, on_error="raise"):
        out = model.generate(
            **data, **{**GREEDY, "num_beams": beams}, logits_processor=[process], stopping_criteria=[stop]
        )
    assert seen
    assert all(seen)
    assert out.shape[1] == prompt.shape[1] + 2


@torch.no_grad()
def test_a_processor_in_place_of_an_option_is_refused_or_acts_alone(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    own = {"logits_processor": [RepetitionPenaltyLogitsProcessor(0.2)]}
    plain = model.generate(**data, **GREEDY, **own, repetition_penalty=1.5)  # its own is left out
    assert not torch.equal(plain, model.generate(**data, **GREEDY, repetition_penalty=1.5))
    with attach(model, create_selector("full"), on_error="raise"):
        with pytest.raises(ValueError, match=r"repetition_penalty=1\.5 makes another one; add repetition_penalty=1\.0"):
            model.generate(**data, **GREEDY, **own, repetition_penalty=1.5)
        assert torch.equal(model.generate(**data, **GREEDY, **own, repetition_penalty=1.0), plain)
        with pytest.raises(ValueError, match="a MaxLengthCriteria would count the shorter prompt too; use max_length"):
            model.generate(**data, **GREEDY, stopping_criteria=[MaxLengthCriteria(40)])
        with pytest.raises(ValueError, match=r"EosTokenCriteria was passed and eos_token_id=\d+ makes another one"):
            model.generate(**data, **GREEDY, stopping_criteria=[EosTokenCriteria(20)])


@torch.no_grad()
def test_a_criterion_of_ones_own_ends_rows_as_in_the_plain_model(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    length = data["input_ids"].shape[1]
    begun = model.generate(**data, **GREEDY)[:, length:]
    options = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": list(range(7)), "eos_token_id": None}
    # `generate` fills rows up with padding after an end that such a criterion names
    options["stopping_criteria"] = [EosTokenCriteria(begun[:1, 1].clone())]
    plain = model.generate(**data, **options)
    assert (plain[0, length + 2 :] == PAD).all()
    with attach(model, create_selector("full"), on_error="raise"):
        assert torch.equal(model.generate(**data, **options), plain)


@torch.no_grad()
def test_logits_can_stand_where_the_full_labels_are(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    labels = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    labels[torch.isin(labels, torch.tensor([IMAGE]))] = -100
    with attach(model, ByScore(), budget=3, on_error="raise"):
        short = model(**data)
        loss = model(**data, labels=labels).loss
    with attach(model, ByScore(), budget=3, on_error="raise", full_logits=True):
        full = model(**data, labels=labels)
        last = model(**data, logits_to_keep=1).logits
    assert full.logits.shape[:2] == data["input_ids"].shape
    assert torch.equal(full.logits[:, -4:], short.logits[:, -4:])
    torch.testing.assert_close(last, short.logits[:, -1:])
    torch.testing.assert_close(full.loss, loss)
    # a loss of one's own, also of the labels that follow a picture directly
    own = torch.nn.functional.cross_entropy(full.logits[:, :-1].float().mT, labels[:, 1:], ignore_index=-100)
    torch.testing.assert_close(own, loss)
    inside = data["input_ids"] == IMAGE
    inside[:, :-1] &= inside[:, 1:]  # all columns of a picture but its last, which predicts what follows
    assert (full.logits[inside] == 0).all()
