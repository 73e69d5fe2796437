"""What tokens pay to others in the language model: read from a few rows, equal to the model's own eager attention."""

import pytest
import torch
from tiny_models import FAMILIES, IMAGE, IMAGE_PROMPT, MIXED, RELATIVES, SMALL, TEXT, TWO_IMAGES, inputs_for, tiny_model

from arr_coc.families.family import open_family
from arr_coc.families.language_attention import Asking, attending_layers, reading_attention


def read(family, data, groups, attention="sdpa", layers=slice(None)):
    """What groups pay, `[layers, B, heads, G, L]`, and the model's output."""
    model = tiny_model(family, attention)
    read_layers = attending_layers(open_family(model))[layers]
    with torch.no_grad(), reading_attention(read_layers, Asking.of(groups), data["attention_mask"].bool()) as paid:
        output = model(**data)
    assert not any(module._forward_pre_hooks for _, module in read_layers)
    return torch.stack(paid), output


def eager(family, data):
    """The model's own attention `[layers, B, heads, L, L]`; of mixed models the layers with full attention."""
    with torch.no_grad():
        attentions = tiny_model(family, "eager")(**data, output_attentions=True).attentions
    return torch.stack([layer for layer in attentions if layer is not None])


def last_and_words(data, words=slice(-4, -1)):
    """Groups: the last token of each row, and some words before it, masks `[B, 2, L]`."""
    groups = torch.zeros(len(data["input_ids"]), 2, data["input_ids"].shape[1], dtype=torch.bool)
    groups[:, 0, -1] = True
    groups[:, 1, words] = True
    return groups & data["attention_mask"][:, None].bool()


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES])
@pytest.mark.parametrize("specs", [[IMAGE_PROMPT], [TWO_IMAGES, SMALL, TEXT]], ids=["one", "padded"])
def test_rows_equal_the_eager_attention(family, specs):
    data = inputs_for(family, *specs)
    groups = last_and_words(data)
    paid, _ = read(family, data, groups)
    whole = eager(family, data)
    assert len(paid) == len(whole) > 0
    torch.testing.assert_close(paid[:, :, :, 0], whole[:, :, :, -1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(paid[:, :, :, 1], whole[:, :, :, -4:-1].mean(dim=3), atol=2e-5, rtol=1e-4)
    # a control: other words pay otherwise
    other, _ = read(family, data, last_and_words(data, slice(-3, -2)))
    assert (other[:, :, :, 1] - paid[:, :, :, 1]).abs().max() > 1e-3
    visual = data["input_ids"] == IMAGE
    assert float(paid[:, visual.any(1)][..., 0, :].sum(-1).min()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_clips_and_chosen_layers(family):
    data = inputs_for(family, MIXED)
    paid, _ = read(family, data, last_and_words(data), layers=slice(1, 2))
    torch.testing.assert_close(paid[:, :, :, 0], eager(family, data)[1:2, :, :, -1], atol=2e-5, rtol=1e-4)


def test_reading_changes_nothing():
    data = inputs_for("qwen3_vl", TWO_IMAGES)
    with torch.no_grad():
        plain = tiny_model("qwen3_vl")(**data).logits
    assert torch.equal(read("qwen3_vl", data, last_and_words(data))[1].logits, plain)


def test_rows_with_fewer_words_are_means_of_their_own():
    groups = torch.zeros(2, 2, 6, dtype=torch.bool)
    groups[0, 0, 5], groups[0, 1, 1:4] = True, True
    groups[1, 0, 5] = True  # a row without words
    asking = Asking.of(groups)
    assert asking.columns.shape == (2, 4)
    assert asking.columns[0].tolist() == [1, 2, 3, 5]
    assert asking.shares[0].tolist() == [[0, 0, 0, 1], pytest.approx([1 / 3] * 3 + [0])]
    assert asking.columns[1, 0] == 5
    assert asking.shares[1].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_layers_that_see_only_near_tokens_are_refused():
    model = tiny_model("qwen2_vl")
    model.config.text_config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="qwen2_vl has layers of sliding_attention, whose attention says nothing"):
        attending_layers(open_family(model))
