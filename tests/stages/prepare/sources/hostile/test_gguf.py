"""Hostile .gguf files are rejected in one line."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.stages.prepare.gguf import file
from pipeline.stages.prepare.sources.source import ModelError
from tests.stages.prepare.sources.hostile.attempts import U64, assert_matches, refusal

U32 = struct.Struct("<I").pack
ARRAY, UINT8, STRING, UINT32 = 9, 0, 8, 4


# .gguf


def text(value: str) -> bytes:
    return U64(len(value.encode())) + value.encode()


def header(
    *, keys: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(infos), len(keys))
    return b"GGUF" + U32(3) + U64(num_tensors) + U64(num_keys) + b"".join(keys) + b"".join(infos)


def info(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(U64, dims)) + U32(kind) + U64(offset)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + U32(kind) + value


HOSTILE_GGUF = {
    "an array beyond the file": (
        header(keys=(key("a", ARRAY, U32(UINT8) + U64(2**40)),)),
        r"'a' is an array of 1\d+ e",
    ),
    "texts beyond the file": (
        header(keys=(key("a", ARRAY, U32(STRING) + U64(2**21)),)),
        r"'a' takes 16777216 bytes, bu",
    ),
    "nested arrays": (
        header(keys=(key("a", ARRAY, (U32(ARRAY) + U64(1)) * 5000 + U32(UINT8) + U64(0)),)),
        r"'a' is an array of arrays",
    ),
    "tensors beyond the file": (header(counts=(2**60, 0)), r"it has \d+ tensors; at most"),
    "tensors that would fit no header": (
        header(counts=(1000, 0)),
        r"its 1000 tensors take at least 32000 bytes, but only 0",
    ),
    "keys beyond the file": (header(counts=(0, 2**63)), r"it has \d+ keys"),
    "a name beyond the file": (
        header(keys=(U64(60000) + bytes(40),)),
        r"the name of a key takes 60000 bytes, but only 40 are",
    ),
    "a huge name": (header(keys=(U64(2**63) + bytes(40),)), r"the name of a key has \d+ bytes"),
    "a text beyond the file": (
        header(keys=(key("a", STRING, U64(2**62)),)),
        r"'a' takes \d+ bytes, but only 0 are left",
    ),
    "an unknown type": (header(keys=(key("a", 77, U64(0)),)), r"'a' has a value of the unknown type 77"),
    "a key twice": (header(keys=(key("a", UINT32, U32(0)),) * 2), r"'a' appears twice"),
    "a name that is no text": (header(keys=(U64(1) + b"\xff" + U32(UINT32) + U32(0),)), r"name of a key is not UTF-8"),
    "a bool of 2": (header(keys=(key("a", 7, b"\x02"),)), r"'a' has a bool that is neither 0 nor 1"),
    "big-endian": (b"GGUF" + bytes((0, 0, 0, 3)) + bytes(16), r"is a big-endian GGUF file; only little-endian"),
    "version 1": (b"GGUF" + U32(1) + bytes(16), r"its version is 1; supported are 2 and 3"),
    "no alignment": (header(keys=(key("general.alignment", UINT32, U32(0)),)), r"general\.alignment is 0; it must be"),
    "an odd alignment": (header(keys=(key("general.alignment", UINT32, U32(24)),)), r"general\.alignment is 24"),
    "an alignment as text": (header(keys=(key("general.alignment", STRING, text("8")),)), r"general\.alignment is '8'"),
    "no dimensions": (header(infos=(info("a", (), 0, 0),)) + bytes(8), r"'a' has 0 dimensions"),
    "a million dimensions": (
        header(infos=(text("a") + U32(10**6) + bytes(100),)),
        r"'a' has 1000000 dimensions; it must have 1 to 4",
    ),
    "dimensions that overflow": (
        header(infos=(info("a", (2**32, 2**32, 2**32), 0, 0),)),
        r"it has \d+ of \d{29,} bytes; the tensor 'a' ends there",
    ),
    "a dimension of 0": (header(infos=(info("a", (0,), 0, 0),)), r"'a' has the shape \[0\]"),
    "half a block": (header(infos=(info("a", (33,), 8, 0),)) + bytes(200), r"'a' has the shape \[33\]; rows must be"),
    "an unknown format": (header(infos=(info("a", (8,), 999, 0),)), r"'a' has the unknown type 999"),
    "an offset beyond the file": (
        header(infos=(info("a", (8,), 0, 2**63),)),
        r"it has \d+ of \d+ bytes; the tensor 'a' ends there",
    ),
    "an offset between": (header(infos=(info("a", (8,), 0, 7),)) + bytes(99), r"'a' begins at 7, not at a multiple"),
    "tensors that overlap": (
        header(infos=(info("a", (16,), 0, 0), info("b", (8,), 0, 32))) + bytes(200),
        r"'b' begins at 32, inside 'a'",
    ),
    "a tensor twice": (header(infos=(info("a", (8,), 0, 0), info("a", (8,), 0, 32))) + bytes(200), r"'a' appears twi"),
}


@pytest.mark.parametrize("what", HOSTILE_GGUF)
def test_a_hostile_gguf_header_is_rejected(tmp_path: Path, what: str) -> None:
    data, words = HOSTILE_GGUF[what]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    message = refusal(path)
    assert message.startswith(f"{path} is " + ("a big-endian" if what == "big-endian" else "not a complete GGUF file"))
    assert_matches(message, words)


def test_a_vocabulary_with_a_huge_token_is_rejected(gguf: Path) -> None:
    old = text("Ċ")
    data = gguf.read_bytes()
    at = data.index(text("tokenizer.ggml.tokens"))
    offset = data.index(old, at)
    long = text("x" * 100_000)
    grown = data[:offset] + long + data[offset + len(old) :]
    # The tensor data after the header moves as well: a multiple of the alignment keeps it aligned.
    pad = -(len(grown) - len(data)) % 64
    long = text("x" * (100_000 + pad))
    gguf.write_bytes(data[:offset] + long + data[offset + len(old) :])
    assert_matches(refusal(gguf), r"tokenizer\.ggml\.tokens has \d+ bytes, and up to 1000\d\d in one token")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_gguf_that_is_not_a_regular_file_is_rejected(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(path := tmp_path / "a.gguf")
    assert_matches(refusal(path), r"neither a folder nor a regular file|config\.json is missing")
    with pytest.raises(ModelError, match=r"a\.gguf is a (FIFO|folder), not a regular file"):
        file.GgufFile(path)
