"""Invariants of the shorter prompt, over every family, each with a control that fails."""

import pytest
import torch
from simple_selector import GREEDY, TOLERANCE, ByScore
from tiny_models import (
    CLIP,
    FAMILIES,
    HIDDEN,
    IMAGE,
    IMAGE_PROMPT,
    MIXED,
    PAD,
    QWEN,
    RELATIVES,
    SMALL,
    TEXT,
    TWO_IMAGES,
    VIDEO,
    inputs_for,
    tiny_model,
)

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    Selection,
    TokenSelector,
    VisualQuery,
    attach,
    create_selector,
    prepare,
)
from arr_coc.families.family import open_family
from arr_coc.families.qwen2_vl import Qwen2VL


@pytest.fixture(scope="module", params=FAMILIES, name="opened")
def open_model(request):
    return request.param, tiny_model(request.param)


@pytest.fixture(scope="module", params=QWEN, name="qwen")
def open_qwen(request):
    return request.param, tiny_model(request.param)


def continuation(model, prepared, **kwargs):
    return model.generate(**prepared, **(GREEDY | kwargs))[:, prepared["input_ids"].shape[1] :]


@pytest.mark.parametrize(
    "specs", [[IMAGE_PROMPT], [TWO_IMAGES], [IMAGE_PROMPT, TWO_IMAGES, SMALL], [IMAGE_PROMPT, TEXT]]
)
@torch.no_grad()
def test_keeping_all_is_the_plain_model_to_the_bit(opened, specs):
    family, model = opened
    data = inputs_for(family, *specs)
    plain = model(**data).logits
    valid = data["attention_mask"].bool()
    prepared = prepare(model, data, ByScore(), budget=1.0)
    assert torch.equal(prepared["input_ids"], data["input_ids"])
    logits = model(**prepared).logits[valid]
    if family == "llava" and not valid.all():  # its plain forward counts padding in the positions
        torch.testing.assert_close(logits, plain[valid], **TOLERANCE)
    else:
        assert torch.equal(logits, plain[valid])
    prepared = prepare(model, data, ByScore(), budget=1.0)
    assert torch.equal(continuation(model, prepared), continuation(model, data))


@pytest.mark.parametrize("spec", [CLIP, MIXED], ids=["clip", "mixed"])
@torch.no_grad()
def test_keeping_all_of_a_clip_is_the_plain_model(qwen, spec):
    family, model = qwen
    data = inputs_for(family, spec)
    assert torch.equal(model(**prepare(model, data, ByScore(), budget=1.0)).logits, model(**data).logits)


def masked_reference(family, model, data, kept_columns):
    """The full prompt whose dropped columns no token may look at."""
    ids = data["input_ids"][0]
    length = len(ids)
    seen = torch.tril(torch.ones(length, length, dtype=torch.bool)) & (
        kept_columns[None, :] | torch.eye(length, dtype=torch.bool)
    )
    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    positions = {}
    if family != "llava":
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        known = {name: data[name] for name in names if name in data}
        positions = {"position_ids": model.model.get_rope_index(**known)[0]}
    return model(**{**data, "attention_mask": mask, **positions}).logits[:, kept_columns]


def kept_columns_of(data, selector, model):
    """Which columns stay, found by an independent count of what the selector keeps."""
    recorded = []
    original = selector.select

    def record(queries, budget=None):
        recorded.extend(original(queries, budget))
        return recorded

    selector.select = record
    prepared = prepare(model, data, selector)
    selector.select = original
    ids = data["input_ids"][0]
    keep = torch.ones_like(ids, dtype=torch.bool)
    # images first, then clips, as the selections come
    columns = torch.cat([(ids == IMAGE).nonzero()[:, 0], (ids == VIDEO).nonzero()[:, 0]])
    offset = 0
    for selection, total in zip(recorded, selector.totals, strict=True):
        dropped = torch.ones(total, dtype=torch.bool)
        dropped[selection.indices] = False
        keep[columns[offset : offset + total][dropped]] = False
        offset += total
    return keep, prepared


class Counting(ByScore):
    def select(self, queries, budget=None):
        self.totals = [query.tokens.shape[0] for query in queries]
        return super().select(queries, budget)


@pytest.mark.parametrize("spec", [IMAGE_PROMPT, TWO_IMAGES, CLIP, MIXED], ids=["one", "two", "clip", "mixed"])
@torch.no_grad()
def test_dropping_is_masking_the_dropped_columns(opened, spec):
    family, model = opened
    if family == "llava" and spec in (CLIP, MIXED):
        pytest.skip("LLaVA 1.5 has no clips")
    data = inputs_for(family, spec, seed=4)
    keep, prepared = kept_columns_of(data, Counting([5, 4]), model)
    assert prepared["input_ids"].shape[1] == keep.sum() < len(keep)
    short = model(**prepared).logits
    torch.testing.assert_close(short, masked_reference(family, model, data, keep), **TOLERANCE)


@torch.no_grad()
def test_renumbered_positions_would_be_caught(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, seed=4)
    keep, prepared = kept_columns_of(data, Counting([7]), model)
    length = prepared["input_ids"].shape[1]
    wrong = torch.arange(length).expand_as(prepared["position_ids"])
    broken = model(**{**prepared, "position_ids": wrong}).logits
    assert not torch.allclose(broken, masked_reference(family, model, data, keep), atol=1e-2)


@torch.no_grad()
def test_a_gappy_text_row_would_be_caught(qwen):
    family, model = qwen
    data = inputs_for(family, IMAGE_PROMPT, seed=4)
    keep, prepared = kept_columns_of(data, Counting([7]), model)
    gappy = prepared["position_ids"].clone()
    gappy[0] = keep.nonzero()[:, 0]  # the places of the full prompt
    without_mask = {name: value for name, value in prepared.items() if name != "attention_mask"}
    broken = model(**{**without_mask, "position_ids": gappy}, use_cache=False).logits
    assert not torch.allclose(broken, masked_reference(family, model, data, keep), atol=1e-2)


@torch.no_grad()
def test_a_ragged_batch_is_each_row_alone_a_text_row_among_them(opened):
    family, model = opened
    specs = [IMAGE_PROMPT, TWO_IMAGES, TEXT]
    together = prepare(model, inputs_for(family, *specs, seed=1), ByScore([5, 11, 3]))
    last = model(**together).logits[:, -1]
    together = prepare(model, inputs_for(family, *specs, seed=1), ByScore([5, 11, 3]))
    answers = continuation(model, together)
    for row, counts in enumerate(([5], [11, 3], None)):
        alone = inputs_for(family, specs[row], seed=1 + row)
        prepared = prepare(model, alone, ByScore(counts)) if counts else alone
        assert prepared["input_ids"].shape[1] == together["attention_mask"][row].sum()
        torch.testing.assert_close(last[row : row + 1], model(**prepared).logits[:, -1], **TOLERANCE)
        prepared = prepare(model, alone, ByScore(counts)) if counts else alone
        assert torch.equal(answers[row : row + 1], continuation(model, prepared))


@torch.no_grad()
def test_right_padding_would_be_caught(opened):
    family, model = opened
    prepared = prepare(model, inputs_for(family, SMALL, TWO_IMAGES, seed=1), ByScore([2, 11, 3]))
    missing = int((prepared["attention_mask"][0] == 0).sum())
    assert missing > 0
    assert prepared["input_ids"][0, 0] == PAD != IMAGE
    right = model(**prepare(model, inputs_for(family, SMALL, seed=1), ByScore([2]))).logits[:, -1]
    torch.testing.assert_close(model(**prepared).logits[:1, -1], right, **TOLERANCE)
    for name in ("input_ids", "attention_mask", "position_ids"):  # the padding of the first row goes to its end
        row = (slice(None), 0) if prepared[name].ndim == 3 else (0,)
        prepared[name][row] = prepared[name][row].roll(-missing, dims=-1)
    assert not torch.allclose(model(**prepared).logits[:1, -1], right, atol=1e-2)


@torch.no_grad()
def test_cached_decoding_is_uncached_decoding_and_the_cache_is_short(opened):
    family, model = opened
    data = inputs_for(family, TWO_IMAGES, seed=5)
    prepared = prepare(model, data, ByScore([6, 4]))
    length = prepared["input_ids"].shape[1]
    result = model.generate(**prepared, **GREEDY, return_dict_in_generate=True)
    assert result.past_key_values.get_seq_length() == length + GREEDY["max_new_tokens"] - 1
    assert length == data["input_ids"].shape[1] - (data["input_ids"] == IMAGE).sum() + 10
    if family == "llava":
        with attach(model, ByScore([6, 4])), pytest.raises(ValueError, match="only with a cache; drop use_cache=False"):
            model.generate(**data, **GREEDY, use_cache=False)
        return
    uncached = continuation(model, prepare(model, data, ByScore([6, 4])), use_cache=False)
    assert torch.equal(uncached, result.sequences[:, length:])


@torch.no_grad()
def test_noise_on_dropped_tokens_changes_nothing_and_on_kept_ones_it_does(qwen, monkeypatch):
    family, model = qwen
    data = inputs_for(family, IMAGE_PROMPT, seed=1)
    selector = ByScore([6])
    kept = selector.select([_query(model, data)])[0].indices
    plain = model(**prepare(model, data, selector)).logits
    chosen = {"rows": None}

    class Fixed(TokenSelector):
        def select(self, queries, budget=None):
            return [Selection(indices=kept)]

    encode = Qwen2VL.encode

    def noisy(self, inputs, kind, layers=()):
        encoded = encode(self, inputs, kind, layers)
        for level in (encoded.features, *encoded.deepstack):
            level[chosen["rows"]] += 1.0
        return encoded

    monkeypatch.setattr(Qwen2VL, "encode", noisy)
    chosen["rows"] = [row for row in range(24) if row not in kept.tolist()]
    assert torch.equal(model(**prepare(model, data, Fixed())).logits, plain)
    chosen["rows"] = kept.tolist()[:1]
    assert not torch.allclose(model(**prepare(model, data, Fixed())).logits, plain, atol=1e-3)


def _query(model, data):
    family = open_family(model)
    return VisualQuery(family.encode(data, "image").features, family.grids(data, "image")[0], torch.zeros(1, HIDDEN))


@torch.no_grad()
def test_deepstack_rows_are_pruned_alike():
    model = tiny_model("qwen3_vl")
    prepared = prepare(model, inputs_for("qwen3_vl", TWO_IMAGES), ByScore([5, 3]))
    levels = prepared["mm_encoder_outputs"]["image"].deepstack_features
    assert [[len(rows) for rows in level] for level in levels] == [[5, 3], [5, 3]]


@torch.no_grad()
def test_unpruned_deepstack_would_be_caught():
    """The control: the first rows of each level instead of the kept ones."""
    model = tiny_model("qwen3_vl")
    data = inputs_for("qwen3_vl", IMAGE_PROMPT, seed=4)
    keep, prepared = kept_columns_of(data, Counting([7]), model)
    reference = masked_reference("qwen3_vl", model, data, keep)
    torch.testing.assert_close(model(**prepared).logits, reference, **TOLERANCE)
    levels = open_family(model).encode(data, "image").deepstack
    prepared["mm_encoder_outputs"]["image"].deepstack_features = [[level[:7]] for level in levels]
    assert not torch.allclose(model(**prepared).logits, reference, atol=1e-2)


@torch.no_grad()
def test_the_picture_is_rebuilt_only_for_selectors_that_look(opened, monkeypatch):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT)
    asked = []
    kind = type(open_family(model))
    original = kind.pictures
    monkeypatch.setattr(kind, "pictures", lambda *args: asked.append(1) or original(*args))
    prepare(model, data, create_selector("grid"), on_error="raise")
    assert asked == []
    prepare(model, data, ARRCOCLayer(ARRCOCConfig(hidden_size=HIDDEN)), on_error="raise")
    assert asked == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"repetition_penalty": 1.3},
    ],
    ids=["beams", "several", "sampling", "static", "penalty"],
)
@torch.no_grad()
def test_every_way_of_decoding_keeps_all_as_the_plain_model(opened, options):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    torch.manual_seed(0)
    plain = model.generate(**data, **(GREEDY | options))
    with attach(model, ByScore(), budget=1.0):
        torch.manual_seed(0)
        assert torch.equal(model.generate(**data, **(GREEDY | options)), plain)
    with attach(model, ByScore(), budget=5):
        torch.manual_seed(0)
        pruned = model.generate(**data, **(GREEDY | options))
    assert pruned.shape == plain.shape
    assert torch.equal(pruned[:, : data["input_ids"].shape[1]], plain[:, : data["input_ids"].shape[1]])


@torch.no_grad()
def test_a_second_turn_goes_on_from_the_pruned_cache(qwen):
    family, model = qwen
    prepared = prepare(model, inputs_for(family, IMAGE_PROMPT, seed=1), ByScore([6]))
    first = model.generate(**prepared, **GREEDY, return_dict_in_generate=True)
    more = torch.randint(16, 128, (1, 5), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([first.sequences, more], dim=1)
    second = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=first.past_key_values, **GREEDY
    )[:, ids.shape[1] :]
    # the control: the longer prompt from scratch, with the same tokens kept
    data = inputs_for(family, IMAGE_PROMPT, seed=1)
    new = ids[:, prepared["input_ids"].shape[1] :]
    for name, value in (("input_ids", new), ("attention_mask", torch.ones_like(new)), ("mm_token_type_ids", 0 * new)):
        data[name] = torch.cat([data[name], value], dim=1)
    assert torch.equal(continuation(model, prepare(model, data, ByScore([6]))), second)


def test_labels_are_gathered_and_the_gate_carries_the_gradient(opened):
    family, model = opened
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=HIDDEN))
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES)
    labels = data["input_ids"].clone()
    labels[:, : labels.shape[1] - 3] = -100
    prepared = prepare(model, {**data, "labels": labels}, layer, budget=6, on_error="raise")
    assert (prepared["labels"] >= 0).sum() == (labels >= 0).sum()
    model(**prepared).loss.backward()
    assert layer.information.channel_logits.grad.abs().sum() > 0
    assert layer.participatory.agree.grad.abs().sum() > 0
    model.zero_grad()


def test_weight_mode_keeps_all_tokens_and_is_differentiable(opened):
    family, model = opened
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=HIDDEN))
    data = inputs_for(family, IMAGE_PROMPT)
    prepared = prepare(model, data, layer, mode="weight", on_error="raise")
    assert torch.equal(prepared["input_ids"], data["input_ids"])
    logits = model(**prepared).logits
    assert not torch.allclose(logits, model(**data).logits, atol=1e-3)
    logits[0, -1].square().sum().backward()
    assert layer.balancer.gain.grad.abs().sum() > 0
    model.zero_grad()
    with pytest.raises(ValueError, match="mode 'weight' scales by relevance"):
        prepare(model, data, ByScore(), mode="weight")


@torch.no_grad()
def test_every_selector_works_on_batches_and_several_pictures(opened):
    family, model = opened
    data = inputs_for(family, IMAGE_PROMPT, TWO_IMAGES, TEXT)
    for name in ("arr-coc-untrained", "centre", "grid", "random"):
        options = {"config": ARRCOCConfig(hidden_size=HIDDEN)} if name == "arr-coc-untrained" else {}
        with attach(model, create_selector(name, **options), budget=4, on_error="raise") as run:
            out = model.generate(**data, **GREEDY)
        assert out.shape == (3, data["input_ids"].shape[1] + 6)
        assert len(run.output) == 3
        assert (run.output[0] is not None) == (name == "arr-coc-untrained")


@torch.no_grad()
def test_encoder_layers_get_the_lengths_of_pictures_on_the_host(qwen, monkeypatch):
    family, model = qwen
    data, opened = inputs_for(family, TWO_IMAGES), open_family(model)
    layers = opened.encoder_attention()
    attention, given = type(layers[0]), []
    plain = attention.forward

    def record(self, *args, **kwargs):
        given.append(kwargs["cu_seqlens"])
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", record)
    [stated] = opened.attended_lengths(data["image_grid_thw"], "image").values()
    monkeypatch.setattr(opened, "attended_lengths", lambda grids, kind: {"image_cu_seqlens": stated})
    features, deepstack = opened.run_encoder(data, "image")
    # Qwen2.5-VL's other layers attend in windows, whose lengths are not those of pictures
    whole = [1, 3] if family == "qwen2_5_vl" else range(len(layers))
    assert stated.device.type == "cpu"
    assert stated.tolist() == [0, 96, 192]
    assert len(given) == len(layers)
    assert [place for place, lengths in enumerate(given) if lengths is stated] == list(whole)

    given.clear()
    monkeypatch.setattr(opened, "attended_lengths", lambda grids, kind: {})
    without, levels = opened.run_encoder(data, "image")
    assert len(given) == len(layers)
    assert not any(lengths is stated for lengths in given)
    assert torch.equal(features, without)
    assert all(map(torch.equal, deepstack, levels))

    wrong = torch.tensor([0, 48, 192], dtype=torch.int32)
    monkeypatch.setattr(opened, "attended_lengths", lambda grids, kind: {"image_cu_seqlens": wrong})
    assert not torch.equal(opened.run_encoder(data, "image")[0], without)


@torch.no_grad()
def test_lengths_are_left_to_transformers_for_clips_and_flash_attention(qwen, monkeypatch):
    family, model = qwen
    data, opened = inputs_for(family, MIXED), open_family(model)
    assert opened.attended_lengths(data["image_grid_thw"], "image")
    assert opened.attended_lengths(data["video_grid_thw"], "video") == {}
    monkeypatch.setattr(model.model.visual.config, "_attn_implementation", "flash_attention_2")
    assert opened.attended_lengths(data["image_grid_thw"], "image") == {}


@torch.no_grad()
def test_missing_token_types_are_made(qwen):
    family, model = qwen
    data = inputs_for(family, MIXED)
    right = model(**prepare(model, data, ByScore())).logits
    del data["mm_token_type_ids"]
    assert torch.equal(model(**prepare(model, data, ByScore())).logits, right)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_and_attention_implementations(attention, dtype):
    model = tiny_model("qwen3_vl", attention).to(dtype)
    data = inputs_for("qwen3_vl", TWO_IMAGES)
    data["pixel_values"] = data["pixel_values"].to(dtype)
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=HIDDEN))
    with attach(model, layer, budget=6, on_error="raise"):
        assert model.generate(**data, **GREEDY).shape[1] == data["input_ids"].shape[1] + 6
        assert bool(model(**data).logits.isfinite().all())


@pytest.mark.parametrize("family", RELATIVES)
@torch.no_grad()
def test_relatives_run_unchanged(family):
    model = tiny_model(family)
    for specs in ([TWO_IMAGES], [IMAGE_PROMPT, SMALL, TEXT], [CLIP]):
        data = inputs_for("qwen3_vl", *specs)
        valid = data["attention_mask"].bool()
        plain = model(**data).logits[valid]
        assert torch.equal(model(**prepare(model, data, ByScore(), budget=1.0)).logits[valid], plain)
        kept = prepare(model, data, ByScore(), budget=5, on_error="raise")
        assert kept["input_ids"].shape[1] < data["input_ids"].shape[1]
        length = kept["input_ids"].shape[1]
        cached = model.generate(**kept, **GREEDY)[:, length:]
        again = prepare(model, data, ByScore(), budget=5, on_error="raise")
        assert torch.equal(model.generate(**again, **GREEDY, use_cache=False)[:, length:], cached)


@torch.no_grad()
def test_an_expert_model_drops_tokens_as_if_they_were_masked():
    model = tiny_model("qwen3_vl_moe")
    data = inputs_for("qwen3_vl", IMAGE_PROMPT)
    keep, prepared = kept_columns_of(data, Counting([6]), model)
    expected = masked_reference("qwen3_vl", model, data, keep)
    torch.testing.assert_close(model(**prepared).logits, expected, **TOLERANCE)
