"""The embedded model's layers for a CPU compute what those of transformers do, and step aside where they cannot."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from arr_coc.config import EMBEDDED_MODEL
from arr_coc.families.faster import cpu_layers
from arr_coc.families.faster.cpu_layers import CPULinear, attend, can_multiply
from arr_coc.inference.load import load_model

SIZES = ((1, 8, 10), (1, 28, 28))  # patches: attention in one call, and in parts that do not fill the last one
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="oneDNN is not used on this CPU",
)


@pytest.fixture(scope="module", name="plain")
def load_plain():
    return AutoModelForImageTextToText.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module", name="quick")
def load_quick():
    return load_model("embedded", dtype=torch.float32)


def draw_patches(*sizes):
    counts = [rows * columns for _, rows, columns in sizes]
    return torch.randn(sum(counts), 1536, generator=torch.Generator().manual_seed(0)), torch.tensor(sizes)


def encode(model, patches, grids):
    encoded = model.model.visual(patches, grids)
    return [encoded.pooler_output, *encoded.deepstack_features]


def compare(values, wanted):
    for value, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(value, other, atol=1e-4, rtol=1e-4)


@pytest.fixture(name="products")
def count_products(monkeypatch):
    """The shapes of all products by oneDNN."""
    multiply, shapes = cpu_layers.multiply, []

    def count(values, weight, *rest):
        shapes.append((*values.shape, len(weight)))
        return multiply(values, weight, *rest)

    monkeypatch.setattr(cpu_layers, "multiply", count)
    return shapes


@needs_onednn
@torch.no_grad()
def test_the_encoder_agrees_with_that_of_transformers(plain, quick, products):
    patches, grids = draw_patches(*SIZES)
    compare(encode(quick, patches, grids), encode(plain, patches, grids))
    assert (864, 1536, 256) in products  # the first layer
    assert (864, 256, 768) in products
    assert (864, 256, 896) in products
    most = cpu_layers.MOST_SCORES // 784
    whole, rest = divmod(784, most)
    assert products.count((most, 64, 784)) == whole * products.count((rest, 64, 784)) == whole * 6 * 4  # layers, heads
    patches[0] += 1  # the control: a patch counts in its own picture, and in no other
    changed, before = encode(quick, patches, grids)[0], encode(plain, *draw_patches(*SIZES))[0]
    assert not torch.allclose(changed[:20], before[:20], atol=1e-3)
    torch.testing.assert_close(changed[20:], before[20:], atol=1e-4, rtol=1e-4)


@needs_onednn
@torch.no_grad()
def test_the_language_model_agrees_with_that_of_transformers(plain, quick, products):
    ids = torch.arange(10, 50)[None]
    torch.testing.assert_close(quick(ids).logits, plain(ids).logits, atol=1e-3, rtol=1e-4)
    assert (1, 40, 256, 512) in products
    products.clear()
    torch.testing.assert_close(quick(ids[:, :2]).logits, plain(ids[:, :2]).logits, atol=1e-3, rtol=1e-4)
    assert not products  # too few rows


@pytest.mark.parametrize("count", [3, 255, 256, 1500])
@torch.no_grad()
def test_attention_in_parts_is_attention(count):
    generator = torch.Generator().manual_seed(count)
    queries, keys, values = torch.randn(3, count, 2, 16, generator=generator)  # [n, heads, d]
    wanted = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (queries / 4, keys, values)), scale=1.0)
    torch.testing.assert_close(attend(queries / 4, keys, values), wanted.transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(attend(queries, keys, values), wanted.transpose(0, 1), atol=1e-2)  # the control: no scale


@needs_onednn
def test_where_onednn_does_not_apply_layers_are_as_usual(products, monkeypatch):
    torch.manual_seed(0)
    layer = CPULinear(8, 4)
    values = torch.randn(32, 8)
    with torch.no_grad():
        assert can_multiply(values, layer.weight, None)
        layer(values)
        assert products == [(32, 8, 4)]
        assert not can_multiply(values.double(), layer.weight.double())
        assert not can_multiply(values.bfloat16(), layer.weight)
        assert not can_multiply(values, layer.weight.bfloat16())
        assert not can_multiply(values.to("meta"), layer.weight)
        assert not can_multiply(values[:0], layer.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(values).dtype == torch.bfloat16
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")  # not AVX2 or AVX512
            assert torch.equal(layer(values), nn.Linear.forward(layer, values))
    layer(values).sum().backward()
    torch.testing.assert_close(layer.weight.grad, values.sum(dim=0).expand(4, -1))
    assert products == [(32, 8, 4)]


def test_gradients_pass_through_the_encoder(plain, quick):
    patches, grids = draw_patches((1, 16, 16))
    found = []
    for model in (plain, quick):
        pixels = patches.clone().requires_grad_()
        encode(model, pixels, grids)[0].square().mean().backward()
        found.append(pixels.grad)
    assert found[0].abs().max() > 0
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_other_attention_and_watched_layers_are_as_usual(plain, quick):
    patches, grids = draw_patches((1, 16, 20))
    other, seen = copy.deepcopy(quick), []
    other.set_attn_implementation({"vision_config": "eager"})
    compare(encode(other, patches, grids), encode(plain, patches, grids))
    for block in other.model.visual.blocks:
        block.mlp.linear_fc1.register_forward_hook(lambda module, given, output: seen.append(output))
    compare(encode(other, patches, grids), encode(plain, patches, grids))
    assert len(seen) == 6
    assert min(values.min() for values in seen) < -0.2  # before the activation, which is never as low


@torch.no_grad()
def test_adapters_count(plain, quick):
    patches, grids = draw_patches((1, 16, 20))
    before, found = encode(plain, patches, grids)[0], []
    for model in (plain, quick):
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=2, lora_alpha=8, target_modules=r".*visual.*\.(linear_fc1|qkv|proj)", init_lora_weights=False,
            exclude_modules=r".*patch_embed.*",
        )  # fmt: skip
        tuned = peft.get_peft_model(copy.deepcopy(model), config).eval()
        found.append(encode(tuned.base_model.model, patches, grids)[0])
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(found[1], before, atol=1e-1)


def test_weights_keep_their_names_and_values(plain, quick):
    wanted, found = plain.state_dict(), quick.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
