"""`EncodingCache`: pictures are recognised by their content, up to a number of bytes, from any thread."""

import copy
import gc
import pickle
import threading
from importlib.resources import files

import numpy as np
import pytest
import torch
from PIL import Image
from simple_selector import GREEDY, ByScore
from tiny_models import FAMILIES, MIXED, SMALL, TWO_IMAGES, inputs_for, tiny_model

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ARRCOCQwen,
    EncodingCache,
    attach,
    create_selector,
    encode,
    prepare,
)
from arr_coc.families.family import Family
from arr_coc.families.qwen2_vl import Qwen2VL
from arr_coc.runtime import digest
from arr_coc.runtime.digest import PictureDigest

EXAMPLES = files("arr_coc") / "assets" / "examples"


@pytest.fixture(scope="module", name="model")
def open_model():
    return tiny_model("qwen3_vl")


@pytest.fixture(name="encoded")
def count_encoded(monkeypatch):
    """The pixels of each call that encoded whole pictures."""
    plain, pixels = Family.encode, []

    def counted(self, inputs, kind, layers=()):
        pixels.append(inputs[self.pixel_names[kind]])
        return plain(self, inputs, kind, layers)

    monkeypatch.setattr(Family, "encode", counted)
    return pixels


def ask(model, data, cache, **options):
    return prepare(model, data, ByScore(), budget=0.3, on_error="raise", encoded=cache, **options)


def features(prepared):
    return torch.cat(list(prepared["mm_encoder_outputs"]["image"].pooler_output))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_picture_is_encoded_once_and_another_one_again(family, encoded):
    model, cache = tiny_model(family), EncodingCache()
    first, other = (inputs_for(family, TWO_IMAGES, seed=seed) for seed in (0, 1))
    question = {**first, "input_ids": first["input_ids"].clone()}
    question["input_ids"][:, -2:] += 1
    # the same content in other tensors
    question["pixel_values"] = first["pixel_values"].clone()
    asked = [first, question, other, first]
    plain = [model.generate(**prepare(model, data, ByScore(), budget=0.3), **GREEDY) for data in asked]
    encoded.clear()
    cached = [model.generate(**ask(model, data, cache), **GREEDY) for data in asked]
    assert len(encoded) == 2
    assert (cache.hits, cache.misses, len(cache)) == (2, 2, 2)
    for one, another in zip(plain, cached, strict=True):
        assert torch.equal(one, another)


@torch.no_grad()
def test_pictures_of_one_size_are_never_mixed(model, monkeypatch):
    pictures = [inputs_for("qwen3_vl", SMALL, seed=seed) for seed in range(4)]
    right = [features(ask(model, data, None)) for data in pictures]

    def through(cache):
        return [
            torch.equal(features(ask(model, data, cache)), known) for data, known in zip(pictures, right, strict=True)
        ]

    cache = EncodingCache()
    assert all(through(cache))
    assert all(through(cache))
    monkeypatch.setattr(PictureDigest, "__call__", lambda self, picture: picture.shape)  # the control
    assert through(EncodingCache()) == [True, False, False, False]


@torch.no_grad()
def test_pixels_changed_in_place_are_another_picture(model, encoded):
    cache, data = EncodingCache(), inputs_for("qwen3_vl", SMALL)
    before = features(ask(model, data, cache))
    data["pixel_values"][0, 0] += 0.5
    after = features(ask(model, data, cache))
    assert len(encoded) == 2
    assert torch.equal(after, features(ask(model, data, None)))
    assert not torch.equal(before, after)


@torch.no_grad()
def test_order_kinds_and_grids_count_too(model, encoded):
    cache = EncodingCache()
    data = inputs_for("qwen3_vl", MIXED)
    ask(model, data, cache)
    assert len(encoded) == 2  # the picture and the clip
    ask(model, data, cache)
    assert len(encoded) == 2
    tall, wide = (
        inputs_for("qwen3_vl", [("text", 2), ("image", grid), ("text", 3)]) for grid in ((1, 8, 4), (1, 4, 8))
    )
    wide["pixel_values"] = tall["pixel_values"]
    for inputs in (tall, wide):
        assert torch.equal(features(ask(model, inputs, cache)), features(ask(model, inputs, None)))


@torch.no_grad()
def test_the_least_recently_used_are_forgotten_first(model, encoded):
    pictures = [inputs_for("qwen3_vl", SMALL, seed=seed) for seed in range(3)]
    one = EncodingCache()
    ask(model, pictures[0], one)
    cache = EncodingCache(limit_bytes=2 * one.nbytes)

    def encodes(place):
        encoded.clear()
        ask(model, pictures[place], cache)
        assert cache.nbytes <= cache.limit_bytes
        return bool(encoded)

    assert [encodes(place) for place in (0, 1, 0)] == [True, True, False]
    assert encodes(2)  # 1 goes: 0 was used after it
    assert not encodes(0)
    assert encodes(1)  # now 2 goes
    assert encodes(2)
    assert len(cache) == 2
    small = EncodingCache(limit_bytes=one.nbytes - 1)  # too small for a single picture
    ask(model, pictures[0], small)
    assert (len(small), small.nbytes) == (0, 0)


@torch.no_grad()
def test_what_is_in_use_is_not_forgotten(model):
    cache, data = EncodingCache(limit_bytes=1), inputs_for("qwen3_vl", SMALL)
    during = []

    class Asking(ByScore):
        def select(self, queries, budget=None):
            ask(model, inputs_for("qwen3_vl", SMALL, seed=1), cache)  # another call, in the middle of this one
            during.append(len(cache))
            return super().select(queries, budget)

    prepare(model, data, Asking(), encoded=cache)
    assert (during, len(cache)) == ([1], 0)


def test_all_that_is_kept_is_counted(model):
    data = inputs_for("qwen3_vl", TWO_IMAGES)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    plain = encode(model, data)
    counted = [plain.nbytes]
    counted.append(encode(model, data, create_selector("visionzip")).nbytes)  # and a layer of the encoder
    for selector, options in ((create_selector("visionzip"), {}), (layer, {}), (layer, {"mode": "saccade"})):
        seen = encode(model, data, selector)
        prepare(model, data, selector, encoded=seen, on_error="raise", budget=9, **options)
        counted.append(seen.nbytes)
    features_alone, layer_too, layer_read, pictures_too, saccades_too = counted
    assert features_alone < layer_too < layer_read
    assert features_alone < pictures_too < saccades_too
    widths = model.config.vision_config.out_hidden_size * (1 + len(model.config.vision_config.deepstack_visual_indexes))
    tokens = (8 * 12 + 12 * 8) // 4
    assert features_alone == tokens * widths * 4


def test_nothing_keeps_gradients(model):
    cache = EncodingCache()
    assert not features(ask(model, inputs_for("qwen3_vl", SMALL), cache)).requires_grad
    assert features(ask(model, inputs_for("qwen3_vl", SMALL), None)).requires_grad  # the control


@torch.no_grad()
def test_saccades_are_found_by_the_original_picture(model, monkeypatch):
    plain, calls = Qwen2VL.encode_cells, []
    monkeypatch.setattr(
        Qwen2VL, "encode_cells", lambda self, *args, **kwargs: calls.append(1) or plain(self, *args, **kwargs)
    )
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    data, cache = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 4, 4)), ("text", 6)]), EncodingCache()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 96, 128, 3), dtype=np.uint8)

    def look(picture, encoded):
        calls.clear()
        prepared = prepare(
            model, data, layer, mode="saccade", budget=40, images=[picture], encoded=encoded, on_error="raise"
        )
        return features(prepared), len(calls)

    for form in (Image.fromarray, lambda array: torch.from_numpy(array).permute(2, 0, 1)):
        for array in pixels:
            first, ran = look(form(array), cache)
            assert ran
            again, ran = look(form(array.copy()), cache)
            assert not ran
            assert torch.equal(first, again)
            torch.testing.assert_close(first, look(form(array), None)[0])
    assert (cache.hits, cache.misses) == (4, 4)


@torch.no_grad()
def test_threads_encode_a_picture_once_and_get_their_own(model, encoded):
    pictures = [inputs_for("qwen3_vl", SMALL, seed=seed) for seed in range(3)]
    right = [features(ask(model, data, None)) for data in pictures]
    size = EncodingCache()
    ask(model, pictures[0], size)
    for limit, most in ((2**30, len(pictures)), (size.nbytes, None)):  # roomy, and always too small
        encoded.clear()
        cache, start, wrong = EncodingCache(limit), threading.Barrier(6), []

        def work(number, cache=cache, start=start, wrong=wrong):
            start.wait()
            with torch.no_grad():
                for turn in range(8):
                    place = (number + turn) % 3
                    if not torch.equal(features(ask(model, pictures[place], cache)), right[place]):
                        wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert cache.hits + cache.misses == 48
        assert cache.nbytes <= limit
        assert most is None or len(encoded) == most


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_incomplete(model, encoded):
    class Failing(ByScore):
        def select(self, queries, budget=None):
            raise RuntimeError("no idea")

    cache, data = EncodingCache(), inputs_for("qwen3_vl", SMALL)
    with pytest.raises(RuntimeError, match="no idea"):
        prepare(model, data, Failing(), encoded=cache, on_error="raise")
    assert len(cache) == 0
    ask(model, data, cache)
    assert (len(cache), len(encoded)) == (1, 2)
    with pytest.raises(ValueError, match="`image_grid_thw` is missing"):
        ask(model, {name: value for name, value in data.items() if name != "image_grid_thw"}, cache)


@torch.no_grad()
def test_models_have_entries_of_their_own_that_go_with_them(model):
    cache, data = EncodingCache(), inputs_for("qwen3_vl", SMALL)
    other = tiny_model("qwen3_vl", seed=1)
    known = features(ask(model, data, cache))
    assert not torch.equal(features(ask(other, data, cache)), known)
    with torch.inference_mode():
        ask(model, data, cache)
    assert (len(cache), cache.misses) == (3, 3)
    del other
    gc.collect()
    ask(model, data, cache)
    assert len(cache) == 2
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_an_encoder_that_learns_is_refused():
    model, data = tiny_model("llava"), inputs_for("llava", SMALL)
    model.train()
    with pytest.raises(ValueError, match="an encoder that learns"):
        ask(model, data, EncodingCache())
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    ask(model, data, EncodingCache())


TARGETS = {"qwen3_vl": r".*visual.*qkv", "llava": r".*vision_tower.*v_proj"}


@pytest.mark.parametrize("family", TARGETS)
@torch.no_grad()
def test_adapters_have_entries_of_their_own(family, encoded):
    peft = pytest.importorskip("peft", reason="comes with the dev extra")
    model, data, cache = tiny_model(family), inputs_for(family, SMALL), EncodingCache()
    configs = [
        peft.LoraConfig(r=4, target_modules=TARGETS[family], init_lora_weights=False, lora_alpha=scale)
        for scale in (16, 64)
    ]
    model = peft.get_peft_model(model, configs[0], "one")
    model.add_adapter("two", configs[1])
    model.eval()
    for adapter in ("one", "two"):
        model.set_adapter(adapter)
        right = features(ask(model, data, None))
        assert torch.equal(features(ask(model, data, cache)), right)
    with model.disable_adapter():
        assert torch.equal(features(ask(model, data, cache)), features(ask(model, data, None)))
    assert (cache.hits, cache.misses, len(cache)) == (0, 3, 3)
    model.set_adapter("one")  # what it made before is still there
    encoded.clear()
    found = features(ask(model, data, cache))
    assert (cache.hits, len(encoded)) == (1, 0)
    assert not torch.allclose(found, right, atol=1e-3)  # the control: adapters matter


@torch.no_grad()
def test_exchanged_weights_are_noticed_and_hooks_and_training_keep_nothing(caplog):
    model, data, cache = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", SMALL), EncodingCache()
    before = features(ask(model, data, cache))
    merger = model.model.visual.merger.linear_fc2
    merger.weight = torch.nn.Parameter(2 * merger.weight)
    after = features(ask(model, data, cache))
    assert torch.equal(after, features(ask(model, data, None)))
    assert not torch.allclose(after, before)
    assert (cache.hits, len(cache)) == (0, 2)
    hook = merger.register_forward_hook(lambda module, args, output: -output)
    for _ in range(2):
        assert torch.equal(features(ask(model, data, cache)), features(ask(model, data, None)))
    assert len(caplog.records) == 1
    assert "keeps nothing of this encoder, as its results may vary: it has hooks" in caplog.text
    hook.remove()
    assert torch.equal(features(ask(model, data, cache)), after)
    assert cache.hits == 1
    model.model.visual.train().requires_grad_(False)
    ask(model, data, cache)
    assert (cache.hits, len(cache)) == (1, 2)


def test_settings_and_copies():
    for wrong in (0, -1, 1.5, True, "1GB"):
        with pytest.raises(ValueError, match="`limit_bytes` must be a whole number of at least 1"):
            EncodingCache(wrong)
    cache = EncodingCache(1000)
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert (again.limit_bytes, len(again)) == (1000, 0)


@pytest.mark.slow
@torch.no_grad()
def test_an_attached_model_and_answers_use_it(encoded):
    vlm, cache = ARRCOCQwen.from_pretrained(), EncodingCache()
    plain = vlm.answer(EXAMPLES / "page.png", "what is the total?").text
    encoded.clear()
    for _ in range(2):
        assert vlm.answer(EXAMPLES / "page.png", "what is the total?", encoded=cache).text == plain
    assert len(encoded) == 1
    assert vlm.answer(EXAMPLES / "page.png", "what is the total?", encoded=cache, mode="full").text
    assert len(encoded) == 1
    data = inputs_for("qwen3_vl", SMALL)
    model = tiny_model("qwen3_vl")
    with attach(model, ByScore(), budget=3, encoded=cache):
        one, two = (model.generate(**data, **GREEDY) for _ in range(2))
    assert torch.equal(one, two)
    assert len(encoded) == 2


def test_digests_on_a_device_tell_any_change(monkeypatch):
    """The sums that are taken on a device, computed on the host; rows are short, so that there are several levels."""
    monkeypatch.setattr(digest, "WIDTH", 16)
    monkeypatch.setattr(digest, "ROWS", 3)
    reduce, chance = PictureDigest().reduce, torch.Generator().manual_seed(0)
    for count in (1, 4, 31, 32, 33, 100, 515):
        values = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=chance)
        known = reduce(values)
        assert known.shape == (4,)
        assert known.abs().max() < 2**32
        assert torch.equal(reduce(torch.cat([values[:1], values])[1:]), known)  # also where words are not aligned
        seen = {tuple(known.tolist())}
        for place in range(count):
            changed = values.clone()
            changed[place] ^= 1
            seen.add(tuple(reduce(changed).tolist()))
        assert len(seen) == count + 1
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert not torch.equal(reduce(zeros), reduce(zeros + 1))
    assert not torch.equal(PictureDigest().reduce(values), known)  # the weights are secret
