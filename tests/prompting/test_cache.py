"""Caches across turns: the reference is one pass over the whole conversation with the same tokens dropped."""

import copy

import pytest
import torch
from simple_selector import GREEDY, ByScore
from tiny_models import (
    CHAT_END,
    CLIP,
    FAMILIES,
    FIRST_WORD,
    IMAGE,
    IMAGE_PROMPT,
    QWEN,
    TWO_IMAGES,
    inputs_for,
    tiny_model,
)
from transformers import DynamicCache

from arr_coc import ARRCOCConfig, ARRCOCLayer, attach, create_selector

TURN = torch.arange(FIRST_WORD, FIRST_WORD + 7)[None]


@pytest.fixture(scope="module", params=FAMILIES, name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


def conversation(data, answer):
    """The ids of a further turn, as a processor gives them: everything so far, then the new question."""
    ids = torch.cat([data["input_ids"], answer, TURN], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def reference(model, data, selector, answer, **settings):
    """Logits after the conversation in one pass without a cache, with the tokens of the first turn dropped."""
    from arr_coc import prepare

    prepared = prepare(model, data, selector, **settings)
    text = torch.cat([answer, TURN], dim=1)
    length = prepared["input_ids"].shape[1]
    mask = torch.cat([prepared["attention_mask"], torch.ones_like(text)], dim=1)
    positions = prepared["position_ids"]
    full = (
        model.model.get_rope_index(**{**data, "mm_token_type_ids": data["mm_token_type_ids"]})[0]
        if "mm_token_type_ids" in data
        else None
    )
    first = data["input_ids"].shape[1] if full is None else int(full.max()) + 1
    after = first + torch.arange(text.shape[1])
    if positions.ndim == 2:
        positions = torch.cat([positions, after[None]], dim=1)
    else:
        count = length + torch.arange(text.shape[1])
        rows = torch.stack([count, after, after, after])[:, None]
        positions = torch.cat([positions, rows], dim=2)
    arguments = {**prepared, "input_ids": torch.cat([prepared["input_ids"], text], dim=1)}
    arguments |= {"attention_mask": mask, "position_ids": positions}
    return model(**arguments, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("how", ["own", "copied", "returned", "with pictures again"])
@pytest.mark.parametrize("spec", [IMAGE_PROMPT, TWO_IMAGES])
@torch.no_grad()
def test_a_further_turn_goes_on_from_the_cache_at_its_true_positions(opened, spec, how):
    family, model = opened
    data = inputs_for(family, spec)
    short = {}
    hook = lambda module, args, kwargs: short.update(length=kwargs["inputs_embeds"].shape[1])  # noqa: E731
    with attach(model, ByScore(), budget=3, on_error="raise"):
        cache = DynamicCache()
        if how == "returned":
            result = model.generate(**data, **GREEDY, return_dict_in_generate=True)
            cache, out = result.past_key_values, result.sequences
        else:
            out = model.generate(**data, **GREEDY, past_key_values=cache)
        if how == "copied":
            cache = copy.deepcopy(cache)
        answer = out[:, data["input_ids"].shape[1] :]
        turn = conversation(data, answer)
        if how == "with pictures again":
            turn = {**data, **turn}
            turn.pop("mm_token_type_ids", None)
        handle = model.model.language_model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            result = model.generate(
                **turn, past_key_values=cache, max_new_tokens=1, do_sample=False, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
        finally:
            handle.remove()
    assert short["length"] <= TURN.shape[1] + 1  # only what is new is read
    assert torch.equal(result.sequences[:, : turn["input_ids"].shape[1]], turn["input_ids"])
    expected = reference(model, data, ByScore(), answer, budget=3)
    torch.testing.assert_close(result.logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_saccades_clips_and_further_turns_go_on_too(family):
    model = tiny_model(family)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    large = [("text", 4), ("image", (1, 16, 16)), ("text", 6)]
    for spec, selector, settings in (
        (large, layer, {"mode": "saccade", "budget": 30}),
        (CLIP, ByScore(), {"budget": 5}),
    ):
        data = inputs_for(family, spec)
        outs = []
        for cached in (True, False):
            with attach(model, selector, on_error="raise", **settings):
                cache = DynamicCache() if cached else None
                out = model.generate(**data, **GREEDY, past_key_values=cache)
                answer = out[:, data["input_ids"].shape[1] :]
                turn = conversation(data, answer)
                if cached:
                    second = model.generate(**turn, **GREEDY, past_key_values=cache)
                    third = torch.cat([second, TURN], dim=1)
                    outs.append(model.generate(input_ids=third, **GREEDY, past_key_values=cache))
        expected = reference(model, data, selector, answer, **settings)
        second = second[:, turn["input_ids"].shape[1]]
        allowed = expected.clone()
        allowed[:, GREEDY.get("suppress_tokens", [])] = -torch.inf
        assert torch.equal(allowed.argmax(dim=-1), second)
        assert torch.equal(outs[0][:, : third.shape[1]], third)


@torch.no_grad()
def test_decoding_by_hand_goes_on_whatever_came_between(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    other = inputs_for(family, TWO_IMAGES, seed=9)
    logits = []
    for disturbed in (False, True):
        with attach(model, ByScore(), budget=3, on_error="raise"):
            first = model(**data, use_cache=True)
            if disturbed:
                model(**other)
            token = first.logits[:, -1:].argmax(dim=-1)
            second = model(input_ids=token, past_key_values=first.past_key_values)
            third = model(input_ids=token, past_key_values=second.past_key_values)
            logits.append(torch.stack([second.logits, third.logits]))
    assert torch.equal(*logits)


@torch.no_grad()
def test_a_cache_of_a_shortened_prompt_is_refused_elsewhere(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    with attach(model, ByScore(), budget=3):
        result = model.generate(**data, **GREEDY, return_dict_in_generate=True)
    cache, turn = result.past_key_values, conversation(data, result.sequences[:, data["input_ids"].shape[1] :])
    for used in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match="holds a shortened prompt, which the plain model would misread"):
            model.generate(**turn, **GREEDY, past_key_values=used)
        with pytest.raises(ValueError, match="holds a shortened prompt, which the plain model would misread"):
            model(input_ids=TURN, past_key_values=used)
    with attach(model, ByScore(), budget=3):  # another attachment knows what it holds
        model.generate(**turn, **GREEDY, past_key_values=copy.deepcopy(cache))
        for wrong, message in (
            ({**turn, "input_ids": turn["input_ids"].flip(1)}, "do not go on from the prompt that this cache holds"),
            ({"input_ids": torch.cat([turn["input_ids"], torch.tensor([[IMAGE, CHAT_END]])], dim=1)},
             "a further picture cannot join"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                model.generate(**wrong, **GREEDY, past_key_values=copy.deepcopy(cache))


@torch.no_grad()
def test_keeping_everything_leaves_an_ordinary_cache(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    plain = model.generate(**data, **GREEDY, return_dict_in_generate=True)
    turn = conversation(data, plain.sequences[:, data["input_ids"].shape[1] :])
    expected = model.generate(**turn, **GREEDY, past_key_values=plain.past_key_values)
    settings = [(create_selector("full"), {})]
    if family != "llava":
        settings.append((create_selector("grid"), {"budget": 1.0}))
    for selector, options in settings:
        with attach(model, selector, **options):
            result = model.generate(**data, **GREEDY, return_dict_in_generate=True)
            out = model.generate(**turn, **GREEDY, past_key_values=copy.deepcopy(result.past_key_values))
        assert torch.equal(out, expected)
        model.generate(**turn, **GREEDY, past_key_values=result.past_key_values)  # an ordinary cache


@torch.no_grad()
def test_crops_count_the_full_prompt(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    with attach(model, ByScore(), budget=3):
        cache = DynamicCache()
        model.generate(**data, **GREEDY, past_key_values=cache)
        length = data["input_ids"].shape[1]
        decoded = cache.get_seq_length() - len([*data["input_ids"][0]]) + (data["input_ids"] == IMAGE).sum() - 3
        with pytest.raises(ValueError, match="cannot be cropped into its shortened prompt"):
            cache.crop(-int(decoded) - 1)
        cache.crop(-int(decoded))
        out = model.generate(**data, **GREEDY)
        answer = out[:, length:]
        turn = conversation(data, answer)
        again = model.generate(**turn, **GREEDY, past_key_values=cache)
        fresh = DynamicCache()
        model.generate(**data, **GREEDY, past_key_values=fresh)
        assert torch.equal(again, model.generate(**turn, **GREEDY, past_key_values=fresh))
