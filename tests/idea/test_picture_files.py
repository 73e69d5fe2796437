import base64
import io
import os
import socket
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, ImageFile

from arr_coc.data.example import MissingPicture, open_file
from arr_coc.inference.messages import make_messages
from arr_coc.pixels.files import FORMATS, MAX_IMAGE_PIXELS, Picture, as_picture, open_picture, to_tensor

SIZE = (17, 12)
NOISE = np.random.default_rng(0).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)


def noise_image():
    return Image.fromarray(NOISE)


def encode(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write(folder, data, name="picture.bin"):
    path = folder / name
    path.write_bytes(data)
    return path


def pixels(picture):
    return np.asarray(picture.image)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks):
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


def png_header(width, height):
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


def ico(inner):
    """An icon whose directory says 16x16 and whose one picture is `inner`."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22) + inner


def bmp(width, height):
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header


def exif_bytes(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    exif[270] = "a description"
    return exif


# --- what cannot be read ---------------------------------------------------------------------------------------------


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.png does not exist"):
        open_picture(tmp_path / "nothing.png")


def test_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        open_picture(tmp_path)


def test_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is empty \(0 bytes\)"):
        open_picture(write(tmp_path, b""))


def test_random_bytes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a picture in a known format; use JPEG, PNG"):
        open_picture(write(tmp_path, np.random.default_rng(1).bytes(5000)))


def test_unreadable_file_is_refused_with_its_name(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, encode(noise_image(), "PNG"))
    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(PermissionError, match=rf"{path.name} cannot be read"):
        open_picture(path)


@pytest.mark.parametrize("name", ["picture.png", "picture.eps"])
def test_postscript_never_reaches_another_program(tmp_path, monkeypatch, name):
    reached = []

    def run_program(*inputs, **options):
        reached.append(inputs)
        return noise_image().im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run_program)
    path = write(tmp_path, encode(noise_image(), "EPS"), name)
    with Image.open(path) as control:
        control.load()
    assert len(reached) == 1  # Pillow alone runs it
    with pytest.raises(ValueError, match="is not a picture in a known format; use JPEG, PNG"):
        open_picture(path)
    assert len(reached) == 1


def as_base64(data):
    return base64.b64encode(data).decode()


# the names that transformers and OpenAI give a picture in a message
PARTS = {
    "image": lambda data, path: {"type": "image", "image": f"data:image/png;base64,{as_base64(data)}"},
    "url": lambda data, path: {"type": "image", "url": f"data:image/png;base64,{as_base64(data)}"},
    "base64": lambda data, path: {"type": "image", "base64": as_base64(data)},
    "path": lambda data, path: {"type": "image", "path": str(path)},
    "image_url": lambda data, path: {"type": "image_url", "image_url": {"url": str(path)}},
    "image_url, data": lambda data, path: {"type": "image_url", "image_url": f"data:;base64,{as_base64(data)}"},
}


@pytest.mark.parametrize("name", PARTS)
def test_pictures_in_messages_are_held_to_the_promised_formats(tmp_path, monkeypatch, name):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *inputs, **options: pytest.fail("reached"))

    def open_part(kind):
        data = encode(noise_image(), kind)
        part = PARTS[name](data, write(tmp_path, data, "picture.png"))
        [message] = make_messages([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}], None)
        return message["content"][0]

    with pytest.raises(ValueError, match="is not a picture in a known format; use JPEG, PNG"):
        open_part("EPS")
    opened = open_part("PNG")
    assert opened["type"] == "image"
    assert opened["image"].tobytes() == noise_image().tobytes()


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:image/png;base64,a*b", "data:"])
def test_a_data_url_that_cannot_be_decoded_is_refused(url):
    with pytest.raises(ValueError, match="a picture in a data URL must be base64, got 'data:"):
        as_picture(url)


def test_base64_in_place_of_a_path_is_refused_with_what_to_do():
    with pytest.raises(OSError, match="is too long for a path; give base64 as 'data:image/png;base64,") as caught:
        as_picture(as_base64(bytes(10_000)))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("kind", ["TGA", "PCX", "SGI", "IM"])
def test_formats_that_are_not_promised_are_refused(tmp_path, kind):
    data = encode(noise_image(), kind)
    assert Image.open(io.BytesIO(data)).format == kind
    with pytest.raises(ValueError, match="is not a picture in a known format"):
        open_picture(write(tmp_path, data, "picture.png"))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_promised_format_is_read_whatever_its_name(tmp_path, kind):
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this build of Pillow writes no {kind}")
    image = noise_image().resize((32, 32))
    options = {"append_images": [image], "save_all": True} if kind == "MPO" else {}
    assert open_picture(write(tmp_path, encode(image, kind, **options))).image.size == (32, 32)


@pytest.fixture(params=["pipe", "device", "socket"])
def no_file(request, tmp_path):
    if request.param == "device":
        yield "/dev/zero"
        return
    path = tmp_path / "picture.png"
    with socket.socket(socket.AF_UNIX) as server:
        if request.param == "pipe":
            os.mkfifo(path)
        else:
            server.bind(str(path))
        yield path


def test_pipes_devices_and_sockets_are_refused_without_opening(no_file, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *inputs, **options: pytest.fail("was opened"))
    with ThreadPoolExecutor(1) as pool:  # a pipe without a writer waits forever
        refused = pool.submit(open_picture, no_file).exception(timeout=20)
        missing = pool.submit(open_file, Path(no_file)).exception(timeout=20)
    assert isinstance(refused, ValueError)
    assert str(refused) == f"{no_file} is a pipe, a device or a socket; give a picture file"
    assert isinstance(missing, MissingPicture)
    assert str(missing) == str(refused)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_truncated_file_is_refused_and_the_whole_one_is_not(tmp_path, kind):
    data = encode(noise_image().resize((170, 120)), kind)
    with pytest.raises(ValueError, match="is damaged and cannot be read") as caught:
        open_picture(write(tmp_path, data[: len(data) // 2]))
    assert len(str(caught.value).splitlines()) == 1
    assert open_picture(write(tmp_path, data)).image.size == (170, 120)


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0)])
def test_picture_without_pixels_is_refused(tmp_path, size):
    data = png(png_header(*size), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    with pytest.raises(ValueError, match=r"picture\.bin") as caught:
        open_picture(write(tmp_path, data))
    assert len(str(caught.value).splitlines()) == 1


def test_handmade_png_is_valid_otherwise(tmp_path):
    rows = zlib.compress(b"\x00\xff\x00\x00\x00\xff\x00")  # one row, filter 0: red, green
    picture = open_picture(write(tmp_path, png(png_header(2, 1), (b"IDAT", rows), (b"IEND", b""))))
    assert pixels(picture).tolist() == [[[255, 0, 0], [0, 255, 0]]]


# --- the pixel limit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png(png_header(100_000, 100_000), (b"IDAT", b"")), id="png"),
        pytest.param(bmp(100_000, 100_000), id="bmp"),
    ],
)
def test_huge_picture_is_refused_from_its_header_by_the_default_limit(tmp_path, monkeypatch, data):
    decoded = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: decoded.append(self.size))
    with pytest.raises(ValueError, match=r"\b256,000,000\b"):
        open_picture(write(tmp_path, data))
    assert decoded == []
    assert MAX_IMAGE_PIXELS == 256_000_000


def test_picture_inside_an_icon_is_held_to_the_limit_before_it_is_decoded(tmp_path, monkeypatch):
    decoded = []
    load = ImageFile.ImageFile.load

    def note(self):
        decoded.append(self.size)
        return load(self)

    inner = encode(Image.new("RGB", (300, 200), "red"), "PNG")
    path = write(tmp_path, ico(inner))
    monkeypatch.setattr(ImageFile.ImageFile, "load", note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a size that differs from the directory's
        with pytest.raises(ValueError, match=r"\b1,000\b"):
            open_picture(path, max_pixels=1000)
    assert (300, 200) not in decoded


def test_limit_is_the_largest_size_allowed(tmp_path):
    path = write(tmp_path, encode(noise_image(), "PNG"))
    count = SIZE[0] * SIZE[1]
    assert open_picture(path, max_pixels=count).image.size == SIZE
    with pytest.raises(ValueError, match=rf"\b{count - 1}\b"):
        open_picture(path, max_pixels=count - 1)


@pytest.mark.parametrize("pillow_limit", [SIZE[0] * SIZE[1] - 1, 50])
def test_picture_above_pillows_limit_and_below_ours_opens_without_a_warning(tmp_path, monkeypatch, pillow_limit):
    path = write(tmp_path, encode(noise_image(), "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
    with pytest.raises((Image.DecompressionBombWarning, Image.DecompressionBombError)):
        Image.open(io.BytesIO(path.read_bytes()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        picture = open_picture(path)
    assert seen == []
    assert np.array_equal(pixels(picture), NOISE)
    assert pillow_limit == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("case", ["good", "too large", "damaged", "unknown", "missing"])
def test_pillows_own_limit_is_restored(tmp_path, monkeypatch, case):
    good = encode(noise_image(), "PNG")
    data = {"damaged": good[:-200], "unknown": b"no picture at all"}.get(case, good)
    path = write(tmp_path, data) if case != "missing" else tmp_path / "missing.png"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_345)
    if case == "good":
        open_picture(path)
    else:
        with pytest.raises((ValueError, OSError)):
            open_picture(path, max_pixels=5 if case == "too large" else 10_000)
    assert Image.MAX_IMAGE_PIXELS == 12_345


def test_pillows_own_limit_is_restored_when_threads_read_at_once(tmp_path, monkeypatch):
    path = write(tmp_path, encode(noise_image(), "PNG"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_345)
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda _: open_picture(path).image.size, range(64)))
    assert sizes == [SIZE] * 64
    assert Image.MAX_IMAGE_PIXELS == 12_345


# --- what is converted -----------------------------------------------------------------------------------------------


def test_plain_rgb_is_unchanged_and_without_notes(tmp_path):
    picture = open_picture(write(tmp_path, encode(noise_image(), "PNG")))
    assert picture.image.mode == "RGB"
    assert picture.notes == ()
    assert np.array_equal(pixels(picture), NOISE)


def test_path_may_be_a_string(tmp_path):
    assert open_picture(str(write(tmp_path, encode(noise_image(), "PNG")))).image.size == SIZE


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animation_gives_its_first_frame_and_says_so(tmp_path, kind):
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    picture = open_picture(write(tmp_path, data))
    assert (pixels(picture) == (255, 0, 0)).all()
    assert any("has 3 frames, of which the first" in note for note in picture.notes)
    still = open_picture(write(tmp_path, encode(frames[0], kind)))
    assert not any("frames" in note for note in still.notes)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grayscale_is_scaled_to_eight(tmp_path, kind):
    values = np.array([[0, 257, 514, 25_700, 32_768, 65_535]], dtype=np.uint16)
    picture = open_picture(write(tmp_path, encode(Image.fromarray(values), kind)))
    assert pixels(picture).tolist() == [[[v, v, v] for v in (0, 1, 2, 100, 128, 255)]]
    assert any("16-bit" in note for note in picture.notes)


@pytest.mark.parametrize(("brightest", "expected"), [(1, 0), (200, 1), (255, 1), (257, 1), (2570, 10)])
def test_dark_sixteen_bit_grayscale_stays_dark(tmp_path, brightest, expected):
    values = np.array([[0, brightest]], dtype=np.uint16)
    picture = open_picture(write(tmp_path, encode(Image.fromarray(values), "PNG")))
    assert pixels(picture)[0, :, 0].tolist() == [0, expected]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, float("nan"), 1.0], [0, 0, 255]),
    ],
)
def test_float_tiff_is_scaled_by_its_range(tmp_path, values, expected):
    image = Image.fromarray(np.array([values], dtype=np.float32))
    picture = open_picture(write(tmp_path, encode(image, "TIFF")))
    assert pixels(picture)[0].tolist() == [[v, v, v] for v in expected]
    assert any("floating point" in note for note in picture.notes)


@pytest.mark.parametrize("value", [-1.0, 70_000.0, 0.0, 0.5])
def test_flat_float_tiff_opens_flat(tmp_path, value):
    image = Image.fromarray(np.full((3, 4), value, dtype=np.float32))
    assert len(np.unique(pixels(open_picture(write(tmp_path, encode(image, "TIFF")))))) == 1


def test_float_tiff_of_extreme_range_keeps_its_order(tmp_path):
    image = Image.fromarray(np.array([[-3e38, 0.0, 3e38]], dtype=np.float32))
    assert pixels(open_picture(write(tmp_path, encode(image, "TIFF"))))[0, :, 0].tolist() == [0, 128, 255]


def test_cmyk_jpeg_is_converted(tmp_path):
    picture = open_picture(write(tmp_path, encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)))
    assert picture.image.mode == "RGB"
    red, green, blue = pixels(picture)[8, 8].tolist()
    assert red > 230
    assert max(green, blue) < 40
    assert picture.notes == ("was converted from CMYK",)


def test_grayscale_is_converted(tmp_path):
    values = np.arange(0, 250, 10, dtype=np.uint8).reshape(5, 5)
    picture = open_picture(write(tmp_path, encode(Image.fromarray(values), "PNG")))
    assert np.array_equal(pixels(picture), np.repeat(values[:, :, None], 3, axis=2))
    assert picture.notes == ("was converted from L",)


def test_one_bit_picture_is_black_and_white(tmp_path):
    image = Image.fromarray(np.array([[True, False, True]]))
    assert image.mode == "1"
    picture = open_picture(write(tmp_path, encode(image, "PNG")))
    assert pixels(picture).tolist() == [[[255] * 3, [0] * 3, [255] * 3]]
    assert picture.notes == ("was converted from 1",)


def palette_image():
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 0, 255, 0, 255, 0])
    image.putdata([0, 1, 2])
    return image


def test_palette_gives_its_colours(tmp_path):
    picture = open_picture(write(tmp_path, encode(palette_image(), "PNG")))
    assert pixels(picture).tolist() == [[[255, 0, 0], [0, 0, 255], [0, 255, 0]]]
    assert picture.notes == ("was converted from P",)


@pytest.mark.parametrize(("transparency", "first"), [(b"\x00\xff\xff", [255, 255, 255]), (b"\x80", [255, 127, 127])])
def test_palette_with_transparency_is_laid_on_white(tmp_path, transparency, first):
    picture = open_picture(write(tmp_path, encode(palette_image(), "PNG", transparency=transparency)))
    assert pixels(picture).tolist() == [[first, [0, 0, 255], [0, 255, 0]]]
    assert picture.notes == ("is transparent and was laid on white",)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_rgba_is_laid_on_white(tmp_path, kind):
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 255), (255, 0, 0, 128), (1, 2, 3, 0)])
    options = {"lossless": True} if kind == "WEBP" else {}
    picture = open_picture(write(tmp_path, encode(image, kind, **options)))
    assert picture.image.mode == "RGB"
    assert pixels(picture).tolist() == [[[255, 0, 0], [255, 127, 127], [255, 255, 255]]]
    assert picture.notes == ("is transparent and was laid on white",)


def test_gray_with_alpha_is_laid_on_white(tmp_path):
    image = Image.new("LA", (2, 1))
    image.putdata([(0, 128), (0, 255)])
    picture = open_picture(write(tmp_path, encode(image, "PNG")))
    assert pixels(picture).tolist() == [[[127] * 3, [0] * 3]]


def test_one_transparent_colour_is_laid_on_white(tmp_path):
    image = Image.new("RGB", (2, 1))
    image.putdata([(10, 20, 30), (40, 50, 60)])
    picture = open_picture(write(tmp_path, encode(image, "PNG", transparency=(10, 20, 30))))
    assert pixels(picture).tolist() == [[[255] * 3, [40, 50, 60]]]


# What brings an upright picture into the state that the EXIF tag undoes.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_exif_orientation_is_applied(tmp_path, kind, orientation):
    method = STORED[orientation]
    stored = noise_image() if method is None else noise_image().transpose(method)
    path = write(tmp_path, encode(stored, kind, exif=exif_bytes(orientation)))
    assert np.array_equal(pixels(open_picture(path)), NOISE)


def test_exif_orientation_of_a_jpeg_turns_it(tmp_path):
    upright = Image.new("RGB", (32, 64), "white")
    upright.paste("red", (0, 0, 32, 32))
    data = encode(upright.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=exif_bytes(6))
    picture = open_picture(write(tmp_path, data))
    assert picture.image.size == (32, 64)
    assert pixels(picture)[8, 16, 1] < 60
    assert pixels(picture)[56, 16, 1] > 200


def test_damaged_exif_does_not_stop_a_good_picture_and_is_not_a_python_warning(tmp_path):
    data = bytearray(encode(noise_image(), "JPEG", exif=exif_bytes(1)))
    start = data.index(b"Exif\x00\x00") + 6
    data[start + 8 : start + 10] = b"\x00\x40"  # 64 entries, of which two exist
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert open_picture(write(tmp_path, bytes(data))).image.size == SIZE
    assert [str(warning.message) for warning in seen] == []


def test_damaged_exif_does_not_stop_a_good_picture_where_warnings_are_errors(tmp_path):
    data = bytearray(encode(noise_image(), "JPEG", exif=exif_bytes(1)))
    start = data.index(b"Exif\x00\x00") + 6
    data[start + 8 : start + 10] = b"\x00\x40"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_picture(write(tmp_path, bytes(data))).image.size == SIZE


# --- damage at random ------------------------------------------------------------------------------------------------


def _seeds():
    image, second = noise_image(), noise_image().transpose(Image.Transpose.ROTATE_180)
    exif = exif_bytes(6)
    return {
        "png": encode(image, "PNG"),
        "png-palette": encode(image.quantize(8), "PNG", transparency=b"\x00\x80"),
        "jpeg": encode(image, "JPEG"),
        "jpeg-exif": encode(image, "JPEG", exif=exif),
        "gif": encode(image, "GIF", save_all=True, append_images=[second]),
        "webp": encode(image, "WEBP"),
        "webp-animated": encode(image, "WEBP", save_all=True, append_images=[second]),
        "tiff": encode(image, "TIFF"),
        "tiff-lzw": encode(image, "TIFF", compression="tiff_lzw"),
        "bmp": encode(image, "BMP"),
    }


SEEDS = _seeds()
# headers weigh more than pixels: half of the flips hit the first 64 bytes
flips = st.lists(
    st.tuples(st.one_of(st.integers(0, 63), st.integers(0, 10_000)), st.integers(1, 255)), min_size=1, max_size=6
)
fuzz = settings(derandomize=True, max_examples=60, deadline=None, database=None)


def damage(data, changes, cut):
    result = bytearray(data)
    for place, mask in changes:
        result[place % len(result)] ^= mask
    return bytes(result[: max(1, round(len(result) * cut))])


def open_or_refuse(path):
    """A picture, or an error of the two promised kinds with a message of one line; anything else fails the test."""
    message = None
    try:
        picture = open_picture(path, max_pixels=1_000_000)
    except (ValueError, OSError) as error:
        message = str(error)
    if message is not None:
        assert len(message.splitlines()) == 1
        assert path.name in message
        return None
    assert isinstance(picture, Picture)
    assert picture.image.mode == "RGB"
    assert min(picture.image.size) >= 1
    np.asarray(picture.image)
    return picture


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", SEEDS)
def test_undamaged_seed_opens(fuzz_folder, name):
    picture = open_or_refuse(write(fuzz_folder, SEEDS[name]))
    assert picture is not None
    assert sorted(picture.image.size) == sorted(SIZE)


@pytest.mark.parametrize("name", SEEDS)
@fuzz
@given(changes=flips, cut=st.one_of(st.just(1.0), st.floats(0, 1)))
def test_damaged_file_gives_a_picture_or_one_line(fuzz_folder, name, changes, cut):
    path = write(fuzz_folder, damage(SEEDS[name], changes, cut))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        open_or_refuse(path)


@pytest.mark.parametrize("name", ["jpeg-exif", "tiff", "webp-animated"])
@fuzz
@given(changes=flips, cut=st.one_of(st.just(1.0), st.floats(0, 1)))
def test_damaged_file_gives_no_python_warning(fuzz_folder, name, changes, cut):
    path = write(fuzz_folder, damage(SEEDS[name], changes, cut))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        open_or_refuse(path)
    assert [str(warning.message) for warning in seen] == []


@fuzz
@given(
    place=st.integers(0, 3),
    changes=flips,
    extra=st.sampled_from([b"tRNS", b"eXIf", b"iCCP", b"zTXt", b"acTL", b"fcTL", b"gAMA"]),
    body=st.binary(max_size=40),
)
def test_png_with_damage_under_valid_checksums_gives_a_picture_or_one_line(fuzz_folder, place, changes, extra, body):
    raw = b"".join(b"\x00" + row.tobytes() for row in NOISE)
    chunks = [png_header(*SIZE), (extra, body), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    kind, data = chunks[place]
    if data:
        chunks[place] = kind, damage(data, changes, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        open_or_refuse(write(fuzz_folder, png(*chunks)))


@fuzz
@given(
    data=st.binary(min_size=1, max_size=300), magic=st.sampled_from([b"", b"GIF89a", b"BM", b"II*\x00", b"\xff\xd8"])
)
def test_arbitrary_bytes_give_a_picture_or_one_line(fuzz_folder, data, magic):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        open_or_refuse(write(fuzz_folder, magic + data))


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_tensor_has_the_pixels_between_zero_and_one():
    tensor = to_tensor(noise_image())
    assert tensor.shape == (1, 3, SIZE[1], SIZE[0])
    assert tensor.dtype == torch.float32
    expected = torch.tensor(NOISE.astype(np.float32) / 255).permute(2, 0, 1)
    torch.testing.assert_close(tensor[0], expected, rtol=0, atol=1e-7)


def test_tensor_ends_are_exact_and_channels_in_order():
    image = Image.new("RGB", (3, 1))
    image.putdata([(255, 0, 0), (0, 255, 0), (0, 0, 255)])
    assert torch.equal(to_tensor(image)[0, :, 0], torch.eye(3))


def test_tensor_of_a_grayscale_image_has_three_equal_channels():
    tensor = to_tensor(Image.new("L", (2, 2), 51))
    assert tensor.shape == (1, 3, 2, 2)
    torch.testing.assert_close(tensor, torch.full((1, 3, 2, 2), 0.2))


def test_tensor_does_not_share_memory_with_the_picture():
    image = noise_image()
    to_tensor(image).zero_()
    assert np.array_equal(np.asarray(image), NOISE)
