"""The added tokens of a prepared model, in a file of their own: the gateway needs them, and not the rest of
tokenizer.json, which takes 0.1 s to read with 262,144 tokens, and more if a file is made for that.

added_tokens.jsonl    {"id": 1, "content": "<s>", "special": true}
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from pipeline.runtime.model.model_folder import read_file
from pipeline.text.formats.grammar.lark import AddedToken

FILE = "added_tokens.jsonl"
PIECE_BYTES = 2**18
"""The decoder holds Python's lock, in processes whose other threads must not wait for long: about a millisecond."""


class _Tokenizer(msgspec.Struct):
    """The part of a tokenizer.json that is used here."""

    added_tokens: list[AddedToken] = []


def load(folder: Path) -> list[AddedToken]:
    """Those of a prepared model. Raises OSError and msgspec.DecodeError."""
    if (path := folder / FILE).exists():
        data, decoder = read_file(path), msgspec.json.Decoder(AddedToken)
        return [token for piece in pieces(data) for token in decoder.decode_lines(piece)]
    return in_tokenizer(folder)


def in_tokenizer(folder: Path) -> list[AddedToken]:
    """Those of its tokenizer.json, none if it has none. Raises OSError and msgspec.DecodeError."""
    path = folder / "tokenizer.json"
    return msgspec.json.decode(read_file(path), type=_Tokenizer).added_tokens if path.exists() else []


def write(folder: Path) -> None:
    """Write the file beside tokenizer.json. Raises OSError and msgspec.DecodeError."""
    encoder, tokens = msgspec.json.Encoder(), iter(in_tokenizer(folder))
    with (folder / FILE).open("wb") as file:
        while piece := list(islice(tokens, 4096)):
            file.write(encoder.encode_lines(piece))


def pieces(data: bytes) -> Iterator[bytes]:
    """Whole lines, about PIECE_BYTES at a time."""
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin + PIECE_BYTES) + 1 or len(data)
        yield data[begin:end]
        begin = end
