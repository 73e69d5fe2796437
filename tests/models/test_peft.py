"""LoRA below and around an attachment, and of a run that is opened by its directory; prompt tuning is refused."""

from importlib.resources import files

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_models import IMAGE_PROMPT, QWEN, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import ARRCOCLayer, ARRCOCQwen, attach, prepare
from arr_coc.inference.load import load_model, load_selector

peft = pytest.importorskip("peft", reason="comes with the dev extra")


@pytest.fixture(params=QWEN, name="adapted")
def adapt(request):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )  # fmt: skip
    return request.param, peft.get_peft_model(tiny_model(request.param), config)


@torch.no_grad()
def test_lora_is_found_below_the_wrapper_and_acts(adapted):
    family, model = adapted
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    prepared = prepare(model, data, ByScore(), budget=5)
    answers = model.generate(**prepared, **GREEDY)[:, prepared["input_ids"].shape[1] :]
    with attach(model, ByScore(), budget=5):
        attached = model.generate(**data, **GREEDY)[:, data["input_ids"].shape[1] :]
        with model.disable_adapter():
            without = model.generate(**data, **GREEDY)[:, data["input_ids"].shape[1] :]
    assert torch.equal(attached, answers)
    assert not torch.equal(without, answers)


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # a tiny model has no checkpoint
def test_lora_learns_through_an_attachment(adapted, tmp_path):
    family, model = adapted
    data = inputs_for(family, IMAGE_PROMPT)
    labels = data["input_ids"].clone()
    labels[:, :-3] = -100
    with attach(model, ByScore(), budget=5):
        model(**data, labels=labels).loss.backward()
        model.save_pretrained(tmp_path)
    gradients = [p.grad for name, p in model.named_parameters() if "lora_" in name and p.grad is not None]
    assert gradients
    assert sum(gradient.abs().sum() for gradient in gradients) > 0
    assert "adapter_model.safetensors" in {path.name for path in tmp_path.iterdir()}


def test_prompt_tuning_is_refused_before_anything_is_touched():
    model = tiny_model("qwen2_vl")
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, num_layers=3, token_dim=64, num_attention_heads=4,
        num_transformer_submodules=1,
    )  # fmt: skip
    tuned = peft.get_peft_model(model, config)
    with pytest.raises(ValueError, match="lose their places; use LoRA"):
        attach(tuned, ByScore())
    assert "forward" not in model.__dict__


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run that was trained with LoRA: the selector, and its matrices beside it."""
    vlm, place = ARRCOCQwen.from_pretrained(), tmp_path_factory.mktemp("run")
    vlm.selector.save_pretrained(place)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, lora_alpha=400, target_modules=r".*language_model.*\.(q_proj|v_proj)", init_lora_weights=False
    )
    model = peft.get_peft_model(vlm.model, config)
    model.save_pretrained(place / "adapter")
    return place, {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}


@pytest.mark.slow
def test_a_run_with_lora_is_opened_with_its_lora(tuned):
    place, matrices = tuned
    opened = ARRCOCQwen.from_pretrained(place)
    found = opened.model.state_dict()
    assert matrices
    for name, value in matrices.items():
        assert torch.equal(found[name], value), name
    assert not any(parameter.requires_grad for parameter in opened.model.parameters())
    picture = files("arr_coc") / "assets" / "examples" / "shapes.png"
    question = "what does the purple text say?"
    plain = ARRCOCQwen.from_pretrained(selector=ARRCOCLayer.from_pretrained(place))
    assert opened.answer(picture, question).text != plain.answer(picture, question).text  # large random matrices


def test_a_selector_that_needs_its_lora_is_not_put_on_a_plain_model(tuned):
    with pytest.raises(ValueError, match="was trained with LoRA on its base, which this model lacks"):
        load_selector(tuned[0], load_model("embedded", dtype=torch.float32))


def test_a_run_that_trained_the_base_is_opened_with_that_base(tmp_path):
    vlm = ARRCOCQwen.from_pretrained()
    vlm.selector.save_pretrained(tmp_path)
    with torch.no_grad():
        vlm.model.lm_head.weight.mul_(-1)
    for part in (vlm.model, vlm.processor):
        part.save_pretrained(tmp_path / "base")
    opened = ARRCOCQwen.from_pretrained(tmp_path)
    assert torch.equal(opened.model.lm_head.weight.float(), vlm.model.lm_head.weight.float())
