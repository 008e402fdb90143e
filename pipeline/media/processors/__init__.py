"""Processors of images, a file for each family. They make the pixels of transformers' processors with Pillow."""

from typing import assert_never

from PIL import Image

from pipeline.media.config import Gemma3, Idefics3, Llava, LlavaOnevision, MediaConfig, Pixtral, Qwen2VL
from pipeline.media.processed import ProcessedImage
from pipeline.media.processors import gemma3, idefics3, llava, llava_onevision, pixtral, qwen2_vl


def process(image: Image.Image, config: MediaConfig) -> ProcessedImage:
    """Process an RGB image. Raises InvalidImage if its shape can't be used."""
    match config:
        case Idefics3():
            return idefics3.process(image, config)
        case Llava():
            return llava.process(image, config)
        case LlavaOnevision():
            return llava_onevision.process(image, config)
        case Gemma3():
            return gemma3.process(image, config)
        case Qwen2VL():
            return qwen2_vl.process(image, config)
        case Pixtral():
            return pixtral.process(image, config)
        case never:
            assert_never(never)
