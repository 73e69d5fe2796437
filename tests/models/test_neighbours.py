"""Other tools around an attached model, in either order: it selects while attached and is plain afterwards."""

import copy
import functools
import pickle
import threading
import types

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import extract_model_from_parallel
from simple_selector import GREEDY, ByScore, state_of
from tiny_models import FAMILIES, IMAGE_PROMPT, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import TokenSelector, attach, detach, prepare

BUDGET = 4


@pytest.fixture(params=FAMILIES, name="family")
def name_family(request):
    return request.param


@pytest.fixture(name="model")
def make_model(family):
    return tiny_model(family)


@pytest.fixture(name="data")
def make_data(family):
    return inputs_for(family, IMAGE_PROMPT)


def lengths(model, data):
    """Columns of the logits of a call, and of the prompt that `generate` reads."""
    read = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            columns = model(**data).logits.shape[1]
            read.clear()
            model.generate(**data, **GREEDY)
    finally:
        hook.remove()
    return columns, read[0]


def full(data):
    return data["input_ids"].shape[1]


def short(model, data):
    return prepare(model, data, ByScore(), budget=BUDGET)["input_ids"].shape[1]


# What tools do to `forward`: each returns how to undo it, or None.


def hook_of_accelerate(model):
    add_hook_to_module(model, ModelHook())
    return lambda: remove_hook_from_module(model)


def mixed_precision(model):
    """As `Accelerator.prepare_model` does for bf16."""
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", enabled=False)
    if hasattr(model.forward, "__func__"):
        model.forward = types.MethodType(autocast(model.forward.__func__), model)
    else:
        model.forward = autocast(model.forward)
    return lambda: extract_model_from_parallel(model, keep_fp32_wrapper=False)


def own_forward(model):
    """As a fused head does: nothing of the earlier `forward` is called."""

    @functools.wraps(type(model).forward)
    def forward(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return lambda: model.__dict__.pop("forward", None)


TOOLS = [hook_of_accelerate, mixed_precision, own_forward]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_a_tool_that_comes_first_stays(model, data, tool):
    expected = short(model, data)
    undo = tool(model)
    theirs = model.__dict__["forward"]
    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        assert lengths(model, data) == (expected, expected)
    assert model.__dict__["forward"] is theirs
    assert lengths(model, data) == (full(data), full(data))
    undo()
    assert lengths(model, data) == (full(data), full(data))


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_a_tool_that_comes_later_neither_stops_the_selection_nor_keeps_it(model, data, tool):
    expected, before = short(model, data), state_of(model)
    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        undo = tool(model)
        for _ in range(2):
            assert lengths(model, data) == (expected, expected)
    assert lengths(model, data) == (full(data), full(data))
    undo()
    assert lengths(model, data) == (full(data), full(data))
    detach(model)
    model.__dict__.pop("forward", None)
    assert state_of(model) == before


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_tool_may_go_while_the_model_is_attached(model, data, tool, first):
    expected = short(model, data)
    undo = tool(model) if first else None
    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        undo = undo or tool(model)
        assert lengths(model, data) == (expected, expected)
        undo()
        assert lengths(model, data) == (expected, expected)
    assert lengths(model, data) == (full(data), full(data))


def test_what_somebody_kept_of_an_attachment_is_the_plain_model_after_it(model, data):
    with torch.no_grad(), attach(model, ByScore(), budget=BUDGET) as run:
        kept = model.forward, model.generate, model._call_impl
        assert kept[0](**data).logits.shape[1] < full(data)
    del run
    with torch.no_grad():
        plain, out = model(**data).logits, model.generate(**data, **GREEDY)
        assert torch.equal(kept[0](**data).logits, plain)
        assert torch.equal(kept[1](**data, **GREEDY), out)
        assert torch.equal(kept[2](**data).logits, plain)


def test_a_lost_handle_is_found(model, data):
    before = state_of(model)
    attach(model, ByScore(), budget=BUDGET)
    wrapper = torch.nn.ModuleDict({"inside": model})
    for _ in range(2):
        detach(wrapper)
        assert state_of(model) == before
    with attach(model, ByScore(), budget=BUDGET) as run:
        detach(model)
    run.remove()
    assert state_of(model) == before
    assert lengths(model, data) == (full(data), full(data))


@torch.no_grad()
def test_a_call_that_goes_around_the_selection_is_refused(model, data):
    with attach(model, ByScore(), budget=BUDGET):
        with pytest.raises(ValueError, match="goes around the attached model's `forward`, so nothing would be select"):
            model.model(**data)
        with pytest.raises(ValueError, match="goes around the attached model's `forward`"):
            type(model).forward(model, **data)
        ids = inputs_for("llava", [("text", 5)])["input_ids"]
        assert model.model(input_ids=ids).last_hidden_state.shape[1] == 5
    assert model.model(**data).last_hidden_state.shape[1] == full(data)


@torch.no_grad()
def test_a_generate_that_was_kept_from_before_is_refused(model, data):
    kept = functools.partial(type(model).generate, model)
    with attach(model, ByScore(), budget=BUDGET):
        with pytest.raises(ValueError, match="pass the pictures, as `pixel_values`, instead"):
            kept(**data, **GREEDY)
        assert kept(input_ids=torch.tensor([[40, 41]]), **GREEDY).shape[1] > 2


@torch.no_grad()
@pytest.mark.parametrize("tool", [None, hook_of_accelerate], ids=["alone", "accelerate"])
def test_copies_and_pickles_of_an_attached_model_are_plain(model, data, tool):
    undo = tool(model) if tool else None
    before = state_of(model)  # before the first call, which adds hooks of transformers that cannot be pickled
    with attach(model, ByScore(), budget=BUDGET):
        twins = [copy.deepcopy(model)]
        if tool is None:  # accelerate's own functions cannot be pickled
            twins.append(pickle.loads(pickle.dumps(model)))
    plain = model(**data).logits
    if undo:
        undo()
    for twin in twins:
        assert state_of(twin) == before
        assert torch.equal(twin(**data).logits, plain)
        with attach(twin, ByScore(), budget=BUDGET):
            assert twin(**data).logits.shape[1] < full(data)
        for parameter in twin.parameters():
            parameter.zero_()
        assert twin(**data).logits.abs().max() == 0
    assert torch.equal(model(**data).logits, plain)


class Failing(TokenSelector):
    def select(self, queries, budget=None):
        raise RuntimeError("no idea")


@torch.no_grad()
def test_a_server_hears_of_failures(model, data, caplog):
    plain, heard = model(**data).logits, []
    with attach(model, Failing(), on_error=heard.append) as run:
        assert run.fallbacks == 0
        assert torch.equal(model(**data).logits, plain)
        model.generate(**data, **GREEDY)
        assert run.fallbacks == 2
    assert [str(error) for error in heard] == ["no idea"] * 2
    assert len(caplog.records) == 2

    def refuse(error):
        raise TimeoutError("later") from error

    with attach(model, Failing(), on_error=refuse), pytest.raises(TimeoutError, match="later"):
        model(**data)
    with attach(model, Failing()) as run:
        model(**data)
    assert run.fallbacks == 1
    with attach(model, ByScore(), budget=BUDGET) as run:
        model(**data)
        assert run.fallbacks == 0
    with pytest.raises(ValueError, match="`on_error` must be 'full' or 'raise', got 3; or give a function"):
        attach(model, Failing(), on_error=3)


class Slowly(ByScore):
    """Keeps as many cells as there are words, and lets other threads in."""

    barrier = None

    def select(self, queries, budget=None):
        self.barrier.wait(timeout=20)
        return super().select(queries, budget)


def test_the_record_belongs_to_the_thread_of_the_call():
    model, calls = tiny_model("qwen3_vl"), 8
    data = {1: inputs_for("qwen3_vl", IMAGE_PROMPT), 2: inputs_for("qwen3_vl", TWO_IMAGES)}
    seen, errors = {1: [], 2: []}, []
    selector = Slowly()
    selector.barrier = threading.Barrier(2)
    after = threading.Barrier(2)

    def work(pictures):
        try:
            for _ in range(calls):
                with torch.no_grad():
                    model(**data[pictures])
                after.wait(timeout=20)  # the other's call has ended too: one of the two records is the latest
                seen[pictures].append((len(run.kept), len(run.output)))
        except Exception as error:
            errors.append(error)

    with attach(model, selector, budget=BUDGET, on_error="raise") as run:
        assert (run.kept, run.output) == ([], [])
        threads = [threading.Thread(target=work, args=(pictures,)) for pictures in data]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(run.kept) in (1, 2)  # this thread made no call: the latest of all, as after a streaming thread
    assert errors == []
    assert seen == {1: [(1, 1)] * calls, 2: [(2, 2)] * calls}
