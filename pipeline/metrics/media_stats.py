"""Counts about images, which stages report among theirs (`pipeline.metrics.stats`)."""

import msgspec


class ImageCounts(msgspec.Struct, array_like=True, frozen=True):
    """Images of requests in ingest, since its start. Those in the cache need not be decoded again."""

    num_queries: int
    """Images that requests had."""
    num_hits: int
    """Those of them that were in the cache."""
    num_rejected: int
    """Those that could not be decoded, in time or at all."""
    decode_s: float
    """Time until those were decoded that were not in the cache, with that in the queue."""
    cache_bytes: int
    """In the cache now."""


class EncoderCacheCounts(msgspec.Struct, array_like=True, frozen=True):
    """The executor's encoder cache, as the scheduler sees it: rows of embeddings, and since its start, images."""

    num_free: int
    num_cached: int
    """Those of images that no sequence reads."""
    num_held: int
    num_queries: int
    """Images that sequences needed."""
    num_hits: int
    """Those of them whose rows were in the cache."""
    num_rows_encoded: int
    encode_s: float
    """Time of steps that was spent on encoding."""
