"""Clips given as pictures, read without torchvision. What torchvision's processor gives was recorded once."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from simple_selector import TOLERANCE
from tiny_directory import make_processor, photo, write_checkpoint
from tiny_models import QWEN

from arr_coc import ARRCOCQwen, Selection, TokenSelector, load_processor, prepare
from arr_coc.inference.load import load_model
from arr_coc.inference.messages import check_messages, make_inputs, make_messages
from arr_coc.inference.processors.clips import Qwen2VLClips, Qwen3VLClips
from arr_coc.pixels.patches import picture_from_patches

BUDGET = {"size": {"shortest_edge": 128 * 128, "longest_edge": 16 * 256 * 256}}
CAPPED = {**BUDGET, "cap_pixels_per_frame": True}
SIZES = [(2, 200, 300), (5, 360, 640), (9, 500, 33), (70, 150, 200), (200, 256, 256)]
# rows and columns of patches that transformers 5.22.2 with torchvision 0.28 gives for these sizes
STOCK_GRIDS = [
    (Qwen2VLClips, {}, [(20, 28), (26, 46), (90, 6), (20, 28), (24, 24)]),
    (Qwen2VLClips, BUDGET, [(14, 22), (26, 46), (36, 4), (10, 14), (18, 18)]),
    (Qwen3VLClips, {}, [(14, 20), (18, 32), (32, 2), (4, 6), (2, 2)]),
    (Qwen3VLClips, BUDGET, [(12, 18), (22, 40), (32, 2), (6, 8), (4, 4)]),
    (Qwen3VLClips, CAPPED, [(12, 18), (22, 40), (32, 2), (6, 8), (8, 8)]),
]
# bytes of a few pixels of three resized pictures
STOCK_PIXELS = [
    (Qwen2VLClips, 1, (2, 6, 8), [255, 226, 18, 239, 164, 88, 15, 82, 88, 155, 65, 108, 241, 112, 44, 137, 195, 80]),
    (Qwen3VLClips, 3, (2, 4, 6), [255, 226, 18, 150, 37, 208, 254, 109, 134]),
]
# number of pictures, their rate, the rate asked for, and the pictures that are taken
STOCK_SAMPLES = [
    (Qwen2VLClips, 49, 24, 2, [0, 12, 24, 36]),
    (Qwen2VLClips, 49, 24, 5, [0, 4, 9, 14, 19, 24, 29, 34, 39, 44]),
    (Qwen2VLClips, 7, 2, 1, [0, 1, 3, 5]),
    (Qwen3VLClips, 49, 24, None, [0, 16, 32, 48]),
    (Qwen3VLClips, 7, 2, 1, [0, 2, 4, 6]),
    (Qwen3VLClips, 120, 30, 2, [0, 17, 34, 51, 68, 85, 102, 119]),
]
QUESTION = "what color is it?"


def film(frames, width=64, height=48):
    return [photo(width, height, seed) for seed in range(frames)]


def asked(clip, **about):
    content = [{"type": "video", "video": clip, **about}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def read(processor, clip, **options):
    return processor.apply_chat_template(
        asked(clip), tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt", **options
    )


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module", params=QWEN, name="family")
def choose_family(request):
    return request.param


@pytest.fixture(scope="module", name="processor")
def open_processor(family):
    return make_processor(family)


@pytest.mark.parametrize(("cls", "settings", "grids"), STOCK_GRIDS)
def test_pictures_get_the_sizes_that_torchvisions_processor_gives(cls, settings, grids):
    reader = cls(**settings)
    sizes = [reader.frame_size(*size) for size in SIZES]
    assert [(height // reader.patch_size, width // reader.patch_size) for height, width in sizes] == grids


@pytest.mark.parametrize(("cls", "frames", "grid", "pixels"), STOCK_PIXELS)
def test_resized_pixels_are_those_of_torchvisions_processor(cls, frames, grid, pixels):
    reader = cls(size={"shortest_edge": 64, "longest_edge": 100 * 100 * frames})

    def few(clip):
        out = reader([clip], return_tensors="pt")
        assert out["video_grid_thw"].tolist() == [list(grid)]
        side = reader.patch_size
        rows = out["pixel_values_videos"].view(-1, 3, 2, side, side)[::17, :, 1, side // 2, 3]
        return ((rows * torch.tensor(reader.image_std) + torch.tensor(reader.image_mean)) * 255).flatten()

    wanted = torch.tensor(pixels, dtype=torch.float)
    assert (few(film(3, 150, 110)) - wanted).abs().max() < 1.5
    assert (few(film(3, 150, 110)[::-1]) - wanted).abs().max() > 20


@pytest.mark.parametrize(("cls", "frames", "fps", "wanted", "taken"), STOCK_SAMPLES)
def test_pictures_of_a_known_rate_are_sampled_as_by_torchvisions_processor(cls, frames, fps, wanted, taken):
    clip = np.zeros((frames, 32, 32, 3), np.uint8)
    reader = cls(size={"shortest_edge": 64, "longest_edge": 32 * 32 * 200})
    options = {"fps": wanted, "do_sample_frames": True, "return_metadata": True}
    out = reader([clip], video_metadata=[{"fps": fps}], **options)
    assert out["video_metadata"][0].frames_indices == taken
    assert len(out["pixel_values_videos"]) == len(taken) // 2 * out["video_grid_thw"][0, 1:].prod()
    out = reader([clip], **options)
    assert out["video_metadata"][0].frames_indices == list(range(frames))


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_the_pictures_come_back_and_the_last_is_repeated(processor, frames):
    clip = film(frames)
    out = processor(text=["<|vision_start|><|video_pad|><|vision_end|>"], videos=[clip], return_tensors="pt")
    reader = processor.video_processor
    cut = {name: getattr(reader, name) for name in ("patch_size", "image_mean", "image_std")}
    [restored] = picture_from_patches(out["pixel_values_videos"], out["video_grid_thw"], **cut)
    wanted = torch.from_numpy(np.stack([np.asarray(frame) for frame in clip + clip[-1:] * (frames % 2)]))
    torch.testing.assert_close(restored * 255, wanted.permute(0, 3, 1, 2).float(), atol=1e-3, rtol=0)
    pads = int((out["input_ids"] == processor.video_token_id).sum())
    assert pads == out["video_grid_thw"].prod() // reader.merge_size**2


def test_pictures_and_arrays_are_the_same_clip(processor):
    clip = film(3, 100, 60)
    array = np.stack([np.asarray(frame) for frame in clip])
    wanted = read(processor, clip)
    for other in (array, torch.from_numpy(array).permute(0, 3, 1, 2), list(array), [f.convert("RGBA") for f in clip]):
        assert same(read(processor, other), wanted)
    assert not same(read(processor, array[::-1].copy()), wanted)
    assert same(make_inputs(processor, [make_messages(asked(clip), None)], "cpu"), wanted)


def test_time_is_told_as_the_family_tells_it(processor, family):
    def times(out):
        if family == "qwen2_5_vl":
            return out["second_per_grid_ts"].tolist()
        text = processor.tokenizer.decode(out["input_ids"][0]).replace("<|video_pad|>", "")
        return text.split("user\n")[1].split(QUESTION)[0]

    def stamps(*seconds):
        inside = "".join(f"<{second} seconds><|vision_start|><|vision_end|>" for second in seconds)
        return f"<|vision_start|>{inside}<|vision_end|>"

    clip = film(5)
    found = [
        times(read(processor, clip)),
        times(read(processor, clip, processor_kwargs={"fps": 4.0})),
        times(make_inputs(processor, [make_messages(asked(clip, fps=4), None)], "cpu")),
        times(read(processor, clip, processor_kwargs={"video_metadata": [{"fps": 1}], "do_sample_frames": False})),
    ]
    wanted = {
        "qwen2_vl": [stamps()] * 4,
        "qwen2_5_vl": [[1.0], [0.5], [0.5], [2.0]],
        "qwen3_vl": [stamps(0.2, 1.2, 2.0), *[stamps(0.1, 0.6, 1.0)] * 2, stamps(0.5, 2.5, 4.0)],
    }
    assert found == wanted[family]


def test_a_batch_reads_clips_and_pictures_in_their_order(processor):
    chats = [asked(film(3)), make_messages(photo(64, 64, 7), QUESTION), asked(film(4, 96, 64), fps=8)]
    out = make_inputs(processor, [make_messages(chat, None) for chat in chats], "cpu", torch.bfloat16)
    alone = [make_inputs(processor, [make_messages(chat, None)], "cpu") for chat in chats[::2]]
    assert out["pixel_values_videos"].dtype == torch.bfloat16
    assert torch.equal(out["video_grid_thw"], torch.cat([one["video_grid_thw"] for one in alone]))
    pixels = torch.cat([one["pixel_values_videos"] for one in alone])
    assert torch.equal(out["pixel_values_videos"], pixels.to(torch.bfloat16))
    for row, one in zip((0, 2), alone, strict=True):
        kept = out["attention_mask"][row].bool()
        assert torch.equal(out["input_ids"][row][kept], one["input_ids"][0])


def test_it_is_saved_and_opened_with_its_settings(processor, family, tmp_path):
    write_checkpoint(tmp_path, family)
    wanted = read(processor, film(3, 100, 60))
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    name = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
    assert settings["video_processor"]["video_processor_type"] == name
    opened = type(processor).from_pretrained(tmp_path)
    for other in (opened, pickle.loads(pickle.dumps(opened))):
        assert same(read(other, film(3, 100, 60)), wanted)
    smaller = settings["video_processor"] | {"size": {"shortest_edge": 64, "longest_edge": 2048}}
    path.write_text(json.dumps({**settings, "video_processor": smaller}))
    assert not same(read(type(processor).from_pretrained(tmp_path), film(3, 100, 60)), wanted)
    path.write_text(json.dumps({name: value for name, value in settings.items() if name != "video_processor"}))
    assert same(read(type(processor).from_pretrained(tmp_path), film(3, 100, 60)), wanted)


def test_settings_of_older_checkpoints_are_understood():
    older = Qwen2VLClips(min_pixels=3136, max_pixels=12845056, size={"min_pixels": 1, "max_pixels": 2})
    assert older.size == {"shortest_edge": 3136, "longest_edge": 12845056}


def test_what_is_no_clip_is_refused_in_one_line(processor):
    reader = processor.video_processor
    for clip, reason in [
        (
            ["film.mp4"],
            r"a video file, here film\.mp4, needs torchvision and torchcodec; .* give a list of its pictures",
        ),
        ([[photo(64, 48), photo(48, 64)]], "a clip must be a list of pictures of one size"),
        ([[]], "a clip must be a list of pictures of one size"),
        ([np.zeros((2, 8, 8, 3), np.float32)], r"got \(2, 8, 8, 3\) of float32"),
        ([np.zeros((2, 8, 8, 4), np.uint8)], r"must have shape \[T, H, W, 3\]"),
    ]:
        with pytest.raises(ValueError, match=f"^.*{reason}.*$"):
            reader(clip)
    with pytest.raises(ValueError, match="must describe each of 1 clips, got 2 descriptions"):
        reader([film(2)], video_metadata=[{"fps": 2}, {"fps": 2}])
    with pytest.raises(ValueError, match="got 48x64 and 64x48"):
        make_messages(asked([photo(64, 48), photo(48, 64)]), None)
    with pytest.raises(ValueError, match="must have its pictures, or a file"):
        check_messages(make_messages(asked(None), None), processor)
    for part in ({"video": "film.mp4"}, {"type": "video", "path": "film.mp4"}):
        with pytest.raises(ValueError, match=r"a video file, here film\.mp4"):
            check_messages(make_messages([{"role": "user", "content": [part]}], None), processor)
    check_messages(make_messages(asked(film(2)), None), processor)
    with pytest.raises(ValueError, match="this model reads no clips"):
        check_messages(make_messages(asked(film(2)), None), SimpleNamespace())


def test_other_things_in_place_of_pictures_are_refused_in_one_line(tmp_path):
    pixels = np.zeros((2, 48, 64, 3), np.uint8)
    for clip, error, reason in [
        (tmp_path, ValueError, f"got the folder {tmp_path}"),
        (str(tmp_path), ValueError, f"got the folder {tmp_path}"),
        ([], ValueError, "at least one picture, got none"),
        (pixels[:0], ValueError, r"got \(0, 48, 64, 3\)"),
        (pixels[0], ValueError, r"got \(48, 64, 3\)"),
        (torch.from_numpy(pixels[0]), ValueError, r"got \(48, 64, 3\)"),
        (photo(64, 48), TypeError, "a list of pictures, an array or a video file, got Image"),
        (5, TypeError, "got int"),
        ({"a": photo(64, 48)}, TypeError, "got dict"),
    ]:
        with pytest.raises(error, match=f"^a clip must .*{reason}.*$"):
            make_messages(asked(clip), None)
    for clip in (pixels, torch.from_numpy(pixels), film(2), tuple(film(2)), iter(film(2))):
        [message] = make_messages(asked(clip), None)
        assert len(message["content"][0]["video"]) == 2


def test_the_rate_of_a_clip_is_a_positive_number(processor):
    def ask(fps):
        return make_inputs(processor, [make_messages(asked(film(4), fps=fps), None)], "cpu")

    for fps in (0, -1, float("nan"), float("inf"), "2", True):
        with pytest.raises(ValueError, match=f"`fps` of a clip must be a positive number, got {fps!r}"):
            ask(fps)
    assert same(ask(None), ask(2))
    assert same(ask(np.float32(4)), ask(4))


def test_a_list_of_pictures_is_no_clip(processor):
    out = make_inputs(processor, [make_messages(film(3), QUESTION)], "cpu")
    assert len(out["image_grid_thw"]) == 3
    assert "video_grid_thw" not in out


class FirstPictures(TokenSelector):
    """Keeps some tokens of a clip's first group of pictures."""

    def select(self, queries, budget=None):
        return [Selection(indices=torch.arange(0, query.grid[1] * query.grid[2], 3)) for query in queries]


@torch.no_grad()
def test_a_clip_is_pruned_end_to_end(processor, family, tmp_path):
    write_checkpoint(tmp_path, family)
    model = load_model(tmp_path)
    clip = film(5, 48, 32)
    later, sooner = [*clip[:4], photo(48, 32, 9)], [photo(48, 32, 9), *clip[1:]]

    def logits(frames, selector):
        inputs = make_inputs(processor, [make_messages(asked(frames), None)], "cpu")
        return model(**(prepare(model, inputs, selector) if selector else inputs)).logits[0, -1]

    pruned = logits(clip, FirstPictures())
    torch.testing.assert_close(
        logits(later, FirstPictures()), pruned, **TOLERANCE
    )  # nothing of the last pictures stays
    for frames, selector in ((sooner, FirstPictures()), (later, None), (clip, None)):
        assert (logits(frames, selector) - pruned).abs().max() > 1e-2
    vlm = ARRCOCQwen(model, processor, FirstPictures())
    answer = vlm.answer(asked(clip), max_new_tokens=2)
    assert (answer.tokens.full, answer.tokens.used) == (3 * 24, 8)
    assert vlm.answer(asked(clip), mode="full", max_new_tokens=2).tokens.used == 3 * 24


def test_the_embedded_model_reads_clips():
    vlm = ARRCOCQwen.from_pretrained("embedded", "grid")
    inputs = make_inputs(vlm.processor, [make_messages(asked(film(16, 256, 256)), None)], "cpu")
    assert inputs["video_grid_thw"].tolist() == [[8, 16, 16]]
    answer = vlm.answer(asked(film(4, 128, 128)), budget=0.25, max_new_tokens=1)
    assert (answer.tokens.full, answer.tokens.used) == (2 * 16, 8)


def test_the_next_embedded_model_reads_clips_within_its_budget(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes" / "embedded")
    from parts import make_processor as make_next
    from parts import save_processor

    processor = make_next(1024)
    reader = processor.video_processor
    for frames, side in ((2, 704), (16, 256), (60, 128), (200, 128)):
        assert reader.frame_size(frames, 800, 800) == (side, side)
    assert reader.frame_size(2, 50, 50) == (96, 96)  # 128x128 pixels of both pictures together
    save_processor(processor, tmp_path)
    opened = type(processor).from_pretrained(tmp_path)
    assert same(read(opened, film(3, 256, 256)), read(processor, film(3, 256, 256)))
    assert opened.video_processor.frame_size(200, 800, 800) == (128, 128)


def test_an_opened_directory_reads_the_same_with_torchvision_and_without(processor, family, tmp_path):
    """Where torchvision is installed, this compares the two."""
    write_checkpoint(tmp_path, family)
    chats = [make_messages(asked(film(5)), None)]
    opened, ours = (make_inputs(reader, chats, "cpu") for reader in (load_processor(tmp_path), processor))
    assert opened.keys() == ours.keys()
    assert torch.equal(opened["input_ids"], ours["input_ids"])
    assert torch.equal(opened["video_grid_thw"], ours["video_grid_thw"])
    torch.testing.assert_close(opened["pixel_values_videos"], ours["pixel_values_videos"], atol=1e-5, rtol=0)


def test_a_clip_stands_where_a_picture_may(processor):
    clip = {"type": "video", "video": film(3), "fps": 4}
    inputs = [
        make_inputs(processor, [make_messages(shown, QUESTION)], "cpu")
        for shown in (clip, [clip], {"video": np.stack([np.asarray(frame) for frame in film(3)]), "fps": 4})
    ]
    wanted = make_inputs(processor, [make_messages(asked(film(3), fps=4), None)], "cpu")
    assert all(same(one, wanted) for one in inputs)
    both = make_inputs(processor, [make_messages([photo(64, 64), clip], QUESTION)], "cpu")
    assert (len(both["image_grid_thw"]), len(both["video_grid_thw"])) == (1, 1)
    with pytest.raises(ValueError, match="there is no question"):
        make_messages(clip, None)


@torch.no_grad()
def test_a_conversation_about_a_clip_processes_and_encodes_it_once(processor, family, tmp_path, monkeypatch):
    write_checkpoint(tmp_path, family)
    vlm = ARRCOCQwen(load_model(tmp_path), processor, FirstPictures())
    clip, still = {"type": "video", "video": film(5, 160, 96), "fps": 4}, photo(96, 64, 7)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "mode": "prune"}
    texts = ["what color is it?", "what is this?"]
    for shown in (clip, [clip, still]):
        alone = [vlm.answer(shown, text, **options) for text in texts]
        pixels, plain = [], Qwen2VLClips._cut
        with monkeypatch.context() as patch:
            patch.setattr(Qwen2VLClips, "_cut", lambda self, clip: pixels.append(clip.size) or plain(self, clip))  # noqa: B023
            talk = vlm.look(shown, remember=False)
            together = [talk.ask(text, **options) for text in texts]
        assert talk.encoder_calls == (1 if shown is clip else 2)
        assert pixels[1] < pixels[0]  # a small copy holds the place
        for one, other in zip(alone, together, strict=True):
            assert (one.text, one.tokens) == (other.text, other.tokens)
            assert all(np.array_equal(a[1], b[1]) for a, b in zip(one.kept, other.kept, strict=True))
    backwards = {**clip, "video": clip["video"][::-1]}
    assert vlm.answer(backwards, texts[0], **options).text != vlm.answer(clip, texts[0], **options).text
    talk = vlm.look(clip)
    for text in texts:
        talk.ask(text, **options)
    assert len([part for turn in talk.turns for part in turn["content"] if part["type"] == "video"]) == 1
    for shown, reason in (({"video": "film.mp4"}, "a video file, here film.mp4"), (asked(film(2)), "got messages")):
        with pytest.raises(ValueError, match=reason):
            vlm.look(shown)
    with pytest.raises(ValueError, match="mode 'saccade' takes still pictures only"):
        talk.ask(texts[0], mode="saccade")
