"""Gestalt and saccades: what is looked at, where it stands, and that nothing of it is invented."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tiny_models import CHAT_END, MERGE, PATCH, QWEN, RELATIVES, inputs_for, tiny_model

from arr_coc import (
    ARRCOCConfig,
    ARRCOCLayer,
    ARRCOCQwen,
    Gaze,
    Selection,
    TokenSelector,
    attach,
    create_selector,
    patches_from_picture,
    prepare,
)
from arr_coc.config import cell_count
from arr_coc.data.worlds import draw_scene, split_seed
from arr_coc.drawing.overlay import draw_gaze
from arr_coc.families.encoder_graph import call_encoder
from arr_coc.families.family import Encoded, open_family
from arr_coc.gaze.compression import plan_merge
from arr_coc.gaze.gestalt import make_gestalts
from arr_coc.gaze.plan import GazePlan, count_beyond, open_windows, place_gestalt, plan_gaze, replace_covered
from arr_coc.gaze.source import NativeSource
from arr_coc.inference.session import Session
from arr_coc.pixels.mipmaps import build_mipmaps
from arr_coc.prompting.encodings import Encodings
from arr_coc.prompting.settings import Settings
from arr_coc.texture import describe
from arr_coc.training.estimators import EstimatingSelector

CPU = torch.device("cpu")
CELL = PATCH * MERGE
LARGE = [("text", 4), ("image", (1, 24, 40)), ("text", 6)]  # 12 x 20 cells
SMALL = [("text", 9), ("image", (1, 4, 8)), ("text", 3)]
CUT = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}


def logits(model, arguments):
    with torch.no_grad():
        return model(**arguments).logits


def gaze_at(model, inputs, selector, budget=60, **options):
    with torch.no_grad():
        return prepare(model, inputs, selector, mode="saccade", budget=budget, on_error="raise", **options)


def noise(height, width, seed=0):
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# plans


@pytest.mark.parametrize("grid", [(1, 94, 126), (1, 32, 32), (1, 24, 46), (1, 442, 442), (1, 5, 400), (1, 600, 20)])
@pytest.mark.parametrize("budget", [None, 100, 0.25, 1500])
def test_a_plan_stays_within_its_budget_and_covers_the_picture(grid, budget):
    plan = plan_gaze(grid, budget, Gaze())
    wanted = {None: 529, 0.25: round(0.25 * cell_count(grid))}.get(budget, budget)
    if cell_count(grid) <= wanted:
        assert plan == GazePlan(grid, 1, 0, 1, cell_count(grid))
        return
    assert cell_count(plan.gestalt) + plan.saccades == plan.tokens == wanted
    assert cell_count(plan.gestalt) <= 256
    assert plan.scale % plan.side == 0
    for cells, tokens, windows in zip(grid[1:], plan.gestalt[1:], plan.windows[1:], strict=True):
        assert tokens * plan.scale >= cells > (tokens - 1) * plan.scale
        assert windows * plan.side == tokens * plan.scale


def test_the_gestalt_keeps_the_aspect_ratio():
    _, rows, columns = plan_gaze((1, 100, 200), None, Gaze()).gestalt
    assert columns == 2 * rows


def test_a_plan_is_asked_for_as_many_tokens_of_each_as_wished():
    assert plan_gaze((1, 64, 64), 256, Gaze(gestalt=256))[:3] == ((1, 16, 16), 4, 0)
    assert plan_gaze((1, 64, 64), 1280, Gaze(gestalt=256)).saccades == 1024
    assert plan_gaze((1, 64, 64), "auto", Gaze()).saccades is None


def test_what_is_compressed_by_halves_has_an_even_scale():
    assert plan_gaze((1, 32, 32), 256, Gaze(gestalt=128, compress="pool")).scale == 3
    for compress in ("merge", "conv"):
        plan = plan_gaze((1, 32, 32), 256, Gaze(gestalt=128, compress=compress))
        assert (plan.scale, plan.squeeze, plan.gestalt) == (4, 4, (1, 8, 8))


@pytest.mark.parametrize(
    "wrong", [{"gestalt": 0}, {"fixation": 0}, {"fixation": True}, {"overlap": "both"}, {"order": "x"}, {"compress": 2}]
)
def test_a_wrong_gaze_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        Gaze(**wrong)


# cells


def test_windows_open_to_their_cells_in_order_and_never_beyond_the_picture():
    plan = plan_gaze((1, 15, 21), 100, Gaze(gestalt=40))
    every = open_windows(torch.arange(cell_count(plan.windows)).flip(0), plan, (1, 15, 21), 10**6)
    assert sorted(every.tolist()) == list(range(15 * 21))
    assert len(open_windows(torch.arange(4), plan, (1, 15, 21), 3)) == 3


def test_only_tokens_that_are_covered_entirely_make_room():
    plan = GazePlan((1, 2, 2), 2, 4, 1, 8)
    cells, stay = replace_covered(torch.tensor([0, 1, 4, 3, 5, 2, 6, 7]), plan, (1, 4, 4))
    # the fifth cell covers the first token, the eighth the second
    assert cells.tolist() == [0, 1, 4, 3, 5, 2, 6, 7][: len(cells)]
    covered = {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}, 2: {8, 9, 12, 13}, 3: {10, 11, 14, 15}}
    for token, own in covered.items():
        assert bool(stay[token]) == (not own <= set(cells.tolist()))
    assert int(stay.sum()) + len(cells) <= 8


def test_places_of_the_gestalt_are_in_the_middle_of_what_it_stands_for():
    assert place_gestalt(GazePlan((1, 2, 2), 3, 4, 1, 8), (1, 6, 6), CPU).tolist() == [7, 10, 25, 28]


# sights


def test_the_small_picture_is_the_same_in_autocast():
    source = NativeSource(noise(12 * CELL, 20 * CELL), {**CUT, "patch_size": PATCH, "merge_size": MERGE}, CPU)
    plan = plan_gaze(source.grid, 60, Gaze())
    outside = source.small_picture(source.measure(plan), plan.encoded)
    with torch.autocast("cpu", torch.bfloat16):
        inside = source.small_picture(source.measure(plan), plan.encoded)
    assert torch.equal(inside, outside)


def test_merged_squares_stand_at_the_same_places_in_autocast():
    plan = plan_gaze((1, 1200, 8), 700, Gaze(gestalt=600, compress="merge"))  # bf16 has no odd numbers above 256
    tokens = torch.randn(cell_count(plan.encoded), 8, generator=torch.Generator().manual_seed(0))
    words = tokens[:2].clone()

    def places():
        [gestalt] = make_gestalts(Encoded(tokens, ()), [plan], [(1, 1200, 8)], [words], Gaze(compress="merge"), None)
        return gestalt.places

    outside = places()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(places(), outside)


@pytest.mark.parametrize("size", [(1024, 1024), (1000, 1300), (1056, 2080)])
@pytest.mark.parametrize("kind", ["tensor", "file"])
def test_a_sight_measures_as_if_the_picture_were_whole(size, kind, monkeypatch):
    monkeypatch.setitem(__import__("arr_coc.gaze.source", fromlist=[""]).STRIP_PIXELS, "cpu", 200_000)  # several strips
    picture = noise(*size)
    given = picture if kind == "tensor" else Image.fromarray(picture.permute(1, 2, 0).numpy())
    sight = NativeSource(given, CUT, torch.device("cpu"))
    plan = plan_gaze(sight.grid, None, Gaze())
    found = sight.measure(plan)
    rows, columns = found.size
    filled = picture[:, torch.arange(rows).clamp(max=size[0] - 1)][:, :, torch.arange(columns).clamp(max=size[1] - 1)]
    whole = build_mipmaps(filled[None] / 255, plan.windows[1:], len(found.moments) - 1)
    torch.testing.assert_close(found.cells, whole.cells, atol=1e-5, rtol=0)
    if found.level == whole.level:
        torch.testing.assert_close(found.colour, whole.colour, atol=1e-5, rtol=0)
    for level in range(max(found.level, whole.level), len(found.moments)):
        torch.testing.assert_close(found.moments[level], whole.moments[level], atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(1024, 1024), (1536, 2048), (736, 768), (400, 3000)])
def test_every_channel_can_be_told_from_what_was_measured(size):
    sight = NativeSource(noise(*size), CUT, torch.device("cpu"))
    for fixation in (1, 2, 4):
        plan = plan_gaze(sight.grid, None, Gaze(fixation=fixation))
        texture = describe(sight.measure(plan), "full", None)
        assert texture.shape == (1, 40, *plan.windows[1:])
        assert 0 <= texture.min() <= texture.max() <= 1


@pytest.mark.parametrize("kind", ["tensor", "file"])
def test_cells_are_cut_as_the_processor_would(kind):
    picture = noise(96, 128)
    given = picture if kind == "tensor" else Image.fromarray(picture.permute(1, 2, 0).numpy())
    sight = NativeSource(given, CUT, torch.device("cpu"))
    rows, _ = patches_from_picture(picture / 255, **CUT)
    cells = torch.tensor([7, 0, 11, 5])
    torch.testing.assert_close(sight.patches(cells), rows.view(12, 4, -1)[cells].flatten(0, 1))


def test_the_last_cells_are_continued_with_the_last_pixels():
    picture = noise(70, 100)
    sight = NativeSource(picture, CUT, torch.device("cpu"))
    assert sight.grid == (1, 3, 4)
    filled = torch.cat([picture, picture[:, -1:].expand(-1, 26, -1)], dim=1)
    filled = torch.cat([filled, filled[:, :, -1:].expand(-1, -1, 28)], dim=2)
    expected = NativeSource(filled, CUT, torch.device("cpu")).patches(torch.arange(12))
    assert torch.equal(sight.patches(torch.arange(12)), expected)


# the encoder


@pytest.mark.parametrize("family", [*QWEN, *RELATIVES])
def test_all_cells_alone_equal_the_normal_encoding(family):
    opened = open_family(tiny_model(family))
    grid = torch.tensor([[1, 8, 12], [1, 12, 8], [1, 10, 14]])
    rows = torch.randn(int(grid.prod(dim=1).sum()), 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(0))
    inputs = {"pixel_values": rows, "image_grid_thw": grid}
    grids = opened.grids(inputs, "image")
    with torch.no_grad():
        normal = opened.encode(inputs, "image")
        alone = opened.encode_cells(rows, [torch.arange(cell_count(one)) for one in grids], grids)
    torch.testing.assert_close(alone.features, normal.features)
    assert len(alone.deepstack) == len(normal.deepstack)
    for one, other in zip(alone.deepstack, normal.deepstack, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", QWEN)
def test_chosen_cells_are_encoded_at_their_true_places_and_pictures_do_not_mix(family):
    opened = open_family(tiny_model(family))
    cells = [torch.tensor([3, 17, 9]), torch.tensor([2, 20])]
    grids = [(1, 4, 6), (1, 5, 7)]
    rows = torch.randn(20, 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        both = opened.encode_cells(rows, cells, grids).features
        first = opened.encode_cells(rows[:12], cells[:1], grids[:1]).features
        moved = opened.encode_cells(rows[:12], [torch.tensor([3, 17, 10])], grids[:1]).features
        turn = [2, 0, 1]
        patches = rows[:12].view(3, 4, -1)[turn].flatten(0, 1)
        turned = opened.encode_cells(patches, [cells[0][turn]], grids[:1])
    torch.testing.assert_close(both[:3], first)
    torch.testing.assert_close(turned.features, first[turn])  # the order of the cells does not matter
    assert not torch.allclose(moved, first, atol=1e-3)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", QWEN)
def test_what_is_recorded_of_cells_equals_a_plain_call(family, adapted):
    model = tiny_model(family)
    cells, grids = [torch.tensor([3, 17, 9]), torch.tensor([2, 20])], [(1, 4, 6), (1, 5, 7)]
    rows = torch.randn(20, 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = open_family(model).encode_cells(rows, cells, grids)
        if adapted:
            peft = pytest.importorskip("peft", reason="comes with the dev extra")
            config = peft.LoraConfig(target_modules=r".*patch_embed\.proj", init_lora_weights=False)
            model = peft.get_peft_model(model, config).eval()
        opened = open_family(model)
        plain = opened.encode_cells(rows, cells, grids)
        recorded = opened.record_cells(rows, cells, grids)
    assert torch.allclose(plain.features, before.features, atol=1e-3) is not adapted  # the adapter matters
    for one, other in zip(recorded, (plain.features, *plain.deepstack), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_without_graphs_the_encoder_is_not_recorded_either(monkeypatch, graphs, shared):
    replays = []

    def count(visual, tensors, plain, recorded, key, replay):
        replays.append(replay)
        return call_encoder(visual, tensors, plain, recorded, key, replay)

    monkeypatch.setattr("arr_coc.families.qwen2_vl.call_encoder", count)
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    encoded = Encodings() if shared else None
    settings = Settings("saccade", 60, gaze=Gaze(gestalt=15), on_error="raise", encoded=encoded, graphs=graphs)
    for name in ("grid", "centre"):
        Session(open_family(model), create_selector(name), settings).prepare(inputs)
    assert len(replays) == (3 if shared else 4)  # gestalt and cells of each, but no gestalt that is known
    assert set(replays) == {graphs}


def test_a_family_that_reads_whole_pictures_says_so():
    model = tiny_model("llava")
    with pytest.raises(ValueError, match="llava does not cut pictures into cells; use mode 'prune'"):
        gaze_at(model, inputs_for("llava", [("text", 4), ("image", (1, 4, 4)), ("text", 6)]), create_selector("grid"))


# prompts


@pytest.mark.parametrize("family", [*QWEN, *RELATIVES])
def test_a_small_picture_is_encoded_normally(family):
    model, inputs = tiny_model(family), inputs_for(family, SMALL)
    prepared = gaze_at(model, inputs, create_selector("grid"), budget=None)
    torch.testing.assert_close(logits(model, prepared), logits(model, inputs))


@pytest.mark.parametrize("family", QWEN)
def test_gestalt_first_then_saccades_at_their_places(family):
    model, inputs = tiny_model(family), inputs_for(family, LARGE)
    selector = create_selector("oracle", boxes=[[(0.5, 0.5, 0.7, 0.8)]])
    prepared = gaze_at(model, inputs, selector, budget=60, gaze=Gaze(gestalt=40, overlap="keep"))
    opened = open_family(model)
    plan = plan_gaze((1, 12, 20), 60, Gaze(gestalt=40))
    visual = (prepared["input_ids"][0] == opened.token_id("image")).nonzero()[:, 0]
    assert len(visual) == 60
    origin = opened.positions(inputs)[:, 0, 5].tolist()  # of the first visual token
    _, rows, columns = (prepared["position_ids"][1:, 0, visual] - torch.tensor(origin)[:, None]).tolist()
    cells = [row * 20 + column for row, column in zip(rows, columns, strict=True)]
    assert cells[: cell_count(plan.gestalt)] == place_gestalt(plan, (1, 12, 20), CPU).tolist()
    saccades = cells[cell_count(plan.gestalt) :]
    assert len(set(saccades)) == 60 - cell_count(plan.gestalt)
    inside = {row * 20 + column for row in range(6, 9) for column in range(10, 14)}
    assert len(inside & set(saccades)) >= 10
    text = prepared["position_ids"][1:, 0, visual[-1] + 1]
    assert torch.equal(text, opened.positions(inputs)[:, 0, 5 + 240])  # goes on where the full picture ends


@pytest.mark.parametrize("family", QWEN)
def test_what_was_not_looked_at_changes_nothing_but_through_the_gestalt(family):
    model, inputs = tiny_model(family), inputs_for(family, LARGE)
    selector = create_selector("oracle", boxes=[[(0.5, 0.5, 0.7, 0.8)]])
    options = {"budget": 60, "gaze": Gaze(gestalt=40, overlap="keep")}
    before = gaze_at(model, inputs, selector, **options)["mm_encoder_outputs"]["image"].pooler_output[0]
    corner, centre = dict(inputs), dict(inputs)
    for changed, cell in ((corner, 0), (centre, 7 * 20 + 11)):
        changed["pixel_values"] = inputs["pixel_values"].clone()
        changed["pixel_values"][4 * cell : 4 * cell + 4] *= -0.5
    count = cell_count(plan_gaze((1, 12, 20), 60, Gaze(gestalt=40)).gestalt)
    away = gaze_at(model, corner, selector, **options)["mm_encoder_outputs"]["image"].pooler_output[0]
    seen = gaze_at(model, centre, selector, **options)["mm_encoder_outputs"]["image"].pooler_output[0]
    torch.testing.assert_close(away[count:], before[count:])
    assert not torch.allclose(away[:count], before[:count], atol=1e-4)
    assert not torch.allclose(seen[count:], before[count:], atol=1e-4)


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("overlap", ["keep", "drop"])
def test_a_batch_equals_its_rows_alone(family, overlap):
    model = tiny_model(family)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    specs = [LARGE, SMALL, [("text", 2), ("image", (1, 32, 24)), ("text", 3), ("image", (1, 28, 28)), ("text", 7)]]
    options = {"budget": 50, "gaze": Gaze(overlap=overlap)}
    together = gaze_at(model, inputs_for(family, *specs), layer, **options)
    found = logits(model, together)
    for place, spec in enumerate(specs):
        alone = inputs_for(family, *specs[: place + 1])
        one = {
            name: value[place : place + 1] if name in ("input_ids", "attention_mask", "mm_token_type_ids") else value
            for name, value in alone.items()
        }
        pictures = sum(kind == "image" for kind, _ in spec)
        rows = [int(grid.prod()) for grid in alone["image_grid_thw"]]
        one["image_grid_thw"] = alone["image_grid_thw"][-pictures:]
        one["pixel_values"] = alone["pixel_values"][-sum(rows[-pictures:]) :]
        single = gaze_at(model, one, layer, **options)
        count = int(single["attention_mask"].sum())
        torch.testing.assert_close(found[place, -count:], logits(model, single)[0, -count:], rtol=1e-3, atol=1e-3)


def test_originals_and_what_the_processor_delivered_are_looked_at_alike():
    model = tiny_model("qwen3_vl")
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    picture = noise(12 * CELL, 20 * CELL)
    delivered = inputs_for("qwen3_vl", LARGE)
    delivered["pixel_values"] = patches_from_picture(picture / 255, **open_family(model).cut())[0]
    stand_in = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 4, 4)), ("text", 6)])
    stand_in["input_ids"][0, -7:] = delivered["input_ids"][0, -7:]  # the same question
    stand_in["input_ids"][0, :4] = delivered["input_ids"][0, :4]
    one = gaze_at(model, delivered, layer)
    other = gaze_at(model, stand_in, layer, images=[picture])
    assert torch.equal(one["position_ids"], other["position_ids"])
    torch.testing.assert_close(
        one["mm_encoder_outputs"]["image"].pooler_output[0], other["mm_encoder_outputs"]["image"].pooler_output[0],
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip


def test_attach_generates_as_prepare_does_and_leaves_the_prompt_in_front():
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    selector = create_selector("grid")
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": CHAT_END}
    expected = model.generate(**gaze_at(model, inputs, selector), **options)
    with attach(model, selector, mode="saccade", budget=60):
        out = model.generate(**inputs, **options)
    length = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :length], inputs["input_ids"])
    assert torch.equal(out[:, length:], expected[:, length - out.shape[1] :])


def test_gradients_of_the_answer_reach_the_selector():
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model))
    prepared = prepare(model, inputs, layer, mode="saccade", budget=60, on_error="raise")
    model(**prepared).logits.square().sum().backward()
    assert layer.information.channel_logits.grad.abs().sum() > 0


def test_the_budget_is_spent_inside_the_picture():
    model = tiny_model("qwen3_vl")
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    inputs = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 4, 4)), ("text", 6)])
    picture = noise(17 * CELL + 3, 25 * CELL + 1)  # 18 x 26 cells, the last of 20 x 28 lie beyond
    plan = plan_gaze((1, 18, 26), 70, Gaze(overlap="keep"))
    assert count_beyond(plan, (1, 18, 26)) > 0
    prepared = gaze_at(model, inputs, layer, budget=70, images=[picture], gaze=Gaze(overlap="keep"))
    assert int((prepared["input_ids"] == open_family(model).token_id("image")).sum()) == 70


class Beyond(TokenSelector):
    def select(self, queries, budget=None):
        return [Selection(torch.tensor([0, cell_count(query.cells)])) for query in queries]


def test_a_selector_that_looks_beyond_the_picture_is_told_so_in_one_line():
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    with pytest.raises(ValueError, match=r"must name cells of `VisualQuery.cells`, here \d+, none beyond"):
        gaze_at(model, inputs, Beyond())


# the learned compressor


def with_compressor(model, levels):
    return ARRCOCLayer(ARRCOCConfig.for_model(model, compressor_levels=levels))


@pytest.mark.parametrize("family", QWEN)
def test_an_untrained_compressor_is_pooling_and_then_learns_from_the_answer(family):
    model, inputs = tiny_model(family), inputs_for(family, LARGE)
    layer = with_compressor(model, 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ())))
    assert plan_gaze((1, 12, 20), 40, Gaze(gestalt=15, compress="conv")).squeeze == 4
    ways = {
        compress: gaze_at(model, inputs, layer, budget=40, gaze=Gaze(gestalt=15, compress=compress))
        for compress in (None, "pool", "conv")
    }
    found = {compress: logits(model, arguments) for compress, arguments in ways.items()}
    assert torch.equal(found["pool"], found["conv"])
    assert not torch.allclose(found["pool"], found[None], atol=1e-4)
    prepared = prepare(model, inputs, layer, mode="saccade", budget=40, gaze=Gaze(gestalt=15, compress="conv"))
    model(**prepared).logits.square().sum().backward()
    for widen in layer.compressor.widen:
        assert widen.weight.grad.abs().sum() > 0


def test_a_compressor_is_saved_with_its_layer(tmp_path):
    model = tiny_model("qwen3_vl")
    layer = with_compressor(model, 2)
    with torch.no_grad():
        layer.compressor.widen[1].weight.normal_()
    layer.save_pretrained(tmp_path)
    again = ARRCOCLayer.from_pretrained(tmp_path)
    tokens = [torch.randn(64, layer.config.hidden_size)] * 2
    for side in (2, 4):
        one, other = (each.compressor(tokens, (1, 8, 8), side) for each in (layer, again))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert not torch.allclose(one[0], one[1])
    with pytest.raises(ValueError, match="this compressor has 2 levels, the encoder 1; train another"):
        layer.compressor(tokens[:1], (1, 8, 8), 4)


def test_compressing_by_what_was_never_learned_is_refused():
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    with pytest.raises(ValueError, match="compress 'conv' needs a selector that learned it"):
        gaze_at(model, inputs, create_selector("grid"), gaze=Gaze(compress="conv"))


def test_wrong_calls_are_refused_in_one_line():
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    grid = create_selector("grid")
    with pytest.raises(ValueError, match="`images` has 2 pictures, the prompt has 1"):
        gaze_at(model, inputs, grid, images=[noise(64, 64)] * 2)
    with pytest.raises(ValueError, match="`images` must be RGB, got a picture of mode 'P'"):
        gaze_at(model, inputs, grid, images=[Image.new("P", (64, 64))])
    with pytest.raises(ValueError, match="`images` and `gaze` belong to mode 'saccade'"):
        prepare(model, inputs, grid, gaze=Gaze())
    with pytest.raises(ValueError, match="needs a selector that picks cells"):
        gaze_at(model, inputs, create_selector("downsample"))
    with pytest.raises(ValueError, match="for clips use mode 'prune'"):
        gaze_at(model, inputs_for("qwen3_vl", [("text", 3), ("video", (3, 8, 8)), ("text", 5)]), grid)
    with pytest.raises(ValueError, match="`mode` must be one of auto, prune, weight, saccade"):
        prepare(model, inputs, grid, mode="gaze")


def test_saccades_are_read_row_by_row_or_most_relevant_first():
    model, inputs = tiny_model("qwen3_vl"), inputs_for("qwen3_vl", LARGE)
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    settings = Settings(mode="saccade", budget=60, on_error="raise", gaze=Gaze(fixation=1))
    with torch.no_grad():
        raster = Session(open_family(model), layer, settings).prepare(inputs)
        turned = replace(settings, gaze=Gaze(fixation=1, order="relevance"))
        relevant = Session(open_family(model), layer, turned).prepare(inputs)
    (_, cells), (_, ordered) = raster.kept[0], relevant.kept[0]
    assert list(cells) == sorted(cells)
    assert set(cells) == set(ordered)
    relevance = relevant.outputs[0].relevance.flatten()
    windows = plan_gaze((1, 12, 20), 60, Gaze(fixation=1)).windows[2]
    seen = relevance[torch.as_tensor(ordered) // 20 * windows + torch.as_tensor(ordered) % 20]
    assert (seen.diff() <= 0).all()
    assert list(ordered) != sorted(ordered)


def test_an_answer_says_what_the_gaze_did():
    vlm = ARRCOCQwen.from_pretrained()
    picture = draw_scene("needles", split_seed("test", 7_000_000), None, (1024, 1024)).picture
    answer = vlm.answer(picture, "what does the sign say?", mode="saccade", budget=300)
    assert (answer.tokens.full, answer.tokens.used, answer.strategy) == (1024, 300, "saccade")
    sharp = len(answer.kept[0][1])
    assert f"the whole picture in {300 - sharp} tokens, then {sharp} of 1024 at full" in answer.reason
    small = vlm.answer(picture.crop((0, 0, 256, 256)), "what does the sign say?", mode="saccade")
    assert small.reason == "the budget covers all 64 tokens"
    assert len(small.kept[0][1]) == 64
    assert draw_gaze(picture, answer).size == picture.size
    with pytest.raises(ValueError, match="`mode` must be one of auto, full, prune, weight, saccade, got 'see'"):
        vlm.answer(picture, "what?", mode="see")


MEMORY = """
import resource, sys
from PIL import Image
from arr_coc import ARRCOCQwen
vlm = ARRCOCQwen.from_pretrained()
vlm.answer(Image.new("RGB", (256, 256)), "what color is the circle?")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answer = vlm.answer(sys.argv[1], "what color is the circle?", mode="saccade", max_new_tokens=2)
print(answer.tokens.full, answer.tokens.used, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
def test_a_file_of_200_megapixels_takes_less_than_twice_its_decoded_size(tmp_path):
    size = (16384, 12288)
    Image.new("RGB", size, (200, 210, 190)).save(tmp_path / "large.jpg", quality=50)
    found = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "large.jpg")], capture_output=True, text=True, check=True
    )
    full, used, more = map(int, found.stdout.split())
    assert full == 512 * 384
    assert used <= 529
    assert more < 2 * 3 * size[0] * size[1]


@pytest.mark.slow
def test_the_question_moves_the_fixations_from_top_to_bottom():
    vlm = ARRCOCQwen.from_pretrained()
    for seed in range(20):  # a page that has both
        scene = draw_scene("pages", split_seed("test", 7_000_000 + seed), None, (1024, 1024))
        if {"page_title", "page_footnote"} <= {question.kind for question in scene.questions}:
            break
    heights = []
    for question in ("what is the title?", "what does the footnote say?"):
        answer = vlm.answer(scene.picture, question, mode="saccade", gaze=Gaze(order="relevance"))
        (_, rows, columns), cells = answer.kept[0]
        heights.append(float((cells[:40] // columns).mean()) / rows)  # of the first fixations
    assert heights[0] < 0.3
    assert heights[1] > 0.7


# compression


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("compress", ["pool", "merge"])
def test_a_compressed_gestalt_has_no_more_tokens_and_is_made_of_more(family, compress):
    model = tiny_model(family)
    inputs = inputs_for(family, [("text", 4), ("image", (1, 48, 64)), ("text", 6)])  # 24 x 32 cells
    grid = create_selector("grid")
    plan = plan_gaze((1, 24, 32), 60, Gaze(gestalt=48, compress=compress))
    assert plan.squeeze == 4
    assert plan.encoded == (1, 24, 32)  # all of the picture is encoded, and 16 tokens become one
    plain = gaze_at(model, inputs, grid, gaze=Gaze(gestalt=48, overlap="keep"))
    squeezed = gaze_at(model, inputs, grid, gaze=Gaze(gestalt=48, overlap="keep", compress=compress))
    tokens = [int((one["input_ids"] == open_family(model).token_id("image")).sum()) for one in (plain, squeezed)]
    assert tokens[1] <= tokens[0] == 60
    assert not torch.allclose(*(logits(model, one)[0, -1] for one in (plain, squeezed)), atol=1e-3)


def test_pooled_tokens_are_means_of_a_normal_encoding():
    model = tiny_model("qwen3_vl")
    inputs = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 48, 64)), ("text", 6)])
    picture = noise(24 * CELL, 32 * CELL) / 255
    inputs["pixel_values"] = patches_from_picture(picture, **open_family(model).cut())[0]
    with torch.no_grad():
        normal = open_family(model).encode(inputs, "image")
        prepared = gaze_at(model, inputs, create_selector("grid"), budget=48, gaze=Gaze(gestalt=48, compress="pool"))[
            "mm_encoder_outputs"
        ]["image"]
    for level, found in ((normal.features, prepared.pooler_output[0]),):
        squares = level.view(6, 4, 8, 4, -1).mean(dim=(1, 3)).flatten(0, 1)
        torch.testing.assert_close(found, squares, rtol=1e-3, atol=1e-3)


def test_merging_leaves_alone_what_differs_and_what_the_question_points_to():
    generator = torch.Generator().manual_seed(0)
    flat, word = torch.randn(1, 1, 32, generator=generator), torch.randn(1, 32, generator=generator)
    tokens = flat.expand(32, 32, -1) + 0.01 * torch.randn(32, 32, 32, generator=generator)
    tokens[3:6, 2:7] = torch.randn(3, 5, 32, generator=generator)  # busy
    tokens[20, 25] = word  # asked for
    merged = plan_merge(tokens.flatten(0, 1), word, (1, 32, 32), 4)
    assert len(merged.share) <= 64
    sizes = (merged.share > 0).sum(dim=1)
    owner = merged.share.argmax(dim=0).view(32, 32)
    assert sizes[owner[20, 25]] < sizes.max()
    assert sizes[owner[4, 4]] < sizes.max()
    assert sizes.max() == 64
    assert torch.equal(merged.share.sum(dim=0) > 0, torch.ones(1024, dtype=torch.bool))  # nothing is lost


@pytest.mark.parametrize("estimator", ["gate", "none"])
def test_training_reads_the_cells_that_deployment_reads(estimator):
    """Dropped tokens of the gestalt make room for further saccades in both."""
    model = tiny_model("qwen3_vl")
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    inputs = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 32, 32)), ("text", 6)])
    settings = Settings(mode="saccade", budget=160, gaze=Gaze(gestalt=64, overlap="drop"), on_error="raise")
    family = open_family(model)
    deployed, trained = (
        Session(family, selector, settings).prepare(inputs)
        for selector in (layer, EstimatingSelector(layer, estimator))
    )
    assert len(deployed.kept[0][1]) > 160 - 64  # more than fits beside the whole gestalt
    assert trained.kept[0][1].tolist() == deployed.kept[0][1].tolist()
    assert trained.used == deployed.used


def test_draws_are_read_in_the_order_of_the_draw():
    model = tiny_model("qwen3_vl")
    layer = ARRCOCLayer(ARRCOCConfig.for_model(model)).eval()
    inputs = inputs_for("qwen3_vl", [("text", 4), ("image", (1, 32, 32)), ("text", 6)])
    settings = Settings(mode="saccade", budget=160, gaze=Gaze(gestalt=64, overlap="drop"), on_error="raise")
    drawing = EstimatingSelector(layer, "gumbel", generator=torch.Generator().manual_seed(0))
    run = Session(open_family(model), drawing, settings).prepare(inputs)
    assert len(run.kept[0][1]) > 160 - 64
    chosen = torch.tensor([7, 2, 9])
    selection = Selection(indices=chosen.sort().values, order=chosen.argsort().argsort())
    assert selection.by_relevance().tolist() == [7, 2, 9]
