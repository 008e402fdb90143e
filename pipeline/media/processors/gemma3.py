"""Gemma 3: the image, and crops of a long one if the model's files ask for pan and scan."""

from math import ceil, floor

from PIL import Image

from pipeline.media.config import Gemma3, PanAndScan
from pipeline.media.processed import ProcessedImage
from pipeline.media.processors.resizing import as_pixels, resized


def process(image: Image.Image, config: Gemma3) -> ProcessedImage:
    crops = [] if config.pan_and_scan is None else _crops(image, config.pan_and_scan)
    images = [resized(each, config.size, config.resample) for each in (image, *crops)]
    one = f"\n\n{config.begin_token}{config.row_token}{config.end_token}\n\n"
    text = one
    if crops:
        others = " ".join([one] * len(crops))
        text = f"Here is the original image {one} and here are some crops to help you see better {others}"
    return ProcessedImage(as_pixels(images), (len(crops),), text, (config.num_rows,) * len(images))


def _crops(image: Image.Image, pan_and_scan: PanAndScan) -> list[Image.Image]:
    """`pan_and_scan` in transformers."""
    short, long = sorted(image.size)
    if long / short < pan_and_scan.min_ratio:
        return []
    number = min(floor(long / pan_and_scan.min_crop), floor(long / short + 0.5))
    number = min(pan_and_scan.max_crops, max(2, number))
    step = ceil(long / number)
    if min(step, short) < pan_and_scan.min_crop:
        return []
    begins = range(0, number * step, step)
    if image.width >= image.height:
        return [image.crop((at, 0, min(at + step, long), short)) for at in begins]
    return [image.crop((0, at, short, min(at + step, long))) for at in begins]
