"""FastV against the model itself with the dropped columns hidden, over every family, each with a control that fails."""

import copy
import threading

import pytest
import tiny_models
import torch
from simple_selector import GREEDY, TOLERANCE, state_of
from tiny_directory import write_checkpoint
from tiny_models import (
    CLIP,
    FAMILIES,
    IMAGE,
    IMAGE_PROMPT,
    MIXED,
    QWEN,
    SMALL,
    TEXT,
    TWO_IMAGES,
    inputs_for,
    tiny_model,
)
from transformers import DynamicCache, Qwen3VLForConditionalGeneration

from arr_coc import ARRCOCQwen, LanguageSelector, attach, create_selector, prepare
from arr_coc.attending import resolve_budget
from arr_coc.families.family import open_family
from arr_coc.prompting.cache import calling
from arr_coc.prompting.inside_model import InsideModel
from arr_coc.prompting.layout import read_prompt

pytestmark = pytest.mark.slow  # quick ones of each folder run in the fast suite

WORDS = GREEDY["suppress_tokens"][-1] + 1
# as long as IMAGE_PROMPT, with a smaller picture: no padding, and other numbers of tokens to keep
AS_LONG = [("text", 12), ("image", (1, 8, 8)), ("text", 6)]


@pytest.fixture(scope="module", params=FAMILIES, name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


def deep_model(attention="sdpa"):
    """Qwen3-VL with three levels of DeepStack and four layers, so that a level comes after the second layer."""
    torch.manual_seed(0)
    config = tiny_models._qwen_config("qwen3_vl")
    values = config.to_dict()
    values["text_config"] |= {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    values["vision_config"]["deepstack_visual_indexes"] = [0, 1, 2]
    config = type(config)(**values)
    config._attn_implementation = attention
    return Qwen3VLForConditionalGeneration(config).eval()


def twin(model):
    """The same weights, with the attention written out."""
    made = type(model)(copy.deepcopy(model.config)).eval()
    made.set_attn_implementation("eager")
    made.load_state_dict(model.state_dict())
    made.generation_config = model.generation_config
    return made


def kept_columns(model, data, layer, budget):
    """Boolean `[B, L]`: text, and the visual tokens that the model's own attention ranks first."""
    prompt = read_prompt(open_family(model), data)
    paid = model(**data, output_attentions=True).attentions[layer - 1].mean(dim=1)[:, -1]  # [B, L]
    kept = data["attention_mask"].bool()
    for span in prompt.spans:
        columns = torch.from_numpy(span.columns)
        best = paid[span.row, columns].topk(resolve_budget(budget, len(columns))).indices
        kept[span.row, columns] = False
        kept[span.row, columns[best]] = True
    return kept


def hidden_columns_logits(model, data, layer, kept):
    """Logits `[B, L, V]` where the later layers cannot see the dropped columns, which stay in their places."""

    def hide(module, args, kwargs):
        mask = kwargs["attention_mask"]
        hidden = torch.zeros_like(kept, dtype=mask.dtype).masked_fill(~kept, torch.finfo(mask.dtype).min)
        return args, kwargs | {"attention_mask": (mask + hidden[:, None, None]).clamp(min=torch.finfo(mask.dtype).min)}

    handles = [
        one.register_forward_pre_hook(hide, with_kwargs=True) for one in model.model.language_model.layers[layer:]
    ]
    try:
        return model(**data, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()


def hidden_columns_answer(model, data, layer, kept, count=6):
    """Greedy tokens `[B, count]`, each from a full pass without a cache."""
    start, data = data["input_ids"].shape[1], dict(data)
    for _ in range(count):
        logits = hidden_columns_logits(model, data, layer, kept)[:, -1]
        logits[:, :WORDS] = -torch.inf
        new = {"input_ids": logits.argmax(dim=-1, keepdim=True)}
        new |= {"attention_mask": torch.ones_like(new["input_ids"])}
        new |= {"mm_token_type_ids": torch.zeros_like(new["input_ids"])} if "mm_token_type_ids" in data else {}
        data |= {name: torch.cat([data[name], value], dim=1) for name, value in new.items()}
        kept = torch.cat([kept, torch.ones_like(kept[:, :1])], dim=1)
    return data["input_ids"][:, start:]


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("specs", [[IMAGE_PROMPT], [TWO_IMAGES], [IMAGE_PROMPT, TWO_IMAGES, SMALL, TEXT]])
@torch.no_grad()
def test_a_budget_of_all_is_the_plain_model_to_the_bit(opened, specs, layer):
    family, model = opened
    data = inputs_for(family, *specs)
    sampled = {**GREEDY, "do_sample": True, "top_k": 20}
    plain, answer = model(**data).logits, model.generate(**data, **GREEDY)
    torch.manual_seed(3)
    drawn = model.generate(**data, **sampled)
    with attach(model, create_selector("fastv", layer=layer), budget=1.0, on_error="raise"):
        valid = data["attention_mask"].bool()
        assert torch.equal(model(**data).logits[valid], plain[valid])
        assert torch.equal(model.generate(**data, **GREEDY), answer)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**data, **sampled), drawn)
    with attach(model, create_selector("fastv", layer=layer), budget=0.25, on_error="raise"):
        assert (model(**data).logits[0, -1] - plain[0, -1]).abs().max() > 0.1


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("specs", [[IMAGE_PROMPT], [IMAGE_PROMPT, TWO_IMAGES, SMALL, TEXT], [IMAGE_PROMPT, AS_LONG]])
@torch.no_grad()
def test_dropping_inside_is_hiding_from_the_later_layers(opened, specs, layer):
    family, model = opened
    check_against_hiding(model, inputs_for(family, *specs), layer)


def check_against_hiding(model, data, layer, budget=0.25):
    reference = twin(model)
    kept = kept_columns(reference, data, layer, budget)
    expected = hidden_columns_logits(reference, data, layer, kept)
    with attach(model, create_selector("fastv", layer=layer), budget=budget, on_error="raise"):
        logits = model(**data).logits
        answer = model.generate(**data, **GREEDY)
        torch.testing.assert_close(model(**data, logits_to_keep=1).logits, logits[:, -1:], **TOLERANCE)
    assert logits.shape[1] == kept.sum(dim=1).max()
    for row, own in enumerate(kept):
        torch.testing.assert_close(logits[row, -own.sum() :], expected[row, own], **TOLERANCE)
    assert torch.equal(answer[:, data["input_ids"].shape[1] :], hidden_columns_answer(reference, data, layer, kept))
    # the control: a single token more shows
    row, column = (data["input_ids"] == IMAGE).logical_and(~kept).nonzero()[0]
    kept[row, column] = True
    other = hidden_columns_logits(reference, data, layer, kept)
    assert (other[row, -1] - expected[row, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("spec", [CLIP, MIXED])
@torch.no_grad()
def test_clips_too(family, spec):
    model = tiny_model(family)
    data = inputs_for(family, spec)
    reference = twin(model)
    kept = kept_columns(reference, data, 2, 0.25)
    expected = hidden_columns_logits(reference, data, 2, kept)[0, kept[0]]
    with attach(model, create_selector("fastv"), on_error="raise"):  # a quarter by default
        torch.testing.assert_close(model(**data).logits[0], expected, **TOLERANCE)


@torch.no_grad()
def test_levels_of_deepstack_reach_the_tokens_that_stay(monkeypatch):
    model = deep_model()
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, TWO_IMAGES)
    model.generation_config = tiny_model("qwen3_vl").generation_config
    check_against_hiding(model, data, 2)
    with attach(model, create_selector("fastv"), on_error="raise"):
        right = model(**data).logits[:, -1]
        monkeypatch.setattr(InsideModel, "_add_level", lambda *args: None)
        assert (model(**data).logits[:, -1] - right).abs().max() > 0.01


@torch.no_grad()
def test_renumbered_positions_would_show(opened, monkeypatch):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    replace = InsideModel._replace

    def renumbered(self, module, args, kwargs):
        args, changed = replace(self, module, args, kwargs)
        places = tuple(value[:, : args[0].shape[1]] for value in kwargs["position_embeddings"])
        return args, changed | {"position_embeddings": places}

    with attach(model, create_selector("fastv"), on_error="raise"):
        right = model(**data).logits[0, -1]
        monkeypatch.setattr(InsideModel, "_replace", renumbered)
        assert (model(**data).logits[0, -1] - right).abs().max() > 0.01


@torch.no_grad()
def test_the_cache_is_shorter_from_the_layer_on(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    full, visual = data["input_ids"].shape[1], int((data["input_ids"] == IMAGE).sum())
    for layer in (1, 2):
        with attach(model, create_selector("fastv", layer=layer), budget=5):
            cache = model(**data).past_key_values
            lengths = [cache.get_seq_length(place) for place in range(3)]
            assert lengths == [full] * layer + [full - visual + 5] * (3 - layer)
            out = model.generate(**data, **GREEDY, return_dict_in_generate=True)
            # the last token was not read again
            assert [out.past_key_values.get_seq_length(place) for place in range(3)] == [n + 5 for n in lengths]


@torch.no_grad()
def test_a_batch_is_its_rows_one_by_one(opened, monkeypatch):
    family, model = opened
    for specs in ([IMAGE_PROMPT, TWO_IMAGES, SMALL, TEXT], [IMAGE_PROMPT, AS_LONG]):
        together = inputs_for(family, *specs)
        length = together["input_ids"].shape[1]
        with attach(model, create_selector("fastv"), budget=5, on_error="raise"):
            logits, answers = model(**together).logits, model.generate(**together, **GREEDY)[:, length:]
            for row, spec in enumerate(specs):
                alone = inputs_for(family, spec, seed=row)
                torch.testing.assert_close(logits[row, -1], model(**alone).logits[0, -1], **TOLERANCE)
                answer = model.generate(**alone, **GREEDY)[0, alone["input_ids"].shape[1] :]
                assert torch.equal(answers[row], answer)
    # the control: without masks of their own the later layers see padding, or do not fit at all
    replace = InsideModel._replace

    def unmasked(self, module, args, kwargs):
        args, changed = replace(self, module, args, kwargs)
        return args, changed | {"attention_mask": kwargs["attention_mask"]}

    monkeypatch.setattr(InsideModel, "_replace", unmasked)
    with attach(model, create_selector("fastv"), budget=5, on_error="raise"), pytest.raises(RuntimeError):
        model(**inputs_for(family, IMAGE_PROMPT, TWO_IMAGES))


@torch.no_grad()
def test_right_padding_gives_the_same_last_token():
    model = tiny_model("qwen2_vl")
    data = inputs_for("qwen2_vl", TWO_IMAGES, SMALL)
    turned = {name: value.clone() for name, value in data.items()}
    padding = int((data["attention_mask"][1] == 0).sum())
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        turned[name][1] = data[name][1].roll(-padding)
    with attach(model, create_selector("fastv"), budget=3, on_error="raise"):
        logits = model(**data).logits[:, -1]
        torch.testing.assert_close(model(**turned).logits[:, -1], logits, **TOLERANCE)


@torch.no_grad()
def test_decoding_by_hand_and_by_beams(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, SMALL)
    length = data["input_ids"].shape[1]
    with attach(model, create_selector("fastv"), budget=3, on_error="raise"):
        expected = model.generate(**data, **GREEDY)[:, length:]
        out, mask, answer = model(**data, past_key_values=DynamicCache()), data["attention_mask"], []
        for _ in range(6):
            logits = out.logits[:, -1].clone()
            logits[:, :WORDS] = -torch.inf
            answer.append(logits.argmax(dim=-1))
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            place = torch.full((2, 1), mask.shape[1] - 1)  # LLaVA's forward counts padding too
            if family != "llava":
                place = (mask.sum(dim=1, keepdim=True) - 1 + model.model.rope_deltas).expand(3, -1, -1)
            out = model(
                input_ids=answer[-1][:, None],
                attention_mask=mask,
                past_key_values=out.past_key_values,
                position_ids=place,
            )
        assert torch.equal(torch.stack(answer, dim=1), expected)
        # beams of a batch are those of its rows
        beams = model.generate(**data, **GREEDY, num_beams=3)[:, length:]
        several = model.generate(**data, **GREEDY | {"do_sample": True, "top_k": 1}, num_return_sequences=2)
        assert torch.equal(several[:, length:], expected.repeat_interleave(2, dim=0))
        for row, spec in enumerate((IMAGE_PROMPT, SMALL)):
            alone = inputs_for(family, spec, seed=row)
            own = model.generate(**alone, **GREEDY, num_beams=3)[0, alone["input_ids"].shape[1] :]
            assert torch.equal(beams[row], own)


@torch.no_grad()
def test_the_mode_of_attention_changes_nothing():
    plain, eager = tiny_model("qwen3_vl"), tiny_model("qwen3_vl", attention="eager")
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, TWO_IMAGES)
    with attach(plain, create_selector("fastv")), attach(eager, create_selector("fastv")):
        torch.testing.assert_close(plain(**data).logits[:, -1], eager(**data).logits[:, -1], **TOLERANCE)
        assert torch.equal(plain.generate(**data, **GREEDY), eager.generate(**data, **GREEDY))


@torch.no_grad()
def test_nothing_stays_behind(opened):
    family, model = opened
    data, text = inputs_for(family, IMAGE_PROMPT), inputs_for(family, TEXT)
    plain, words = model(**data).logits, model(**text).logits
    before = state_of(model)
    with attach(model, create_selector("fastv"), budget=3) as run:
        assert model(**data).logits.shape != plain.shape
        assert run.output == [None]
        assert torch.equal(model(**text).logits, words)
        model.generate(**data, **GREEDY)
    assert state_of(model) == before
    assert torch.equal(model(**data).logits, plain)


class Failing(LanguageSelector):
    layer = 1

    def select(self, attention, budget=None):
        raise RuntimeError("no idea")


@torch.no_grad()
def test_a_failing_selection_keeps_all_or_raises_and_leaves_no_hooks(opened, caplog):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    plain, before = model(**data).logits, state_of(model)
    with attach(model, Failing()):
        assert torch.equal(model(**data).logits, plain)
    assert caplog.messages == ["selection failed, all visual tokens are kept: no idea"]
    with pytest.raises(RuntimeError, match="no idea"), attach(model, Failing(), on_error="raise"):
        model.generate(**data, **GREEDY)
    assert state_of(model) == before
    assert torch.equal(model(**data).logits, plain)


@torch.no_grad()
def test_threads_do_not_mix():
    models = {family: tiny_model(family) for family in ("qwen2_vl", "qwen3_vl")}
    data = {family: inputs_for(family, IMAGE_PROMPT) for family in models}
    expected, results, errors = {}, {}, []
    for family, model in models.items():
        with attach(model, create_selector("fastv"), budget=4):
            expected[family] = model(**data[family]).logits

    def work(family):
        try:
            with torch.no_grad(), attach(models[family], create_selector("fastv"), budget=4):
                for _ in range(10):
                    results[family] = models[family](**data[family]).logits
        except Exception as error:
            errors.append(error)

    def run(*threads):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run(*(threading.Thread(target=work, args=(family,)) for family in models))
    assert errors == []
    for family in models:
        assert torch.equal(results[family], expected[family])
    # a thread that runs the plain model meanwhile
    model, own = models["qwen2_vl"], data["qwen2_vl"]
    plain = model(**own).logits

    def look():
        with torch.no_grad():
            results["plain"] = model(**own).logits

    selector, family = create_selector("fastv"), open_family(model)
    choose = lambda paid: [chosen.indices.numpy() for chosen in selector.select(paid, 4)]  # noqa: E731
    with calling(model), InsideModel(family, selector, read_prompt(family, own), choose):
        run(threading.Thread(target=look))
        assert torch.equal(model(**own).logits, expected["qwen2_vl"])
    assert torch.equal(results["plain"], plain)


@torch.no_grad()
def test_what_cannot_work_is_said_in_one_line():
    model = tiny_model("qwen3_vl")
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    fastv, before = create_selector("fastv"), state_of(model)
    with pytest.raises(ValueError, match=r"'fastv' acts inside the language model, .*; use `attach`"):
        prepare(model, data, fastv)
    for mode in ("weight", "saccade"):
        with pytest.raises(ValueError, match=f"use mode 'prune', not '{mode}'"):
            attach(model, fastv, mode=mode)
    with pytest.raises(ValueError, match=r"`layer` must be in 1..2 for this model, got 3"):
        attach(model, create_selector("fastv", layer=3))
    with pytest.raises(ValueError, match="`layer` must be a whole number of at least 1, got 0"):
        create_selector("fastv", layer=0)
    with pytest.raises(ValueError, match="needs full attention in every layer, this model has linear_attention"):
        attach(tiny_model("qwen3_5"), fastv)
    with pytest.raises(ValueError, match="must pick tokens of an encoded picture, got 'fastv'"):
        create_selector("half-and-half", selector="fastv")
    with attach(model, fastv):
        with pytest.raises(ValueError, match="drop `labels`"):
            model(**data, labels=data["input_ids"])
        for wrong, says in (
            ({"use_cache": False}, "drop use_cache=False"),
            ({"prompt_lookup_num_tokens": 2}, "decodes one token at a time"),
            ({"cache_implementation": "static"}, "use a dynamic cache"),
        ):
            with pytest.raises(ValueError, match=says):
                model.generate(**data, **GREEDY, **wrong)
        first = model.generate(**data, **GREEDY, return_dict_in_generate=True)
        with pytest.raises(ValueError, match="start the next turn without `past_key_values`"):
            model.generate(input_ids=first.sequences, past_key_values=first.past_key_values, **GREEDY)
        with pytest.raises(ValueError, match="already holds tokens, which a shortened prompt cannot follow"):
            model(**data, past_key_values=first.past_key_values)
        with pytest.raises(ValueError, match="its last token does the choosing"):
            model(**ending_in_a_picture(data))
    assert state_of(model)[:2] == before[:2]  # transformers leaves a static cache on the model


def ending_in_a_picture(data):
    """The prompt with what follows its picture put in front."""
    after = data["input_ids"].shape[1] - 1 - int((data["input_ids"][0] == IMAGE).nonzero().max())
    columns = ("input_ids", "mm_token_type_ids")
    return data | {name: data[name].roll(after, dims=1) for name in columns}


def test_an_answer_says_what_went_on(tmp_path):
    write_checkpoint(tmp_path)
    vlm = ARRCOCQwen.from_pretrained(tmp_path, "fastv")
    picture, short = torch.zeros(64, 96, 3, dtype=torch.uint8).numpy(), {"max_new_tokens": 4, "min_new_tokens": 4}
    picture[16:40, 20:60] = 200
    answer, full = (
        vlm.answer(picture, "what color is it?", mode=mode, budget=0.25, **short) for mode in (None, "full")
    )
    (grid, cells), total = answer.kept[0], answer.tokens.full
    assert (answer.tokens.used, len(cells), full.tokens.used) == (round(0.25 * total), round(0.25 * total), total)
    assert grid == full.kept[0][0]
    assert answer.strategy == "fastv"
    assert answer.reason == f"{len(cells)} of {total} tokens go on after layer 2 of the language model"
    assert vlm.answer(picture, "what color is it?", budget=1.0, **short).text == full.text
    with pytest.raises(ValueError, match="use mode 'prune', not 'saccade'"):
        vlm.answer(picture, "what color is it?", mode="saccade")
    message = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]}
    inputs = vlm.processor.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    before = state_of(vlm.model)
    out, logits = vlm.generate(**inputs, **short, do_sample=False), vlm(**inputs).logits
    assert vlm.output == [None]
    assert state_of(vlm.model) == before
    with attach(vlm.model, create_selector("fastv")):
        assert torch.equal(vlm.model.generate(**inputs, **short, do_sample=False), out)
        assert torch.equal(vlm.model(**inputs).logits, logits)
    assert logits.shape[1] < inputs["input_ids"].shape[1]
