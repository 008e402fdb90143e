"""Numbers of bytes in messages are what --set takes."""

import pytest

from pipeline.config.load import load
from pipeline.config.values.sizes import size_words


@pytest.mark.parametrize(
    ("num_bytes", "up", "words"),
    [
        (0, False, "0B"),
        (9999, True, "9999B"),
        (2048, False, "2KiB"),
        (402653184, False, "384MiB"),
        (402653185, False, "384MiB"),
        (402653185, True, "385MiB"),
        (2**31, True, "2GiB"),
        (2**31 + 1, True, "2049MiB"),
        (107 * 2**30 + 5, False, "107GiB"),
    ],
)
def test_sizes_are_rounded_to_units(num_bytes: int, up: bool, words: str) -> None:
    assert size_words(num_bytes, up=up) == words
    read = load(None, [f"execute.kv_cache_bytes={words}"]).execute.kv_cache_bytes
    assert read >= num_bytes if up else read <= num_bytes
