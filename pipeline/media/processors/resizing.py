"""What several processors do with images. Sizes are (height, width); Pillow's are (width, height)."""

from collections.abc import Sequence
from math import ceil

import numpy as np
from PIL import Image

from pipeline.media.config import Size
from pipeline.media.processed import InvalidImage, Pixels

MAX_PIXELS = 2**26
"""Of an image that is resized: shape alone must not choose how much memory that takes."""


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """Raises InvalidImage if a side would have no pixel, or the image too many."""
    height, width = size
    if min(size) < 1 or height * width > MAX_PIXELS:
        raise InvalidImage(
            f"has {image.width}×{image.height} pixels, and this model can't use so long a shape: send one whose sides "
            "are closer to each other"
        )
    return image.resize((width, height), Image.Resampling(resample))


def as_pixels(images: Sequence[Image.Image]) -> Pixels:
    """[images, 3, height, width], contiguous, of RGB images of one size."""
    return np.ascontiguousarray(np.stack([np.asarray(image, np.uint8) for image in images]).transpose(0, 3, 1, 2))


def shortest_edge_size(image: Image.Image, edge: int) -> tuple[int, int]:
    """The size at which the shorter side is `edge` (`get_resize_output_image_size` in transformers)."""
    short, long = sorted(image.size)
    other = int(edge * long / short)
    return (other, edge) if image.width <= image.height else (edge, other)


def padded_to_square(image: Image.Image, mean: Sequence[float]) -> Image.Image:
    """The image in the middle of a square with the color of the mean. Raises InvalidImage if that is too large."""
    if image.width == image.height:
        return image
    side = max(image.size)
    if side * side > MAX_PIXELS:
        raise InvalidImage(
            f"has {image.width}×{image.height} pixels, and the square around it has too many: send a smaller one"
        )
    square = Image.new("RGB", (side, side), tuple(int(each * 255) for each in mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def center_cropped(image: Image.Image, size: Size) -> Image.Image:
    """The middle of an image. A smaller one is padded with black."""
    height, width = max(size[0], image.height), max(size[1], image.width)
    top, left = (image.height - size[0]) // 2, (image.width - size[1]) // 2
    top_pad, left_pad = ceil((height - image.height) / 2), ceil((width - image.width) / 2)
    if top >= 0 and left >= 0:
        return image.crop((left, top, left + size[1], top + size[0]))
    whole = Image.new("RGB", (width, height))
    whole.paste(image, (left_pad, top_pad))
    left, top = left + left_pad, top + top_pad
    return whole.crop((left, top, min(width, left + size[1]), min(height, top + size[0])))
