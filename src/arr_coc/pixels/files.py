"""Read picture files as upright RGB: conversions are noted, unreadable files raise a one-line error."""

from __future__ import annotations

import base64
import io
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

MAX_IMAGE_PIXELS = 256_000_000
# What we promise to read, whatever a file is called. Pillow knows more, and hands some of it (EPS) to other programs.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF")

_limit_lock = threading.Lock()


@dataclass(frozen=True)
class Picture:
    """An RGB picture with notes on its conversion.

    Args:
        image (`PIL.Image.Image`): 8-bit RGB, upright.
        notes (`tuple[str, ...]`): conversions a user should know about.
    """

    image: Image.Image
    notes: tuple[str, ...] = ()


@contextmanager
def _limit(max_pixels: int) -> Iterator[None]:
    """Replace Pillow's pixel limit, which is lower and only warns, and silence its other warnings.

    Pillow checks the limit when it reads a header, also that of a picture inside a container.
    """
    with _limit_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        pillow_limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = max_pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = pillow_limit


def open_picture(path: str | Path, max_pixels: int = MAX_IMAGE_PIXELS) -> Picture:
    """Read a picture file as upright 8-bit RGB.

    Animations give their first frame, transparency is laid on white, and 16-bit, grayscale, palette and CMYK pictures
    are converted. A missing, damaged, empty or too large file raises `ValueError` or `OSError` with a one-line message.
    So do pipes, devices and sockets, which are not opened, and formats other than JPEG (also MPO), PNG, GIF, WebP, BMP,
    TIFF, PPM, ICO, JPEG 2000 and AVIF. The size is checked in the header, before anything is decoded.

    Example:

    ```python
    >>> from importlib.resources import files
    >>> from arr_coc.pixels.files import open_picture
    >>> open_picture(files("arr_coc") / "assets" / "astronaut.jpg").image.size
    (512, 512)

    ```
    """
    path = Path(path)
    try:
        exists = path.exists()
    except OSError:
        why = f"{str(path)[:40]}... is too long for a path; give base64 as 'data:image/png;base64,...'"
        raise OSError(why) from None
    if not exists:
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a picture file")
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is a pipe, a device or a socket; give a picture file")
    if about.st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes)")
    return _read(path, str(path), max_pixels)


def _read(file: Path | BinaryIO, name: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Picture:
    """Read a picture of one of our formats; errors call it by its name."""
    with _limit(max_pixels):
        try:
            with Image.open(file, formats=_known_formats()) as image:
                image.load()
                return to_rgb(image)
        except PermissionError:
            raise PermissionError(f"{name} cannot be read; check its permissions") from None
        except UnidentifiedImageError:
            known = ", ".join(name for name in FORMATS if name not in ("MPO", "DIB"))
            raise ValueError(f"{name} is not a picture in a known format; use {known}") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise ValueError(f"{name} is larger than the limit of {max_pixels:,} pixels; downsample it") from None
        except MemoryError:
            raise
        except Exception as error:  # decoders raise all kinds of errors on damaged data
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{name} is damaged and cannot be read ({why})") from None


def _read_data_url(url: str) -> Picture:
    """The picture in a URL such as `data:image/png;base64,...`."""
    begin, _, data = url.partition(",")
    try:
        if not begin.endswith(";base64"):
            raise ValueError
        content = base64.b64decode(data, validate=True)
    except ValueError:
        raise ValueError(f"a picture in a data URL must be base64, got {begin[:40]!r}") from None
    return _read(io.BytesIO(content), "the picture in a data URL")


@cache
def _known_formats() -> list[str]:
    """Those of our formats that this build of Pillow can read."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def to_rgb(image: Image.Image) -> Picture:
    """Convert a picture to upright 8-bit RGB, with notes on the conversion."""
    notes = []
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # MPO is how cameras store one photo with its preview
        notes.append(f"has {frames} frames, of which the first is used")
    # an upright RGB picture is not copied: it may be all that fits into memory
    upright = image if image.getexif().get(ExifTags.Base.Orientation, 1) == 1 else ImageOps.exif_transpose(image)
    if upright.mode == "F" or upright.mode.startswith("I"):
        kind = {"F": "floating point", "I": "32-bit"}.get(upright.mode, "16-bit")
        notes.append(f"was converted from {kind} grayscale")
        upright = Image.fromarray(_eight_bit(np.asarray(upright, dtype=np.float64), upright.mode))
    elif upright.has_transparency_data:
        notes.append("is transparent and was laid on white")
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    elif upright.mode != "RGB":
        notes.append(f"was converted from {upright.mode}")
    if upright.mode != "RGB" or frames > 1:  # a frame of an animation would go back to its file, which is closed
        upright = upright.convert("RGB")
    return Picture(upright, tuple(notes))


def _eight_bit(values: np.ndarray, mode: str) -> np.ndarray:
    values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if mode.startswith("I;16") or (low >= 0 and 255 < high <= 65535):
        scaled = values / 257
    elif low >= 0 and high <= 1:
        scaled = values * 255
    elif low >= 0 and high <= 255:
        scaled = values
    else:  # no known scale: stretch to the full range
        scaled = (values - low) * (255 / max(high - low, 1e-30))
    return scaled.round().astype(np.uint8)


def as_picture(picture: Any) -> Image.Image:
    """Upright 8-bit RGB picture from a path, a `data:` URL, a PIL image, or an array `[H, W, 3]` of bytes."""
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise ValueError(f"an array must be [H, W, 3] of uint8, got {list(picture.shape)} of {picture.dtype}")
        picture = Image.fromarray(picture)
    if isinstance(picture, Image.Image):
        return to_rgb(picture).image
    if isinstance(picture, str) and picture.startswith("data:"):
        return _read_data_url(picture).image
    if isinstance(picture, str) and "://" in picture:
        raise ValueError(f"{picture} is a URL; download the picture first and give its path")
    if isinstance(picture, str | Path):
        return open_picture(picture).image
    raise TypeError(f"a picture must be a path, a PIL image or an array of bytes, got {type(picture).__name__}")


def to_tensor(image: Image.Image) -> Tensor:
    """Picture `[1, 3, H, W]` in [0, 1], float32.

    Example:

    ```python
    >>> from PIL import Image
    >>> from arr_coc.pixels.files import to_tensor
    >>> to_tensor(Image.new("RGB", (4, 2), "white")).shape
    torch.Size([1, 3, 2, 4])

    ```
    """
    pixels = torch.from_numpy(np.array(image.convert("RGB")))  # [H, W, 3]
    return pixels.permute(2, 0, 1)[None].float().div_(255)
