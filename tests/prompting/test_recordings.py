"""Passes of the language model that are recorded and replayed on a CUDA device: `make test-gpu`."""

import gc
import logging
import threading
from dataclasses import replace
from itertools import cycle
from weakref import ref

import pytest
import torch
from tiny_models import CLIP, IMAGE_PROMPT, MIXED, QWEN, SMALL, TEXT, TWO_IMAGES, inputs_for, tiny_model
from transformers import DynamicCache

from arr_coc import ARRCOCQwen, attach, create_selector
from arr_coc.data.worlds import make_example, open_world, split_seed
from arr_coc.families import language_passes, open_family
from arr_coc.families.language_graph import _graphs, replayed_passes
from arr_coc.families.room import Room
from arr_coc.inference.messages import make_messages
from arr_coc.inference.session import Session
from arr_coc.prompting.settings import Settings
from arr_coc.runtime import cuda_graphs
from arr_coc.runtime.cuda_graphs import GraphCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "suppress_tokens": list(range(7))}
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
ROUNDS = 4  # a pass runs as it is twice, is recorded, and is then replayed


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(name="launches")
def count_launches(monkeypatch):
    """One entry for each launch of a recording."""
    launches, replay = [], torch.cuda.CUDAGraph.replay

    def count(self):
        launches.append(1)
        return replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    return launches


def on_device(data):
    return {name: value.to(DEVICE) for name, value in data.items()}


def open_tiny(family, dtype=torch.float32, seed=0):
    return tiny_model(family, seed=seed).to(DEVICE, dtype)


def prompt(family, *specs, seed=0):
    return on_device(inputs_for(family, *specs, seed=seed))


def session(model, graphs=True, **settings):
    settings = {"budget": 5, "on_error": "raise", "graphs": graphs} | settings
    return Session(open_family(model), create_selector("grid"), Settings(**settings))


def generate(model, data, graphs=True, **options):
    return session(model, graphs).generate({**data, **GREEDY, **options}).result


def ask(model, data, graphs=True):
    """The tokens of an answer, and their logits."""
    result = generate(model, data, graphs, output_logits=True, return_dict_in_generate=True)
    return result.sequences.cpu(), torch.stack(result.logits)


def assert_same_answers(model, data, rounds=ROUNDS):
    """Each round gives the answer of a model without recordings; returns its logits."""
    tokens, logits = ask(model, data, graphs=False)
    for _ in range(rounds):
        found, found_logits = ask(model, data)
        torch.testing.assert_close(found_logits, logits, **CLOSE)
        assert torch.equal(found, tokens)
    return logits


def recordings(model):
    return _graphs[open_family(model).inner].replay._recordings


# the embedded model

WORLDS = {"scenes": 70, "pages": 10, "void": 10, "camouflage": 10}  # questions of each mode


@pytest.fixture(scope="module", name="vlm")
def open_embedded():
    return ARRCOCQwen.from_pretrained().to(DEVICE)


@pytest.mark.parametrize("mode", ["prune", "saccade"])
def test_questions_get_the_same_tokens(vlm, mode, launches):
    model, different, asked = vlm.model, [], 0
    for world, count in WORLDS.items():
        kinds = cycle(open_world(world).kinds)
        for index in range(count):
            example = make_example(world, split_seed("test", 2 * 10**6 + index), next(kinds))
            settings = replace(vlm._choose_settings(None, mode, None, None, False)[1], on_error="raise")
            inputs, settings = vlm._make_prompt([make_messages(example.picture, example.question)], settings)
            # the same shorter prompt for both: choosing tokens is not what is compared
            short = vlm._open_session(mode, settings).prepare(inputs).inputs
            options = {"max_new_tokens": 16, "do_sample": False}
            plain = model.generate(**short, **options)
            with replayed_passes(open_family(model), unpadded=True):
                found = model.generate(**short, **options)
            asked += 1
            if not torch.equal(found, plain):
                different.append((example.id, example.question))
    assert asked == 100
    assert not different
    assert len(launches) > asked


def test_answers_are_the_same_with_graphs_and_without(vlm):
    texts = []
    for graphs in (True, False):
        held = vlm._calls.session.settings
        vlm._calls.session.settings = replace(held, graphs=graphs)
        try:
            for index in range(6):
                example = make_example("scenes", split_seed("test", 3 * 10**6 + index))
                texts.append(vlm.answer(example.picture, example.question, max_new_tokens=12).text)
        finally:
            vlm._calls.session.settings = held
    assert texts[:6] == texts[6:]
    assert any(texts)


# what passes return


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", QWEN)
def test_a_pass_without_padding_is_equal_to_the_bit(family, dtype, launches):
    model = open_tiny(family, dtype)
    for seed in range(2):
        # 4 + 52 words, two marks and 6 cells of the picture: 64 tokens
        data = prompt(family, [("text", 4), ("image", (1, 8, 12)), ("text", 52)], seed=seed)
        short = session(model, budget=6).prepare(data).inputs
        plain = model(**short, use_cache=True)
        assert plain.past_key_values.get_seq_length() == 64
        for _ in range(ROUNDS):
            with replayed_passes(open_family(model), unpadded=True):
                found = model(**short, use_cache=True)
            assert torch.equal(found.logits, plain.logits)
            for here, there in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
                assert torch.equal(here.keys, there.keys)
                assert torch.equal(here.values, there.values)
    assert len(launches) >= ROUNDS


@pytest.mark.parametrize("spec", [IMAGE_PROMPT, TWO_IMAGES, SMALL, CLIP, MIXED, TEXT])
@pytest.mark.parametrize("family", QWEN)
def test_every_kind_of_prompt_gets_the_same_answer(family, spec):
    assert_same_answers(open_tiny(family), prompt(family, spec))


@pytest.mark.parametrize("family", QWEN)
def test_recordings_are_really_replayed(family, launches):
    model, data = open_tiny(family), prompt(family, IMAGE_PROMPT)
    generate(model, data, False)
    assert not launches
    for _ in range(ROUNDS):
        generate(model, data)
    kinds = sorted(settings[0] for settings, _ in recordings(model))
    assert kinds == ["append", "first"]
    before = len(launches)
    generate(model, data)
    assert len(launches) == before + 6  # one prompt, five tokens
    other = prompt(family, SMALL, seed=3)  # of another length, for which the same recordings do
    assert_same_answers(model, other, rounds=1)
    assert len(recordings(model)) == 2


@pytest.mark.parametrize("family", QWEN)
def test_pictures_of_different_sizes_in_a_batch(family, launches):
    model = open_tiny(family)
    sizes = [(1, 8, 12), (1, 12, 8), (1, 4, 8), (1, 16, 16)]
    specs = [[("text", 3 + number), ("image", size), ("text", 6)] for number, size in enumerate(sizes)]
    data = prompt(family, *specs)
    assert_same_answers(model, data)
    assert {settings[0] for settings, _ in recordings(model)} == {"append"}  # the first pass has padding
    assert launches


def test_turns_beams_and_samples(launches):
    model, data = open_tiny("qwen3_vl"), prompt("qwen3_vl", IMAGE_PROMPT)
    for options in ({"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}):
        outs = []
        for graphs in (False, *[True] * ROUNDS):
            torch.manual_seed(0)
            outs.append(generate(model, data, graphs, **options))
        assert all(torch.equal(out, outs[0]) for out in outs)
    words = torch.arange(20, 90, device=DEVICE)[None]
    outs, caches = [], []
    for graphs in (False, *[True] * ROUNDS):
        cache = DynamicCache()
        first = generate(model, data, graphs, past_key_values=cache)
        outs.append(generate(model, {"input_ids": torch.cat([first, words], dim=1)}, graphs, past_key_values=cache))
        caches.append([layer.keys.clone() for layer in cache.layers])
    assert all(torch.equal(out, outs[0]) for out in outs)
    for cache in caches[1:]:
        torch.testing.assert_close(cache, caches[0], **CLOSE)
    assert launches


# what recordings depend on


def test_adapters_are_seen(launches):
    peft = pytest.importorskip("peft", reason="comes with the dev extra")
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=r".*language_model.*\.(q_proj|up_proj)", init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(open_tiny("qwen3_vl"), config)
    model.add_adapter("other", config)
    model = model.to(DEVICE).eval()
    data, seen = prompt("qwen3_vl", IMAGE_PROMPT), []
    seen.append(assert_same_answers(model, data))
    model.set_adapter("other")
    seen.append(assert_same_answers(model, data))
    with model.disable_adapter():
        seen.append(assert_same_answers(model, data))
    torch.testing.assert_close(assert_same_answers(model, data, 1), seen[1], **CLOSE)
    layer = model.base_model.model.model.language_model.layers[0].self_attn.q_proj
    layer.scale_layer(3.0)
    seen.append(assert_same_answers(model, data))
    layer.unscale_layer(3.0)
    model.set_adapter("default")
    torch.testing.assert_close(assert_same_answers(model, data, 1), seen[0], **CLOSE)
    model.merge_adapter()
    assert_same_answers(model, data)
    for place, logits in enumerate(seen):  # the control: they differ, so that an old recording would show
        assert all(not torch.allclose(logits[0], other[0], atol=0.01) for other in seen[:place])
    assert launches


def test_weights_are_seen_wherever_they_are(launches):
    model, data = open_tiny("qwen3_vl"), prompt("qwen3_vl", IMAGE_PROMPT)
    weight = model.model.language_model.layers[1].mlp.up_proj.weight
    seen = [assert_same_answers(model, data)]
    weight.mul_(-1)  # in place
    seen.append(assert_same_answers(model, data))
    weight.data = weight.data * -2  # elsewhere
    seen.append(assert_same_answers(model, data))
    assert not torch.allclose(seen[0][0], seen[1][0], atol=0.01)
    assert not torch.allclose(seen[1][0], seen[2][0], atol=0.01)
    model.cpu()
    here = {name: value.cpu() for name, value in data.items()}
    before = len(launches)
    # the encoder of the device may round more
    torch.testing.assert_close(ask(model, here)[1].to(DEVICE), seen[2], rtol=0.02, atol=0.05)
    assert len(launches) == before
    scratch = [torch.full((2**18,), 7.0, device=DEVICE) for _ in range(16)]  # where weights were
    model.to(DEVICE)
    torch.testing.assert_close(assert_same_answers(model, data), seen[2], **CLOSE)
    del scratch


def test_two_models_keep_to_their_own_and_go_with_all_they_had(launches):
    data = prompt("qwen3_vl", IMAGE_PROMPT)
    stays, goes = open_tiny("qwen3_vl", seed=0), open_tiny("qwen3_vl", seed=1)
    for _ in range(ROUNDS):
        for model in (stays, goes):
            generate(model, data)
    expected = assert_same_answers(stays, data, 1)
    assert not torch.allclose(expected[0], assert_same_answers(goes, data, 1)[0], atol=0.01)
    graphs, inner = _graphs[goes.model], ref(goes.model)
    needed = sum(weight.nbytes for weight in goes.parameters())
    needed += sum(room.memory.nbytes for room in graphs.rooms._rooms.values())
    graphs = ref(graphs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del model, goes
    gc.collect()
    assert inner() is None
    assert graphs() is None
    assert before - torch.cuda.memory_allocated() >= needed
    scratch = torch.full((2**22,), torch.nan, device=DEVICE)  # where the other was
    torch.testing.assert_close(assert_same_answers(stays, data, 2), expected, **CLOSE)
    del scratch


# threads and streams


@pytest.mark.parametrize("streams", [1, 2])
def test_two_threads_ask_one_model(streams, launches):
    model, failures = open_tiny("qwen3_vl"), []
    prompts = [prompt("qwen3_vl", IMAGE_PROMPT), prompt("qwen3_vl", TWO_IMAGES, seed=4)]
    right = [generate(model, data, False).cpu() for data in prompts]
    gate = threading.Barrier(2)
    made = [torch.cuda.Stream() for _ in prompts] if streams == 2 else [torch.cuda.current_stream()] * 2
    torch.cuda.synchronize()

    def talk(number):
        try:
            with torch.no_grad(), torch.cuda.stream(made[number]):
                for turn in range(20):
                    gate.wait(timeout=60)
                    if not torch.equal(generate(model, prompts[number]).cpu(), right[number]):
                        failures.append((number, turn))
        except Exception as error:
            failures.append(repr(error))
            gate.abort()

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert launches
    assert "forward" not in vars(model.model)


def test_a_room_is_left_before_another_stream_enters_it(monkeypatch):
    """A cache gets its copy at the end of a call; a call on another stream must not write there before."""
    model = open_tiny("qwen3_vl")
    family, filled = open_family(model), Room.filled
    shorts = [session(model).prepare(prompt("qwen3_vl", IMAGE_PROMPT, seed=seed)).inputs for seed in range(2)]

    def read(short):
        with replayed_passes(family, unpadded=True):
            return model(**short, use_cache=True).past_key_values

    for _ in range(ROUNDS):
        expected, _ = (read(short) for short in shorts)

    def copy_late(self, length, copied=False):
        if copied:
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
        return filled(self, length, copied)

    monkeypatch.setattr(Room, "filled", copy_late)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        first = read(shorts[0])
    with torch.cuda.stream(torch.cuda.Stream()):
        read(shorts[1])
    torch.cuda.synchronize()
    for here, there in zip(first.layers, expected.layers, strict=True):
        torch.testing.assert_close(here.keys, there.keys, **CLOSE)


def test_inference_mode_and_no_grad_take_turns(launches):
    model, data = open_tiny("qwen3_vl"), prompt("qwen3_vl", IMAGE_PROMPT)
    for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        model = open_tiny("qwen3_vl")
        right = generate(model, data, False)
        for _ in range(ROUNDS):
            for mode in (first, second):
                with mode():
                    assert torch.equal(generate(model, data), right)
    assert launches


# what cannot be recorded


def test_without_memory_for_a_recording_the_answer_is_the_same(monkeypatch, caplog, launches):
    def fail(self, function, tensors, settings, device):
        raise torch.OutOfMemoryError("no memory for this\nand more")

    monkeypatch.setattr(GraphCache, "_record", fail)
    model, data = open_tiny("qwen3_vl"), prompt("qwen3_vl", IMAGE_PROMPT)
    with caplog.at_level(logging.WARNING, logger=cuda_graphs.logger.name):
        right = session(model, False).forward(data).result.logits
        for _ in range(2 * ROUNDS):
            torch.testing.assert_close(session(model).forward(data).result.logits, right, **CLOSE)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["no memory for this"]
    assert not launches


def test_a_recording_that_waits_for_the_device_is_given_up(monkeypatch, caplog, launches):
    """A real failure in the middle of a recording, after which others are made as before."""
    model, data, run = open_tiny("qwen3_vl"), prompt("qwen3_vl", IMAGE_PROMPT), language_passes._run

    def wait(*args):
        hidden = run(*args)
        hidden.sum().item()
        return hidden

    with caplog.at_level(logging.WARNING, logger=cuda_graphs.logger.name):
        with monkeypatch.context() as patch:
            patch.setattr(language_passes, "_run", wait)
            assert_same_answers(model, data, 2 * ROUNDS)
        assert len(caplog.records) == 2  # the prompt's, and a token's
        assert not recordings(model)
        assert not launches
        assert torch.rand(8, device=DEVICE).std() > 0  # chance was not left in the middle of a recording
        assert_same_answers(open_tiny("qwen3_vl"), data)
    assert len(caplog.records) == 2
    assert launches


@pytest.mark.filterwarnings("ignore")  # of Dynamo
@pytest.mark.parametrize("how", ["a wrapper", "in place", "a layer"])
def test_compiled_models_answer_as_before(how):
    torch._dynamo.reset()
    data = prompt("qwen3_vl", IMAGE_PROMPT)
    right, _ = ask(open_tiny("qwen3_vl"), data, graphs=False)
    model = called = open_tiny("qwen3_vl")
    if how == "a wrapper":
        called = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        layers = model.model.language_model.layers
        layers[0] = torch.compile(layers[0], backend="eager")
    with attach(called, create_selector("grid"), budget=5, on_error="raise"):
        for _ in range(ROUNDS):
            assert torch.equal(called.generate(**data, **GREEDY).cpu(), right)


def test_static_caches_and_hooks_run_as_they_are(launches):
    model, data = open_tiny("qwen3_vl"), prompt("qwen3_vl", IMAGE_PROMPT)
    right = generate(model, data, False)
    for _ in range(ROUNDS):
        assert torch.equal(generate(model, data, cache_implementation="static", disable_compile=True), right)
    assert torch.equal(generate(model, data, cache_implementation="offloaded"), right)
    handle = model.model.language_model.norm.register_forward_hook(lambda *_: None)
    for _ in range(ROUNDS):
        assert torch.equal(generate(model, data), right)
    assert not launches
    handle.remove()
    for _ in range(ROUNDS):
        assert torch.equal(generate(model, data), right)
    assert launches
