"""LLaVA 1.5, with the processors of CLIP, SigLIP or LLaVA: one image of fixed size."""

from PIL import Image

from pipeline.media.config import Llava
from pipeline.media.processed import ProcessedImage
from pipeline.media.processors.resizing import (
    as_pixels,
    center_cropped,
    padded_to_square,
    resized,
    shortest_edge_size,
)


def process(image: Image.Image, config: Llava) -> ProcessedImage:
    if config.pads_to_square:
        image = padded_to_square(image, config.mean)
    if config.shortest_edge is not None:
        image = resized(image, shortest_edge_size(image, config.shortest_edge), config.resample)
    elif config.size is not None:
        image = resized(image, config.size, config.resample)
    if config.crop is not None:
        image = center_cropped(image, config.crop)
    return ProcessedImage(as_pixels([image]), (), config.row_token, (config.num_rows,))
