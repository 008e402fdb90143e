"""The cache of decoded images is bounded in bytes and in descriptors, whatever images clients send."""

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.media.jobs import Decoded
from pipeline.stages.ingest.media.image_cache import ITEM_BYTES, MAPPED_BYTES, DecodedImage, ImageCache, mapped


def decoded(number: int, num_bytes: int) -> DecodedImage:
    fd = os.memfd_create("image")
    try:
        os.pwrite(fd, bytes([number % 251]) * num_bytes, 0)
        key = number.to_bytes(16, "big")
        return mapped(key, Decoded(number, shape=(1, num_bytes), grid=(1, 1, 1), run_lengths=(1,)), fd)
    finally:
        os.close(fd)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("num_bytes", [1, 768, MAPPED_BYTES - 1, MAPPED_BYTES])
def test_descriptors_do_not_grow_with_the_number_of_images(num_bytes: int) -> None:
    """Each image had one: ten thousand tiny ones left ingest none, and more of them no mappings."""
    cache, before = ImageCache(8 * 1024**2), num_descriptors()
    for number in range(2000):
        cache.put(image := decoded(number, num_bytes))
        assert (image.pixels == number % 251).all() and not image.pixels.flags.writeable
    assert num_descriptors() - before <= 8 * 1024**2 // MAPPED_BYTES
    assert len(cache) == min(2000, 8 * 1024**2 // (num_bytes + ITEM_BYTES))
    assert cache.num_bytes <= 8 * 1024**2


def test_what_is_dropped_is_unmapped_when_nothing_refers_to_it() -> None:
    cache, before = ImageCache(2 * MAPPED_BYTES + 2 * ITEM_BYTES), num_descriptors()
    images = [decoded(number, MAPPED_BYTES) for number in range(4)]
    for image in images:
        cache.put(image)
    assert len(cache) == 2 and num_descriptors() == before + 4
    del image, images[:2]
    assert num_descriptors() == before + 2
    assert np.array_equal(images[1].pixels, np.full((1, MAPPED_BYTES), 3, np.uint8))


def test_a_memfd_of_another_size_is_refused() -> None:
    fd = os.memfd_create("image")
    try:
        os.ftruncate(fd, 5)
        with pytest.raises(ValueError, match="has 5 bytes"):
            mapped(bytes(16), Decoded(1, shape=(2, 3)), fd)
    finally:
        os.close(fd)
