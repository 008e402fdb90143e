"""Weights in safetensors files: what a file holds, and whether it is what a model needs.

The format: a u64 with the length of the header, the header as JSON (name → dtype, shape, begin and end of its bytes),
then the bytes (https://github.com/huggingface/safetensors#format). Written here rather than with the library because
a tensor may be larger than the memory at hand and numpy has no bfloat16.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import safe_open

from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.prepare.files import open_regular, shown
from pipeline.stages.prepare.sources.source import ModelError

STORED: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
"""The dtypes that weights may have, and how numpy reads them."""
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The dtypes of whole bytes that safetensors knows: those of tensors that no model of ours has."""
MAX_HEADER_BYTES = 32 * 1024**2
"""Ten thousand layers take 16 MB."""
MAX_DIMS = 16

Shape = tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Begin and end in the file; in the header itself they count from the header's end."""


class _Described(msgspec.Struct):
    """An entry of a header, before it is known to be a tensor's: `__metadata__` has texts under any names."""

    dtype: str | None = None
    shape: tuple[int, ...] | str | None = None
    data_offsets: tuple[int, int] | str | None = None


_headers = msgspec.json.Decoder(dict[str, _Described])


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name.

    Raises ModelError unless it is a complete safetensors file, whose tensors fill it without holes and overlaps.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise _unreadable(path, f"it has {size} bytes, and the length of its header takes 8")
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise _unreadable(path, f"its header would be {length} bytes long; {MAX_HEADER_BYTES} are supported")
        if length > size - 8:
            raise _unreadable(path, f"its header takes {length} bytes, and {size - 8} are left")
        text = file.read(length)
    try:
        if text[:1] != b"{":
            raise ValueError("its header does not begin with '{'")
        described = _headers.decode(text)
        json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    described.pop("__metadata__", None)
    entries = {name: _entry(path, name, one) for name, one in described.items()}
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, _ = entry.data_offsets
        if begin != end:
            what = "overlaps" if begin < end else "leaves a hole behind"
            raise ModelError(f"{path}: tensor {shown(name)} begins at {begin}, which {what} {shown(before)}")
        _, end = entry.data_offsets
        before = name
    base = 8 + length
    if size < base + end:
        raise ModelError(f"{path} is cut short: {size} bytes of {base + end}; copy or download it again")
    if size > base + end:
        raise ModelError(f"{path} has {size} bytes, and its tensors end at {base + end}; copy or download it again")
    try:
        with safe_open(path, framework="np"):  # what the library refuses now, it would refuse in the executor
            pass
    except Exception as error:  # the library raises nothing more precise
        raise _unreadable(path, error) from error
    return {
        name: TensorEntry(entry.dtype, entry.shape, (base + entry.data_offsets[0], base + entry.data_offsets[1]))
        for name, entry in entries.items()
    }


def _unreadable(path: Path, fault: object) -> ModelError:
    return ModelError(f"{path} is not a safetensors file, or only the beginning of one: {fault}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Raises ValueError if a name is there twice: which of two is taken differs from one reader to another."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"its header has {shown(name)} twice")
        seen.add(name)


def _entry(path: Path, name: str, one: _Described) -> TensorEntry:
    """A tensor whose shape and place in the file agree. Raises ModelError."""
    where = f"{path}: tensor {shown(name)}"
    if one.dtype is None or not isinstance(one.shape, tuple) or not isinstance(one.data_offsets, tuple):
        raise ModelError(f"{where} must have dtype, shape and data_offsets")
    bits = DTYPE_BITS.get(one.dtype)
    if bits is None:
        raise ModelError(f"{where} has dtype {shown(one.dtype)}; weights must be one of {', '.join(STORED)}")
    if len(one.shape) > MAX_DIMS or min(one.shape, default=0) < 0:
        raise ModelError(f"{where} has shape {shown(list(one.shape))}; it must have {MAX_DIMS} numbers from 0 at most")
    begin, end = one.data_offsets
    num_bytes = math.prod(one.shape) * bits // 8
    if begin < 0 or end - begin != num_bytes:
        raise ModelError(
            f"{where} has data_offsets {shown(list(one.data_offsets))}; its shape and dtype take {shown(num_bytes)} "
            "bytes, from 0 on"
        )
    if begin % (bits // 8):
        raise ModelError(f"{where} begins at {begin}, which is not a multiple of the {bits // 8} bytes of {one.dtype}")
    return TensorEntry(one.dtype, one.shape, (begin, end))


def float_rows(path: Path, entry: TensorEntry, rows_at_once: int) -> Iterator["np.ndarray[Any, Any]"]:
    """A tensor's numbers as float32, exactly, some rows at a time. The file is mapped, not read as a whole."""
    begin, _ = entry.data_offsets
    stored = np.memmap(path, STORED[entry.dtype], mode="r", offset=begin, shape=entry.shape)
    for start in range(0, entry.shape[0], rows_at_once):
        piece = stored[start : start + rows_at_once]
        if entry.dtype == "BF16":  # the upper half of a float32
            yield (piece.astype(np.uint32) << 16).view(np.float32)
        else:
            yield piece.astype(np.float32)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a model of this shape has, in Hugging Face's names and layout."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        linears = {
            "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, q_size, config.out_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        before = f"model.layers.{layer}."
        shapes[f"{before}input_layernorm.weight"] = (hidden,)
        shapes[f"{before}post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{before}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{before}self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{before}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{before}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, paths: Iterable[Path]) -> dict[str, tuple[Path, TensorEntry]]:
    """Where each tensor of the model is: its file, and its place in it.

    Raises ModelError, naming tensor and file, where the files don't hold exactly the model that `config` describes.
    A tied head and the rotary buffers of old checkpoints may be there; nothing reads them.
    """
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in found:
                raise ModelError(f"{path}: tensor {shown(name)} is in {found[name][0].name} too")
            found[name] = (path, entry)
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"the weights have no tensor {name!r}, which config.json asks for")
        path, entry = found[name]
        if entry.shape != shape:
            raise ModelError(f"{path}: tensor {name!r} has shape {shown(entry.shape)}, config.json says {shape}")
        if entry.dtype not in STORED:
            raise ModelError(f"{path}: tensor {name!r} is {entry.dtype}; weights must be one of {', '.join(STORED)}")
    for name, (path, _) in found.items():
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"{path}: tensor {shown(name)} is not part of a model as config.json describes it")
    return {name: found[name] for name in expected}
