"""Hostile safetensors files are rejected in one line."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stages.prepare.sources.hostile.attempts import U64, assert_matches, refusal


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    written = json.dumps(entries).encode()
    path.write_bytes(U64(len(written)) + written + data[8 + length :])


NORM = "model.norm.weight"


def moved(by_begin: Any, by_end: Any) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        begin, end = entries[NORM]["data_offsets"]
        entries[NORM]["data_offsets"] = [begin + by_begin, end + by_end]

    return change


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        entries[NORM].update(values)

    return change


def shared_offset(entries: dict[str, Any]) -> None:
    twin = next(name for name in entries if name.endswith("input_layernorm.weight"))
    entries[NORM]["data_offsets"] = entries[twin]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(data_offsets=[-128, 0]), r"norm\.weight' has data_offsets \[-128, 0\]; its shape and dtype take 128"),
        (moved(-(2**40), -(2**40)), r"has data_offsets \[-"),
        (changed(data_offsets=[2**70, 2**70 + 128]), r"leaves a gap after"),
        (moved(1, 1), r"begins at \d+, which is not a multiple of the 4 bytes of F32|leaves a gap"),
        (moved(0, 4), r"has data_offsets"),
        (moved(128, -128), r"has data_offsets"),
        (moved(0.5, 0.5), r"Expected `int"),
        (changed(data_offsets=[True, 128]), r"Expected `int"),
        (changed(data_offsets=[0]), r"length 2"),
        (shared_offset, r"tensor '\S+' begins at \d+, which (overlaps|leaves a gap)"),
        (changed(shape=[-32]), r"norm\.weight' has shape \[-32\]"),
        (changed(shape=[2**40, 2**40]), r"its shape and dtype take \d+ bytes"),
        (changed(shape=[1] * 1000 + [32]), r"it must have at most 16 dimensions"),
        (changed(shape=[10**300] * 16), r"its shape and dtype take <a number of \d+ bits> bytes"),
        (changed(shape="32"), r"must have dtype, shape and data_offsets"),
        (changed(dtype="F7"), r"norm\.weight' has dtype 'F7'"),
        (changed(dtype="I32"), r"norm\.weight' is I32; weights must be"),
        (lambda entries: entries.update(a=1), r"Expected `object`"),
        (lambda entries: entries.update(a={}), r"tensor 'a' must have dtype"),
        (lambda entries: entries.update(__metadata__={"a": 1}), r"expected a string"),
    ],
)
def test_a_hostile_safetensors_header_is_rejected(
    llama: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    with_header(llama / "model.safetensors", change)
    message = refusal(llama)
    assert message.startswith(str(llama / "model.safetensors"))
    assert_matches(message, words)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (U64(2**63) + b"{}", r"its header has 9223372036854775808 bytes"),
        (U64(10**6) + b"{}", r"its header has 1000000 bytes, but only 2 are left"),
        (U64(100_000) + b"[" * 100_000, r"does not begin with '\{'"),
        (U64(100_005) + b'{"a":' + b"[" * 100_000, r"not a complete safetensors file"),
        (U64(13) + b'{"a":1,"a":2}', r"not a complete safetensors file"),
        (U64(8_400_002) + b"{" + b'"a":{},' * 1_200_000 + b"}", r"its header has more than 262144 tensors"),
        (b"\x01", r"it has 1 bytes"),
    ],
)
def test_a_safetensors_file_with_only_a_hostile_header_is_rejected(llama: Path, data: bytes, words: str) -> None:
    (llama / "model.safetensors").write_bytes(data)
    assert_matches(refusal(llama), words)


def test_a_duplicate_tensor_in_a_header_is_rejected(llama: Path) -> None:
    path = llama / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    head = f"{{{json.dumps(NORM)}:{json.dumps({**entries[NORM], 'shape': [32, 1]})},".encode()
    written = head + data[9 : 8 + length]
    path.write_bytes(U64(len(written)) + written + data[8 + length :])
    assert_matches(refusal(llama), r"its header has 'model\.norm\.weight' twice")


def test_bytes_after_the_tensors_are_rejected_as_by_the_library(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(64))
    assert_matches(refusal(llama), r"has \d+ bytes, but its tensors end at \d+")


def test_a_tensor_in_two_files_without_an_index_is_rejected(qwen3: Path) -> None:
    (qwen3 / "model.safetensors.index.json").unlink()
    shutil.copyfile(qwen3 / "model-1.safetensors", qwen3 / "model-2.safetensors")
    assert_matches(refusal(qwen3), r"model-2\.safetensors: tensor '\S+' is also in model-1\.safetensors")
