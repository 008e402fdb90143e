"""Patches of images: squares of pixels, each a token of a vision tower.

A byte p of a channel stands for (p * scale - mean) / std. The matrix after the patches reads p - CENTER instead, which
is exact in bfloat16, and has the rest in its numbers and in its bias.
"""

from typing import Any

import numpy as np

from pipeline.kernels.step_inputs import LongArray

PixelArray = np.ndarray[Any, np.dtype[np.uint8]]

CENTER = 128
"""What is subtracted from a byte before it is multiplied. `PIXEL_CENTER` in cpu/patches.h."""


class PatchInputs:
    """The pixels of one step's tokens. The array keeps its address, which recorded programs contain."""

    def __init__(self, max_num_tokens: int, width: int) -> None:
        """`width` is that of a patch: its pixels times their channels."""
        self.pixels: PixelArray = np.full((max_num_tokens, width), CENTER, np.uint8)
        """[T, width]; a token without pixels has CENTER everywhere."""


def cut(image: PixelArray, size: int) -> PixelArray:
    """The patches of an image [channels, height, width], from left to right, then the next ones below: [patches,
    channels * size * size], each channel after the other. Both sides are multiples of `size`."""
    channels, height, width = image.shape
    squares = image.reshape(channels, height // size, size, width // size, size)
    return np.ascontiguousarray(squares.transpose(1, 3, 0, 2, 4)).reshape(-1, channels * size * size)


def squares(rows: int, columns: int, side: int) -> LongArray:
    """The patches of each square of `side` x `side` patches, [squares, side * side]. Squares are ordered like patches,
    and so are the patches of each; there are whole ones only."""
    patches = np.arange(rows * columns).reshape(rows, columns)[: rows // side * side, : columns // side * side]
    grid = patches.reshape(rows // side, side, columns // side, side)
    found: LongArray = grid.swapaxes(1, 2).reshape(-1, side * side).astype(np.int64)
    return found
