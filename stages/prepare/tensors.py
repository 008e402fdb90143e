"""Weights in safetensors files: what a file holds, and whether it is what a model needs.

The format: a u64 with the length of the header, the header as JSON (name → dtype, shape, begin and end of its bytes),
then the bytes (https://github.com/huggingface/safetensors#format). Written here rather than with the library because
a tensor may be larger than the memory at hand and numpy has no bfloat16.
"""

import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.model_folder import ModelConfig
from pipeline.stages.prepare.source import ModelError

STORED: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
"""The dtypes that weights may have, and how numpy reads them."""
MAX_HEADER_BYTES = 100 * 1024**2
"""The library's own limit."""

Shape = tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Begin and end in the file; in the header itself they count from the header's end."""


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name. Raises ModelError where it isn't a complete safetensors file."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            (length,) = struct.unpack("<Q", head)
            if length > MAX_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file: its header would be {length} bytes long")
            raw = msgspec.json.decode(file.read(length), type=dict[str, Any])
        raw.pop("__metadata__", None)
        entries = msgspec.convert(raw, dict[str, TensorEntry])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file, or only the beginning of one: {error}") from error
    base = 8 + length
    end = base + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if path.stat().st_size < end:
        raise ModelError(f"{path} is cut short: {path.stat().st_size} bytes of {end}; copy or download it again")
    return {
        name: TensorEntry(entry.dtype, entry.shape, (base + entry.data_offsets[0], base + entry.data_offsets[1]))
        for name, entry in entries.items()
    }


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
        found.update({name: (path, entry) for name, entry in read_header(path).items()})
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"the weights have no tensor {name!r}, which config.json asks for")
        path, entry = found[name]
        if entry.shape != shape:
            raise ModelError(f"{path}: tensor {name!r} has shape {entry.shape}, config.json says {shape}")
        if entry.dtype not in STORED:
            raise ModelError(f"{path}: tensor {name!r} is {entry.dtype}; weights must be one of {', '.join(STORED)}")
        begin, end = entry.data_offsets
        if end - begin != math.prod(shape) * STORED[entry.dtype].itemsize:
            raise ModelError(f"{path}: tensor {name!r} takes {end - begin} bytes, which is not what its shape says")
    for name, (path, _) in found.items():
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"{path}: tensor {name!r} is not part of a model as config.json describes it")
    return {name: found[name] for name in expected}
