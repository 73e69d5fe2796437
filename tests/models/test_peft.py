"""LoRA below and around an attachment; prompt tuning is refused."""

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_models import IMAGE_PROMPT, QWEN, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import attach, prepare

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
