"""A processed image: what a vision tower gets of it, and what stands for it in the prompt."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class InvalidImage(Exception):
    """The image can't be used. The message is for the client and says why; it follows on the image's name."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """The result of `processors.process`.

    The placeholder in the rendered chat is replaced by `text`. Each run of row tokens is one token in it, whose id is
    to be repeated: `placeholders.expand`.
    """

    pixels: Pixels
    """Contiguous: [tiles, 3, height, width]; of Qwen2VL [patches, 3, patch, patch], in the order in which the model
    merges them."""
    grid: tuple[int, ...]
    """Of Idefics3: lines and columns of tiles without the last one, which shows all; (0, 0) if that is the only one.
    Of LlavaOnevision: lines and columns of tiles behind the first, and the height and width of the client's image. Of
    Gemma3: the number of crops behind the image. Of Qwen2VL: frames, and lines and columns of patches. Of Pixtral:
    lines and columns of patches. Of Llava: none."""
    text: str
    run_lengths: tuple[int, ...]
    """The number of rows of each run of row tokens in `text`, in its order. Of Idefics3 and Gemma3, each run is a
    tile."""

    @property
    def num_rows(self) -> int:
        """Rows of embeddings that the vision tower makes."""
        return sum(self.run_lengths)
