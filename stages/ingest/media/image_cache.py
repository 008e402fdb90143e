"""The decoded images that were used last, up to a number of bytes."""

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from pipeline.media.jobs import Decoded
from pipeline.media.processed import Pixels

ITEM_BYTES = 512
"""What an image takes besides its pixels, about."""
MAPPED_BYTES = 256 * 1024
"""Pixels from this size on stay in their memfd: a mapping has a descriptor and whole pages. So a full cache has a
thousand descriptors at most, however small the images of clients are. To copy smaller ones takes 0.05 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """A processed image. Large ones are in shared memory, which is unmapped when nothing refers to the pixels any
    more."""

    key: bytes
    """`key_of` of what it was decoded from."""
    pixels: Pixels
    """Read-only, as in `ProcessedImage`; so are the others."""
    grid: tuple[int, ...]
    text: str
    run_lengths: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes + len(self.text) + ITEM_BYTES


def mapped(key: bytes, answer: Decoded, fd: int) -> DecodedImage:
    """The image that a child has left in a sealed memfd, which the caller closes. Raises ValueError if it has another
    size than its shape says."""
    num_bytes = int(np.prod(answer.shape, dtype=object))
    if not answer.shape or min(answer.shape) < 1 or os.fstat(fd).st_size != num_bytes:
        raise ValueError(f"a decoded image of shape {answer.shape} has {os.fstat(fd).st_size} bytes")
    memory: mmap.mmap | bytes
    if num_bytes < MAPPED_BYTES:
        memory = os.pread(fd, num_bytes, 0)
    else:
        memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    pixels = np.frombuffer(memory, np.uint8).reshape(answer.shape)
    return DecodedImage(key, pixels, answer.grid, answer.text, answer.run_lengths)


class ImageCache:
    """Drops the image that was not used for longest."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[bytes, DecodedImage] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: bytes) -> DecodedImage | None:
        if (found := self._items.get(key)) is not None:
            self._items.move_to_end(key)
        return found

    def put(self, image: DecodedImage) -> None:
        """Keep an image, unless it is larger than the whole cache."""
        if image.num_bytes > self._max_bytes:
            return
        if (before := self._items.pop(image.key, None)) is not None:
            self.num_bytes -= before.num_bytes
        self._items[image.key] = image
        self.num_bytes += image.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._items.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
