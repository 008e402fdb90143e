"""Idefics3 and SmolVLM.

image ──longest edge──► resized ──to whole tiles──► ┌──┬──┬──┐
                                                    ├──┼──┼──┤ and all of it in one tile
                                                    └──┴──┴──┘
"""

from math import ceil

from PIL import Image

from pipeline.media.config import Idefics3
from pipeline.media.processed import ProcessedImage
from pipeline.media.processors.resizing import as_pixels, resized

MAX_IMAGE_SIZE = 4096
"""The longest edge that transformers resizes to."""


def process(image: Image.Image, config: Idefics3) -> ProcessedImage:
    if config.longest_edge is not None:
        size = _below(_with_longest_edge((image.height, image.width), config.longest_edge))
        image = resized(image, size, config.resample)
    lines = columns = 0
    if config.splits:
        image = resized(image, _in_whole_tiles((image.height, image.width), config.tile), config.resample)
        lines, columns = image.height // config.tile, image.width // config.tile
    if lines * columns <= 1:
        lines = columns = 0
    tiles = [
        image.crop((x, y, x + config.tile, y + config.tile))
        for y in range(0, lines * config.tile, config.tile)
        for x in range(0, columns * config.tile, config.tile)
    ]
    if tiles or not config.splits:
        image = resized(image, (config.tile, config.tile), config.resample)
    tiles.append(image)
    return ProcessedImage(
        as_pixels(tiles), (lines, columns), _text(lines, columns, config), (config.tile_rows,) * len(tiles)
    )


def _text(lines: int, columns: int, config: Idefics3) -> str:
    whole = f"{config.fake_token}{config.global_token}{config.row_token}{config.fake_token}"
    if not lines:
        return whole
    text = ""
    for line in range(1, lines + 1):
        for column in range(1, columns + 1):
            text += f"{config.fake_token}<row_{line}_col_{column}>{config.row_token}"
        text += "\n"
    return f"{text}\n{whole}"


def _with_longest_edge(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """`_resize_output_size_rescale_to_max_len` in transformers."""
    height, width = size
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    return max(height, 1), max(width, 1)


def _below(size: tuple[int, int]) -> tuple[int, int]:
    """`_resize_output_size_scale_below_upper_bound` in transformers."""
    height, width = size
    ratio = width / height
    if width >= height and width > MAX_IMAGE_SIZE:
        height, width = int(MAX_IMAGE_SIZE / ratio), MAX_IMAGE_SIZE
    elif height > width and height > MAX_IMAGE_SIZE:
        height, width = MAX_IMAGE_SIZE, int(MAX_IMAGE_SIZE * ratio)
    return max(height, 1), max(width, 1)


def _in_whole_tiles(size: tuple[int, int], tile: int) -> tuple[int, int]:
    """`resize_for_vision_encoder` in transformers."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = ceil(width / tile) * tile
        height = ceil(int(width / ratio) / tile) * tile
    else:
        height = ceil(height / tile) * tile
        width = ceil(int(height * ratio) / tile) * tile
    return height, width
