"""Selectors that need no paper: where they look, and what the model then reads."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from simple_selector import TOLERANCE, ByScore
from tiny_directory import photo, processed, write_checkpoint
from tiny_models import CLIP, FAMILIES, HIDDEN, IMAGE, MIXED, QWEN, SMALL, TEXT, TWO_IMAGES, inputs_for, tiny_model
from transformers import AutoModelForImageTextToText

from arr_coc import (
    ARRCOCConfig,
    ChatTokens,
    PictureSelector,
    VisualQuery,
    attach,
    create_selector,
    list_selectors,
    prepare,
)
from arr_coc.config import cell_count
from arr_coc.families.family import open_family
from arr_coc.prompting.layout import read_prompt
from arr_coc.prompting.resize import resize_prompt
from arr_coc.selectors import GlanceSelector, PixelSelector
from arr_coc.selectors.smaller_picture import nearest_cells, shrink_grid


def kept_by_oracle(boxes, budget, grid=(1, 6, 8)):
    query = VisualQuery(torch.zeros(cell_count(grid), 8), grid, torch.zeros(1, 8))
    return create_selector("oracle", boxes=[boxes]).select([query], budget)[0].indices.tolist()


def test_the_oracle_keeps_what_its_boxes_touch():
    touched = [row * 8 + column for row in (2, 3) for column in (4, 5)]
    assert kept_by_oracle([(0.5, 2 / 6, 0.75, 4 / 6)], 4) == touched
    assert kept_by_oracle([(0.51, 2.1 / 6, 0.74, 3.9 / 6)], 4) == touched
    both = kept_by_oracle([(0, 0, 0.125, 1 / 6), (0.875, 5 / 6, 1, 1)], 2)
    assert both == [0, 47]


def test_the_oracle_goes_on_with_the_surroundings_and_without_boxes_looks_everywhere():
    first = kept_by_oracle([(0, 0, 0.125, 1 / 6)], 4)
    assert first == [0, 1, 8, 9]
    everywhere = kept_by_oracle([], 6)
    assert (
        everywhere
        == create_selector("grid")
        .select([VisualQuery(torch.zeros(48, 8), (1, 6, 8), torch.zeros(1, 8))], 6)[0]
        .indices.tolist()
    )


def test_the_oracle_spends_a_small_budget_on_the_middle_of_every_box():
    kept = kept_by_oracle([(0, 0, 0.375, 0.5), (0.625, 0.5, 1, 1)], 2)
    assert kept == [9, 38]


@pytest.mark.parametrize("box", [(0.5, 0.5, 0.4, 0.6), (-0.1, 0, 0.5, 0.5), (0, 0, 64, 64)])
def test_boxes_that_are_none_are_refused(box):
    with pytest.raises(ValueError, match=r"within \[0, 1\]"):
        kept_by_oracle([box], 4)


def test_the_oracle_needs_boxes_for_every_picture():
    with pytest.raises(ValueError, match="boxes for 0 pictures, the call has 1; set `boxes`"):
        create_selector("oracle").select([VisualQuery(torch.zeros(4, 8), (1, 2, 2), torch.zeros(1, 8))], 2)


@given(rows=st.integers(1, 130), columns=st.integers(1, 130), tokens=st.integers(1, 600), frames=st.integers(1, 4))
def test_a_smaller_grid_has_at_most_its_tokens_and_nearly_the_same_shape(rows, columns, tokens, frames):
    grid = (frames, rows, columns)
    small = shrink_grid(grid, tokens)
    a_frame = max(1, tokens // frames)
    assert small[0] == frames
    assert 1 <= small[1] <= rows
    assert 1 <= small[2] <= columns
    assert small[1] * small[2] <= a_frame
    if a_frame >= 64 and max(rows, columns) < 4 * min(rows, columns) and a_frame < rows * columns:
        assert small[1] * small[2] >= 0.75 * a_frame
        assert abs(math.log(small[1] * columns / (small[2] * rows))) < 0.3


def test_nearest_cells_keep_the_corners_and_the_order():
    assert nearest_cells((1, 6, 8), (1, 6, 8)).tolist() == list(range(48))
    cells = nearest_cells((2, 2, 2), (2, 6, 6))
    assert cells.tolist() == [7, 10, 25, 28, 43, 46, 61, 64]


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_downsampling_is_what_the_processor_makes_of_a_smaller_picture(family, tmp_path):
    processor = write_checkpoint(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    images = [photo(96, 64), photo(64, 64, 1)]
    full = processed(processor, images)
    assert full["image_grid_thw"].tolist() == [[1, 16, 24], [1, 16, 16]]  # 96 and 64 tokens
    full["labels"] = full["input_ids"].clone()
    sizes = [shrink_grid(grid, 24) for grid in ((1, 8, 12), (1, 8, 8))]
    reduced = [
        image.resize((8 * width, 8 * height), Image.Resampling.BICUBIC)
        for image, (_, height, width) in zip(images, sizes, strict=True)
    ]
    small = processed(processor, reduced)
    assert small["image_grid_thw"].tolist() == [[1, 2 * height, 2 * width] for _, height, width in sizes]
    family_of = open_family(model)
    resized = resize_prompt(family_of, full, read_prompt(family_of, full), sizes)
    assert resized.keys() == {*small.keys(), "labels"}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "image_grid_thw"):
        assert torch.equal(resized[name], small[name]), name
    assert torch.equal(resized["labels"], small["input_ids"])
    # eight bits of the resized picture, in units of the normalised one
    assert (resized["pixel_values"] - small["pixel_values"]).abs().max() < 0.04
    prepared = prepare(model, full, create_selector("downsample"), budget=24)
    expected = model(**{**small, "pixel_values": resized["pixel_values"]}).logits
    torch.testing.assert_close(model(**prepared).logits, expected)
    del full["mm_token_type_ids"]  # made where it is missing
    torch.testing.assert_close(model(**prepare(model, full, create_selector("downsample"), budget=24)).logits, expected)
    assert torch.equal(prepare(model, full, create_selector("downsample"), budget=1.0)["input_ids"], full["input_ids"])


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_half_and_half_reads_an_overview_and_tokens_of_the_full_picture(family):
    model = tiny_model(family)
    data = inputs_for(family, [("text", 4), ("image", (1, 16, 16)), ("text", 6)])
    selector = create_selector("half-and-half", selector="grid")
    prepared = prepare(model, data, selector, budget=32, on_error="raise")
    assert (prepared["input_ids"] == IMAGE).sum() == 32
    small, count = selector.plan((1, 8, 8), 32)
    assert (small, count) == ((1, 4, 4), 16)
    full = prepare(model, data, create_selector("full"))
    features = full["mm_encoder_outputs"]["image"].pooler_output[0]
    beside = create_selector("grid").select([VisualQuery(features, (1, 8, 8), features[:1])], 16)[0].indices
    own = prepared["mm_encoder_outputs"]["image"].pooler_output[0]
    assert torch.equal(own[16:], features[beside])
    opened = open_family(model)
    reduced = resize_prompt(opened, data, read_prompt(opened, data), [(1, 4, 4)])
    encoded = opened.encode(reduced, "image")
    assert torch.equal(own[:16], encoded.features)
    if family == "qwen3_vl":
        levels = prepared["mm_encoder_outputs"]["image"].deepstack_features
        whole = full["mm_encoder_outputs"]["image"].deepstack_features
        for level, small_level, full_level in zip(levels, encoded.deepstack, whole, strict=True):
            assert torch.equal(level[0], torch.cat([small_level, full_level[0][beside]]))
    # places: an overview cell stands where the full cell nearest to its middle stands
    at = full["position_ids"][1:, 0][:, data["input_ids"][0] == IMAGE]  # [3, 64]
    wanted = torch.cat([nearest_cells(small, (1, 8, 8)), beside])
    assert torch.equal(prepared["position_ids"][1:, 0][:, prepared["input_ids"][0] == IMAGE], at[:, wanted])
    assert model(**prepared).logits.isfinite().all()


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("name", ["downsample", "half-and-half"])
@torch.no_grad()
def test_clips_and_mixed_prompts_are_made_smaller_frame_by_frame(family, name):
    model = tiny_model(family)
    for spec in (CLIP, MIXED):
        data = inputs_for(family, spec)
        prepared = prepare(model, data, create_selector(name), budget=12, on_error="raise")
        assert prepared["input_ids"].shape[1] < data["input_ids"].shape[1]
        assert model(**prepared).logits.isfinite().all()
        text = [row[(row != IMAGE) & (row != 6)].tolist() for row in (prepared["input_ids"][0], data["input_ids"][0])]
        assert text[0] == text[1]


def test_pictures_of_one_size_cannot_be_made_smaller():
    model, data = tiny_model("llava"), inputs_for("llava", SMALL)
    for name in ("downsample", "half-and-half", "downsample-auto", "crop"):
        with pytest.raises(ValueError, match="llava reads every picture at one size; use a selector that picks tokens"):
            prepare(model, data, create_selector(name), budget=4)
    with pytest.raises(ValueError, match="llava does not cut pictures into cells; use mode 'prune', picking tokens"):
        prepare(model, data, create_selector("pixelprune"), budget=4)
    with pytest.raises(ValueError, match="`selector` must pick tokens of an encoded picture, got 'downsample'"):
        create_selector("half-and-half", selector="downsample")
    data = inputs_for("qwen3_vl", [("text", 2), ("image", (1, 16, 16)), ("text", 2)])
    with pytest.raises(ValueError, match=r"kept .* tokens for a budget of 10; keep at most 10"):
        prepare(tiny_model("qwen3_vl"), data, create_selector("half-and-half", selector="full"), budget=16)
    with pytest.raises(ValueError, match="mode 'weight' scales by relevance"):
        prepare(tiny_model("qwen3_vl"), inputs_for("qwen3_vl", SMALL), create_selector("downsample"), mode="weight")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", sorted({*list_selectors()} - {"fastv"}))  # no `prepare`: see test_fastv.py
@torch.no_grad()
def test_every_selector_in_batches_and_on_several_pictures(family, name):
    model = tiny_model(family)
    made = {
        "arr-coc-untrained": {"config": ARRCOCConfig(hidden_size=HIDDEN)},
        "oracle": {"boxes": [[(0.2, 0.2, 0.6, 0.6)]] * 3},
    }
    selector = create_selector(name, **made.get(name, {}))
    if family == "llava" and isinstance(selector, PictureSelector | GlanceSelector | PixelSelector):
        return  # refused, see above
    specs = [TWO_IMAGES, SMALL, TEXT]
    together = prepare(model, inputs_for(family, *specs), selector, budget=5, on_error="raise")
    logits = model(**together).logits
    for row, spec in enumerate(specs):
        data = inputs_for(family, spec, seed=row)
        if name == "oracle":
            selector.boxes = [[(0.2, 0.2, 0.6, 0.6)]] * sum(kind == "image" for kind, _ in spec)
        alone = prepare(model, data, selector, budget=5, on_error="raise")
        kept = (alone["input_ids"] == IMAGE).sum()
        assert kept == (together["input_ids"][row] == IMAGE).sum()
        if name != "full":
            assert kept <= 5 * sum(kind == "image" for kind, _ in spec)
        length = alone["input_ids"].shape[1]
        torch.testing.assert_close(logits[row, -length:], model(**alone).logits[0], **TOLERANCE)


@pytest.mark.parametrize("family", QWEN)
def test_real_processor_output_reaches_the_selector_as_the_picture_it_was(family, tmp_path):
    processor = write_checkpoint(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    seen = []

    class Looking(ByScore):
        def select(self, queries, budget=None):
            seen.extend(queries)
            return super().select(queries, budget)

    data = processed(processor, [photo(96, 64)])
    prepare(model, data, Looking(), budget=4, chat=ChatTokens.from_tokenizer(processor.tokenizer))
    expected = torch.from_numpy(np.asarray(photo(96, 64), dtype=np.float32) / 255).permute(2, 0, 1)
    torch.testing.assert_close(seen[-1].picture[0], expected, atol=1e-5, rtol=0)
    asked = processor.tokenizer("what color is it?", return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    assert torch.equal(seen[-1].words, model.get_input_embeddings()(asked))


def test_random_keeps_other_cells_in_every_picture_and_the_same_again():
    pictures = torch.rand(40, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    queries = [VisualQuery(torch.zeros(64, 4), (1, 8, 8), torch.ones(1, 4), picture=picture) for picture in pictures]
    first, again, other = (
        [selection.indices.tolist() for selection in create_selector("random", seed=seed).select(queries, 16)]
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert len({tuple(cells) for cells in first}) > 30
    counts = torch.zeros(64).index_add(0, torch.tensor(first).flatten(), torch.ones(40 * 16))
    assert counts.min() > 0  # over many pictures every cell has its turn
    # the expected number is 10 of 40
    assert counts.max() < 25


def test_random_is_random_in_a_model_too():
    model = tiny_model("qwen3_vl")
    inputs = inputs_for("qwen3_vl", [("image", (1, 16, 16)), ("text", 3), ("image", (1, 16, 16)), ("text", 5)])
    with torch.no_grad(), attach(model, create_selector("random"), budget=16) as run:
        model(**inputs)
    (_, first), (_, second) = run.kept
    assert first.tolist() != second.tolist()
