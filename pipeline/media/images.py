"""Decodes a client's image: bytes, which may be anything, to RGB pixels.

Checked in this order, the cheap things first: the number of bytes, the format by its first bytes, the size in the
header, then the data. Pillow's own texts reach no client: they have had addresses in them. Decoding may take any time
and memory that the pixels allow, so it belongs into a process that can be killed (pipeline/media/decoder.py).
"""

import struct
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from pipeline.media.limits import LIMITS, ImageLimits
from pipeline.media.processed import InvalidImage

Format = Literal["JPEG", "PNG", "WebP", "GIF", "BMP"]
FORMATS = "JPEG, PNG, WebP, GIF or BMP"

PLUGINS: dict[Format, Callable[[BytesIO], ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}
"""The classes themselves: when one fails, Image.open would import the plugins of all formats. Its limit of pixels is
another one, too."""

ORIENTATION = 0x0112
"""The EXIF tag."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright that has this orientation."""

MAX_SIDE = 2**17 - 1
"""No longer side is decoded, whatever the other one is."""


def decode(data: bytes, limits: ImageLimits = LIMITS) -> Image.Image:
    """The first frame of an image, upright, in mode RGB; what is transparent is over white. Raises InvalidImage."""
    if len(data) > limits.max_bytes:
        raise InvalidImage(f"has {len(data)} bytes; the limit is {limits.max_bytes}")
    kind = format_of(data)
    if kind == "WebP":
        _check_size(_webp_size(data), limits)  # Pillow allocates the canvas before it says how large that is
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Pillow say what a client's file lacks
        return _decoded(data, kind, limits)


def _decoded(data: bytes, kind: Format, limits: ImageLimits) -> Image.Image:
    try:
        image = PLUGINS[kind](BytesIO(data))
    except MemoryError:
        raise
    except Exception as error:  # any: what Pillow raises for damaged headers is no list that ends
        raise InvalidImage(f"is no valid {kind} image: its header is damaged") from error
    _check_size(Header(image.width, image.height), limits)
    try:
        image.load()
        return _upright(_as_rgb(image), _orientation(image))
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidImage(f"is no valid {kind} image: its data is damaged or incomplete") from error


def format_of(data: bytes) -> Format:
    """By the first bytes, whatever a client says. Raises InvalidImage."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if data.startswith(b"BM"):
        return "BMP"
    raise InvalidImage("is empty" if not data else f"is in no format that is read here: send {FORMATS}")


class Header(NamedTuple):
    width: int
    height: int


def _check_size(size: Header, limits: ImageLimits) -> None:
    if min(size) < 1:
        raise InvalidImage("has no pixels")
    if size.width * size.height > limits.max_pixels or max(size) > MAX_SIDE:
        raise InvalidImage(
            f"has {size.width}×{size.height} pixels; the limit is {limits.max_pixels}, and {MAX_SIDE} for one side"
        )


def _webp_size(data: bytes) -> Header:
    """The size in a WebP's header (RFC 9649, section 2). Raises InvalidImage."""
    try:
        match data[12:16]:
            case b"VP8X":
                return Header(
                    int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30].ljust(3, b"\0"), "little") + 1
                )
            case b"VP8L":
                (bits,) = struct.unpack_from("<I", data, 21)
                return Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
            case b"VP8 ":
                width, height = struct.unpack_from("<HH", data, 26)
                return Header(width & 0x3FFF, height & 0x3FFF)
    except struct.error:
        pass
    raise InvalidImage("is no valid WebP image: its header is damaged")


def _as_rgb(image: Image.Image) -> Image.Image:
    """As `convert_to_rgb` in transformers; gray values of 16 bits keep their upper 8, which Pillow would clip."""
    alpha: Image.Image | None = None
    transparent = image.info.get("transparency")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if isinstance(transparent, int):
            alpha = Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))
        result = Image.fromarray((np.clip(values, 0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    elif "A" in image.getbands() or transparent is not None:
        result = image.convert("RGBA")
        alpha = result.getchannel("A")
    else:
        return image.convert("RGB")
    if alpha is None:
        return result
    result.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), result).convert("RGB")


def _orientation(image: ImageFile) -> int:
    """The EXIF orientation; 1 if there is none that can be read."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - damaged EXIF data raises anything, and says nothing of the pixels
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    turn = TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)
