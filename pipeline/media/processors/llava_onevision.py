"""LLaVA-OneVision ("anyres").

    image ──size of a tile──────────────────────────────► the first tile
          └─the best of `resolutions`──► black around it ──► tiles, line by line

Each image is processed alone: as in vLLM, and in transformers if images are a flat list.
"""

from math import ceil, sqrt

from PIL import Image

from pipeline.media.config import LlavaOnevision, Size
from pipeline.media.processed import InvalidImage, ProcessedImage
from pipeline.media.processors.resizing import as_pixels, resized

INTERPOLATED = 1.1
"""Tiles have fewer rows of embeddings if the sides of all of them together are this much longer than `max_tiles`
allow."""


def process(image: Image.Image, config: LlavaOnevision) -> ProcessedImage:
    size = image.height, image.width
    target = best_resolution(size, config.resolutions)
    fitted = resized(image, _fitted_size(size, target), config.resample)
    whole = Image.new("RGB", (target[1], target[0]))
    whole.paste(fitted, ((target[1] - fitted.width) // 2, (target[0] - fitted.height) // 2))
    height, width = config.size
    tiles = [resized(image, config.size, config.resample)]
    tiles += [
        whole.crop((x, y, x + width, y + height))
        for y in range(0, target[0], height)
        for x in range(0, target[1], width)
    ]
    grid = target[0] // height, target[1] // width
    return ProcessedImage(as_pixels(tiles), (*grid, *size), config.row_token, (_num_rows(size, grid, config),))


def best_resolution(size: Size, resolutions: tuple[Size, ...]) -> Size:
    """The resolution in which the image keeps most pixels; of several, that with the least padding
    (`select_best_resolution` in transformers). Raises InvalidImage if it keeps none in any."""

    def merit(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / size[1], resolution[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - resolution[0] * resolution[1]

    best = max(resolutions, key=merit)
    if merit(best)[0] == 0:
        raise InvalidImage(
            f"has {size[1]}×{size[0]} pixels, and so thin an image has none left when this model sees it"
        )
    return best


def _fitted_size(size: Size, target: Size) -> Size:
    """`get_patch_output_size` in transformers."""
    scale_h, scale_w = target[0] / size[0], target[1] / size[1]
    if scale_w < scale_h:
        return min(ceil(size[0] * scale_w), target[0]), target[1]
    return target[0], min(ceil(size[1] * scale_h), target[1])


def _num_rows(size: Size, grid: Size, config: LlavaOnevision) -> int:
    """Rows of the first tile, those of the tiles without padding, and one behind each line of these
    (`_get_number_of_features` in transformers)."""
    height, width = config.tile_side * grid[0], config.tile_side * grid[1]
    if size[1] / size[0] > width / height:
        height -= (height - int(round(size[0] * (width / size[1]), 7))) // 2 * 2
    else:
        width -= (width - int(round(size[1] * (height / size[0]), 7))) // 2 * 2
    ratio = sqrt(height * width / (config.max_tiles * config.tile_side**2))
    if ratio > INTERPOLATED:
        height, width = int(height // ratio), int(width // ratio)
    return config.tile_side**2 + height * width + height
