"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5.

A patch has `temporal_patch` frames for the model, which all show the same part of the image: pixels have it once. The
patches that are merged into one row of embeddings follow each other:

    0 1 | 4 5
    2 3 | 6 7
"""

from math import ceil, floor, sqrt

import numpy as np
from PIL import Image

from pipeline.media.config import MAX_RATIO, Qwen2VL
from pipeline.media.processed import InvalidImage, Pixels, ProcessedImage
from pipeline.media.processors.resizing import resized


def process(image: Image.Image, config: Qwen2VL) -> ProcessedImage:
    image = resized(image, smart_resize((image.height, image.width), config), config.resample)
    grid = image.height // config.patch, image.width // config.patch
    num_rows = grid[0] * grid[1] // config.merge**2
    return ProcessedImage(_patches(image, config), (1, *grid), config.row_token, (num_rows,))


def smart_resize(size: tuple[int, int], config: Qwen2VL) -> tuple[int, int]:
    """The size in whole rows of embeddings that is closest to the image's (`smart_resize` in transformers). Raises
    InvalidImage."""
    height, width = size
    if max(size) / min(size) > MAX_RATIO:
        raise InvalidImage(
            f"has {width}×{height} pixels: one side may be at most {MAX_RATIO} times as long as the other"
        )
    factor = config.patch * config.merge
    result = round(height / factor) * factor, round(width / factor) * factor
    if result[0] * result[1] > config.max_pixels:
        beta = sqrt((height * width) / config.max_pixels)
        return (
            max(factor, floor(height / beta / factor) * factor),
            max(factor, floor(width / beta / factor) * factor),
        )
    if result[0] * result[1] < config.min_pixels:
        beta = sqrt(config.min_pixels / (height * width))
        return ceil(height * beta / factor) * factor, ceil(width * beta / factor) * factor
    return result


def _patches(image: Image.Image, config: Qwen2VL) -> Pixels:
    """[patches, 3, patch, patch]"""
    merge, patch = config.merge, config.patch
    lines, columns = image.height // (merge * patch), image.width // (merge * patch)
    pixels = np.asarray(image, np.uint8).reshape(lines, merge, patch, columns, merge, patch, 3)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, patch, patch)
