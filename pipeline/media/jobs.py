"""The messages between ingest and its media process, and the key of an image.

The bytes of an image go through a memfd of ingest's, whose descriptor comes with the `DecodeJob`. The child that
decodes it writes the pixels there, in place of the bytes. No one else has the descriptor of that image.
"""

import hashlib

import msgspec

from pipeline.media.limits import ImageLimits

KEY_BYTES = 16


class DecodeJob(msgspec.Struct, array_like=True, frozen=True):
    number: int
    num_bytes: int
    """Of the encoded image, at the begin of the memfd."""
    limits: ImageLimits
    asked_s: float
    """Time of the request, by time.monotonic()."""


class Decoded(msgspec.Struct, array_like=True, frozen=True):
    """The answer. Either `error` is empty, or all that follows it but `took_s`."""

    number: int
    error: str = ""
    """For the client: what is wrong with the image."""
    is_final: bool = True
    """Whether the same image always has this result. False if a busy machine may have caused a timeout."""
    shape: tuple[int, ...] = ()
    """Of the pixels in the memfd, uint8."""
    grid: tuple[int, ...] = ()
    text: str = ""
    run_lengths: tuple[int, ...] = ()
    """As in `ProcessedImage`, the last three."""
    took_s: float = 0.0
    """CPU time."""


def key_of(kind: str, config: bytes, detail: str, scope: str, data: bytes) -> bytes:
    """A key that no two images share, 16 bytes: that of rows of embeddings, and of KV blocks that depend on them.

    `kind` is "image", `config` the content of media.json, and `scope` that of the API key, so that a cache does not
    tell one client what another one has sent.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (kind.encode(), config, detail.encode(), scope.encode(), data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
