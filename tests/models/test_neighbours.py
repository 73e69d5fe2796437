"""Other tools around an attached model, in either order: it selects while attached and is plain afterwards."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import pickle
import threading
import types
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import extract_model_from_parallel
from simple_selector import GREEDY, ByScore, state_of
from tiny_directory import make_tokenizer, photo, processed, write_checkpoint
from tiny_models import FAMILIES, IMAGE_PROMPT, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ARRCOCQwen,
    TokenSelector,
    attach,
    create_selector,
    detach,
    prepare,
)
from arr_coc.inference.load import load_selector

pytestmark = pytest.mark.slow  # quick ones of each folder run in the fast suite

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


@torch.no_grad()
def test_hooks_on_the_model_run_while_it_is_attached(model, data):
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, output: seen.append(output.logits.shape[1]))
    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        model(**data)
    assert seen == ["before", short(model, data)]


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


def read_lengths(model):
    """A list to which every pass of the language model adds the number of columns that it reads."""
    read = []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    return read


def labelled(data):
    labels = data["input_ids"].clone()
    labels[:, :-3] = -100
    return {**data, "labels": labels}


def open_trainer(cls, model, data, directory, **settings):
    settings = {"use_cpu": True, "report_to": [], "max_steps": 2, "per_device_train_batch_size": 1, **settings}
    settings |= {"output_dir": str(directory), "save_strategy": "no", "disable_tqdm": True}
    settings |= {"remove_unused_columns": False, "dataloader_pin_memory": False}
    # the collator delivers the batch: rows only count it
    if cls is transformers.Trainer:
        args, extra = transformers.TrainingArguments(**settings), {"train_dataset": [{"input_ids": [1]}] * 4}
    else:
        trl = pytest.importorskip("trl", reason="comes with the dev extra")
        rows = pytest.importorskip("datasets").Dataset.from_list([{"input_ids": [1]}] * 4)
        cls, extra = trl.SFTTrainer, {"processing_class": make_tokenizer(), "train_dataset": rows}
        args = trl.SFTConfig(**settings, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None)
    return cls(model=model, args=args, data_collator=lambda batch: labelled(data), **extra)


def trained():
    """Each family with each trainer and each precision; Qwen3-VL also with every pair of these."""
    for family in FAMILIES:
        for trainer, bf16 in itertools.product((transformers.Trainer, "trl"), (False, True)):
            if family == "qwen3_vl" or bf16 == (trainer == "trl"):
                names = (family, "SFTTrainer" if trainer == "trl" else "Trainer", "bf16" if bf16 else "float32")
                yield pytest.param(family, trainer, bf16, id="-".join(names))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trainers
@pytest.mark.parametrize(("family", "trainer", "bf16"), list(trained()))
@pytest.mark.parametrize("order", ["attach first", "trainer first", "trained inside"])
def test_trainers(family, model, data, tmp_path, trainer, order, bf16):
    expected, read = short(model, data), read_lengths(model)
    if order == "trainer first":
        opened = open_trainer(trainer, model, data, tmp_path, bf16=bf16)
        with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
            opened.train()
    elif order == "attach first":
        with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
            open_trainer(trainer, model, data, tmp_path, bf16=bf16).train()
    else:  # training, attached for one of two runs
        opened = open_trainer(trainer, model, data, tmp_path, bf16=bf16)
        opened.train()
        assert set(read) == {full(data)}
        read.clear()
        with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
            opened.train()
    assert set(read) == {expected}
    read.clear()
    with torch.no_grad():
        model.eval()(**data)
    assert read == [full(data)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attached", ["wrapper", "base", "after"])
def test_lora_and_a_fused_head(data, family, tmp_path, attached):
    peft = pytest.importorskip("peft", reason="comes with the dev extra")
    model = tiny_model(family)
    expected, read = short(model, data), read_lengths(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    if attached == "after":
        trainer = open_trainer("trl", adapted, data, tmp_path)
    with attach(model if attached == "base" else adapted, ByScore(), budget=BUDGET, on_error="raise"):
        if attached != "after":
            trainer = open_trainer("trl", adapted, data, tmp_path)
        # older PEFT calls the base's `forward` directly, where the fused head stands alone: that is refused
        with contextlib.suppress(ValueError) if attached == "base" else contextlib.nullcontext():
            trainer.train()
        assert set(read) <= {expected}
        assert read or attached == "base"
    read.clear()
    with torch.no_grad():
        adapted.eval()(**data)
    assert read == [full(data)]


COMPILED = [("qwen2_vl", way, order) for way in ("torch.compile", "model.compile") for order in ("attach", "compile")]
COMPILED += [(family, "model.compile", "compile") for family in FAMILIES if family != "qwen2_vl"]  # each takes seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo
@pytest.mark.parametrize(("family", "way", "first"), COMPILED)
@torch.no_grad()
def test_compiled_models_select_and_stay_compiled(family, way, first):
    model, data = tiny_model(family), inputs_for(family, IMAGE_PROMPT)
    counters = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()

    def compiled():
        if way == "torch.compile":
            return torch.compile(model, backend="eager")
        model.compile(backend="eager")
        return model

    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        expected, out = model(**data).logits, model.generate(**data, **GREEDY)
    plain = model(**data).logits
    opened = compiled() if first == "compile" else None
    counters.clear()
    with attach(model, ByScore(), budget=BUDGET, on_error="raise") as run:
        opened = compiled() if opened is None else opened
        torch.testing.assert_close(opened(**data).logits, expected, atol=1e-4, rtol=1e-4)
        assert counters["calls_captured"] > 100  # the operations of the model's layers
        assert [len(cells) for _, cells in run.kept] == [BUDGET]
        if family == "qwen3_vl":
            assert torch.equal(opened.generate(**data, **GREEDY), out)
    if family == "qwen3_vl":
        torch.testing.assert_close(opened(**data).logits, plain, atol=1e-4, rtol=1e-4)


def test_layers_and_inputs_go_where_an_offloaded_model_computes(model, data, family):
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model))
    with torch.no_grad(), attach(model, layer, budget=BUDGET, on_error="raise"):
        expected = model(**data).logits
    cpu_offload(model, execution_device="cpu")
    assert model.device.type == "meta"
    assert next(load_selector("arr-coc-untrained", model).parameters()).device.type == "cpu"
    with torch.no_grad(), attach(model, layer, budget=BUDGET, on_error="raise") as run:
        assert run.device == next(layer.parameters()).device == torch.device("cpu")
        assert torch.equal(model(**data).logits, expected)


@pytest.fixture(scope="module", name="directory")
def make_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    return directory


@pytest.fixture(name="vlm")
def open_vlm(directory):
    return ARRCOCQwen.from_pretrained(directory, "arr-coc-untrained", budget=9)


@pytest.mark.filterwarnings("ignore")  # of the trainer
def test_a_trainer_trains_the_selector_of_the_one_object(vlm, directory, tmp_path):
    data = dict(processed(vlm.processor, [photo(96, 64)]))
    before = [parameter.clone() for parameter in vlm.selector.parameters()]
    trainer = open_trainer(transformers.Trainer, vlm, data, tmp_path, gradient_checkpointing=True, learning_rate=1e-2)
    trainer.train()
    assert trainer.label_names == ["labels"]
    assert any(not torch.equal(*pair) for pair in zip(before, vlm.selector.parameters(), strict=True))
    assert trainer.evaluate([{"input_ids": [1]}])["eval_loss"] > 0
    vlm.save_pretrained(tmp_path / "trained")
    again = ARRCOCQwen.from_pretrained(tmp_path / "trained", budget=9)
    assert again.model.config.name_or_path == str(directory)
    for mine, saved in zip(vlm.selector.parameters(), again.selector.parameters(), strict=True):
        assert torch.equal(mine, saved)


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_answers_as_the_object_itself(vlm):
    pipe = transformers.pipeline("image-text-to-text", model=vlm, processor=vlm.processor)
    content = [{"type": "image", "image": photo(96, 64)}, {"type": "text", "text": "what color is it?"}]
    options = {"max_new_tokens": 4, "do_sample": False}
    [said] = pipe(text=[{"role": "user", "content": content}], return_full_text=False, generate_kwargs=options)
    assert [output.num_kept.item() for output in vlm.output] == [9]
    assert said["generated_text"].strip() == vlm.answer(photo(96, 64), "what color is it?", max_new_tokens=4).text


def test_what_the_base_knows_shows_through(vlm):
    assert vlm.dtype == vlm.model.dtype == torch.float32
    vlm.generation_config = transformers.GenerationConfig(max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    assert vlm.model.generation_config.max_new_tokens == 3
    data = processed(vlm.processor, [photo(96, 64)])
    assert vlm.generate(**data, do_sample=False).shape[1] == full(data) + 3
    vlm.gradient_checkpointing_enable()
    assert vlm.is_gradient_checkpointing
    vlm.gradient_checkpointing_disable()
    assert not vlm.model.is_gradient_checkpointing
    with pytest.raises(AttributeError, match="'ARRCOCQwen' object has no attribute 'generate_batch'"):
        vlm.generate_batch  # noqa: B018  # it would read all tokens
    for name in ("forward", "generate"):
        assert getattr(ARRCOCQwen, name).__doc__
        assert inspect.signature(getattr(vlm, name)) == inspect.signature(getattr(vlm.model, name))


@torch.no_grad()
def test_the_object_can_be_copied_and_pickled(vlm):
    data = processed(vlm.processor, [photo(96, 64)])
    pickled = pickle.dumps(vlm)
    expected = vlm(**data).logits
    for twin in (pickle.loads(pickled), copy.deepcopy(vlm)):
        assert torch.equal(twin(**data).logits, expected)
        assert twin.answer(photo(96, 64), "what?", max_new_tokens=2).tokens.used == 9
        for parameter in twin.model.parameters():
            parameter.zero_()
        assert twin(**data).logits.abs().max() == 0
    assert torch.equal(vlm(**data).logits, expected)


def test_the_object_is_saved_and_opened_again(vlm, directory, tmp_path, monkeypatch):
    plain = vlm.selector.config
    vlm.save_pretrained(tmp_path / "alone")
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {"config.json", "model.safetensors"}
    vlm.save_pretrained(tmp_path / "whole", save_base=True)
    assert vlm.selector.config == plain
    for place, base in (("alone", directory), ("whole", tmp_path / "whole" / "base")):
        again = ARRCOCQwen.from_pretrained(tmp_path / place, budget=9)
        assert again.model.config.name_or_path == str(base)
        assert again.answer(photo(96, 64), "what?", max_new_tokens=2).tokens.used == 9
    # a selector that names no base is saved with the name of the one it is used with
    nameless = ARRCOCLayer(dataclasses.replace(plain, base_model_name_or_path=None)).eval()
    vlm.selector = nameless
    vlm.save_pretrained(tmp_path / "named")
    assert nameless.config.base_model_name_or_path is None
    assert ARRCOCQwen.from_pretrained(tmp_path / "named").model.config.name_or_path == str(directory)
    calls = {}

    class Api:
        def __init__(self, token=None):
            calls["token"] = token

        def create_repo(self, repo_id, **options):
            calls["repo"] = repo_id

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            calls["files"] = {path.name for path in Path(folder_path).iterdir()}
            return types.SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr("arr_coc.inference.vlm.HfApi", Api)
    assert vlm.push_to_hub("me/selector") == "https://hub/commit"
    assert calls == {"token": None, "repo": "me/selector", "files": {"config.json", "model.safetensors"}}
    vlm.selector = create_selector("grid")
    with pytest.raises(ValueError, match=r"'grid' has no weights to save; open it by name: from_pretrained\(base, 'gr"):
        vlm.save_pretrained(tmp_path / "grid")
    assert not (tmp_path / "grid").exists()
    nameless = ARRCOCQwen(vlm.model, vlm.processor, ARRCOCLayer(ARRCOCConfig.for_model(vlm.model)))
    nameless.model.config.name_or_path = ""
    with pytest.raises(ValueError, match="was not opened by a name, so it must be saved too; pass save_base=True"):
        nameless.save_pretrained(tmp_path / "nameless")


def test_a_trained_adapter_is_saved_with_the_object(directory, tmp_path):
    peft = pytest.importorskip("peft", reason="comes with the dev extra")
    vlm = ARRCOCQwen.from_pretrained(directory, "arr-coc-untrained", budget=9)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = ARRCOCQwen(peft.get_peft_model(vlm.model, config).eval(), vlm.processor, vlm.selector, budget=9)
    data = processed(vlm.processor, [photo(96, 64)])
    adapted.save_pretrained(tmp_path)
    again = ARRCOCQwen.from_pretrained(tmp_path, budget=9)
    with torch.no_grad():
        assert torch.equal(again(**data).logits, adapted(**data).logits)
    with pytest.raises(ValueError, match="merge it first, or drop save_base"):
        adapted.save_pretrained(tmp_path, save_base=True)


def test_the_object_selects_by_itself_and_its_model_may_be_attached(vlm):
    with pytest.raises(ValueError, match="an ARRCOCQwen selects by itself; set its `selector`, or attach its `model`"):
        attach(vlm, ByScore(), budget=BUDGET)
    data = processed(vlm.processor, [photo(96, 64)])
    with attach(vlm.model, create_selector("grid"), budget=BUDGET) as run, torch.no_grad():
        words = full(data) - int(data["image_grid_thw"].prod()) // 4
        assert vlm.model(**data).logits.shape[1] == words + BUDGET
        assert vlm(**data).logits.shape[1] == words + 9
        assert [len(cells) for _, cells in run.kept] == [BUDGET]


def test_failures_of_answers_are_counted(vlm):
    assert vlm.answer(photo(96, 64), "what?", max_new_tokens=2).failure is None
    vlm.selector = Failing()
    answer = vlm.answer(photo(96, 64), "what?", max_new_tokens=2)
    assert (answer.failure, answer.reason) == ("no idea", "selection failed: no idea")
    vlm.inspect(photo(96, 64), "what?")
    vlm(**processed(vlm.processor, [photo(96, 64)]))
    assert vlm.fallbacks == 3
