"""`Prepared` and `collate_prepared`: a batch joined by hand gives what its prompts give by themselves."""

import copy
import pickle

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_models import (
    CLIP,
    FAMILIES,
    IMAGE_PROMPT,
    MIXED,
    PAD,
    QWEN,
    RELATIVES,
    SMALL,
    TEXT,
    TWO_IMAGES,
    inputs_for,
    tiny_model,
)
from transformers import DynamicCache

from arr_coc import ARRCOCConfig, ARRCOCLayer, Prepared, TokenSelector, collate_prepared, create_selector, prepare

ROUNDING = {"atol": 1e-4, "rtol": 1e-4}
FAST = ["qwen3_vl", "llava"]  # with and without DeepStack and positions in three dimensions
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in [*FAMILIES, *RELATIVES] if name not in FAST]


@pytest.fixture(scope="module", params=[*FAST, *SLOW], name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


@pytest.fixture(scope="module", params=QWEN, name="qwen")
def open_qwen(request):
    return request.param, tiny_model(request.param)


def prompt(family, spec, seed=0):
    return inputs_for(family if family in FAMILIES else "qwen3_vl", spec, seed=seed)


def prepare_all(family, model):
    """Prompts of different lengths, pictures, selectors and modes."""
    specs = [IMAGE_PROMPT, TWO_IMAGES, SMALL, SMALL] + ([] if family == "llava" else [CLIP, MIXED])
    items = [
        prepare(model, prompt(family, spec, place), ByScore(), budget=0.3, on_error="raise")
        for place, spec in enumerate(specs)
    ]
    if family != "llava":
        layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
        items.append(prepare(model, prompt(family, IMAGE_PROMPT, 9), layer, mode="saccade", budget=14))
    return items


def decode(model, prepared):
    return model.generate(**prepared, **GREEDY)[:, prepared["input_ids"].shape[1] :]


def decode_by_hand(model, prepared, steps=4):
    """Greedy tokens `[B, n]` from forward passes alone."""
    cache = DynamicCache(config=model.config.get_text_config())
    logits, tokens = model(**prepared, past_key_values=cache).logits, []
    for _ in range(steps):
        tokens.append(logits[:, -1:].argmax(dim=-1))
        logits = model(**prepared.step(cache, tokens[-1])).logits
    return torch.cat(tokens, dim=1)


@torch.no_grad()
def test_a_batch_gives_what_its_prompts_give_alone(opened):
    family, model = opened
    alone = [model(**item).logits[0, -1] for item in prepare_all(family, model)]
    tokens = [decode(model, item)[0] for item in prepare_all(family, model)]
    batch = collate_prepared(prepare_all(family, model))
    torch.testing.assert_close(model(**batch).logits[:, -1], torch.stack(alone), **ROUNDING)
    assert len({tuple(row.tolist()) for row in tokens}) == len(tokens)  # rows that were mixed up would show
    assert torch.equal(decode(model, batch), torch.stack(tokens))
    assert batch.tokens.used == sum(item.tokens.used for item in prepare_all(family, model))
    assert len(batch.kept) == sum(len(item.kept) for item in prepare_all(family, model))


@torch.no_grad()
def test_without_mask_positions_or_order_the_batch_would_differ(opened):
    family, model = opened
    batch = collate_prepared(prepare_all(family, model))
    right = model(**batch).logits[:, -1]
    length = batch["input_ids"].shape[1]
    # two prompts have pictures of the same size: the features of one take the place of the other's
    swapped = {**batch["mm_encoder_outputs"], "image": copy.copy(batch["mm_encoder_outputs"]["image"])}
    pictures = list(swapped["image"].pooler_output)
    pictures[3], pictures[4] = pictures[4], pictures[3]
    swapped["image"].pooler_output = pictures
    wrong = {
        "positions": {"position_ids": torch.arange(length).expand_as(batch["position_ids"])},
        "padding": {"attention_mask": torch.ones_like(batch["attention_mask"])},
        "order": {"mm_encoder_outputs": swapped},
    }
    for name, change in wrong.items():
        assert not torch.allclose(model(**{**batch, **change}).logits[:, -1], right, atol=1e-2), name


@torch.no_grad()
def test_steps_by_hand_are_right_whatever_was_prepared_in_between(opened):
    family, model = opened
    alone = [decode_by_hand(model, item)[0] for item in prepare_all(family, model)]
    batch = collate_prepared(prepare_all(family, model))
    prepare_all(family, model)  # the model's own count of positions is now that of another prompt
    assert torch.equal(decode_by_hand(model, batch), torch.stack(alone))


@torch.no_grad()
def test_the_model_itself_continues_from_the_batch(qwen):
    family, model = qwen

    def continued(before):
        items = [prepare(model, prompt(family, SMALL, seed), ByScore(), budget=3) for seed in (0, 1)]
        batch, cache = collate_prepared(items), DynamicCache()
        ids = model(**batch, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
        before()
        plain = model(input_ids=ids, past_key_values=copy.deepcopy(cache)).logits
        return plain, model(**batch.step(cache, ids)).logits

    torch.testing.assert_close(*continued(lambda: None), **ROUNDING)
    plain, step = continued(lambda: prepare(model, prompt(family, IMAGE_PROMPT), ByScore()))
    assert not torch.allclose(plain, step, atol=1e-2)  # the control: another prompt was prepared in between


@torch.no_grad()
def test_the_loss_is_the_mean_over_all_labels(opened):
    family, model = opened
    items, losses, counts = [], [], []
    for place, (spec, learned) in enumerate(((IMAGE_PROMPT, 3), (TWO_IMAGES, 5), (SMALL, 2))):
        data = prompt(family, spec, place)
        data["labels"] = data["input_ids"].clone()
        data["labels"][:, :-learned] = -100
        items.append(prepare(model, data, ByScore(), budget=0.3))
        losses.append(model(**items[-1]).loss)
        counts.append(learned)
    batch = collate_prepared(items)
    assert (batch.labels[batch["attention_mask"] == 0] == -100).all()
    weighted = (torch.stack(losses) * torch.tensor(counts)).sum() / sum(counts)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, weighted, **ROUNDING)
    assert not torch.allclose(loss, torch.stack(losses).mean(), atol=1e-4)  # the control


class Failing(TokenSelector):
    def select(self, queries, budget=None):
        raise RuntimeError("no idea")


@torch.no_grad()
def test_prompts_that_were_not_shortened_join_with_all_tokens(opened):
    family, model = opened

    def items():
        return [
            prepare(model, prompt(family, IMAGE_PROMPT), Failing()),
            prepare(model, prompt(family, TEXT, 1), ByScore()),
            prepare(model, prompt(family, SMALL, 2), ByScore(), budget=2),
        ]

    failed, text, _ = items()
    assert failed.failure == "no idea"
    assert "pixel_values" in failed
    assert text.kept == []
    alone = [model(**item).logits[0, -1] for item in items()]
    batch = collate_prepared(items())
    torch.testing.assert_close(model(**batch).logits[:, -1], torch.stack(alone), **ROUNDING)
    assert torch.equal(decode(model, batch), torch.cat([decode(model, item) for item in items()]))
    assert batch.failure == "no idea"
    with pytest.raises(ValueError, match="was not shortened"):
        failed.step(DynamicCache(), torch.tensor([[20]]))
    with pytest.raises(ValueError, match="run the prompt with this cache first"):
        batch.step(DynamicCache(), torch.tensor([[20]] * 3))


@torch.no_grad()
def test_batches_can_be_joined_again(opened):
    family, model = opened
    items = prepare_all(family, model)
    batch = collate_prepared([collate_prepared(items[:2]), collate_prepared(items[2:])])
    once = collate_prepared(prepare_all(family, model))
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert torch.equal(batch[name], once[name])
    assert torch.equal(model(**batch).logits, model(**once).logits)


def test_what_does_not_fit_is_refused_in_one_line():
    model, other = tiny_model("llava"), tiny_model("llava", seed=1)
    data = prompt("llava", SMALL)
    item = prepare(model, data, ByScore())
    labelled = prepare(model, {**data, "labels": data["input_ids"]}, ByScore())
    sampled = [prepare(model, {**data, "logits_to_keep": count}, ByScore()) for count in (1, 2)]
    unpickled = pickle.loads(pickle.dumps(item))
    cases = [
        ([], "at least one, got none"),
        ([item, dict(item)], "must be prompts from `prepare`, at least one, got a dict"),
        ([item, prepare(other, data, ByScore())], "different models"),
        ([item, labelled], "only some of these prompts have the argument `labels`"),
        (sampled, "`logits_to_keep` cannot be joined"),
        ([item, unpickled], "not in this process"),
    ]
    for items, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            collate_prepared(items)
        assert "\n" not in str(error.value)


@torch.no_grad()
def test_copies_and_pickles_are_prepared_prompts_too(opened):
    family, model = opened
    item = prepare_all(family, model)[1]
    logits = model(**item).logits
    for again in (copy.copy(item), copy.deepcopy(item), pickle.loads(pickle.dumps(item))):
        assert type(again) is Prepared
        assert again.tokens == item.tokens
        assert [cells.tolist() for _, cells in again.kept] == [cells.tolist() for _, cells in item.kept]
        assert torch.equal(model(**again).logits, logits)
    assert collate_prepared([copy.deepcopy(item)])["input_ids"].tolist() == item["input_ids"].tolist()
    assert len(pickle.dumps(item)) < sum(weights.nbytes for weights in model.parameters())  # without the model


def test_a_prepared_prompt_does_not_keep_its_model_alive():
    model = tiny_model("llava")
    item = prepare(model, prompt("llava", SMALL), create_selector("grid"), budget=4)
    del model
    with pytest.raises(ValueError, match="is gone"):
        collate_prepared([item])


def test_every_tensor_moves_to_another_device(opened):
    family, model = opened
    item = prepare(model, prompt(family, TWO_IMAGES), ByScore(), budget=0.3)
    assert item.to("meta") is item
    outputs = item["mm_encoder_outputs"]["image"]
    assert type(outputs) is type(collate_prepared(prepare_all(family, model))["mm_encoder_outputs"]["image"])
    levels = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
    tensors = [item["input_ids"], item["position_ids"], *(picture for level in levels for picture in level)]
    tensors += [value for value in vars(item.holding).values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    with pytest.raises(TypeError):
        item.to(torch.bfloat16)  # would change ids


def test_attributes_say_what_was_kept(opened):
    family, model = opened
    data = prompt(family, IMAGE_PROMPT)
    item = prepare(model, data, create_selector("grid"), budget=4)
    [(grid, cells)] = item.kept
    assert (item.tokens.full, item.tokens.used, len(cells)) == (grid[1] * grid[2], 4, 4)
    assert item.failure is None
    assert item.outputs == [None]
    assert item.labels is None
    assert item["input_ids"].shape[1] == data["input_ids"].shape[1] - item.tokens.full + 4
    assert (collate_prepared([item, item])["input_ids"] != PAD).all()
