"""Images of clients: each format and mode, and files that are made to do harm."""

import struct
import subprocess
import sys
import warnings
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin
from transformers.image_transforms import convert_to_rgb

from pipeline.media import images
from pipeline.media.images import decode, format_of
from pipeline.media.limits import ImageLimits
from pipeline.media.processed import InvalidImage

LIMITS = ImageLimits(max_bytes=2**20, max_pixels=1_000_000)


def picture(mode: str = "RGB", size: tuple[int, int] = (7, 5)) -> Image.Image:
    width, height = size
    values = np.random.default_rng(1).integers(0, 256, (height, width, 4), np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(image: Image.Image) -> "np.ndarray[Any, Any]":
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        ("RGB", "JPEG", {"quality": 90}),
        ("L", "JPEG", {}),
        ("CMYK", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True}),
        ("RGB", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("LA", "PNG", {}),
        ("L", "PNG", {}),
        ("1", "PNG", {}),
        ("P", "PNG", {}),
        ("P", "PNG", {"transparency": 3}),
        ("RGB", "PNG", {"transparency": (255, 0, 1)}),
        ("L", "PNG", {"transparency": 200}),
        ("RGB", "WEBP", {"lossless": True}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("RGB", "WEBP", {"quality": 50}),
        ("P", "GIF", {}),
        ("P", "GIF", {"transparency": 0}),
        ("RGB", "BMP", {}),
        ("L", "BMP", {}),
        ("1", "BMP", {}),
    ],
)
def test_formats_and_modes_are_as_in_transformers(mode: str, kind: str, options: dict[str, Any]):
    data = encoded(picture(mode), kind, **options)
    assert np.array_equal(pixels(decode(data)), convert_to_rgb(Image.open(BytesIO(data)), return_numpy=True))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(kind: str, orientation: int):
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    data = encoded(picture(), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    assert np.array_equal(pixels(decode(data)), np.asarray(expected))


def test_damaged_exif_data_does_not_matter():
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40)
    assert decode(data).size == (7, 5)


def test_gray_of_16_bits_keeps_its_upper_ones():
    values = np.array([[0, 255, 256], [1000, 40000, 65535]], np.uint16)
    data = encoded(Image.fromarray(values), "PNG")
    assert pixels(decode(data))[..., 0].tolist() == [[0, 0, 1], [3, 156, 255]]


def test_transparent_gray_of_16_bits_is_white():
    values = np.array([[0, 300, 65535]], np.uint16)
    data = encoded(Image.fromarray(values), "PNG", transparency=300)
    assert pixels(decode(data))[0, :, 0].tolist() == [0, 255, 255]


def test_the_first_frame_of_an_animation_counts():
    first, second = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")
    for kind in ("GIF", "WEBP", "PNG"):
        data = encoded(first, kind, save_all=True, append_images=[second])
        red, _, blue = pixels(decode(data))[0, 0].tolist()
        assert red > 240 and blue < 20, kind


@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (100_000, 1)])
def test_thin_images_are_images(size: tuple[int, int]):
    assert decode(encoded(Image.new("RGB", size), "PNG"), LIMITS).size == size


# Files that are made to do harm.


def png_of(width: int, height: int, data: bytes = b"", extra: bytes = b"") -> bytes:
    """A PNG with any header."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def gif_of(width: int, height: int) -> bytes:
    """A GIF whose screen has another size than its frame."""
    data = bytearray(encoded(picture("P"), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def webp_of(width: int, height: int) -> bytes:
    """An extended WebP with any canvas."""
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + (width - 1).to_bytes(3, "little")
    body += (height - 1).to_bytes(3, "little") + encoded(picture(), "WEBP")[12:]
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def bmp_of(width: int, height: int) -> bytes:
    data = bytearray(encoded(picture(), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
JPEG = encoded(picture(size=(80, 60)), "JPEG")

HOSTILE = {
    "empty": (b"", "is empty"),
    "text": (b"hello", "is in no format that is read here: send JPEG, PNG, WebP, GIF or BMP"),
    "svg": (SVG, "is in no format"),
    "tiff": (encoded(picture(), "TIFF"), "is in no format"),
    "ico": (encoded(picture(), "ICO"), "is in no format"),
    "ppm": (encoded(picture(), "PPM"), "is in no format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is in no format"),
    "pdf": (b"%PDF-1.7", "is in no format"),
    "too many bytes": (b"\xff\xd8\xff" + bytes(2**20), "has 1048579 bytes; the limit is 1048576"),
    "jpeg without data": (b"\xff\xd8\xff", "is no valid JPEG image: its header is damaged"),
    "truncated jpeg": (JPEG[:-200], "is no valid JPEG image: its data is damaged or incomplete"),
    "png of text": (b"\x89PNG\r\n\x1a\n" + b"x" * 100, "is no valid PNG image: its header is damaged"),
    "truncated png": (encoded(picture(), "PNG")[:60], "is no valid PNG image"),
    "png that ends in its header": (encoded(picture(), "PNG")[:20], "is no valid PNG image: its header is damaged"),
    "truncated gif": (encoded(picture("P"), "GIF")[:-30], "is no valid GIF image"),
    "truncated webp": (encoded(picture(), "WEBP")[:40], "is no valid WebP image"),
    "webp of 12 bytes": (b"RIFF\0\0\0\0WEBP", "is no valid WebP image: its header is damaged"),
    "webp header of 20 bytes": (encoded(picture(), "WEBP")[:20], "is no valid WebP image: its header is damaged"),
    "truncated bmp": (encoded(picture(), "BMP")[:70], "is no valid BMP image"),
    "png without pixels": (png_of(0, 5), "is no valid PNG image|has no pixels"),
    "huge png": (png_of(2**31 - 1, 2**31 - 1), "has 2147483647×2147483647 pixels; the limit is 1000000"),
    "huge gif": (gif_of(65535, 65535), "has 65535×65535 pixels; the limit is 1000000"),
    "huge webp": (webp_of(2**24, 2**24), "has 16777216×16777216 pixels; the limit is 1000000"),
    "huge bmp": (bmp_of(2**30, 2**30), "has 1073741824×1073741824 pixels|is no valid BMP image"),
    "bmp of negative width": (bmp_of(-5, 5), "is no valid BMP image|has 4294967291×5 pixels"),
    "thin and too long": (
        png_of(140_000, 1, bytes(420_001)),
        "has 140000×1 pixels; the limit is 1000000, and 131071 for one side",
    ),
    "png bomb": (png_of(1000, 1001, bytes(3_004_001)), "has 1000×1001 pixels"),
    "png with less data": (png_of(100, 100, bytes(10)), "is no valid PNG image: its data is damaged or incomplete"),
    "bomb in a text": (
        png_of(1, 1, bytes(4), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26)))),
        "is no valid PNG image: its header is damaged",
    ),
}


@pytest.mark.parametrize(("data", "error"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_get_an_error_of_ours(data: bytes, error: str):
    with pytest.raises(InvalidImage, match=f"^({error})"):
        decode(data, LIMITS)


def test_errors_have_no_words_of_pillow():
    """Its texts have had addresses in them."""
    for data, _ in HOSTILE.values():
        with pytest.raises(InvalidImage) as caught:
            decode(data, LIMITS)
        assert "0x" not in str(caught.value)
        assert "BytesIO" not in str(caught.value)


def test_a_file_of_two_formats_is_what_its_first_bytes_say():
    both = encoded(picture(), "PNG") + SVG + b"PK\x03\x04" + JPEG
    assert format_of(both) == "PNG"
    assert np.array_equal(pixels(decode(both)), np.asarray(picture()))
    with pytest.raises(InvalidImage, match="is in no format"):
        decode(SVG + encoded(picture(), "PNG"))


def test_a_picture_behind_another_does_not_count():
    """An MPO file is a JPEG with more pictures behind the first."""
    data = encoded(picture(size=(16, 16)), "MPO", save_all=True, append_images=[picture(size=(16, 16)).rotate(90)])
    assert np.array_equal(pixels(decode(data)), pixels(Image.open(BytesIO(data)).convert("RGB")))


def test_no_plugin_of_another_format_is_imported():
    code = """
import sys
from pipeline.media.images import decode
from pipeline.media.processed import InvalidImage
for data in (b"II*\\0\\x08\\0\\0\\0", b"BM", b"\\xff\\xd8\\xff", b"GIF89a"):
    try:
        decode(data)
    except InvalidImage:
        pass
print(*sorted(name for name in sys.modules if name.startswith("PIL.") and name.endswith("ImagePlugin")))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {name.removeprefix("PIL.").removesuffix("ImagePlugin") for name in ran.stdout.split()}
    assert names == {"Bmp", "Gif", "Jpeg", "Png", "WebP"}


def test_a_large_image_within_the_limit_makes_no_warning():
    """Pillow warns above 89 million pixels, and fails above twice as many."""
    data = encoded(Image.new("L", (14_000, 13_500)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(data, ImageLimits(max_pixels=200_000_000)).size == (14_000, 13_500)


def test_png_text_is_no_text_for_clients():
    info = PngImagePlugin.PngInfo()
    info.add_text("secret", "x" * 1000)
    assert decode(encoded(picture(), "PNG", pnginfo=info)).size == (7, 5)
