"""Passes of the language model as recordings. On a CPU nothing is recorded: what would be recorded runs as it is."""

import copy
import gc
import logging
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from simple_selector import GREEDY, TOLERANCE, ByScore
from tiny_models import (
    CLIP,
    FIRST_WORD,
    IMAGE_PROMPT,
    MIXED,
    PAD,
    QWEN,
    SMALL,
    TEXT,
    TWO_IMAGES,
    VOCAB,
    inputs_for,
    tiny_model,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from arr_coc import ARRCOCConfig, ARRCOCLayer, attach, detach
from arr_coc.families import language_graph, language_passes, open_family, room
from arr_coc.families.faster.leaner_layers import GROUPED, AddedInPlace, TurnedTogether, lean_language_model
from arr_coc.families.language_graph import replayed_passes
from arr_coc.families.language_passes import Lease
from arr_coc.families.recordable import State, read_state, unchanged_modules
from arr_coc.inference.session import Session
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.prefix import Prefix
from arr_coc.prompting.settings import Settings
from arr_coc.runtime import cuda_graphs
from arr_coc.runtime.cuda_graphs import GraphCache

TURN = torch.arange(FIRST_WORD, FIRST_WORD + 7)[None]
LONG = {**GREEDY, "max_new_tokens": 40, "min_new_tokens": 40}


@pytest.fixture(name="passes", autouse=True)
def run_what_would_be_recorded(monkeypatch):
    """The kind, rows and length of each pass that a recording could have replaced."""
    passes = []

    class Eager(GraphCache):
        def __call__(self, function, tensors, settings):
            passes.append((settings[0], *tensors[0].shape[:2]))
            return function(*tensors, *settings)

    monkeypatch.setattr(language_graph, "GraphCache", Eager)
    monkeypatch.setattr(language_graph, "_graphs", WeakKeyDictionary())
    monkeypatch.setattr(language_graph, "_is_on_cuda", lambda inner: True)
    monkeypatch.setattr(language_passes, "may_replay", lambda tensor: not torch.is_grad_enabled())
    with torch.no_grad():
        yield passes


# the fast suite has one family
EACH = [pytest.param(family, marks=() if family == "qwen3_vl" else pytest.mark.slow) for family in QWEN]


@pytest.fixture(scope="module", params=EACH, name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


@pytest.fixture(name="model")
def make_model():
    return tiny_model("qwen3_vl")


def session(model, graphs=True, selector=None, **settings):
    settings = {"budget": 5, "on_error": "raise"} | settings
    return Session(open_family(model), selector or ByScore(), Settings(graphs=graphs, **settings))


def generate(model, data, graphs=True, **options):
    return session(model, graphs).generate({**data, **GREEDY, **options}).result


def states(cache):
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def clones(cache):
    return [tensor.clone() for tensor in states(cache)]


def assert_same_states(cache, other):
    assert len(states(cache)) == len(states(other)) > 0
    for one, two in zip(states(cache), states(other), strict=True):
        torch.testing.assert_close(one, two, **TOLERANCE)


def kinds(passes):
    return [kind for kind, *_ in passes]


def words(count, seed=0):
    return torch.randint(FIRST_WORD, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def prompt_of(count, seed=0):
    """Text alone."""
    ids = words(count, seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def conversation(data, answer, turn=TURN):
    ids = torch.cat([data["input_ids"], answer, turn], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# what passes return


@pytest.mark.parametrize("spec", [IMAGE_PROMPT, TWO_IMAGES, SMALL, CLIP, MIXED])
def test_a_pass_returns_logits_keys_and_values_of_a_plain_one(opened, spec, passes):
    family, model = opened
    data = inputs_for(family, spec)
    found, plain = (session(model, graphs).forward(data).result for graphs in (True, False))
    assert kinds(passes) == ["first"]
    torch.testing.assert_close(found.logits, plain.logits, **TOLERANCE)
    assert_same_states(found.past_key_values, plain.past_key_values)
    assert found.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


def test_positions_features_and_levels_matter(model, monkeypatch):
    """The control of the test above: each of them, if wrong, shows in the logits."""
    data, embed = inputs_for("qwen3_vl", IMAGE_PROMPT), Lease._embed
    right = session(model).forward(data).result.logits
    changes = {
        "no features": lambda self, call: (embed(self, call._replace(features={}))[0], embed(self, call)[1]),
        "no levels": lambda self, call: (embed(self, call)[0], []),
        "levels in another order": lambda self, call: (embed(self, call)[0], embed(self, call)[1][::-1]),
    }
    for change in changes.values():
        monkeypatch.setattr(Lease, "_embed", change)
        assert not torch.allclose(session(model).forward(data).result.logits, right, atol=0.01)
    monkeypatch.undo()


DECODING = {
    "greedy": {**LONG},
    "sampling": {"max_new_tokens": 12, "do_sample": True},
    "several samples": {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3},
    "beams": {"max_new_tokens": 8, "num_beams": 3, "do_sample": False},
    "guessed from the prompt": {**GREEDY, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("how", DECODING)
def test_decoding_gives_the_same_tokens(opened, how, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    data["input_ids"][0, -4:] = FIRST_WORD  # so that there is something to guess
    outs = []
    for graphs in (True, False):
        torch.manual_seed(0)
        outs.append(session(model, graphs).generate({**data, **DECODING[how]}).result)
    assert torch.equal(*outs)
    several = how in ("several samples", "beams")
    assert kinds(passes)[:2] == ["append" if several else "first", "append"]
    assert len(passes) > 4
    assert {rows for _, rows, _ in passes} == {3 if several else 1}


def test_rows_of_a_padded_batch_are_decoded_alike(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    found, plain = (generate(model, data, graphs, **LONG) for graphs in (True, False))
    assert torch.equal(found, plain)
    assert passes == [("append", 2, 1)] * 39  # the first pass has padding


def test_the_mask_of_a_padded_batch_matters(model, monkeypatch):
    """The control of the test above."""
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, TWO_IMAGES)
    read = Lease._read

    def forget_mask(self, kwargs):
        call = read(self, kwargs)
        return None if call is None else call._replace(mask=None if call.ids.shape[1] == 1 else call.mask)

    found = session(model).generate({**data, **GREEDY, "output_logits": True, "return_dict_in_generate": True}).result
    monkeypatch.setattr(Lease, "_read", forget_mask)
    wrong = session(model).generate({**data, **GREEDY, "output_logits": True, "return_dict_in_generate": True}).result
    assert not torch.allclose(found.logits[1], wrong.logits[1], atol=1e-3)


def test_one_padded_row(opened, passes):
    family, model = opened
    batch = inputs_for(family, SMALL, TWO_IMAGES)
    data = {name: batch[name][:1] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    data |= {"pixel_values": batch["pixel_values"][:32], "image_grid_thw": batch["image_grid_thw"][:1]}
    assert not data["attention_mask"].all()
    assert torch.equal(*(generate(model, data, graphs) for graphs in (True, False)))
    assert kinds(passes) == ["first"] + ["append"] * 5  # the shorter prompt has no padding
    passes.clear()
    assert torch.equal(*(generate(model, padded_text(), graphs) for graphs in (True, False)))
    assert kinds(passes) == ["append"] * 5


def padded_text():
    ids = torch.cat([torch.full((1, 5), PAD), words(9)], dim=1)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def test_another_prompt_in_the_middle_of_a_call(opened):
    """It is read in the same thread, and has padding, which the outer one has not."""
    family, model = opened
    inside = []

    def ask_another(ids, scores, **kwargs):
        if not inside:
            inside.append(model.generate(**padded_text(), **GREEDY))
        return torch.zeros(len(ids), dtype=torch.bool)

    outs = []
    for graphs in (True, False):
        data = {**inputs_for(family, IMAGE_PROMPT), "stopping_criteria": [ask_another]}
        outs.append((generate(model, data, graphs), inside.pop()))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


def test_a_prompt_of_text_alone(opened, passes):
    family, model = opened
    data = inputs_for(family, TEXT)
    assert torch.equal(*(generate(model, data, graphs, **LONG) for graphs in (True, False)))
    assert kinds(passes) == ["first"] + ["append"] * 39


def test_saccades_and_what_prompts_have_in_common(opened, passes):
    family, model = opened
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    large = inputs_for(family, [("text", 20), ("image", (1, 32, 32)), ("text", 6)])
    other = {**large, "input_ids": large["input_ids"].clone()}
    other["input_ids"][0, -3:] = FIRST_WORD
    outs = []
    for graphs in (True, False):
        seen = Encodings()
        seen.prefix = Prefix()
        made = session(model, graphs, layer, mode="saccade", budget=40, encoded=seen)
        outs.append([made.generate({**data, **GREEDY}).result for data in (large, other, large)])
        assert seen.prefix.tokens_read < 3 * (20 + 2 + 40 + 6)  # some of them were in the cache
    assert all(torch.equal(found, plain) for found, plain in zip(*outs, strict=True))
    assert max(length for kind, _, length in passes if kind == "append") > 1


# caches


def test_two_turns_in_one_cache(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    outs, caches = [], []
    for graphs in (True, False):
        cache = DynamicCache()
        first = generate(model, data, graphs, past_key_values=cache)
        turn = conversation(data, first[:, data["input_ids"].shape[1] :])
        outs.append(generate(model, turn, graphs, past_key_values=cache))
        caches.append(cache)
    assert torch.equal(*outs)
    assert_same_states(*caches)
    assert passes == [("first", 1, 32), *[("append", 1, 1)] * 5, ("append", 1, 32), *[("append", 1, 1)] * 5]


def test_a_cache_is_continued_by_hand(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    logits = []
    for graphs in (True, False):
        made = session(model, graphs)
        first = made.forward(data).result
        made.forward(inputs_for(family, TWO_IMAGES))  # another question in between
        token = first.logits[:, -1:].argmax(dim=-1)
        second = made.forward({"input_ids": token, "past_key_values": first.past_key_values}).result
        third = made.forward({"input_ids": TURN, "past_key_values": second.past_key_values}).result
        logits.append(torch.cat([second.logits, third.logits], dim=1))
    torch.testing.assert_close(*logits, **TOLERANCE)
    assert passes == [("first", 1, 32)] * 2 + [("append", 1, 1), ("append", 1, 32)]


def in_room(model, cache):
    """Whether a cache shows memory that later calls write to."""
    rooms = language_graph._graphs[model.model].rooms._rooms.values()
    memory = {room.memory.untyped_storage().data_ptr() for room in rooms}
    return any(state.untyped_storage().data_ptr() in memory for state in states(cache))


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("beams", [1, 2])
def test_a_cache_is_its_own_after_the_call(opened, beams, returned):
    family, model = opened
    cache = DynamicCache()
    given = {"return_dict_in_generate": True} if returned else {"past_key_values": cache}
    result = generate(model, inputs_for(family, IMAGE_PROMPT), num_beams=beams, **given)
    cache = result.past_key_values if returned else cache
    before = clones(cache)
    generate(model, inputs_for(family, TWO_IMAGES, seed=5), num_beams=beams)
    assert all(torch.equal(now, then) for now, then in zip(states(cache), before, strict=True))
    assert not in_room(model, cache)


def test_a_cache_that_was_cropped_in_the_call_is_its_own_too(opened):
    """Tokens that are guessed from the prompt are cropped if they were wrong."""
    family, model = opened
    prompt = session(model).prepare(inputs_for(family, IMAGE_PROMPT)).inputs
    cache, other = DynamicCache(), DynamicCache()
    with replayed_passes(open_family(model)):
        model(**prompt, past_key_values=cache)
        assert in_room(model, cache)
        cache.crop(-2)
        before = clones(cache)
        model(**prompt, past_key_values=other)
        assert not in_room(model, cache)
        other.crop(-3)
    assert not in_room(model, other)
    assert all(torch.equal(now, then) for now, then in zip(states(cache), before, strict=True))
    # the same through `generate`
    data = inputs_for(family, [("text", 4), ("image", (1, 8, 12)), ("text", 30)])
    data["input_ids"][0, -30:] = words(3).repeat(1, 10)[0]
    for count in (6, 7, 8):
        cache = DynamicCache()
        options = {"max_new_tokens": count, "min_new_tokens": count, "prompt_lookup_num_tokens": 4}
        generate(model, data, **options, past_key_values=cache)
        assert not in_room(model, cache)


def test_without_a_copy_a_cache_would_change(model, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(Lease, "end", lambda self: None)
    cache = DynamicCache()
    generate(model, inputs_for("qwen3_vl", IMAGE_PROMPT), past_key_values=cache)
    before = clones(cache)
    generate(model, inputs_for("qwen3_vl", TWO_IMAGES, seed=5))
    assert not torch.equal(states(cache)[0], before[0])


def test_a_cropped_cache_is_continued(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    outs, caches = [], []
    for graphs in (True, False):
        cache = DynamicCache()
        first = generate(model, data, graphs, past_key_values=cache)
        cache.crop(-3)
        turn = conversation(data, first[:, data["input_ids"].shape[1] :][:, :2])
        outs.append(generate(model, turn, graphs, past_key_values=cache))
        caches.append(cache)
    assert torch.equal(*outs)
    assert_same_states(*caches)
    assert "append" in kinds(passes)


@pytest.mark.slow
def test_long_turns_after_long_prompts(opened, passes):
    _, model = opened
    data, turns = prompt_of(600), {100: ("append", 1, 128), 512: ("append", 1, 512), 600: None}
    for count, expected in turns.items():
        outs, caches = [], []
        for graphs in (True, False):
            cache = DynamicCache()
            first = generate(model, data, graphs, past_key_values=cache)[:, 600:]
            passes.clear()
            # the last token that was generated is not in the cache yet
            turn = conversation(data, first, words(count - 1, seed=1))
            outs.append(generate(model, turn, graphs, past_key_values=cache))
            if graphs:
                assert passes == [expected] * (expected is not None) + [("append", 1, 1)] * 5
            caches.append(cache)
        assert torch.equal(*outs)
        assert_same_states(*caches)


def test_a_prompt_that_is_too_long_is_read_as_it_is(opened, passes, monkeypatch):
    _, model = opened
    monkeypatch.setattr(language_passes, "MOST_FIRST", 64)
    for count, first in ((64, ["first"]), (65, [])):
        passes.clear()
        data = prompt_of(count)
        assert torch.equal(*(generate(model, data, graphs) for graphs in (True, False)))
        assert kinds(passes) == first + ["append"] * 5


def test_one_pass_over_a_prompt_that_is_too_long_needs_no_recordings(model, monkeypatch):
    """Everything that recordings depend on would be read for nothing."""
    reads = []
    monkeypatch.setattr(language_graph, "read_state", lambda module: reads.append(module) or read_state(module))
    monkeypatch.setattr(language_passes, "MOST_FIRST", 32)
    monkeypatch.setattr(language_passes, "APPENDED", (1, 32))
    short, long = ([("text", 4), ("image", (1, 8, 12)), ("text", count)] for count in (10, 40))
    for spec, expected in ((short, 1), (long, 0)):
        data = inputs_for("qwen3_vl", spec)
        reads.clear()
        found, plain = (session(model, graphs).forward(data).result.logits for graphs in (True, False))
        torch.testing.assert_close(found, plain, **TOLERANCE)
        assert len(reads) == expected
        generate(model, data)
        assert len(reads) == expected + 1  # for the tokens that follow


def room_of(model):
    (found,) = language_graph._graphs[model.model].rooms._rooms.values()
    return found


def test_a_cache_that_was_copied_from_a_room_comes_back_in_one_copy(model, monkeypatch):
    cache, copies = DynamicCache(), []
    generate(model, prompt_of(20), past_key_values=cache)
    cache.crop(-3)
    found, length = room_of(model), cache.get_seq_length()
    right = clones(cache)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: copies.append(args))
    found.memory.fill_(7)
    found.load(cache, length)
    assert not copies
    assert all(torch.equal(one, two) for one, two in zip(found.filled(length), right[::2] + right[1::2], strict=True))
    assert (found.memory[:, :, :, :, length:] == 7).all()
    # the control: keys of a layer that was exchanged lie elsewhere
    cache.layers[1].keys = cache.layers[1].keys.clone()
    found.load(cache, length)
    assert len(copies) == 1


def test_only_tensors_at_equal_distances_of_one_memory_are_taken_together():
    memory = torch.arange(120.0).view(5, 3, 8)
    parts = [part[:, :6] for part in memory]
    assert torch.equal(room._join(parts), torch.stack(parts))
    assert torch.equal(room._join(parts[::2]), torch.stack(parts[::2]))
    for others in (
        [*parts[:2], parts[3]],  # one is missing
        parts[::-1],
        [parts[0]] * 3,
        [parts[0], parts[1][:2]],
        [memory[0, :, :3], memory[1, :, ::2][:, :3]],
        [memory[0], memory[1].T.contiguous().T],
        [torch.zeros(2), torch.zeros(2)],
    ):
        assert room._join(others) is None


def test_a_cache_that_outgrows_its_room_moves_to_the_next(opened, passes, monkeypatch):
    family, model = opened
    monkeypatch.setattr(room, "ROOMS", (40, 48, 56))
    monkeypatch.setattr(language_passes, "SPARE", 8)
    data = inputs_for(family, IMAGE_PROMPT)  # 17 tokens with 5 of the picture
    options = {**LONG, "max_new_tokens": 50, "min_new_tokens": 50}
    caches = [DynamicCache(), DynamicCache()]
    outs = [
        generate(model, data, graphs, **options, past_key_values=cache)
        for graphs, cache in zip((True, False), caches, strict=True)
    ]
    assert torch.equal(*outs)
    assert_same_states(*caches)
    assert [size for _, size, *_ in language_graph._graphs[model.model].rooms._rooms] == [40, 48, 56]
    assert 30 < len(passes) < 49  # the last ones fit nowhere


def test_rooms_that_would_be_too_large_are_not_made(opened, passes, monkeypatch, caplog):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    right = generate(model, data, False)
    monkeypatch.setattr(room, "ROOM_SHARE", 1e-9)
    assert torch.equal(generate(model, data), right)
    assert not passes
    # enough for one room of one row: a batch of two gets none, and another length takes its place
    monkeypatch.setattr(room, "ROOMS", (1024,))
    rows = 2 * 3 * 2 * 16 * 4
    monkeypatch.setattr(room, "ROOM_SHARE", 1.5 * 1024 * rows / 2**34)
    assert torch.equal(generate(model, data), right)
    batch = inputs_for(family, IMAGE_PROMPT, IMAGE_PROMPT)
    assert torch.equal(*(generate(model, batch, graphs) for graphs in (True, False)))
    assert {rows for _, rows, _ in passes} == {1}
    monkeypatch.setattr(room, "ROOMS", (1024, 1280))
    long = prompt_of(1100)
    assert torch.equal(*(generate(model, long, graphs) for graphs in (True, False)))
    assert [size for _, size, *_ in language_graph._graphs[model.model].rooms._rooms] == [1280]
    assert torch.equal(generate(model, data), right)


def test_two_caches_take_turns_in_one_call(opened, passes):
    family, model = opened
    prompts = [session(model).prepare(inputs_for(family, spec)).inputs for spec in (IMAGE_PROMPT, TWO_IMAGES)]

    def talk(graphs):
        caches, logits = [DynamicCache(), DynamicCache()], []
        for cache, prompt in zip(caches, prompts, strict=True):
            logits.append(model(**prompt, past_key_values=cache).logits[:, -1])
        for step in range(6):
            for cache, prompt in zip(caches, prompts, strict=True):
                place = prompt["position_ids"][..., -1:] + 1 + step
                token = torch.full((1, 1), FIRST_WORD + step)
                logits.append(model(input_ids=token, position_ids=place, past_key_values=cache).logits[:, -1])
        return logits, caches

    with replayed_passes(open_family(model)):
        found, caches = talk(True)
    assert kinds(passes) == ["first"] * 2 + ["append"] * 12
    plain, expected = talk(False)
    assert len(passes) == 14
    torch.testing.assert_close(found, plain, **TOLERANCE)
    for cache, other in zip(caches, expected, strict=True):
        assert_same_states(cache, other)


def test_inference_mode_and_no_grad_take_turns(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    right = generate(model, data, False)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(generate(model, data), right)
    outs = []
    for graphs, mode in ((True, torch.inference_mode), (False, torch.no_grad)):
        cache = DynamicCache()
        with mode():
            first = generate(model, data, graphs, past_key_values=cache)
        turn = conversation(data, first[:, data["input_ids"].shape[1] :])
        outs.append(generate(model, turn, graphs, past_key_values=cache))
    assert torch.equal(*outs)


# where nothing may be replayed


@pytest.mark.parametrize("how", ["hook", "pre-hook", "replaced method", "training", "compiled", "accelerate"])
def test_modules_that_do_more_than_their_weights_are_called_as_they_are(model, passes, caplog, how):
    layer, seen = model.model.language_model.layers[1], []
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    right = generate(model, data, False)
    generate(model, data)
    assert passes
    passes.clear()
    if how == "hook":
        layer.mlp.register_forward_hook(lambda *_: seen.append(1))
    elif how == "pre-hook":
        layer.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    elif how == "replaced method":
        own = layer.mlp.forward
        layer.mlp.forward = lambda *args: (seen.append(1), own(*args))[1]
    elif how == "training":
        layer.mlp.train()
        seen.append(1)
    elif how == "compiled":
        layer.mlp._compiled_call_impl = lambda *args: (seen.append(1), layer.mlp.forward(*args))[1]
    else:
        hooks = pytest.importorskip("accelerate.hooks", reason="comes with the dev extra")
        hooks.add_hook_to_module(layer.mlp, hooks.ModelHook())
        seen.append(1)
    with caplog.at_level(logging.WARNING, logger=language_graph.logger.name):
        for _ in range(3):
            assert torch.equal(generate(model, data), right)
    assert seen
    assert not passes
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "runs without CUDA graphs: " in caplog.text


def test_training_says_nothing(model, passes, caplog):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    with caplog.at_level(logging.WARNING, logger=language_graph.logger.name):
        session(model.train()).forward(data)
    assert not passes
    assert not caplog.records
    session(model.eval()).forward(data)
    assert passes


def test_states_are_counted_up_to_a_limit(model):
    graphs = language_graph.LanguageGraphs(model.model)
    numbers = [graphs.number(State(None, (address,))) for address in range(3 * language_graph.MOST_STATES)]
    assert numbers[: language_graph.MOST_STATES] == [*range(language_graph.MOST_STATES)]
    assert len(graphs._states) == language_graph.MOST_STATES
    graphs.replay._recordings["recorded"] = None
    assert graphs.number(State(None, (address := 3 * language_graph.MOST_STATES - 1,))) == numbers[address]
    assert graphs.replay._recordings
    graphs.number(State("new"))
    assert not graphs.replay._recordings  # it may have had the number of another state


def test_a_call_that_ends_without_memory_leaves_no_lease(model, monkeypatch):
    def fail(self):
        raise torch.OutOfMemoryError("no memory for the copy")

    monkeypatch.setattr(Lease, "end", fail)
    with pytest.raises(torch.OutOfMemoryError):
        session(model).forward(inputs_for("qwen3_vl", IMAGE_PROMPT))
    assert language_graph._graphs[model.model].lease is None
    assert "forward" not in vars(model.model)


def test_a_hook_that_left_is_no_obstacle(model, passes):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    handle = model.model.language_model.norm.register_forward_hook(lambda *_: None)
    generate(model, data)
    assert not passes
    handle.remove()
    generate(model, data)
    assert passes


@pytest.mark.parametrize("how", ["attention", "forward"])
def test_models_of_another_kind_say_so_once(passes, caplog, how):
    model = tiny_model("qwen2_vl", "eager" if how == "attention" else "sdpa")
    if how == "forward":
        own = model.model.forward
        model.model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    data = inputs_for("qwen2_vl", IMAGE_PROMPT)
    with caplog.at_level(logging.WARNING, logger=language_graph.logger.name):
        assert torch.equal(generate(model, data), generate(model, data))
    assert not passes
    assert len(caplog.records) == 1
    assert ("forward" in vars(model.model)) == (how == "forward")  # theirs stays


def test_sliding_layers_and_experts_are_found():
    model = tiny_model("qwen2_vl").model
    assert language_graph._why_not(model) is None
    model.language_model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    assert "full attention" in language_graph._why_not(model)
    assert "experts" in language_graph._why_not(tiny_model("qwen3_vl_moe").model)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl_moe", "qwen3_5"])
def test_other_families_never_replay(family, passes):
    model = tiny_model(family)
    data = inputs_for(family, IMAGE_PROMPT)
    assert torch.equal(*(generate(model, data, graphs) for graphs in (True, False)))
    assert not passes
    assert "forward" not in vars(model.model)


def test_gradients_flow_and_nothing_is_replayed(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    weight = model.model.language_model.norm.weight
    with torch.enable_grad():
        session(model).forward({**data, "labels": data["input_ids"]}).result.loss.backward()
    assert weight.grad.abs().sum() > 0
    assert not passes
    model.zero_grad(set_to_none=True)
    model.train()
    session(model).forward(data)
    model.eval()
    assert not passes


@pytest.mark.parametrize("how", ["asked for", "in the config"])
def test_hidden_states_are_returned(how, passes):
    model, data = tiny_model("qwen2_5_vl"), inputs_for("qwen2_5_vl", IMAGE_PROMPT)
    options = {"output_hidden_states": True} if how == "asked for" else {}
    model.config.text_config.output_hidden_states = not options
    found, plain = (session(model, graphs).forward({**data, **options}).result for graphs in (True, False))
    assert not passes
    assert len(found.hidden_states) == len(plain.hidden_states) > 3
    for states_here, states_there in zip(found.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(states_here, states_there)


def test_attentions_and_scores_are_returned(passes):
    model, data = tiny_model("qwen2_vl", "eager"), inputs_for("qwen2_vl", IMAGE_PROMPT)
    result = session(model).forward({**data, "output_attentions": True}).result
    assert len(result.attentions) == 3
    assert not passes
    model = tiny_model("qwen2_vl")
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    found, plain = (session(model, graphs).generate({**data, **options}).result for graphs in (True, False))
    assert passes
    torch.testing.assert_close(found.logits, plain.logits, **TOLERANCE)


@pytest.mark.parametrize("how", ["asked for", "in the config"])
def test_no_cache_is_returned_if_none_is_wanted(model, passes, how):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    options = {"use_cache": False} if how == "asked for" else {}
    model.config.text_config.use_cache = bool(options)
    assert session(model).forward({**data, **options}).result.past_key_values is None
    assert not passes
    model.config.text_config.use_cache = False
    assert session(model).forward({**data, "use_cache": True}).result.past_key_values is not None
    assert kinds(passes) == ["first"]


def test_static_caches_are_left_alone(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    options = {"cache_implementation": "static", "disable_compile": True}
    found, plain = (generate(model, data, graphs, **options) for graphs in (True, False))
    assert torch.equal(found, plain)
    assert torch.equal(found, generate(model, data, False))
    assert not passes


def test_other_caches_are_left_alone():
    config = tiny_model("qwen2_vl").config.text_config
    offloaded = DynamicCache(config=config)
    offloaded.offloading = True
    sliding = copy.deepcopy(config)
    sliding.layer_types, sliding.sliding_window = ["sliding_attention"] * 3, 4
    assert language_passes._is_plain_cache(None)
    assert language_passes._is_plain_cache(DynamicCache())
    assert language_passes._is_plain_cache(DynamicCache(config=config))
    for cache in (offloaded, DynamicCache(config=sliding), object()):
        assert not language_passes._is_plain_cache(cache)


def test_positions_of_another_form_are_left_alone(model, passes):
    """Of four rows, positions `[B, n]` look like positions of text, time, height and width."""
    ids, places = words(10).repeat(4, 1), torch.arange(10).repeat(4, 1)
    logits = []
    for graphs in (True, False):
        made, cache = session(model, graphs), DynamicCache()
        for part in (slice(9), slice(9, 10)):
            given = {"input_ids": ids[:, part], "position_ids": places[:, part], "past_key_values": cache}
            logits.append(made.forward(given).result.logits)
    torch.testing.assert_close(logits[:2], logits[2:])
    assert not passes


def test_attached_models_replay_and_are_left_clean(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    right = generate(model, data, False)
    with attach(model, ByScore(), budget=5, on_error="raise"):
        assert torch.equal(model.generate(**data, **GREEDY), right)
        assert len(passes) == 6
        assert "forward" not in vars(model.model)
        model(**data)
        assert len(passes) == 7
    model.generate(**data, **GREEDY)
    model(**data)
    assert len(passes) == 7
    copied = copy.deepcopy(model)
    assert torch.equal(generate(copied, data), right)


# what recordings depend on


def numbers(model):
    """How many states were seen."""
    return len(language_graph._graphs[open_family(model).inner]._states)


def test_weights_elsewhere_are_another_state(model):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    generate(model, data)
    generate(model, data)
    assert numbers(model) == 1
    weight = model.model.language_model.layers[1].mlp.up_proj.weight
    weight.mul_(1.5)  # recordings read it by its address
    generate(model, data)
    assert numbers(model) == 1
    weight.data = weight.data.clone()
    generate(model, data)
    assert numbers(model) == 2
    language = model.model.language_model
    language.rotary_emb.inv_freq = language.rotary_emb.inv_freq.clone()
    generate(model, data)
    assert numbers(model) == 3
    model.model.visual.merger.requires_grad_(False)  # not its part
    generate(model, data)
    assert numbers(model) == 3


class Wrapped(torch.Tensor):
    """Like a quantized weight: its values are in other tensors."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values_inside = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(arg.values_inside if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def test_weights_without_an_address_are_an_obstacle(model):
    language = model.model.language_model
    language.register_buffer("empty", torch.zeros(0))
    assert read_state(language).obstacle is None
    language.register_buffer("quantized", Wrapped(torch.ones(3)))
    assert "without an address" in read_state(language).obstacle
    del language.quantized
    language.norm.to("meta")
    assert "without an address" in read_state(language).obstacle


@pytest.fixture(name="adapted")
def adapt(model):
    peft = pytest.importorskip("peft", reason="comes with the dev extra")
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=r".*language_model.*\.(q_proj|up_proj)", modules_to_save=["norm"],
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("other", config)
    for name, weight in adapted.named_parameters():
        if "modules_to_save.other" in name:
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return adapted.eval()


def logits_of(model, data, graphs=True):
    return session(model, graphs).forward(data).result.logits


def test_every_change_of_adapters_is_another_state(adapted, passes):
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    seen = []

    def compare(*, again=None):
        """With graphs and without, as at an earlier time or as never before."""
        found = logits_of(adapted, data)
        torch.testing.assert_close(found, logits_of(adapted, data, False), **TOLERANCE)
        alike = [place for place, other in enumerate(seen) if torch.allclose(found, other, atol=1e-3)]
        assert alike == ([] if again is None else [again])
        if again is None:
            seen.append(found)
        assert numbers(adapted) == len(seen)

    compare()
    adapted.set_adapter("other")
    compare()
    with adapted.disable_adapter():
        compare()
    compare(again=1)
    layer = adapted.base_model.model.model.language_model.layers[0].self_attn.q_proj
    layer.scale_layer(3.0)
    compare()
    layer.unscale_layer(3.0)
    compare(again=1)
    adapted.set_adapter("default")
    compare(again=0)
    adapted.merge_adapter()
    merged = logits_of(adapted, data)
    torch.testing.assert_close(merged, logits_of(adapted, data, False), **TOLERANCE)
    torch.testing.assert_close(merged, seen[0], rtol=1e-3, atol=1e-3)
    assert numbers(adapted) == len(seen) + 1  # the same in another way
    assert kinds(passes) == ["first"] * 8


def test_a_whole_layer_that_belongs_to_an_adapter_is_part_of_the_state(adapted):
    norm = adapted.base_model.model.model.language_model.norm
    before = read_state(norm)
    norm.set_adapter("other")
    assert read_state(norm) != before
    norm.enable_adapters(False)
    assert len({before, read_state(norm)}) == 2


def test_modules_are_looked_through_once_where_they_do_not_change(model):
    language = model.model.language_model
    with unchanged_modules():
        before = read_state(language)
        handle = language.norm.register_forward_hook(lambda *_: None)
        with unchanged_modules():
            assert read_state(language) is before
    assert read_state(language).obstacle == "it has hooks"
    handle.remove()
    assert read_state(language) == before
    weights = [*language.parameters(), *language.buffers()]
    assert sorted(before.weights) == sorted(weight.data_ptr() for weight in weights)


def test_a_compiled_part_is_an_obstacle(model):
    language = model.model.language_model
    language.layers[0].mlp = torch.compile(language.layers[0].mlp, backend="eager")
    assert read_state(language).obstacle == "it is compiled"
    language.layers[0].mlp = language.layers[0].mlp._orig_mod
    language.layers[0].mlp.compile(backend="eager")
    assert read_state(language).obstacle == "it is compiled"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo
@pytest.mark.parametrize("way", ["torch.compile", "model.compile"])
def test_a_compiled_model_replays_some_passes_and_compiles_the_others(passes, way, monkeypatch):
    model, one = tiny_model("qwen2_vl"), inputs_for("qwen2_vl", IMAGE_PROMPT)  # compiles fastest
    right = session(model, False).forward(one).result.logits
    tokens = generate(model, one, False)
    counters = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    if way == "torch.compile":
        called = torch.compile(model, backend="eager")
    else:
        called = model
        model.compile(backend="eager")
    with attach(model, ByScore(), budget=5, on_error="raise"):
        counters.clear()
        for _ in range(3):
            torch.testing.assert_close(called(**one).logits, right, atol=1e-4, rtol=1e-4)
        assert kinds(passes) == ["first"] * 3
        assert 0 < counters["calls_captured"] < 10  # of the head
        assert torch.equal(called.generate(**one, **GREEDY), tokens)
        passes.clear()
        monkeypatch.setattr(language_passes, "MOST_FIRST", 8)  # a longer prompt
        torch.testing.assert_close(called(**one).logits, right, atol=1e-4, rtol=1e-4)
        assert not passes
        assert counters["calls_captured"] > 100  # the operations of the model's layers


# threads and errors


def test_a_call_in_another_thread_runs_as_it_is(opened, passes):
    family, model = opened
    data, other = inputs_for(family, IMAGE_PROMPT), inputs_for(family, TWO_IMAGES)
    right, right_other = generate(model, data, False), generate(model, other, False)
    found = []

    def ask_in_another_thread(ids, scores, **kwargs):
        if not found:
            before = len(passes)
            with torch.no_grad():
                thread = threading.Thread(target=lambda: found.append(torch.no_grad()(generate)(model, other)))
            thread.start()
            thread.join()
            assert len(passes) == before
        return torch.zeros(len(ids), dtype=torch.bool)

    assert torch.equal(generate(model, data, stopping_criteria=[ask_in_another_thread]), right)
    assert torch.equal(found[0], right_other)
    assert len(passes) == 6
    assert torch.equal(generate(model, other), right_other)
    assert len(passes) == 12


@pytest.mark.slow
def test_threads_that_come_and_go(model):
    """Without a model of its own, each finds the recordings free or not, in the middle of a pass or not."""
    prompts = [inputs_for("qwen3_vl", spec) for spec in (IMAGE_PROMPT, TWO_IMAGES, SMALL)]
    right = [generate(model, data, False) for data in prompts]
    wrong = []

    def ask(data, expected):
        with torch.no_grad():
            for _ in range(15):
                try:
                    if not torch.equal(generate(model, data), expected):
                        wrong.append("another answer")
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(prompts, right, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "forward" not in vars(model.model)
    assert not language_graph._graphs[model.model].lock.locked()


def test_a_lease_may_end_while_another_thread_is_about_to_use_it(model, monkeypatch):
    graphs = language_graph.LanguageGraphs(model.model)

    class Ending:
        """Is there when one looks, and gone when one looks again."""

        def __get__(self, owner, kind=None):
            return leases.pop() if leases else None

        def __set__(self, owner, value):
            pass

    leases = [SimpleNamespace(replay=lambda args, kwargs: None)]
    monkeypatch.setattr(language_graph.LanguageGraphs, "lease", Ending(), raising=False)
    assert graphs.forward(**prompt_of(5)).last_hidden_state.shape[1] == 5
    assert not leases


def test_after_an_error_nothing_is_left_behind(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    right, cache = generate(model, data, False), DynamicCache()

    def fail(ids, scores):
        if len(passes) < 3:
            return scores
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        generate(model, data, logits_processor=[fail], past_key_values=cache)
    graphs = language_graph._graphs[model.model]
    assert "forward" not in vars(model.model)
    assert not graphs.lock.locked()
    assert graphs.lease is None
    assert not in_room(model, cache)
    assert torch.equal(generate(model, data), right)


def test_a_room_that_cannot_be_allocated_is_done_without(model, passes, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("no")

    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    monkeypatch.setattr(room, "Room", fail)
    assert torch.equal(*(generate(model, data, graphs) for graphs in (True, False)))
    assert not passes


def test_recordings_go_with_their_model(model):
    generate(model, inputs_for("qwen3_vl", IMAGE_PROMPT))
    assert len(language_graph._graphs) == 1
    del model
    # the fixture still has this one, but nobody has the next
    model = tiny_model("qwen3_vl")
    generate(model, inputs_for("qwen3_vl", IMAGE_PROMPT))
    assert len(language_graph._graphs) == 2
    del model
    gc.collect()
    assert len(language_graph._graphs) == 1


# recordings themselves


def test_when_a_recording_may_stand_in(monkeypatch):
    tensor = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda_graphs.may_replay(tensor)
    assert not cuda_graphs.may_replay(torch.zeros(1))
    for mode in (torch.enable_grad(), FlopCounterMode(display=False)):
        with mode:
            assert not cuda_graphs.may_replay(tensor)
    for place, name in (
        (torch, "is_autocast_enabled"), (torch.compiler, "is_compiling"), (torch.cuda, "is_current_stream_capturing"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda *args: True)
            assert not cuda_graphs.may_replay(tensor)
    assert cuda_graphs.may_replay(tensor)


class Recorded:
    """In place of a recording: knows how often it was replayed."""

    def __init__(self, function, tensors, settings):
        self.inputs, self.size, self.replays, self.graph = [x.clone() for x in tensors], 8, 0, self
        self.function, self.settings, self.outputs = function, settings, None

    def replay(self):
        self.replays += 1
        self.outputs = self.function(*self.inputs, *self.settings)


@pytest.fixture(name="stream")
def pretend_a_stream(monkeypatch):
    stream = SimpleNamespace(wait_event=lambda event: None, record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_signature_is_recorded_after_some_calls(monkeypatch, patience):
    calls = []

    def double(x, name):
        calls.append(name)
        return (2 * x,)

    monkeypatch.setattr(
        GraphCache, "_record", lambda self, function, tensors, settings, device: Recorded(function, tensors, settings)
    )
    cache = GraphCache(limit=2, patience=patience)
    for value in range(patience + 2):
        for name in ("a", "b"):
            (found,) = cache(double, [torch.full((3,), float(value))], (name,))
            assert found.tolist() == [2.0 * value] * 3
        assert len(cache._recordings) == (2 if value >= patience else 0)
    assert [recording.replays for recording in cache._recordings.values()] == [2, 2]
    assert not cache._seen  # recorded ones need not be counted
    cache.clear()
    assert not cache._recordings
    assert type(copy.deepcopy(cache)) is GraphCache
    assert copy.deepcopy(cache).patience == patience
    for _ in range(patience):  # begins anew
        cache(double, [torch.zeros(3)], ("a",))
        assert not cache._recordings
    cache(double, [torch.zeros(3)], ("a",))
    assert len(cache._recordings) == 1
    for name in ("c", "d"):
        for _ in range(patience + 1):
            cache(double, [torch.zeros(3)], (name,))
    assert len(cache._recordings) == 2  # the most


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_what_cannot_be_recorded_runs_as_it_is_for_good(monkeypatch, caplog, error):
    tries = []

    def fail(self, function, tensors, settings, device):
        tries.append(settings)
        raise error("waits for the device\nand more")

    monkeypatch.setattr(GraphCache, "_record", fail)
    cache = GraphCache(patience=2)
    with caplog.at_level(logging.WARNING, logger=cuda_graphs.logger.name):
        for value in range(6):
            (found,) = cache(lambda x, name: (x + 1,), [torch.full((2,), float(value))], ("a",))
            assert found.tolist() == [value + 1.0] * 2
    assert len(tries) == 1
    (record,) = caplog.records
    assert record.getMessage().endswith("so this runs without one: waits for the device")
    assert not cache._recordings


def test_detach_gives_back_the_memory_of_recordings(opened, passes):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    for _ in range(2):
        with attach(model, ByScore(), budget=5, on_error="raise"):
            model.generate(**data, **GREEDY)
        assert model.model in language_graph._graphs  # for the next attachment
        detach(model)
        assert model.model not in language_graph._graphs


def test_hooks_that_only_listen_are_no_obstacle(model, passes):
    """Transformers leaves them behind once somebody asked for hidden states."""
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    right = generate(model, data, False)
    model(**data, output_hidden_states=True)
    assert any(part._forward_hooks for part in model.model.language_model.modules())
    assert torch.equal(generate(model, data), right)
    assert kinds(passes)[0] == "first"


def test_a_lean_copy_turns_queries_and_keys_in_one_go():
    language = tiny_model("qwen3_vl").model.language_model
    twin = lean_language_model(language)
    assert {type(layer.self_attn) for layer in twin.layers} == {TurnedTogether}
    assert not any(isinstance(layer.self_attn, TurnedTogether) for layer in language.layers)
    hidden = torch.randn(2, 5, language.config.hidden_size)
    places = torch.randint(0, 50, (3, 2, 5))
    mask = torch.zeros(2, 1, 5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    found = []
    for model in (language, twin):
        with torch.no_grad():
            rotary = model.rotary_emb(hidden, places)
            found.append(model.layers[0].self_attn(hidden, rotary, mask, past_key_values=DynamicCache())[0])
    torch.testing.assert_close(*found, **TOLERANCE)
    plain = language.rotary_emb(hidden, places)  # sines without signs: the copy needs its own
    wrong = twin.layers[0].self_attn(hidden, plain, mask, past_key_values=DynamicCache())[0]
    assert not torch.allclose(found[0], wrong, **TOLERANCE)


@pytest.mark.parametrize("biased", [False, True])
def test_a_lean_copy_adds_its_products_to_the_hidden_states(biased):
    language = copy.deepcopy(tiny_model("qwen3_vl").model.language_model)
    if biased:
        for layer in language.layers:
            layer.self_attn.o_proj.bias = torch.nn.Parameter(torch.randn(language.config.hidden_size))
    twin = lean_language_model(language)
    assert {type(layer) for layer in twin.layers} == {AddedInPlace}
    assert not any(isinstance(layer, AddedInPlace) for layer in language.layers)
    hidden, given = torch.randn(2, 5, language.config.hidden_size), []
    places = torch.randint(0, 50, (3, 2, 5))
    mask = torch.zeros(2, 1, 5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    found = []
    for model in (language, twin):
        given.append(hidden.clone())
        rotary = model.rotary_emb(hidden, places)
        found.append(model.layers[0](given[-1], rotary, attention_mask=mask, past_key_values=DynamicCache()))
    torch.testing.assert_close(*found, **TOLERANCE)
    assert torch.equal(given[0], hidden)
    assert torch.equal(given[1], found[1])
    assert not torch.allclose(given[1], hidden, **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2])
def test_heads_that_share_keys_need_no_copy_of_their_queries(rows, monkeypatch):
    language = tiny_model("qwen3_vl").model.language_model
    shared = []

    def look(query, key, value, **options):
        shared.append(query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr())
        return torch.zeros_like(query)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    layer = lean_language_model(language, GROUPED).layers[0].self_attn

    class Passing:
        def update(self, key, value, number):
            return key, value

    hidden = torch.randn(rows, 5, language.config.hidden_size)
    places = lean_language_model(language).rotary_emb(hidden, torch.arange(5).expand(3, rows, 5))
    layer.look(hidden, places, None, Passing())
    assert shared == [True]
