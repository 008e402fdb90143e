"""Pixtral and Mistral 3: an image of any shape, in whole patches."""

from math import floor

from PIL import Image

from pipeline.media.config import Pixtral
from pipeline.media.processed import ProcessedImage
from pipeline.media.processors.resizing import as_pixels, resized


def process(image: Image.Image, config: Pixtral) -> ProcessedImage:
    step = config.patch * config.merge
    height, width = image.height, image.width
    ratio = max(height / config.max_size[0], width / config.max_size[1])
    if ratio > 1:
        height, width = floor(height / ratio), floor(width / ratio)
    lines, columns = (height - 1) // step + 1, (width - 1) // step + 1
    image = resized(image, (lines * step, columns * step), config.resample)
    text = config.break_token.join([config.row_token] * lines) + config.end_token
    grid = image.height // config.patch, image.width // config.patch
    return ProcessedImage(as_pixels([image]), grid, text, (columns,) * lines)
