"""Clips given as pictures, read as the video processors of Qwen-VL read them, but without torchvision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.image_utils import ChannelDimension, infer_channel_dimension_format
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.processing_utils import VideosKwargs
from transformers.utils.import_utils import is_torchcodec_available
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata, is_torchvision_video_decoding_available, make_batched_videos

from arr_coc.pixels.files import to_rgb
from arr_coc.pixels.patches import CLIP_MEAN, CLIP_STD, HALF, patches_from_picture

# Pictures a second of a clip about which nothing is said.
FPS = 2.0


class ClipSettings(VideosKwargs, total=False):
    """What a call may set, beside what any video processor may be told."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int


class Qwen2VLClips(VideoProcessorMixin):
    """Reads clips for Qwen2-VL and Qwen2.5-VL. Settings, inputs and outputs are those of `Qwen2VLVideoProcessor`.

    A clip is a list of pictures of one size, or an array `[T, H, W, 3]` or `[T, 3, H, W]` of bytes. All pictures are
    used, and are taken to come two a second, or at the rate that `fps` or `video_metadata` gives. They are sampled only
    if `do_sample_frames` is set, and either `video_metadata` gives their rate or `num_frames` is given.

    Args:
        settings: `size`, whose `shortest_edge` and `longest_edge` are the fewest and most pixels of a picture,
            `patch_size`, `merge_size`, `temporal_patch_size`, `image_mean`, `image_std` and so on.

    Example:

    ```python
    >>> from PIL import Image
    >>> from arr_coc.inference.processors.clips import Qwen2VLClips
    >>> read = Qwen2VLClips()([[Image.new("RGB", (448, 280))] * 5], return_tensors="pt")
    >>> read["video_grid_thw"].tolist()
    [[3, 20, 32]]

    ```
    """

    stands_for = "Qwen2VLVideoProcessor"
    valid_kwargs = ClipSettings
    model_input_names = ["pixel_values_videos", "video_grid_thw"]  # noqa: RUF012
    size: Any = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}  # noqa: RUF012
    resample: Any = Image.Resampling.BICUBIC
    image_mean: Any = CLIP_MEAN
    image_std: Any = CLIP_STD
    do_resize = do_rescale = do_normalize = True
    do_sample_frames = False
    patch_size = 14
    merge_size = temporal_patch_size = 2
    fps: float | None = None
    min_frames, max_frames = 4, 768
    cap_pixels_per_frame = False
    max_video_tokens = 128000

    def __init__(self, **settings: Any) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):  # of older checkpoints
            if name in given:
                others = {key: value for key, value in dict(given.get("size", self.size)).items() if key != name}
                given["size"] = {**others, edge: given.pop(name)}
        if "size" in given:
            given["size"] = {edge: pixels for edge, pixels in dict(given["size"]).items() if pixels is not None}
        super().__init__(**given)

    def preprocess(
        self,
        videos: Any,
        *,
        video_metadata: Any = None,
        fps: float | None = None,
        num_frames: int | None = None,
        do_sample_frames: bool | None = None,
        input_data_format: Any = None,
        return_metadata: bool | None = False,
        return_tensors: Any = None,
        **settings: Any,
    ) -> Any:
        """Patches and grid of each clip: `pixel_values_videos` `[patches, C * T * P * P]` and `video_grid_thw`."""
        changed = {name: value for name, value in settings.items() if value is not None}
        reader = type(self)(**{**vars(self), **changed})
        fps = fps or reader.fps
        sampling = reader.do_sample_frames if do_sample_frames is None else do_sample_frames
        clips = [_as_bytes(clip, input_data_format) for clip in _as_clips(videos)]
        rows, grids, described = [], [], []
        for clip, known in zip(clips, _flatten_metadata(video_metadata, len(clips)), strict=True):
            about = _describe(clip, fps or FPS, known)
            whole = about.total_num_frames == len(clip)
            if sampling and whole and (num_frames or "fps" in known):
                about.frames_indices = reader.sample_frames(about, num_frames, fps)
                clip = clip[about.frames_indices]
            patches, grid = reader._cut(clip)
            rows.append(patches)
            grids.append(grid)
            described.append(about)
        data: dict[str, Any] = {"pixel_values_videos": torch.cat(rows), "video_grid_thw": torch.tensor(grids)}
        if return_metadata:
            data["video_metadata"] = described
        return transformers.BatchFeature(data, tensor_type=return_tensors, skip_tensor_conversion=["video_metadata"])

    def sample_frames(self, metadata: Any, num_frames: int | None = None, fps: float | None = None) -> list[int]:
        """Indices of the pictures to use of a clip that has more."""
        total, group = metadata.total_num_frames, self.temporal_patch_size
        if num_frames is not None:
            wanted: float = round(num_frames / group) * group
        elif fps is not None:
            most = min(self.max_frames, total) // group * group
            wanted = min(max(total / metadata.fps * fps, self.min_frames), most) // group * group
        else:
            wanted = total
        if wanted > total:
            raise ValueError(f"`num_frames` must be at most the number of pictures, {total}, got {num_frames}")
        if not wanted:
            return list(range(total))
        return [int(index) for index in torch.arange(0, total, total / wanted).int()]

    def frame_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width to which the pictures of a clip are resized; the budget is one of pixels a picture."""
        cell, least, most = self.patch_size * self.merge_size, self.size["shortest_edge"], self.size["longest_edge"]
        if self.cap_pixels_per_frame:
            whole = int(self.max_video_tokens * cell * cell * 0.9)
            most = max(min(most, whole * self.temporal_patch_size // frames), int(least * 1.05))
        sides: tuple[int, int] = smart_resize(height, width, factor=cell, min_pixels=least, max_pixels=most)
        return sides

    def _cut(self, clip: np.ndarray) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches `[t * h * w, C * T * P * P]` of a clip `[T, H, W, 3]`, and their grid."""
        frames, height, width = clip.shape[:3]
        size = self.frame_size(frames, height, width) if self.do_resize else (height, width)
        if size != (height, width):
            pictures = [Image.fromarray(frame).resize(size[::-1], Image.Resampling(self.resample)) for frame in clip]
            clip = np.stack([np.asarray(picture) for picture in pictures])
        pixels = torch.from_numpy(np.ascontiguousarray(clip)).permute(0, 3, 1, 2).float()  # [T, 3, H, W]
        return patches_from_picture(
            pixels * self.rescale_factor if self.do_rescale else pixels,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            image_mean=self.image_mean if self.do_normalize else (0.0, 0.0, 0.0),
            image_std=self.image_std if self.do_normalize else (1.0, 1.0, 1.0),
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings, for transformers' own video processor too."""
        written: dict[str, Any] = super().to_dict()
        return {**written, "video_processor_type": self.stands_for}


class Qwen3VLClips(Qwen2VLClips):
    """Reads clips for Qwen3-VL and its relatives, as `Qwen3VLVideoProcessor` does.

    `shortest_edge` and `longest_edge` of `size` are the fewest and most pixels of all pictures of a clip together.
    """

    stands_for = "Qwen3VLVideoProcessor"
    size: Any = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}  # noqa: RUF012
    image_mean: Any = HALF
    image_std: Any = HALF
    do_sample_frames = True
    patch_size = 16
    fps: float | None = 2
    max_video_tokens = 768

    def sample_frames(self, metadata: Any, num_frames: int | None = None, fps: float | None = None) -> list[int]:
        """Indices of the pictures to use of a clip that has more."""
        total = metadata.total_num_frames
        if num_frames is None:
            wanted = int(total / metadata.fps * (fps or FPS))
            num_frames = min(max(wanted, self.min_frames), self.max_frames, total)
        return [int(index) for index in np.linspace(0, total - 1, num_frames).round()]

    def frame_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width to which the pictures of a clip are resized; the budget is one of all its pixels."""
        cell, least, most = self.patch_size * self.merge_size, self.size["shortest_edge"], self.size["longest_edge"]
        frames = max(frames, self.temporal_patch_size)  # a single picture is repeated
        if self.cap_pixels_per_frame:
            most = frames * max(min(self.max_video_tokens * cell * cell, most // frames), int(least * 1.05))
        if min(height, width) < cell:
            scale = max(cell / height, cell / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise ValueError(f"a picture's sides must differ by a factor of at most 200, got {height}x{width}")
        rows, columns = round(height / cell), round(width / cell)
        pixels = round(frames / self.temporal_patch_size) * self.temporal_patch_size * rows * columns * cell**2
        if pixels > most:
            scale = math.sqrt(frames * height * width / most)
            rows, columns = (max(1, math.floor(side / scale / cell)) for side in (height, width))
        elif pixels < least:
            scale = math.sqrt(least / (frames * height * width))
            rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
        return rows * cell, columns * cell


def check_file(path: Any, processor: Any = None) -> None:
    """Raise `ValueError` for a video file unless the processor, and this environment, can read it."""
    decoder = is_torchcodec_available() or is_torchvision_video_decoding_available()
    if processor is None or isinstance(processor.video_processor, Qwen2VLClips) or not decoder:
        raise ValueError(
            f"a video file, here {path}, needs torchvision and torchcodec; without them give a list of its pictures"
        )


def _as_clips(videos: Any) -> list[Any]:
    """The clips, each an array `[T, H, W, C]` or `[T, C, H, W]`, or a list of arrays `[H, W, C]` or `[C, H, W]`."""
    opened = _open_pictures(videos)
    try:
        clips: list[Any] = make_batched_videos(opened)
    except (TypeError, ValueError, IndexError):
        clips = []
    if not clips:
        raise ValueError("a clip must be a list of pictures of one size, or an array [T, H, W, 3] of bytes")
    return clips


def _open_pictures(videos: Any) -> Any:
    if isinstance(videos, list | tuple):
        return [_open_pictures(item) for item in videos]
    if isinstance(videos, str | Path):
        check_file(videos)
    return to_rgb(videos).image if isinstance(videos, Image.Image) else videos


def _as_bytes(clip: Any, layout: Any) -> np.ndarray:
    """A clip as bytes `[T, H, W, 3]`."""
    frames = np.stack([np.asarray(frame.cpu() if isinstance(frame, Tensor) else frame) for frame in clip])
    if frames.dtype != np.uint8 or frames.ndim != 4 or 3 not in (frames.shape[1], frames.shape[3]):
        raise ValueError(
            f"a clip must have shape [T, H, W, 3] or [T, 3, H, W] and bytes, got {frames.shape} of {frames.dtype}"
        )
    first = ChannelDimension(layout or infer_channel_dimension_format(frames)) == ChannelDimension.FIRST
    return frames.transpose(0, 2, 3, 1) if first else frames


def _flatten_metadata(given: Any, clips: int) -> list[dict[str, Any]]:
    """What is known of each clip."""
    if given is None:
        return [{} for _ in range(clips)]
    listed = given if isinstance(given, list) else [given]
    flat = [item for part in listed for item in (part if isinstance(part, list) else [part])]
    if len(flat) != clips:
        raise ValueError(f"`video_metadata` must describe each of {clips} clips, got {len(flat)} descriptions")
    return [{name: value for name, value in dict(item).items() if value is not None} for item in flat]


def _describe(clip: np.ndarray, fps: float, known: dict[str, Any]) -> VideoMetadata:
    """Number, rate and size of a clip's pictures, and their places in the clip from which they were taken."""
    frames, height, width = clip.shape[:3]
    facts = {"total_num_frames": frames, "fps": fps, "height": height, "width": width, **known}
    return VideoMetadata(**{**facts, "frames_indices": list(known.get("frames_indices", range(frames)))})
