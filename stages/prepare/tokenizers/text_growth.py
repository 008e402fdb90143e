"""What a tokenizer's parts can make of a short text: a file may have replacements of one letter by megabytes, which a
client's short text would then take in ingest. Computed from the parts, because any text may be the one that grows."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipeline.stages.prepare.files import read
from pipeline.stages.prepare.sources.source import ModelError

MAX_GROWTH = 64
"""Of each character, in all steps of a normalizer. Unicode's longest composition has 18, SentencePiece's maps too."""
MAX_ADDED = 1024
"""Tokens that a post-processor puts around a text, and bytes that a model puts before or behind a part of a word."""

MAX_WORD_CHARS = 1000
"""Of a word that WordPiece looks for parts in, which takes time that grows with its third power; models have 100."""
MOST = 10**12
"""Growth is counted up to this."""


class _Parts(msgspec.Struct):
    normalizer: Any = None
    post_processor: Any = None
    model: dict[str, msgspec.Raw] = {}


def check_growth(path: Path, max_bytes: int, where: str) -> None:
    """Raises ModelError, naming `where` and the part, if a tokenizer.json may make much of a short text. What
    the library can't read is left to it."""
    try:
        parts = msgspec.json.decode(read(path, max_bytes), type=_Parts)
        growth = _growth(parts.normalizer)
        num_added = max((_num_added(one) for one in _each(parts.post_processor, "processors")), default=0)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} cannot be read: {error}") from error
    if growth > MAX_GROWTH:
        number = growth if growth < MOST else "more than 10^12"
        raise ModelError(f"{where}: normalizer can make {number} characters of one; at most {MAX_GROWTH} are supported")
    if num_added > MAX_ADDED:
        raise ModelError(
            f"{where}: post_processor adds {num_added} tokens to each text; at most {MAX_ADDED} are supported"
        )
    longest = _decoded_int(parts.model.get("max_input_chars_per_word"))
    if longest > MAX_WORD_CHARS:
        raise ModelError(f"{where}: model.max_input_chars_per_word is {longest}; at most {MAX_WORD_CHARS} is supported")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if (size := len(bytes(parts.model.get(name, msgspec.Raw())))) > MAX_ADDED:
            raise ModelError(f"{where}: model.{name} has {size} bytes; at most {MAX_ADDED} are supported")


def _decoded_int(value: msgspec.Raw | None) -> int:
    """0 for what is no integer that fits 64 bits: the library can't read it."""
    try:
        return 0 if value is None else msgspec.json.decode(value, type=int)
    except msgspec.DecodeError:
        return 0


def _each(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """The parts of a sequence, also of sequences in it, in their order."""
    if not isinstance(part, dict):
        return
    inner = part.get(name)
    if part.get("type") == "Sequence" and isinstance(inner, list):
        for one in inner:
            yield from _each(one, name)
    else:
        yield part


def _growth(normalizer: Any) -> int:
    """Characters that a normalizer can make of one, at most."""
    growth = 1
    for one in _each(normalizer, "normalizers"):
        growth = min(growth * _growth_of(one), MOST)
    return growth


def _growth_of(part: dict[str, Any]) -> int:
    match part:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(text)}} if text:
            return -(-len(content) // len(text)) or 1
        case {"type": "Replace", "content": str(content)}:  # a regular expression may match nothing, at each character
            return max(1, len(content)) if len(content) < 2 else len(content) + 1
        case {"type": "Prepend", "prepend": str(text)}:  # of a text of one character
            return len(text) + 1
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return longest_of_map(_decoded(charsmap))
    return 1  # Unicode's forms and the others: the longest composition counts in MAX_GROWTH


def _decoded(charsmap: str) -> bytes:
    try:
        return base64.b64decode(charsmap)
    except ValueError:
        return b""


def longest_of_map(charsmap: bytes) -> int:
    """Characters of the longest text in SentencePiece's map: the size of its trie, the trie, and texts that end with 0.
    1 for what is no map."""
    if len(charsmap) < 4:
        return 1
    (size,) = struct.unpack_from("<I", charsmap)
    return max(1, *(len(text.decode(errors="replace")) for text in charsmap[4 + size :].split(b"\0")))


def _num_added(part: dict[str, Any]) -> int:
    """Tokens that a post-processor adds to a text or a pair."""
    specials, most = part.get("special_tokens"), 0
    if part.get("type") != "TemplateProcessing" or not isinstance(specials, dict):
        return 0
    sizes = {name: len(ids) for name, one in specials.items() if isinstance(ids := _value(one, "ids"), list)}
    for name in ("single", "pair"):
        pieces = part.get(name)
        ids = [_value(_value(one, "SpecialToken"), "id") for one in (pieces if isinstance(pieces, list) else [])]
        most = max(most, sum(sizes.get(one, 1) for one in ids if isinstance(one, str)))
    return most


def _value(part: Any, key: str) -> Any:
    """None for what the library can't read either."""
    return part.get(key) if isinstance(part, dict) else None
