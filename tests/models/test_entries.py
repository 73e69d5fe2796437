"""Every way into an attached model, with every argument that describes the prompt: a shorter prefill, or a refusal.

The tables below are the expectation. Each cell is a test that makes the call. This prints them in docs/recipes.md:

    python tests/models/test_entries.py
"""

import contextlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # for a run without pytest

import pytest
import torch
import transformers
from simple_selector import GREEDY, ByScore
from tiny_directory import make_tokenizer, photo, processed, write_checkpoint
from tiny_models import CLIP, FAMILIES, HIDDEN, IMAGE_PROMPT, inputs_for, tiny_model
from transformers import DynamicCache, StaticCache

from arr_coc import ARRCOCQwen, attach, prepare
from arr_coc.runtime.atomic_files import write_aside

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- entries: made by tests/models/test_entries.py -->\n", "<!-- /entries -->\n"
BUDGET = 4
SHORT = {**GREEDY, "max_new_tokens": 3, "min_new_tokens": 3}
DROPPED = object()  # in place of an argument that is not passed

# How a call enters the model. `opened` is the attached model, or the object around it.
CALLS = {
    "`model(...)`": lambda opened, args, kwargs: opened(*args, **kwargs),
    "`model.generate`": lambda opened, args, kwargs: opened.generate(*args, **{**SHORT, **kwargs}),
    "`prepare`": lambda opened, args, kwargs: opened(**prepare(opened, kwargs, ByScore(), budget=BUDGET)),
    "`ARRCOCQwen(...)`": lambda opened, args, kwargs: opened(*args, **kwargs),
    "`ARRCOCQwen.generate`": lambda opened, args, kwargs: opened.generate(*args, **{**SHORT, **kwargs}),
    "`ARRCOCQwen.answer`": lambda opened, args, kwargs: opened.answer(
        photo(96, 64), "what color is it?", **{**SHORT, **kwargs}
    ),
}
FORWARD, GENERATE, PREPARE, OUR_FORWARD, OUR_GENERATE, ANSWER = CALLS
OF_PROMPT = (FORWARD, GENERATE, PREPARE, OUR_FORWARD, OUR_GENERATE)
OF_FORWARD = (FORWARD, PREPARE, OUR_FORWARD)
OF_GENERATE = (GENERATE, OUR_GENERATE)
OF_OPTIONS = (*OF_GENERATE, ANSWER)


@dataclass(frozen=True)
class Argument:
    """A row of the table.

    Args:
        name (`str`): as the table shows it.
        make (`Callable`): from the opened model and the processor's output, the arguments that differ; `"*"` are those
            by place.
        calls (`tuple[str, ...]`): that take it.
        refusal (`str`): the error's text; "" if the prefill is shorter.
        refused_by (`tuple[str, ...]`, *optional*): the calls that refuse it, if not all do.
        families (`list[str]`): that have it.
        needs (`str`): the package that it needs, or "cuda".
        spec (`list`): the prompt.
    """

    name: str
    make: Callable
    calls: tuple = OF_PROMPT
    refusal: str = ""
    refused_by: tuple | None = None
    families: list = field(default_factory=lambda: list(FAMILIES))
    needs: str = ""
    spec: list = field(default_factory=lambda: IMAGE_PROMPT)

    def refuses(self, call):
        return bool(self.refusal) and (self.refused_by is None or call in self.refused_by)


def given(**changes):
    return lambda opened, data: changes


def like_ids(value):
    return lambda opened, data: value(data["input_ids"])


def embeds(ids):
    return torch.zeros(*ids.shape, HIDDEN)


def by_place(opened, data):
    return {"*": (data["input_ids"],), "input_ids": DROPPED}


def features_instead(opened, data):
    return {"pixel_values": DROPPED, "mm_encoder_outputs": {"image": object()}}


def own_cache(opened, data):
    """A further turn after `generate`, with the cache that it filled."""
    cache = DynamicCache()
    ids = opened.generate(**data, **SHORT, past_key_values=cache)
    ids = torch.cat([ids, torch.tensor([[40, 41]])], dim=1)
    return dict.fromkeys(data, DROPPED) | {"input_ids": ids, "past_key_values": cache}


def returned_cache(opened, data):
    """A step by hand after `forward`, with the cache that it returned."""
    cache = opened(**data, use_cache=True).past_key_values
    return dict.fromkeys(data, DROPPED) | {"input_ids": torch.tensor([[40]]), "past_key_values": cache}


def filled_cache(opened, data):
    """A cache that some other call has filled."""
    text = tiny_model("qwen2_vl")
    return {"past_key_values": text(input_ids=torch.tensor([[40, 41]]), use_cache=True).past_key_values}


def static_cache(opened, data):
    return {"past_key_values": StaticCache(config=opened.config.get_text_config(), max_cache_len=64)}


def sample(model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, **kwargs):
    """A decoding loop of one's own, for `custom_generate`."""
    return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


class Streamer:
    """Records what it is shown."""

    def __init__(self):
        self.shown = []

    def put(self, value):
        self.shown.append(value)

    def end(self):
        self.shown.append(None)


MISSING = "`input_ids` are missing, but say where the pictures are; pass all of the processor's output"
EMBEDS = "`inputs_embeds` do not say where the pictures are; pass `input_ids`"
MASK = "`attention_mask` must have shape (1, {length}), as `input_ids`, to be shortened, got"
LOGITS = "`logits_to_keep` names columns of the full prompt; use a number of last columns"
HOLDS = "`past_key_values` already holds tokens, which a shortened prompt cannot follow; start without it"
PACKED = "columns of the full prompt, of which fewer are read; pass padded rows"
PAGED = "cache_implementation='paged' loses the pictures of a prompt; drop it"
ONE_TEXT = "`answer` returns one text, so it takes no {name}; use `generate`"
QWEN = [family for family in FAMILIES if family != "llava"]

ARGUMENTS = [
    Argument("the processor's output", given(), tuple(CALLS)),
    Argument("`input_ids` by place", by_place, (FORWARD, GENERATE, OUR_FORWARD, OUR_GENERATE)),
    Argument("`input_ids` as `inputs`", like_ids(lambda ids: {"inputs": ids, "input_ids": DROPPED}), OF_GENERATE),
    Argument(
        "`inputs` and `input_ids`",
        like_ids(lambda ids: {"inputs": ids}),
        OF_GENERATE,
        "`inputs` and `input_ids` are two names of the same; pass one of them",
    ),
    Argument("no `input_ids`", given(input_ids=DROPPED), OF_PROMPT, MISSING),
    Argument(
        "`input_ids` as a list",
        like_ids(lambda ids: {"input_ids": ids.tolist()}),
        OF_PROMPT,
        "`input_ids` must be a tensor of shape [B, L], got list",
    ),
    Argument(
        "`inputs_embeds`", like_ids(lambda ids: {"inputs_embeds": embeds(ids), "input_ids": DROPPED}), OF_PROMPT, EMBEDS
    ),
    Argument(
        "`inputs_embeds` without pictures",
        like_ids(lambda ids: {"inputs_embeds": embeds(ids), "input_ids": DROPPED, "pixel_values": DROPPED}),
        OF_PROMPT,
        EMBEDS,
    ),
    Argument("`attention_mask` `[B, L]`, also of `bool`", like_ids(lambda ids: {"attention_mask": ids > -1})),
    Argument("no `attention_mask`", given(attention_mask=None)),
    Argument(
        "`attention_mask` `[B, 1, L, L]`",
        like_ids(lambda ids: {"attention_mask": torch.ones(1, 1, ids.shape[1], ids.shape[1])}),
        OF_PROMPT,
        MASK,
    ),
    Argument("`attention_mask` as a dictionary", given(attention_mask={"full_attention": None}), OF_PROMPT, MASK),
    Argument("`attention_mask` of another length", given(attention_mask=torch.ones(1, 5)), OF_PROMPT, MASK),
    Argument(
        "`position_ids`",
        like_ids(lambda ids: {"position_ids": torch.zeros(3, *ids.shape, dtype=torch.long)}),
        OF_PROMPT,
        "`position_ids` are computed here, so that kept tokens keep their places; drop `position_ids`",
    ),
    Argument(
        "`cache_position`",
        like_ids(lambda ids: {"cache_position": torch.arange(ids.shape[1])}),
        OF_PROMPT,
        "`cache_position` counts columns of the full prompt, of which fewer are read; drop it",
    ),
    Argument(
        "`pixel_values` as a list",
        lambda opened, data: {"pixel_values": list(data["pixel_values"])},
        OF_PROMPT,
        "`pixel_values` must be a tensor, got list; see `return_tensors`",
    ),
    Argument(
        "placeholders without `pixel_values`",
        given(pixel_values=DROPPED),
        OF_PROMPT,
        "placeholders of pictures, but no pictures; pass `pixel_values` too",
    ),
    Argument("`pixel_values_videos`", given(), spec=CLIP, families=QWEN),
    Argument(
        "no `image_grid_thw`",
        given(image_grid_thw=DROPPED),
        OF_PROMPT,
        "`image_grid_thw` is missing; pass all of the processor's output",
        families=QWEN,
    ),
    Argument("no `mm_token_type_ids`", given(mm_token_type_ids=DROPPED), families=QWEN),
    Argument("`token_type_ids`", like_ids(lambda ids: {"token_type_ids": torch.zeros_like(ids)}), OF_FORWARD),
    Argument(
        "`mm_encoder_outputs` with `pixel_values`",
        given(mm_encoder_outputs={"image": object()}),
        OF_PROMPT,
        "`mm_encoder_outputs` come beside `pixel_values`; pass the pictures alone",
    ),
    Argument(
        "`mm_encoder_outputs` alone",
        features_instead,
        OF_PROMPT,
        "`mm_encoder_outputs` cannot be shortened; pass the pictures, as `pixel_values`, instead",
    ),
    Argument(
        "`vision_feature_layer`",
        given(vision_feature_layer=-1),
        OF_PROMPT,
        "`vision_feature_layer` is read from the model's config here; set it there",
        families=["llava"],
    ),
    Argument("`labels`", like_ids(lambda ids: {"labels": ids}), OF_FORWARD),
    Argument(
        "`labels` of another length",
        given(labels=torch.ones(1, 5)),
        OF_FORWARD,
        "`labels` must have shape (1, {length}), as `input_ids`, to be shortened, got (1, 5)",
    ),
    Argument(
        "`shift_labels`",
        like_ids(lambda ids: {"labels": ids, "shift_labels": ids}),
        OF_FORWARD,
        "`shift_labels` stand at columns of the full prompt, of which fewer are read; pass `labels` alone",
    ),
    Argument("packed rows: `cu_seq_lens_q`", given(cu_seq_lens_q=torch.tensor([0, 5])), OF_FORWARD, PACKED),
    Argument("packed rows: `seq_idx`", like_ids(lambda ids: {"seq_idx": torch.zeros_like(ids)}), OF_FORWARD, PACKED),
    Argument("`logits_to_keep`, a number", given(logits_to_keep=2)),
    Argument("`logits_to_keep`, a tensor `[n]`", given(logits_to_keep=torch.tensor([0, 3])), OF_PROMPT, LOGITS),
    Argument("`logits_to_keep`, a slice", given(logits_to_keep=slice(0, 3)), OF_FORWARD, LOGITS),
    Argument("`return_dict=False`", given(return_dict=False), OF_FORWARD),
    Argument("`output_attentions`", given(output_attentions=True), OF_FORWARD),
    Argument("`output_hidden_states`", given(output_hidden_states=True), OF_FORWARD),
    Argument("`past_key_values`, empty", lambda opened, data: {"past_key_values": DynamicCache()}),
    Argument("`past_key_values`, a `StaticCache`", static_cache),
    Argument("`past_key_values` of the last turn", own_cache, OF_GENERATE),
    Argument("`past_key_values` of the last step", returned_cache, (FORWARD, OUR_FORWARD)),
    Argument("`past_key_values`, filled elsewhere", filled_cache, OF_PROMPT, HOLDS),
    Argument(
        "`past_key_values` as tuples",
        given(past_key_values=((torch.zeros(1, 2, 3, 16),) * 2,) * 3),
        OF_PROMPT,
        "`past_key_values` must be a `Cache`, got tuple; start with a `DynamicCache()`",
    ),
    Argument("`use_cache=False`, Qwen", given(use_cache=False), OF_OPTIONS, families=QWEN),
    Argument(
        "`use_cache=False`, LLaVA",
        given(use_cache=False),
        OF_GENERATE,
        "Llava keeps true positions only with a cache; drop use_cache=False",
        families=["llava"],
    ),
    Argument(
        "`max_length`", like_ids(lambda ids: {"max_length": ids.shape[1] + 3, "max_new_tokens": None}), OF_GENERATE
    ),
    Argument("`num_beams`", given(num_beams=3), OF_OPTIONS),
    Argument(
        "`num_return_sequences`",
        given(num_return_sequences=2, num_beams=2),
        OF_OPTIONS,
        ONE_TEXT.format(name="num_return_sequences"),
        (ANSWER,),
    ),
    Argument(
        "`return_dict_in_generate`, with scores, attentions and states",
        given(return_dict_in_generate=True, output_scores=True, output_attentions=True, output_hidden_states=True),
        OF_OPTIONS,
        ONE_TEXT.format(name="return_dict_in_generate"),
        (ANSWER,),
    ),
    Argument("`logits_processor`", given(logits_processor=[lambda input_ids, scores: scores]), OF_OPTIONS),
    Argument(
        "`stopping_criteria`",
        given(stopping_criteria=[lambda input_ids, scores: torch.zeros(len(input_ids), dtype=torch.bool)]),
        OF_OPTIONS,
    ),
    Argument(
        "`prefix_allowed_tokens_fn`", given(prefix_allowed_tokens_fn=lambda row, input_ids: [40, 41, 42]), OF_OPTIONS
    ),
    Argument("`streamer`", lambda opened, data: {"streamer": Streamer()}, OF_OPTIONS),
    Argument(
        "`assistant_model`",
        lambda opened, data: {"assistant_model": tiny_model("qwen3_vl", seed=1)},
        OF_GENERATE,
        families=["qwen3_vl"],
    ),
    Argument("`prompt_lookup_num_tokens`", given(prompt_lookup_num_tokens=2), OF_OPTIONS),
    Argument(
        "`assistant_early_exit`",
        given(assistant_early_exit=1),
        OF_OPTIONS,
        "assistant_early_exit knows no models with pictures; use prompt_lookup_num_tokens instead",
    ),
    Argument("`custom_generate`, a function", given(custom_generate=sample), OF_GENERATE),
    Argument("`negative_prompt_ids` alone", given(negative_prompt_ids=torch.tensor([[40]])), OF_OPTIONS),
    Argument(
        "`guidance_scale`, `negative_prompt_ids`",
        given(guidance_scale=1.5, negative_prompt_ids=torch.tensor([[40]])),
        OF_OPTIONS,
        "guidance_scale reads a second prompt, after which positions are lost; drop it",
    ),
    Argument(
        "`token_healing`",
        lambda opened, data: {"token_healing": True, "tokenizer": make_tokenizer()},
        OF_OPTIONS,
        "token_healing writes the prompt anew, without its pictures; drop it",
    ),
    Argument(
        "`stop_strings`", lambda opened, data: {"stop_strings": ["dog"], "tokenizer": make_tokenizer()}, OF_OPTIONS
    ),
    Argument(
        "`prefill_chunk_size`",
        given(prefill_chunk_size=4),
        OF_OPTIONS,
        "prefill_chunk_size loses the pictures of a prompt; drop it",
    ),
    *(
        Argument(f"`cache_implementation={name!r}`", given(cache_implementation=name), OF_OPTIONS)
        for name in ("dynamic", "static", "hybrid")
    ),
    *(
        # compiled, `offloaded_static` ends the process, with the plain model too
        Argument(
            f"`cache_implementation={name!r}` (CUDA)",
            given(cache_implementation=name, disable_compile=True),
            OF_OPTIONS,
            needs="cuda",
        )
        for name in ("offloaded", "offloaded_static")
    ),
    Argument(
        "`cache_implementation='quantized'` (optimum-quanto)",
        given(cache_implementation="quantized"),
        OF_GENERATE,
        needs="optimum.quanto",
    ),
    Argument("`cache_implementation='paged'`", given(cache_implementation="paged"), OF_OPTIONS, PAGED),
]


def is_here(needed):
    if needed == "cuda":
        return torch.cuda.is_available()
    if not needed:
        return True
    return find_spec(needed.partition(".")[0]) is not None and find_spec(needed) is not None


@contextlib.contextmanager
def counting(model):
    """A list to which every pass of the language model adds the number of columns that it reads."""
    read = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    try:
        yield read
    finally:
        hook.remove()


@contextlib.contextmanager
def refusing(text):
    """One line that says this."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below, with what has to be escaped in a pattern
        yield
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def open_models(family):
    """The plain model, to be attached, and one object around another; one that answers for Qwen3-VL."""
    around = ARRCOCQwen(
        tiny_model(family, attention="eager"), types.SimpleNamespace(tokenizer=make_tokenizer()), ByScore(),
        budget=BUDGET, on_error="raise",
    )  # fmt: skip
    return tiny_model(family, attention="eager"), around


@pytest.fixture(scope="module", name="opened")
def open_every_model():
    return {}


@pytest.fixture(scope="module", name="answering")
def open_answering(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory)
    options = {"budget": BUDGET, "on_error": "raise", "attn_implementation": "eager"}
    return ARRCOCQwen.from_pretrained(directory, ByScore(), **options)


def cells():
    """A test for each cell: Qwen3-VL always, the other families in the whole suite."""
    for argument in ARGUMENTS:
        for call in argument.calls:
            for family in ["qwen3_vl"] if call == ANSWER else argument.families:
                quick = family == "qwen3_vl" or argument.families == [family]
                name = f"{argument.name}-{call}-{family}".replace("`", "")
                marks = [pytest.mark.slow] * (not quick) + [pytest.mark.gpu] * (argument.needs == "cuda")
                yield pytest.param(argument, call, family, id=name, marks=marks)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize(("argument", "call", "family"), list(cells()))
def test_every_cell_of_the_table(argument, call, family, opened, answering):
    if not is_here(argument.needs):
        pytest.skip(f"needs {argument.needs}")
    if family not in opened:
        opened[family] = open_models(family)
    plain, around = opened[family]
    device = "cuda" if argument.needs == "cuda" else "cpu"
    data = {name: value.to(device) for name, value in inputs_for(family, argument.spec).items()}
    full = data["input_ids"].shape[1]
    model, entry = {ANSWER: (answering.model, answering), PREPARE: (plain, plain)}.get(call, (plain, plain))
    if call in (OUR_FORWARD, OUR_GENERATE):
        model, entry = around.model, around
    if call == ANSWER:
        full = processed(answering.processor, [photo(96, 64)])["input_ids"].shape[1]
    model.to(device)
    attached = call in (FORWARD, GENERATE)
    selecting = attach(model, ByScore(), budget=BUDGET, on_error="raise") if attached else contextlib.nullcontext()
    with selecting:
        changes = argument.make(entry, data)
        kwargs = {} if call == ANSWER else dict(data)
        kwargs = {name: value for name, value in {**kwargs, **changes}.items() if value is not DROPPED}
        args = kwargs.pop("*", ())
        with counting(model) as read:
            if argument.refuses(call):
                with refusing(argument.refusal.format(length=full)):
                    CALLS[call](entry, args, kwargs)
                assert read == []
            else:
                CALLS[call](entry, args, kwargs)
                assert 0 < read[0] < full


@torch.no_grad()
def test_a_plain_model_reads_everything():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)
    for call in (FORWARD, GENERATE):
        with counting(model) as read:
            CALLS[call](model, (), data)
        assert read[0] == data["input_ids"].shape[1]


# What surrounds a model. Each function makes one call with the attached model; most work in either order, which
# tests/models/test_neighbours.py shows.


def labelled(data):
    return {**data, "labels": data["input_ids"]}


def open_trainer(cls, model, data, directory):
    settings = {"use_cpu": True, "report_to": [], "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    settings |= {"output_dir": str(directory), "remove_unused_columns": False, "dataloader_pin_memory": False}
    rows = [{"input_ids": [1]}] * 2  # the collator delivers the batch: rows only count it
    if cls == "Trainer":
        args, extra = transformers.TrainingArguments(**settings), {"train_dataset": rows}
        cls = transformers.Trainer
    else:
        trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
        args = trl.SFTConfig(**settings, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None)
        extra = {"processing_class": make_tokenizer(), "train_dataset": datasets.Dataset.from_list(rows)}
        cls = trl.SFTTrainer
    return cls(model=model, args=args, data_collator=lambda batch: labelled(data), eval_dataset=rows, **extra)


def train(model, data, directory):
    with torch.enable_grad():
        open_trainer("Trainer", model, data, directory).train()


def evaluate(model, data, directory):
    open_trainer("Trainer", model, data, directory).evaluate()


def predict(model, data, directory):
    open_trainer("Trainer", model, data, directory).predict([{"input_ids": [1]}])


def fine_tune(model, data, directory):
    with torch.enable_grad():
        open_trainer("SFTTrainer", model, data, directory).train()


def wrap_with_lora(model, data, directory):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).eval()(**data)


def prepare_with_accelerate(model, data, directory):
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).prepare(model)(**data)


def offload_with_accelerate(model, data, directory):
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device="cpu")(**data)


def wrap_in_ddp(model, data, directory):
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)(**data)
    finally:
        torch.distributed.destroy_process_group()


def compile_a_wrapper(model, data, directory):
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(**data)


def compile_in_place(model, data, directory):
    torch._dynamo.reset()
    model.compile(backend="eager")
    model(**data)


def generate_with_a_directory(model, data, directory):
    folder = directory / "custom_generate"
    folder.mkdir()
    (folder / "generate.py").write_text(
        "def generate(model, inputs=None, **kwargs):\n"
        "    kwargs = {name: value for name, value in kwargs.items() if value is not None}\n"
        "    kwargs.pop('max_new_tokens', None)\n"
        "    ids = kwargs.pop('input_ids')\n"
        "    logits = model(input_ids=ids, **kwargs).logits\n"
        "    import torch\n"
        "    return torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)\n"
    )
    model.generate(**data, custom_generate=str(directory), trust_remote_code=True)


def enter_continuous_batching(model, data, directory):
    with model.continuous_batching_context_manager():
        pass


BATCHING = "continuous batching (`generate_batch`, `init_continuous_batching`) takes ids alone"
TOOLS = {
    "`Trainer.train`": (train, ""),
    "`Trainer.evaluate`": (evaluate, ""),
    "`Trainer.predict`": (predict, ""),
    "TRL's `SFTTrainer.train`": (fine_tune, ""),
    "PEFT's LoRA around the model": (wrap_with_lora, ""),
    "`Accelerator.prepare`": (prepare_with_accelerate, ""),
    "accelerate's `cpu_offload`": (offload_with_accelerate, ""),
    "`torch.compile(model)`": (compile_a_wrapper, ""),
    "`model.compile()`": (compile_in_place, ""),
    "`custom_generate`, a directory": (generate_with_a_directory, ""),
    "`DistributedDataParallel`": (wrap_in_ddp, ""),
    "`nn.DataParallel`, one device": (lambda model, data, directory: torch.nn.DataParallel(model)(**data), ""),
    "`nn.DataParallel`, several devices": (
        lambda model, data, directory: model._replicate_for_data_parallel(),
        "nn.DataParallel copies a model without its selection; start one process per device instead",
    ),
    "`model.model(...)`, without the head": (
        lambda model, data, directory: model.model(**data),
        "this call goes around the attached model's `forward`, so nothing would be selected; call the model itself",
    ),
    "`model.generate_batch`": (
        lambda model, data, directory: model.generate_batch(data["input_ids"].tolist(), max_new_tokens=2),
        BATCHING,
    ),
    "`model.init_continuous_batching`": (lambda model, data, directory: model.init_continuous_batching(), BATCHING),
    "`model.continuous_batching_context_manager`": (enter_continuous_batching, BATCHING),
}
SLOW = {name for name in TOOLS if "Trainer" in name or "compile" in name}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of the tools
@pytest.mark.parametrize(
    "tool",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else [], id=name.replace("`", "")) for name in TOOLS],
)
def test_every_tool_of_the_table(tool, tmp_path):
    call, refusal = TOOLS[tool]
    # the family that compiles fastest; tests/models/test_neighbours.py compiles the others
    family = "qwen2_vl" if "compile" in tool else "qwen3_vl"
    model, data = tiny_model(family), inputs_for(family, IMAGE_PROMPT)
    with counting(model) as read, attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        if refusal:
            with refusing(refusal):
                call(model, data, tmp_path)
            assert read == []
        else:
            call(model, data, tmp_path)
            assert 0 < read[0] < data["input_ids"].shape[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", [True, False], ids=["ARRCOCQwen", "attached"])
def test_a_pipeline_reads_a_shorter_prompt(answering, around):
    model = answering if around else answering.model
    pipe = transformers.pipeline("image-text-to-text", model=model, processor=answering.processor)
    content = [{"type": "image", "image": photo(96, 64)}, {"type": "text", "text": "what color is it?"}]
    selecting = contextlib.nullcontext() if around else attach(model, ByScore(), budget=BUDGET, on_error="raise")
    with selecting, counting(answering.model) as read:
        pipe(text=[{"role": "user", "content": content}], generate_kwargs=SHORT)
    assert 0 < read[0] < processed(answering.processor, [photo(96, 64)])["input_ids"].shape[1]


def test_copies_for_several_devices_are_refused(answering):
    with refusing("nn.DataParallel copies a model without its selection; start one process per device instead"):
        answering._replicate_for_data_parallel()


@torch.no_grad()
def test_what_was_refused_works_again_afterwards():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)
    attach(model, ByScore(), budget=BUDGET).remove()
    assert not {"init_continuous_batching", "_replicate_for_data_parallel"} & set(model.__dict__)
    assert model.model(**data).last_hidden_state.shape[1] == data["input_ids"].shape[1]
    assert model._replicate_for_data_parallel() is not model


# What sees tokens sees the full prompt.


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}],
    ids=["greedy", "beams", "samples"],
)
@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_allowed_prefixes_begin_with_the_full_prompt(family, options):
    model, data = tiny_model(family), inputs_for(family, IMAGE_PROMPT, [("text", 3), *IMAGE_PROMPT])
    prompt, seen = data["input_ids"], []
    copies = options.get("num_return_sequences", 1)

    def allow(row, input_ids):
        seen.append(torch.equal(input_ids[: prompt.shape[1]], prompt[row // copies]))
        return [40 + input_ids.shape[0] - prompt.shape[1]]

    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        out = model.generate(**data, **{**SHORT, **options}, prefix_allowed_tokens_fn=allow)
    assert seen
    assert all(seen)
    assert out[:, prompt.shape[1] :].tolist() == [[40, 41, 42]] * len(out)


@torch.no_grad()
def test_a_streamer_is_shown_the_full_prompt_and_then_the_answer():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)
    streamer = Streamer()
    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        out = model.generate(**data, **SHORT, streamer=streamer)
    prompt, *answer, end = streamer.shown
    assert torch.equal(prompt, data["input_ids"])
    assert [int(token) for token in answer] == out[0, prompt.shape[1] :].tolist()
    assert end is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_decoding_says_what_greedy_decoding_says(name):
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)
    value = tiny_model("qwen3_vl", seed=1) if name == "assistant_model" else 2
    with attach(model, ByScore(), budget=BUDGET, on_error="raise"):
        assert torch.equal(model.generate(**data, **GREEDY, **{name: value}), model.generate(**data, **GREEDY))


@torch.no_grad()
def test_tuples_hold_marked_caches_and_full_logits_too():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)
    with attach(model, ByScore(), budget=BUDGET, on_error="raise", full_logits=True):
        named = model(**data, use_cache=True)
        logits, cache, *_ = model(**data, use_cache=True, return_dict=False)
    assert torch.equal(logits, named.logits)
    assert logits.shape[1] == data["input_ids"].shape[1]
    with refusing("this cache holds a shortened prompt, which the plain model would misread"):
        model(input_ids=torch.tensor([[40]]), past_key_values=cache)


# The tables in docs/recipes.md.


def write_tables():
    """Both tables, as Markdown."""
    lines = [
        f"| argument | {' | '.join(CALLS)} | what is said |",
        "|---" * (len(CALLS) + 2) + "|",
    ]
    for argument in ARGUMENTS:
        said = argument.refusal.replace("{length}", "L")
        outcomes = {call: "refused" if argument.refuses(call) else "shorter" for call in argument.calls}
        lines.append(f"| {' | '.join([argument.name, *(outcomes.get(call, '') for call in CALLS), said])} |")
    lines += ["", "| tool | outcome |", "|---|---|"]
    lines += [f"| {name} | {f'refused: {refusal}' if refusal else 'shorter'} |" for name, (_, refusal) in TOOLS.items()]
    lines += ['| `pipeline("image-text-to-text")` | shorter |']
    return "\n".join(lines) + "\n"


def test_the_tables_in_the_recipes_are_these():
    _, _, rest = RECIPES.read_text(encoding="utf-8").partition(BEGIN)
    written, _, _ = rest.partition(END)
    assert written == write_tables(), "run `python tests/models/test_entries.py`"


if __name__ == "__main__":
    before, _, rest = RECIPES.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_aside(RECIPES, f"{before}{BEGIN}{write_tables()}{END}{after}")
