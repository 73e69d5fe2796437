import numpy as np
import pytest
import torch
import transformers
from drawing import noise

from arr_coc import patches_from_picture, picture_from_patches
from arr_coc.pixels.patches import CLIP_MEAN, CLIP_STD, HALF

FAMILIES = {14: (CLIP_MEAN, CLIP_STD), 16: (HALF, HALF)}


def keywords(patch):
    mean, std = FAMILIES[patch]
    return {"patch_size": patch, "image_mean": mean, "image_std": std}


@pytest.mark.parametrize("patch", [14, 16])
def test_patches_are_those_of_the_qwen_processor(patch):
    mean, std = FAMILIES[patch]
    cell = 2 * patch
    pixels = np.random.default_rng(0).integers(0, 256, (3 * cell, 5 * cell, 3), dtype=np.uint8)
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=patch, image_mean=mean, image_std=std, size={"shortest_edge": 1, "longest_edge": 10**9}
    )
    theirs = processor(images=[pixels], return_tensors="pt")
    picture = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    rows, grid = patches_from_picture(picture, **keywords(patch))
    assert [list(grid)] == theirs["image_grid_thw"].tolist() == [[1, 6, 10]]
    torch.testing.assert_close(rows, theirs["pixel_values"])
    [restored] = picture_from_patches(theirs["pixel_values"], theirs["image_grid_thw"], **keywords(patch))
    torch.testing.assert_close(restored[0], picture, atol=1e-6, rtol=0)
    assert torch.equal(restored[0], restored[1])


@pytest.mark.parametrize("patch", [14, 16])
def test_several_pictures_and_clips_come_back(patch):
    cell = 2 * patch
    originals = [noise(1, cell, 3 * cell), noise(2, 4 * cell, 2 * cell), torch.rand(5, 3, 2 * cell, cell)]
    parts = [patches_from_picture(picture, **keywords(patch)) for picture in originals]
    grids = torch.tensor([grid for _, grid in parts])
    assert grids[:, 0].tolist() == [1, 1, 3]  # five frames are three groups of two
    restored = picture_from_patches(torch.cat([rows for rows, _ in parts]), grids, **keywords(patch))
    for original, back in zip(originals, restored, strict=True):
        torch.testing.assert_close(back[: original.shape[0]], original, atol=1e-6, rtol=0)
    assert torch.equal(restored[2][5], restored[2][4])


def test_a_wrong_patch_order_would_be_seen():
    picture = noise(3, 64, 64)
    rows, grid = patches_from_picture(picture)
    [restored] = picture_from_patches(rows.flip(0), [grid])
    assert not torch.allclose(restored[0], picture[0], atol=0.1)


def test_bfloat16_patches_keep_their_type_and_range():
    rows, grid = patches_from_picture(noise(4, 64, 64).bfloat16())
    [restored] = picture_from_patches(rows, [grid])
    assert rows.dtype == restored.dtype == torch.bfloat16
    assert bool(((restored >= 0) & (restored <= 1)).all())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: patches_from_picture(torch.rand(3, 60, 64)), "multiples of 32 pixels, got 60x64"),
        (lambda: patches_from_picture(torch.rand(1, 64, 64)), r"\[frames, 3, H, W\]"),
        (lambda: picture_from_patches(torch.rand(16, 100), [(1, 4, 4)]), r"\[patches, 1536\]"),
        (lambda: picture_from_patches(torch.rand(15, 1536), [(1, 4, 4)]), "has 16 patches, `pixel_values` 15"),
        (lambda: picture_from_patches(torch.rand(15, 1536), [(1, 3, 5)]), "multiples of the merge size 2"),
    ],
)
def test_bad_shapes_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
