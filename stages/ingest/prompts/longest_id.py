"""The longest text of one token id. Pure."""

import json
from typing import Any

from tokenizers import Tokenizer, decoders


def longest_id_bytes(tokenizer: Tokenizer) -> int | None:
    """The most bytes of text in one id; None if ids may lose text (normalization, unknown tokens, added tokens that
    strip spaces)."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    byte_fallback = bool(getattr(tokenizer.model, "byte_fallback", False))
    if not (byte_level or byte_fallback) or not _keeps_every_byte(tokenizer.normalizer):
        return None
    # A vocabulary spells each byte as a character of one or more bytes, so a spelling is never shorter than its text.
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=None)


def _keeps_every_byte(normalizer: Any) -> bool:
    """Whether a normalizer removes nothing: there is none, or it adds SentencePiece's marks for spaces."""
    if normalizer is None:
        return True
    return _only_marks_spaces(json.loads(normalizer.__getstate__()))


def _only_marks_spaces(state: dict[str, Any]) -> bool:
    match state:
        case {"type": "Sequence", "normalizers": list(parts)}:
            return all(_only_marks_spaces(part) for part in parts)
        case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
    return False
