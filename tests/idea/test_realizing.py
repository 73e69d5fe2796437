import copy
from importlib.resources import files

import pytest
import torch
from drawing import flat, noise, random_tokens, red_dot, splatter, street, with_text
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import WIDTH, embed_cells, embed_words, split_words

from arr_coc import ARRCOCConfig, ARRCOCLayer, VisualQuery, generate_texture_array
from arr_coc.pixels.files import open_picture, to_tensor

CONFIG = ARRCOCConfig(hidden_size=WIDTH)


def look(picture, question, budget=None, layer=None, **kwargs):
    """The untrained layer on tokens and words that share a space."""
    grid = (picture.shape[2] // 32, picture.shape[3] // 32)
    tokens = embed_cells(picture, generate_texture_array(picture, grid, "full"))
    words = embed_words(split_words(question))[None].expand(picture.shape[0], -1, -1)
    layer = layer or ARRCOCLayer(CONFIG)
    return layer(tokens, words, grid=grid, picture=picture, budget=budget, **kwargs)


def call(layer=None, batch=2, grid=(6, 8), words=5, seed=0, **kwargs):
    layer = layer or ARRCOCLayer(CONFIG)
    picture = torch.cat([noise(seed + i, grid[0] * 32, grid[1] * 32) for i in range(batch)])
    tokens = random_tokens(grid[0] * grid[1], WIDTH, seed, batch)
    return layer(tokens, random_tokens(words, WIDTH, seed + 1, batch), grid=grid, picture=picture, **kwargs)


def test_output_has_the_shapes_of_the_contract():
    output = call(budget=7, details=True)
    assert output.tokens.shape == (2, 7, WIDTH)
    assert output.positions.shape == (2, 7, 3)
    assert output.mask.shape == output.budgets.shape == (2, 7)
    assert output.num_kept.tolist() == [7, 7]
    assert output.relevance.shape == (2, 1, 6, 8)
    assert {name: tuple(value.shape) for name, value in output.scores.items()} == dict.fromkeys(
        ("information", "perspectival", "participatory"), (2, 1, 6, 8)
    )
    assert output.weights.shape == output.tensions.shape == (2, 3)
    assert output.texture.shape == (2, 1, 40, 6, 8)
    assert output.word_pull.shape == (2, 5, 1, 6, 8)
    assert call(budget=7).texture is None


def test_kept_tokens_are_those_at_their_positions_and_unchanged():
    tokens = random_tokens(48, WIDTH)
    output = ARRCOCLayer(CONFIG)(tokens, random_tokens(3, WIDTH, 1), grid=(6, 8), budget=9)
    index = output.positions[0, :, 1] * 8 + output.positions[0, :, 2]
    assert torch.equal(output.tokens[0], tokens[0, index])
    assert torch.equal(output.indices[0], index)
    assert output.kept_mask().sum() == 9
    assert torch.equal(output.kept_mask().flatten().nonzero()[:, 0], index)
    assert output.budgets[0, output.order[0, 0]] == output.budgets[0].max()


@pytest.mark.parametrize("channels", ["core", "full"])
def test_same_inputs_same_output_and_construction_is_deterministic(channels):
    config = ARRCOCConfig(hidden_size=WIDTH, channels=channels)
    torch.manual_seed(1)
    one = ARRCOCLayer(config)
    torch.manual_seed(2)
    other = ARRCOCLayer(config)
    a, b, c = call(one), call(one), call(other)
    for x in (b, c):
        assert torch.equal(a.relevance, x.relevance)
        assert torch.equal(a.positions, x.positions)
    assert not torch.equal(call(ARRCOCLayer(ARRCOCConfig(hidden_size=WIDTH, seed=1))).relevance, a.relevance)


def test_a_batch_of_two_is_two_single_calls_and_padding_changes_nothing():
    layer = ARRCOCLayer(CONFIG)
    pictures = torch.cat([street(), red_dot()])
    tokens = random_tokens(256, WIDTH, batch=2)
    words = random_tokens(6, WIDTH, 1, batch=2)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    both = layer(tokens, words, grid=(16, 16), picture=pictures, word_mask=mask, budget="auto")
    singles = [
        layer(tokens[:1], words[:1], grid=(16, 16), picture=pictures[:1], budget="auto"),
        layer(tokens[1:], words[1:, :4], grid=(16, 16), picture=pictures[1:], budget="auto"),
    ]
    for index, single in enumerate(singles):
        one = both.picture(index)
        torch.testing.assert_close(one.relevance, single.relevance)
        torch.testing.assert_close(one.weights, single.weights)
        assert torch.equal(one.positions, single.positions)
        assert one.reason == single.reason
    swapped = layer(tokens.flip(0), words.flip(0), grid=(16, 16), picture=pictures.flip(0), word_mask=mask.flip(0))
    straight = layer(tokens, words, grid=(16, 16), picture=pictures, word_mask=mask)
    torch.testing.assert_close(swapped.relevance.flip(0), straight.relevance)
    assert torch.equal(swapped.positions.flip(0), straight.positions)


def test_same_question_on_a_busy_street_and_on_one_red_dot_is_weighed_differently():
    street_weights, dot_weights = (look(picture, "what is here?").weights[0] for picture in (street(), red_dot()))
    assert (street_weights - dot_weights).abs().max() > 0.1


def test_the_question_decides_where_it_looks():
    picture = flat(0.5, 512, 512)
    picture[:, 0, 64:128, 64:128] = 0.85
    picture[:, 1:, 64:128, 64:128] = 0.1
    picture[:, 2, 384:448, 384:448] = 0.8
    picture[:, :2, 384:448, 384:448] = 0.15
    red, blue = (look(picture, f"where is the {name} square?", 4).positions[0, :, 1:] for name in ("red", "blue"))
    assert red.tolist() == [[2, 2], [2, 3], [3, 2], [3, 3]]
    assert blue.tolist() == [[12, 12], [12, 13], [13, 12], [13, 13]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "question", ["how many people are there?", "is it red", "so is there anything in it that is red?"]
)
def test_noise_and_splatter_fall_back_to_the_grid_with_a_reason(seed, question):
    for picture in (noise(seed), splatter(seed)):
        output = look(picture, question)
        assert output.strategy == ("grid",)
        assert "no structure" in output.reason[0]


def test_a_place_that_is_asked_for_is_looked_at_even_in_noise():
    output = look(noise(0), "what is on the left?", 64)
    assert output.strategy == ("relevance",)
    assert (output.positions[0, :, 2] < 8).float().mean() > 0.8


def test_a_street_and_asked_text_on_noise_do_not_fall_back():
    photo = to_tensor(open_picture(files("arr_coc") / "assets" / "astronaut.jpg").image)
    for picture in (street(), photo):
        assert look(picture, "how many people are there?").strategy == ("relevance",)
    asked = noise(0) * 0.5 + 0.25
    asked = with_text(asked, "XK42", (200, 230), size=40, fill=(230, 20, 20))
    output = look(asked, "what does the red text say?", 40)
    assert output.strategy == ("relevance",)
    rows, columns = output.positions[0, :, 1], output.positions[0, :, 2]
    on_text = (rows >= 7) & (rows <= 8) & (columns >= 6) & (columns <= 9)
    assert on_text.sum() >= 7
    # the control: the same picture, a question that points nowhere
    plain = look(noise(0) * 0.5 + 0.25, "what does the red text say?", 40)
    assert plain.strategy == ("grid",)


def test_focused_and_spread_relevance_get_small_and_large_automatic_budgets():
    few = look(red_dot(1024, 40), "where is the red dot?", "auto").num_kept.item()
    many = look(noise(0, 1024, 1024), "what is here?", "auto").num_kept.item()
    assert few < 150
    assert many == 400


def test_detached_selection_gives_the_scorers_no_gradient_and_the_gate_does():
    layer = ARRCOCLayer(CONFIG)
    tokens, words, picture = random_tokens(48, WIDTH), random_tokens(5, WIDTH, 1), noise(0, 192, 256)
    target = random_tokens(12, WIDTH, 2)

    def gradients(kept):
        layer.zero_grad()
        loss = (kept - target).square().mean()
        if loss.requires_grad:
            loss.backward()
        return {
            name: 0.0 if parameter.grad is None else parameter.grad.abs().sum().item()
            for name, parameter in layer.named_parameters()
        }

    output = layer(tokens, words, grid=(6, 8), picture=picture, budget=12)
    detached = tokens.gather(1, output.relevance.flatten(1).topk(12).indices.detach()[..., None].expand(-1, -1, WIDTH))
    assert set(gradients(detached).values()) == {0.0}
    gated = gradients(output.tokens)
    for name in (
        "information.channel_logits",
        "perspectival.correction.6.weight",
        "participatory.agree",
        "participatory.mix_logits",
        "balancer.gain",
        "balancer.neutral",
        "project.weight",
    ):
        assert gated[name] > 0, name


def test_selections_carry_a_gate_of_value_one_while_learning():
    layer = ARRCOCLayer(CONFIG)
    one = VisualQuery(random_tokens(48, WIDTH)[0], (1, 6, 8), random_tokens(4, WIDTH, 1)[0])
    [selection] = layer.select([one], 10)
    assert bool((selection.gate == 1).all())
    selection.gate.sum().backward()
    assert layer.participatory.mix_logits.grad.abs().sum() > 0
    with torch.no_grad():
        assert layer.select([one], 10)[0].gate is None


def test_relevance_can_be_learned():
    layer = ARRCOCLayer(CONFIG)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.01)
    wanted = torch.zeros(2, 1, 6, 8)
    wanted[:, :, 4, 1] = 1
    first = None
    for _ in range(30):
        loss = (call(layer).relevance - wanted).square().mean()
        first = first or loss.item()
        optimiser.zero_grad()
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)
        optimiser.step()
    assert loss.item() < 0.8 * first


def test_works_without_a_picture_and_never_falls_back_then():
    tokens, words = random_tokens(48, WIDTH), random_tokens(4, WIDTH, 1)
    words[0, 2] = tokens[0, 17]
    for channels in ("core", "full"):
        layer = ARRCOCLayer(ARRCOCConfig(hidden_size=WIDTH, channels=channels))
        output = layer(tokens, words, grid=(6, 8), budget=5)
        assert 17 in output.indices[0].tolist()
        assert output.strategy == ("relevance",)


def test_clips_are_chosen_from_as_a_whole():
    layer = ARRCOCLayer(CONFIG)
    tokens, words = random_tokens(3 * 24, WIDTH), random_tokens(4, WIDTH, 1)
    words[0, 0] = tokens[0, 24 + 7]
    clip = torch.stack([noise(i, 128, 192)[0] for i in range(3)])[None]
    output = layer(tokens, words, grid=(3, 4, 6), picture=clip, budget=10, details=True)
    assert output.relevance.shape == (1, 3, 4, 6)
    assert [1, 1, 1] in output.positions[0].tolist()
    motion = output.texture[0, :, 10]
    assert motion[0].max() < 1e-6
    assert motion[1:].min() > 0


def test_finer_cells_than_tokens_are_scored_but_not_gathered():
    layer = ARRCOCLayer(CONFIG)
    tokens, words = random_tokens(16, WIDTH), random_tokens(4, WIDTH, 1)
    output = layer(tokens, words, grid=(4, 4), cells=(16, 16), picture=street(), budget=30)
    assert output.tokens is None
    assert output.relevance.shape == (1, 1, 16, 16)
    assert output.positions[0, :, 1:].max() < 16
    assert output.num_kept.tolist() == [30]


def test_a_stream_remembers_what_it_looked_at():
    layer = ARRCOCLayer(CONFIG)
    tokens, words = random_tokens(64, WIDTH), random_tokens(4, WIDTH, 1)
    frame = red_dot(256, place=(80, 80))
    first = layer(tokens, words, grid=(8, 8), picture=frame, budget=6)
    memory = layer.remember(first, frame)
    second = layer(tokens, words, grid=(8, 8), picture=frame, previous=memory, budget=6, details=True)
    kept = first.kept_mask()[0, 0]
    assert bool((memory.age[0][kept] == 0).all())
    assert bool((memory.age[0][~kept] == 1).all())
    assert torch.equal(second.texture[0, 0, 37] > 0, kept)
    later = layer.remember(second, frame, memory)
    assert later.age.max() == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tokens_choose_nearly_the_same(dtype):
    layer = ARRCOCLayer(CONFIG)
    tokens, words, picture = random_tokens(256, WIDTH), random_tokens(5, WIDTH, 1), street()
    exact = layer(tokens, words, grid=(16, 16), picture=picture, budget=64)
    rough = layer(tokens.to(dtype), words.to(dtype), grid=(16, 16), picture=picture.to(dtype), budget=64)
    assert rough.tokens.dtype == dtype
    common = set(exact.indices[0].tolist()) & set(rough.indices[0].tolist())
    assert len(common) >= 58


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_changes_nothing(trained):
    picture = to_tensor(open_picture(files("arr_coc") / "assets" / "examples" / "page.png").image)
    layer = ARRCOCLayer(CONFIG)
    if trained:  # the corrections, which are zero at first, are products too
        generator = torch.Generator().manual_seed(0)
        for weight in layer.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    grid = (picture.shape[2] // 32, picture.shape[3] // 32)
    tokens, words = random_tokens(grid[0] * grid[1], WIDTH), random_tokens(5, WIDTH, 1)
    with torch.no_grad():
        # first inside: what is kept for later calls must not be rounded either
        with torch.autocast("cpu", torch.bfloat16):
            inside = layer(tokens, words, grid=grid, picture=picture, budget=0.5)
        outside = layer(tokens, words, grid=grid, picture=picture, budget=0.5)
    assert inside.indices.tolist() == outside.indices.tolist()
    assert torch.equal(inside.relevance, outside.relevance)


def test_weights_of_a_text_detector_are_its_own():
    class Detector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Conv2d(3, 1, 1)

        def forward(self, picture):
            return self.weight(picture)[:, 0].sigmoid()

    detector = Detector()
    before = detector.weight.weight.clone()
    layer = ARRCOCLayer(CONFIG, text_detector=detector)
    assert torch.equal(detector.weight.weight, before)
    assert layer.num_parameters() == ARRCOCLayer(CONFIG).num_parameters()
    assert layer.config.text_detector == "Detector"
    with pytest.raises(ValueError, match="made with the text detector 'Detector'; pass it"):
        ARRCOCLayer(layer.config)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_casting_a_model_leaves_the_layer_in_float32(cast):
    layer = ARRCOCLayer(CONFIG)
    before = call(layer).relevance
    torch.nn.ModuleList([layer]).to(cast)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}
    assert torch.equal(call(layer).relevance, before)


def test_construction_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    ARRCOCLayer(CONFIG)
    assert torch.equal(torch.rand(2), expected)


def test_large_half_precision_tokens_are_not_lost():
    tokens = 7000 * random_tokens(48, WIDTH)
    words = tokens[:, 7:8]
    output = ARRCOCLayer(CONFIG)(tokens.half(), words.half(), grid=(6, 8), budget=1)
    assert output.indices.tolist() == [[7]]


def test_bad_weights_and_memory_are_said_not_used():
    layer = ARRCOCLayer(CONFIG)
    frame = noise(0, 192, 256)
    memory = layer.remember(call(layer, batch=1), frame)
    memory.relevance[0, 0, 0] = torch.nan
    torch.nn.init.ones_(layer.perspectival.correction[-1].weight)  # else the channel is not read
    with pytest.raises(ValueError, match="relevance is NaN or infinite; check the layer's weights, `previous`"):
        layer(random_tokens(48, WIDTH), random_tokens(3, WIDTH, 1), grid=(6, 8), picture=frame, previous=memory)


def test_one_picture_of_a_batch_counts_from_either_end():
    output = call(budget=5)
    assert torch.equal(output.picture(-1).positions, output.picture(1).positions)
    with pytest.raises(IndexError):
        output.picture(2)


def test_a_text_detector_is_recorded_by_name():
    def finds_nothing(picture):
        return torch.zeros(picture.shape[0], 4, 4)

    layer = ARRCOCLayer(CONFIG, text_detector=finds_nothing)
    assert layer.config.text_detector == "finds_nothing"
    assert call(layer, details=True).texture[:, :, 16].max() == 0
    assert ARRCOCLayer(CONFIG).config.text_detector is None


def test_copies_are_independent():
    layer = ARRCOCLayer(CONFIG)
    other = copy.deepcopy(layer)
    torch.nn.init.ones_(other.balancer.neutral)
    assert not torch.equal(layer.balancer.neutral, other.balancer.neutral)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    height=st.integers(1, 80),
    width=st.integers(1, 80),
    words=st.integers(1, 9),
    budget=st.one_of(st.integers(1, 60), st.floats(0.01, 1.0), st.just("auto")),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    channels=st.sampled_from(["core", "full"]),
    value=st.sampled_from([0.0, 0.5, 1.0, None]),
)
def test_any_size_type_and_budget_gives_a_valid_output(
    rows, columns, height, width, words, budget, dtype, channels, value
):
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=16, channels=channels))
    picture = noise(0, height, width) if value is None else flat(value, height, width)
    tokens = random_tokens(rows * columns, 16) if value is None else torch.full((1, rows * columns, 16), value)
    output = layer(
        tokens.to(dtype), random_tokens(words, 16, 1).to(dtype), grid=(rows, columns), picture=picture.to(dtype),
        budget=budget,
    )  # fmt: skip
    assert bool(output.relevance.isfinite().all())
    assert 1 <= output.num_kept.item() <= rows * columns
    assert output.tokens.shape == (1, output.num_kept.item(), 16)
    assert output.strategy[0] in ("relevance", "grid", "all")


def broken(name, value):
    inputs = {"tokens": random_tokens(48, WIDTH), "words": random_tokens(5, WIDTH, 1), "picture": noise(0, 192, 256)}
    inputs[name].view(-1)[3] = value
    return inputs


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["tokens", "words", "picture"])
@pytest.mark.parametrize("budget", [0.25, "auto"])
def test_nan_and_infinity_are_refused_by_the_name_of_the_tensor(name, value, budget):
    inputs = broken(name, value)
    with pytest.raises(ValueError, match=f"`{name}` contains NaN or infinity"):
        ARRCOCLayer(CONFIG)(**inputs, grid=(6, 8), budget=budget)


def test_pictures_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"`picture` must lie in \[0, 1\]"):
        ARRCOCLayer(CONFIG)(**broken("picture", 1.5), grid=(6, 8))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"tokens": torch.rand(1, 47, WIDTH)}, ValueError, r"`tokens` must have shape \[B, 48, 64\]"),
        ({"tokens": torch.rand(1, 48, 32)}, ValueError, "and this layer"),
        ({"tokens": torch.zeros(1, 48, WIDTH, dtype=torch.long)}, TypeError, "got torch.int64"),
        ({"words": torch.rand(1, 0, WIDTH)}, ValueError, "Q >= 1"),
        ({"words": torch.rand(2, 5, WIDTH)}, ValueError, r"\[1, Q, 64\]"),
        ({"words": torch.rand(1, 5, WIDTH).half()}, TypeError, "one dtype"),
        ({"word_mask": torch.ones(1, 5)}, ValueError, "must be bool"),
        ({"picture": torch.rand(3, 192, 256)}, ValueError, "`picture` must have shape"),
        ({"picture": torch.rand(1, 2, 3, 192, 256)}, ValueError, r"\[1, 1, 3, H, W\]"),
        ({"grid": (6,)}, ValueError, "`grid` must be"),
        ({"cells": (2, 6, 8)}, ValueError, "frames of `grid`"),
        ({"cells": (3, 4)}, ValueError, "no coarser"),
        ({"tokens": random_tokens(48, WIDTH).double()}, TypeError, "got torch.float64"),
        ({"picture": torch.zeros(1, 3, 192, 256, dtype=torch.uint8)}, TypeError, "`picture / 255`"),
        ({"grid": 48}, ValueError, "`grid` must be"),
        ({"budget": 0}, ValueError, "at least 1 token"),
        ({"budget": 1.01}, ValueError, "use an int"),
        ({"budget": -0.5}, ValueError, "got -0.5"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(changes, error, says):
    inputs = {
        "tokens": random_tokens(48, WIDTH), "words": random_tokens(5, WIDTH, 1), "grid": (6, 8),
        "picture": noise(0, 192, 256), **changes,
    }  # fmt: skip
    with pytest.raises(error, match=says):
        ARRCOCLayer(CONFIG)(**inputs)


def test_pictures_above_the_limit_are_refused():
    layer = ARRCOCLayer(ARRCOCConfig(hidden_size=WIDTH, max_image_pixels=1000))
    with pytest.raises(ValueError, match="49,152 pixels, the limit is 1,000; downsample"):
        call(layer)
