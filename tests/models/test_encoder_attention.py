"""What selectors read from the encoder's layers, against an attention that writes down its own weights."""

import gc
import threading

import pytest
import torch
from tiny_models import CLIP, FAMILIES, IMAGE_PROMPT, QWEN, TWO_IMAGES, inputs_for, tiny_model
from transformers import AttentionInterface

from arr_coc import Selection, TokenSelector, prepare
from arr_coc.families import encoder_attention as reading
from arr_coc.families.encoder_attention import find_layer

RECORDED = []
KEPT = {}


def recording_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    weights = (query @ key.mT * scaling).softmax(dim=-1)  # [B, heads, n, n]
    RECORDED.append((module, weights.detach(), key.detach()))
    return (weights @ value).transpose(1, 2), weights


class Reading(TokenSelector):
    def __init__(self, *layers):
        self.encoder_layers = layers
        self.seen = []

    def select(self, queries, budget=None):
        for query in queries:
            self.seen.append([(query.received_attention(layer), query.keys(layer)) for layer in self.encoder_layers])
        return [Selection(indices=torch.arange(2)) for _ in queries]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [IMAGE_PROMPT, TWO_IMAGES], ids=["one", "two"])
@torch.no_grad()
def test_received_attention_is_what_the_encoder_computes(family, spec, monkeypatch):
    # one layer with windows, where there are windows, and one without
    layers = (1, -1) if family == "llava" else (0, 1, -1)
    model = tiny_model(family)
    data = inputs_for(family, spec)
    selector = Reading(*layers)
    monkeypatch.setattr(reading, "MOST_ELEMENTS", 200)  # several chunks
    prepare(model, data, selector, on_error="raise")

    AttentionInterface.register("recording", recording_attention)
    spying = tiny_model(family, "recording")
    RECORDED.clear()
    tower = spying.model.vision_tower if family == "llava" else spying.model.visual
    modules = (
        [layer.self_attn for layer in tower.encoder.layers] if family == "llava" else [b.attn for b in tower.blocks]
    )
    for module in modules:
        module.register_forward_pre_hook(
            lambda module, args, kwargs: KEPT.update({module: args[0] if args else kwargs["hidden_states"]}),
            with_kwargs=True,
        )
    prepare(spying, data, Reading(), on_error="raise")
    grids = [4 * 4] * 2 if family == "llava" else (data["image_grid_thw"].prod(dim=1) // 4).tolist()
    for place, layer in enumerate(layers):
        weights = [found for module, found, _ in RECORDED if module is modules[layer]]
        if family == "llava":  # all pictures at once; the class token is left out, as it is no cell
            patch = weights[0][:, :, 1:, 1:]
            received = (patch / patch.sum(dim=-1, keepdim=True)).mean(dim=(1, 2)).flatten()
        else:
            received = torch.cat([found.mean(dim=(0, 1, 2)) for found in weights])
            received = received.view(-1, 4).mean(dim=1)
            if family == "qwen2_5_vl":
                received = received[window_order(spying, data).argsort()]
        wanted_keys = content_keys(spying, modules[layer], KEPT[modules[layer]])
        if family == "qwen2_5_vl":
            wanted_keys = wanted_keys[window_order(spying, data).argsort()]
        offset = 0
        for picture, seen in enumerate(selector.seen):
            count = grids[picture]
            torch.testing.assert_close(seen[place][0], received[offset : offset + count], atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(seen[place][1], wanted_keys[offset : offset + count], atol=1e-5, rtol=1e-4)
            offset += count
    model_hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    assert model_hooks == 0


def content_keys(model, module, hidden):
    """Keys of each cell before they are turned, in the order of the encoder."""
    if hasattr(module, "k_proj"):
        return module.k_proj(hidden[:, 1:]).flatten(0, 1)
    width = hidden.shape[-1]
    return module.qkv(hidden)[:, width : 2 * width].view(-1, 4, width).mean(dim=1)


def window_order(model, data):
    """Where the encoder puts each cell, counted window by window over the picture."""
    vision = model.config.vision_config
    side = vision.window_size // vision.patch_size // vision.spatial_merge_size
    order, offset = [], 0
    for _, height, width in data["image_grid_thw"].tolist():
        rows, columns = height // 2, width // 2
        for top in range(0, rows, side):
            for left in range(0, columns, side):
                order += [
                    offset + row * columns + column
                    for row in range(top, min(top + side, rows))
                    for column in range(left, min(left + side, columns))
                ]
        offset += rows * columns
    return torch.tensor(order)


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_keys_stand_where_their_pictures_are_and_frames_attend_to_themselves(family):
    model = tiny_model(family)
    selector = Reading(1)
    data = inputs_for(family, CLIP)
    prepare(model, data, selector, on_error="raise")
    [(received, keys)] = selector.seen[0]
    assert received.shape == (48,)
    # every frame hands out all of its attention
    torch.testing.assert_close(received.view(3, 16).mean(dim=1), torch.full((3,), 1 / 64), atol=1e-6, rtol=0)
    shifted = dict(data)
    pixels = data["pixel_values_videos"].clone()
    pixels[:64] += 0.5  # the first frame
    shifted["pixel_values_videos"] = pixels
    prepare(model, shifted, selector, on_error="raise")
    [(_, others)] = selector.seen[1]
    assert not torch.allclose(others[:16], keys[:16], atol=1e-3)
    torch.testing.assert_close(others[16:], keys[16:])


def test_layers_that_were_not_kept_are_named():
    model = tiny_model("qwen3_vl")
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)

    class Careless(Reading):
        def select(self, queries, budget=None):
            queries[0].keys(2)

    with pytest.raises(ValueError, match="layer 2 of the encoder was not kept; name it in the selector's"):
        prepare(model, data, Careless(1), on_error="raise")
    with pytest.raises(ValueError, match="carries no encoder to read keys from"):
        prepare(model, data, Careless(), on_error="raise")
    with pytest.raises(ValueError, match="the encoder has 4 layers, there is no layer 4"):
        prepare(model, data, Reading(4), on_error="raise")


@torch.no_grad()
def test_two_threads_on_one_model_read_their_own_pictures():
    model = tiny_model("qwen3_vl")
    data = [inputs_for("qwen3_vl", IMAGE_PROMPT, seed=seed) for seed in (0, 1)]
    expected = []
    for one in data:
        selector = Reading(1)
        prepare(model, one, selector, on_error="raise")
        expected.append(selector.seen[0][0][0])
    assert not torch.allclose(*expected)
    wrong = []

    def work(place):
        for _ in range(40):
            selector = Reading(1)
            prepare(model, data[place], selector, on_error="raise")
            wrong.append(not torch.equal(selector.seen[0][0][0], expected[place]))

    with torch.no_grad():
        threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(wrong) == 80
    assert not any(wrong)


@torch.no_grad()
def test_what_was_read_goes_with_the_call():
    model, data = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", IMAGE_PROMPT)

    class Forgetful(Reading):
        def select(self, queries, budget=None):
            chosen = super().select(queries, budget)
            self.seen.clear()
            return chosen

    def tensors():
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    selector = Forgetful(1)
    prepare(model, data, selector, on_error="raise")
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(20):
            prepare(model, data, selector, on_error="raise")
        assert tensors() <= before + 10
    finally:
        gc.enable()


def test_a_share_of_the_depth_means_the_nearest_layer_that_sees_everything():
    assert [find_layer(share, 27, range(27)) for share in (0.0, 0.5, 1.0)] == [0, 13, 26]
    assert [find_layer(share, 32, [7, 15, 23, 31]) for share in (0.0, 0.5, 0.8)] == [7, 15, 23]
    with pytest.raises(ValueError, match=r"as a share of the depth must be in \[0, 1\], got 1.5"):
        find_layer(1.5, 4, range(4))


@torch.no_grad()
def test_layers_are_read_by_their_share_of_the_depth():
    model, data = tiny_model("qwen2_5_vl"), inputs_for("qwen2_5_vl", IMAGE_PROMPT)  # layers 1 and 3 see everything
    shares, numbers = Reading(0.3, 0.8), Reading(1, 3)
    for selector in (shares, numbers):
        prepare(model, data, selector, on_error="raise")
    for by_share, by_number in zip(shares.seen[0], numbers.seen[0], strict=True):
        assert torch.equal(by_share[0], by_number[0])
    assert not torch.equal(shares.seen[0][0][0], shares.seen[0][1][0])
