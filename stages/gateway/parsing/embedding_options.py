"""How embeddings are told."""

import msgspec


class EmbeddingOptions(msgspec.Struct, frozen=True, kw_only=True):
    dimensions: int | None = None
    """Numbers of each; None: as many as the model has."""
    is_base64: bool = False
    """float32, little-endian, in base64, rather than a list of numbers"""
