"""The image processor that looks floats up in a table gives those of transformers, to the bit."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from arr_coc import load_processor
from arr_coc.inference.processors.pictures import Qwen2VLImageProcessorPil

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
SETTINGS = {"of Qwen2-VL": {}, "of Qwen3-VL": HALF, "other merge": {**HALF, "merge_size": 3, "temporal_patch_size": 3}}


def draw(width: int, height: int, mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng(width * height)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"do_resize": False},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 128},
        {"image_mean": [0.1, 0.2, 0.3]},
    ],
    ids=lambda call: "-".join(map(str, call)) or "as made",
)
def test_floats_are_those_of_transformers(settings, call):
    theirs, ours = transformers.Qwen2VLImageProcessorPil(**settings), Qwen2VLImageProcessorPil(**settings)
    cell = theirs.patch_size * theirs.merge_size
    pictures = [draw(8 * cell, 5 * cell), draw(8 * cell, 5 * cell, "L")]
    if call != {"do_resize": False}:
        pictures += [draw(333, 251), draw(64, 97, "RGBA")]
    expected, found = (reader(pictures, return_tensors="pt", **call) for reader in (theirs, ours))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        assert found[name].dtype == values.dtype, name


def test_floats_are_read_as_they_are():
    theirs, ours = transformers.Qwen2VLImageProcessorPil(**HALF), Qwen2VLImageProcessorPil(**HALF)
    picture = np.asarray(draw(128, 96), dtype=np.float32)
    expected, found = (reader(picture, return_tensors="np")["pixel_values"] for reader in (theirs, ours))
    assert np.array_equal(found, expected)


def test_load_processor_takes_it_and_saves_it_under_its_name(tmp_path):
    processor = load_processor("embedded")
    if type(processor.image_processor).__name__ != "Qwen2VLImageProcessorPil":
        pytest.skip("torchvision reads pictures here")
    assert type(processor.image_processor) is Qwen2VLImageProcessorPil
    processor.save_pretrained(tmp_path)
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert type(again) is transformers.Qwen2VLImageProcessorPil
    assert again.to_dict() == processor.image_processor.to_dict()
