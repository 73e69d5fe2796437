"""Models without a head (embedders, rerankers) read shorter prompts too, and what cannot work is refused."""

import peft
import pytest
import torch
import transformers
from tiny_models import FAMILIES, IMAGE_PROMPT, RELATIVES, SMALL, TEXT, TWO_IMAGES, inputs_for, tiny_model
from torch import nn

from arr_coc import ARRCOCQwen, attach, create_selector, list_families, prepare

ALL = [*FAMILIES, *RELATIVES]


def pooled(output):
    return output.last_hidden_state[:, -1]


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_the_last_state_is_that_of_the_model_with_its_head(family):
    model = tiny_model(family)
    data = inputs_for(family, IMAGE_PROMPT, SMALL)
    grid = create_selector("grid")
    with attach(model, grid, budget=4, on_error="raise"):
        logits = model(**data).logits[:, -1]
    full = pooled(model.model(**data))
    with attach(model.model, grid, budget=4, on_error="raise") as run:
        output = model.model(**data)
    assert [len(cells) for _, cells in run.kept] == [4, 4]
    assert output.last_hidden_state.shape[1] < data["input_ids"].shape[1]
    torch.testing.assert_close(model.lm_head(pooled(output)), logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(pooled(output), full, atol=1e-2)
    assert torch.equal(pooled(model.model(**data)), full)  # nothing is left behind
    made = prepare(model.model, data, grid, budget=4, on_error="raise")
    assert torch.equal(pooled(model.model(**made)), pooled(output))


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_keeping_all_changes_nothing(family):
    inner, data = tiny_model(family).model, inputs_for(family, TWO_IMAGES)
    full = inner(**data).last_hidden_state
    with attach(inner, create_selector("grid"), budget=1.0, on_error="raise"):
        torch.testing.assert_close(inner(**data).last_hidden_state, full, atol=1e-5, rtol=1e-5)
        text = inputs_for(family, TEXT)
        assert inner(**text).last_hidden_state.shape[1] == text["input_ids"].shape[1]


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_automodel_and_lora_are_opened(family):
    torch.manual_seed(0)
    inner = transformers.AutoModel.from_config(tiny_model(family).config).eval()
    data = inputs_for(family, IMAGE_PROMPT)
    wrapped = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)).eval()
    with attach(wrapped, create_selector("grid"), budget=4, on_error="raise") as run:
        wrapped(**data)
    assert [len(cells) for _, cells in run.kept] == [4]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_prompt_that_ends_in_a_picture_is_refused(family):
    inner = tiny_model(family).model
    data = inputs_for(family, [("text", 3), ("image", (1, 4, 4))])
    if family != "llava":  # its pictures end with a marker
        length = data["input_ids"].shape
        data = {name: value[:, :-1] if value.shape == length else value for name, value in data.items()}
    with (
        attach(inner, create_selector("grid"), budget=2),
        pytest.raises(ValueError, match="a model without a head is read at the last token; end it in text"),
    ):
        inner(**data)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generating_with_the_inner_model_attached_is_refused(family):
    """The outer model prepares the full prompt: that is said, instead of answering nonsense."""
    model, data = tiny_model(family), inputs_for(family, IMAGE_PROMPT)
    refused = pytest.raises(ValueError, match=r"`(mm_encoder_outputs|position_ids)`")
    with attach(model.model, create_selector("grid"), budget=2), refused:
        model.generate(**data, max_new_tokens=2)


def test_a_head_of_its_own_is_refused_with_what_to_attach_instead():
    model = tiny_model("qwen3_5")
    classifier = transformers.Qwen3_5ForSequenceClassification(model.config)
    with pytest.raises(ValueError, match=r"its own head, which reads columns of the full prompt.* its part `model`"):
        attach(classifier, create_selector("grid"))

    class Reranker(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder, self.score = encoder, nn.Linear(64, 1)

        def forward(self, **inputs):
            return self.score(pooled(self.encoder(**inputs)))

    reranker, data = Reranker(model.model).eval(), inputs_for("qwen3_5", IMAGE_PROMPT)
    with pytest.raises(ValueError, match=r"Reranker has its own head.* its part `encoder`"):
        attach(reranker, create_selector("grid"))
    with torch.no_grad():
        full = reranker(**data)
        with attach(reranker.encoder, create_selector("grid"), budget=2) as run:
            assert reranker(**data).shape == full.shape
    assert [len(cells) for _, cells in run.kept] == [2]


def test_the_mixture_of_experts_is_registered():
    assert {"qwen3_5", "qwen3_5_moe"} <= set(list_families())


def test_a_model_without_a_head_cannot_answer():
    with pytest.raises(ValueError, match="this model has no head, so it cannot answer; use `attach` or `prepare` for"):
        ARRCOCQwen(tiny_model("qwen3_vl").model, None, create_selector("grid"))
