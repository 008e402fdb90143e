"""Checks that a model's tokenizer can be served: its token ids fit int32, and it can encode and decode text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pipeline.errors import UserError
from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.stages.prepare.shape import MAX_COUNT
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.text.vocabulary import Vocabulary

MAX_CONVERTED_ID = 2**24
"""Limit for vocabularies that are converted to tokenizer.json: saving one iterates over all ids up to the largest."""


MAX_ADDED_TOKENS = 2**18
"""The gateway has them all. Models have up to 66,000: one for each sound of speech."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _File(msgspec.Struct):
    """The parts of a tokenizer.json that hold ids outside the vocabulary."""

    added_tokens: list[_AddedToken] = []
    post_processor: Any = None


def check_token_ids(tokenizer: Tokenizer, path: Path, where: str) -> None:
    """Raises ModelError, naming `where`, unless every id of a tokenizer and of its file at `path` fits int32.

    The library accepts any uint32.
    """
    check_vocabulary(tokenizer, where)
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} cannot be read: {error}") from error
    check_num_added(len(file.added_tokens), where)
    for added in file.added_tokens:
        _check(added.id, f"added_tokens gives {added.content!r}", where)
    for number in _integers(file.post_processor):
        _check(number, "post_processor has", where)


def check_num_added(number: int, where: str, what: str = "added_tokens") -> None:
    """Raises ModelError, naming `where`, if a tokenizer has too many added tokens."""
    if number > MAX_ADDED_TOKENS:
        raise ModelError(f"{where}: {what} gives {number} added tokens; at most {MAX_ADDED_TOKENS} are supported")


def check_vocabulary(tokenizer: Tokenizer, where: str, max_id: int = MAX_COUNT) -> None:
    """Raises ModelError, naming `where`, if the vocabulary has an id above `max_id`."""
    for token, token_id in tokenizer.get_vocab().items():
        _check(token_id, f"its vocabulary gives {token!r}", where, max_id)


def check_encodes(tokenizer: Tokenizer, where: str) -> None:
    """Raises ModelError, naming `where`, if the tokenizer can't encode a short text."""
    try:
        with panics_as_errors():
            tokenizer.encode("a", add_special_tokens=True)
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{where}: its tokenizer cannot encode a text: {error}") from error


def check_decodes(tokenizer: Tokenizer, where: str) -> None:
    """Raises ModelError, naming `where`, if its decoder is not one that detokenizes one id after the other."""
    try:
        Vocabulary(tokenizer)
    except UserError as error:
        raise ModelError(f"{where}: {error}") from error


def _check(token_id: int, what: str, where: str, max_id: int = MAX_COUNT) -> None:
    if token_id > max_id:
        raise ModelError(f"{where}: {what} the token id {token_id}; the largest supported id is {max_id}")


def _integers(value: Any) -> Iterator[int]:
    """All integers in a JSON value; in a post-processor these are token and type ids."""
    match value:
        case bool():
            return
        case int():
            yield value
        case list():
            for item in value:
                yield from _integers(item)
        case dict():
            yield from _integers(list(value.values()))
