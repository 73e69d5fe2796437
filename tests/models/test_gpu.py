"""Checks that need a CUDA device: `make test-gpu`."""

import copy
import warnings

import pytest
import torch
from PIL import Image
from simple_selector import PEERS
from tiny_models import QWEN, inputs_for, tiny_model

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    Gaze,
    VisualQuery,
    create_selector,
    generate_texture_array,
    load_processor,
    prepare,
)
from arr_coc.data.sources import open_places
from arr_coc.families import open_family
from arr_coc.families.encoder_graph import _caches
from arr_coc.gaze.source import NativeSource
from arr_coc.inference.load import load_model
from arr_coc.runtime.digest import PictureDigest
from arr_coc.training.feature_cache import Features, write_features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SACCADES = {"mode": "saccade", "budget": 60, "on_error": "raise", "gaze": Gaze(overlap="keep")}


@pytest.mark.parametrize("family", QWEN)
def test_a_replayed_encoder_sees_what_the_plain_one_sees(family):
    model = tiny_model(family).cuda().eval()
    selector = ARRCOCLayer(ARRCOCConfig.for_model(model)).cuda().eval()
    given = [inputs_for(family, [("text", 4 + n), ("image", (1, 24, 40)), ("text", 6)]) for n in range(4)]
    given = [{name: value.cuda() for name, value in one.items()} for one in given]
    for seed, one in enumerate(given):
        torch.manual_seed(seed)
        one["pixel_values"] = torch.randn_like(one["pixel_values"])
    # the encoder's convolution, which a recording replaces by a matrix product, would round to TF32
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        replayed = [prepare(model, one, selector, **SACCADES) for one in given]
        assert len(_caches[model.model.visual]._recordings) == 2
        held = model.model.visual.register_forward_hook(lambda *_: None)  # with a hook nothing is replayed
        for one, seen in zip(given, replayed, strict=True):
            plain = prepare(model, one, selector, **SACCADES)["mm_encoder_outputs"]["image"].pooler_output[0]
            found = seen["mm_encoder_outputs"]["image"].pooler_output[0]
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
        held.remove()
        before = prepare(model, given[0], selector, **SACCADES)["mm_encoder_outputs"]["image"].pooler_output[0]
        for weight in model.model.visual.merger.parameters():
            weight.data = weight.data * 2  # elsewhere in memory
        after = prepare(model, given[0], selector, **SACCADES)["mm_encoder_outputs"]["image"].pooler_output[0]
        assert not torch.allclose(before, after, atol=1e-3)


def test_a_digest_is_computed_on_the_device_as_on_the_host():
    digest = PictureDigest()
    for pixels in (
        torch.randn(4690, 1536),
        torch.randn(1001, 77).bfloat16(),
        torch.randint(0, 256, (3, 301, 401)).byte(),
    ):
        on_device = pixels.cuda()
        words = [digest.reduce(values.flatten().view(torch.uint8)).tolist() for values in (pixels, on_device)]
        assert words[0] == words[1]
        assert digest(on_device) == digest(on_device.clone())
        changed = on_device.clone()
        changed[-1, -1] += 1
        assert digest(on_device) != digest(changed)


@pytest.fixture(name="layer")
def make_layer():
    return ARRCOCLayer(ARRCOCConfig(hidden_size=128)).cuda().eval()


def inputs(seed, grid=(12, 20), batch=2, words=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(batch, grid[0] * grid[1], 128, generator=generator)
    query = torch.randn(batch, words, 128, generator=generator)
    picture = torch.rand(batch, 3, grid[0] * 32, grid[1] * 32, generator=generator)
    return tokens.cuda().to(dtype), query.cuda().to(dtype), picture.cuda()


def run(layer, data, **kwargs):
    tokens, words, picture = data
    return layer(tokens, words, grid=(12, 20), picture=picture, details=True, **kwargs)


def assert_same(one, other):
    for name in ("positions", "mask", "num_kept"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("tokens", "budgets", "relevance", "weights", "tensions", "texture", "word_pull"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4)
    assert (one.strategy, one.reason) == (other.strategy, other.reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 1.0, 0.25, 64, "auto"])
def test_replayed_graphs_equal_plain_calls(layer, budget, dtype):
    with torch.inference_mode():
        data = [inputs(seed, dtype=dtype) for seed in range(4)]
        replayed = [run(layer, one, budget=budget) for one in data]  # plain, recorded, replayed, replayed
        layer.use_graphs = False
        for one, output in zip(data, replayed, strict=True):
            assert_same(output, run(layer, one, budget=budget))


def test_a_later_call_does_not_overwrite_an_earlier_result(layer):
    with torch.inference_mode():
        for seed in range(3):
            first = run(layer, inputs(seed))
        before = first.relevance.clone()
        run(layer, inputs(9))
        assert torch.equal(first.relevance, before)


def test_graphs_see_changed_weights_and_survive_a_copy(layer):
    data = inputs(0)
    with torch.no_grad():
        for _ in range(3):
            before = run(layer, data).relevance
        layer.balancer.neutral.add_(torch.tensor([3.0, -3, -3, 0, 0, 0], device="cuda"))
        after = run(layer, data).relevance
        assert not torch.allclose(before, after)
        torch.testing.assert_close(run(copy.deepcopy(layer), data).relevance, after)


def test_recordings_keep_their_constants_alive(layer):
    """A graph reads grids and orders by address; sizes in between must not free them."""
    data = inputs(0)
    with torch.no_grad():
        for _ in range(3):
            expected = run(layer, data).relevance
        for rows in range(2, 160):
            tokens, words = torch.randn(1, rows * 3, 128, device="cuda"), torch.randn(1, 4, 128, device="cuda")
            layer(tokens, words, grid=(rows, 3), picture=torch.rand(1, 3, rows * 32, 96, device="cuda"))
        scratch = [torch.full((12 * 20,), 7, device="cuda") for _ in range(500)]
        assert torch.equal(run(layer, data).relevance, expected)
        del scratch


def test_questions_of_similar_lengths_share_a_recording(layer):
    with torch.no_grad():
        for count in range(2, 16):
            output = run(layer, inputs(count, words=count))
            assert output.word_pull.shape[1] == count
    assert len(layer._graphs._recordings) == 1


def test_two_streams_do_not_mix(layer):
    data = [inputs(seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in data]
    with torch.no_grad():
        layer.use_graphs = False
        expected = [run(layer, one).relevance for one in data]
        layer.use_graphs = True
        torch.cuda.synchronize()
        for _ in range(20):
            results = []
            for one, stream in zip(data, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(run(layer, one).relevance)
            torch.cuda.synchronize()
            for result, right in zip(results, expected, strict=True):
                torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)


def test_bad_inputs_are_refused_when_replayed(layer):
    tokens, words, picture = inputs(0)
    with torch.no_grad():
        for _ in range(3):
            layer(tokens, words, grid=(12, 20), picture=picture)
        tokens[0, 3, 5] = torch.nan
        with pytest.raises(ValueError, match="`tokens` contains NaN"):
            layer(tokens, words, grid=(12, 20), picture=picture)
        tokens[0, 3, 5] = 0
        layer(tokens, words, grid=(12, 20), picture=picture)


def test_gradients_flow_on_the_device(layer):
    tokens, words, picture = inputs(0)
    layer(tokens, words, grid=(12, 20), picture=picture).tokens.square().sum().backward()
    assert layer.information.channel_logits.grad.abs().sum() > 0


@pytest.mark.parametrize("channels", ["core", "full"])
def test_texture_equals_that_of_the_cpu(channels):
    picture = torch.rand(2, 3, 200, 333, generator=torch.Generator().manual_seed(1))
    here = generate_texture_array(picture, (7, 11), channels)
    there = generate_texture_array(picture.cuda(), (7, 11), channels)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_call_waits_for_the_device_once(layer, graphs):
    layer.use_graphs = graphs
    data = inputs(0)
    with torch.no_grad():
        for _ in range(3):
            run(layer, data)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # says of itself that it is a prototype
            try:
                run(layer, data)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "synchronizing CUDA operation" in str(wait.message)]) == 1


@pytest.mark.parametrize("name", PEERS)
def test_peers_choose_as_on_the_cpu_the_same_each_time_and_never_wait(name):
    generator = torch.Generator().manual_seed(0)
    tokens, words = torch.randn(240, 64, generator=generator), torch.randn(5, 64, generator=generator)
    attention, keys = torch.rand(240, generator=generator), torch.randn(240, 32, generator=generator)

    def ask(device):
        return VisualQuery(
            tokens.to(device), (1, 12, 20), words.to(device), deepstack=(tokens.to(device) + 1,),
            attention_reader=lambda layer: attention.to(device), key_reader=lambda layer: keys.to(device),
        )  # fmt: skip

    selector = create_selector(name)
    expected = selector.select([ask("cpu")], 60)[0]
    attention, keys, query = attention.cuda(), keys.cuda(), ask("cuda")
    first = selector.select([query], 60)[0]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = selector.select([query], 60)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first.indices, again.indices)
    assert torch.equal(first.indices.cpu(), expected.indices)
    if expected.features is not None:
        assert torch.equal(first.features, again.features)
        assert torch.equal(first.deepstack[0], again.deepstack[0])
        torch.testing.assert_close(first.features.cpu(), expected.features, rtol=1e-4, atol=1e-4)


def test_features_are_written_on_the_device_as_on_the_cpu(tmp_path):
    model, processor = load_model("embedded", dtype=torch.float32), load_processor("embedded")
    found = []
    for device in ("cpu", "cuda"):
        layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).to(device)
        write_features(tmp_path / device, model.to(device), processor, layer, open_places("scenes", 2))
        found.append(Features(tmp_path / device).batch([0]))
    for here, there in zip(found[0][:5], found[1][:5], strict=True):
        torch.testing.assert_close(there, here, rtol=2e-3, atol=0.02)  # kept in half precision


@pytest.mark.parametrize("native", [True, False])
def test_saccades_on_the_device_equal_those_of_the_cpu(native):
    model = tiny_model("qwen3_vl")
    inputs = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 60, 56)), ("text", 6)], seed=3)
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (3, 300, 340), dtype=torch.uint8, generator=generator)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    found = []
    for device in ("cpu", "cuda"):
        here = {name: value.to(device) for name, value in inputs.items()}
        options = {"images": [picture.to(device)]} if native else {}
        with torch.no_grad():
            for _ in range(3):  # recorded at the second call, replayed at the third
                prepared = prepare(
                    model.to(device), here, layer.to(device), mode="saccade", budget=120, on_error="raise", **options
                )
            found.append((prepared["position_ids"].cpu(), model(**prepared).logits.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=1e-2)


def test_a_picture_of_the_host_is_uploaded_once_and_looks_the_same():
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 200, 300), dtype=torch.uint8, generator=chance)  # no whole cells at the border
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    cut = open_family(tiny_model("qwen3_vl")).cut()
    host, device = (NativeSource(picture, cut, torch.device(name)) for name in ("cpu", "cuda"))
    assert isinstance(device.picture, torch.Tensor)
    assert torch.equal(device.picture.cpu(), pixels)
    cells = torch.tensor([3, 0, 7])
    torch.testing.assert_close(device.patches(cells.cuda()).cpu(), host.patches(cells))
