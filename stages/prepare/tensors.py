"""Weights in safetensors files: reading what a file holds, writing one tensor after the other, checking shapes.

The format: a u64 with the length of the header, the header as JSON (name → dtype, shape, begin and end of its bytes),
then the bytes (https://github.com/huggingface/safetensors#format). Written here rather than with the library because
a tensor may be larger than the memory at hand and numpy has no bfloat16.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from pipeline.model_folder import ModelConfig
from pipeline.stages.prepare.source import ModelError

FLOATS = ("BF16", "F16", "F32")
MAX_HEADER_BYTES = 100 * 1024**2
"""The library's own limit."""

Shape = tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
    end = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if path.stat().st_size < end:
        raise ModelError(f"{path} is cut short: {path.stat().st_size} bytes of {end}; copy or download it again")
    return entries


class Bf16Writer:
    """Writes a safetensors file of bfloat16 tensors, in the order in which they were announced, in pieces."""

    def __init__(self, path: Path, shapes: dict[str, Shape]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in shapes.items():
            end = offset + 2 * int(np.prod(shape, dtype=np.int64))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        self.num_bytes = 8 + len(text) + offset
        self._file = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, values: "np.ndarray[Any, np.dtype[np.float32]]") -> int:
        """Append float32 values, rounded to bfloat16. Returns the bytes written."""
        return self._file.write(to_bf16(values).data)

    def __enter__(self) -> "Bf16Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        written = self._file.tell()
        self._file.close()
        assert kind is not None or written == self.num_bytes, f"wrote {written} bytes of {self.num_bytes}"


def to_bf16(values: "np.ndarray[Any, np.dtype[np.float32]]") -> "np.ndarray[Any, np.dtype[np.uint16]]":
    """The upper halves of float32 numbers, rounded to the nearest even. Infinite stays infinite, NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values).reshape(bits.shape)
    return np.where(nan, np.uint16(0x7FC0), rounded) if nan.any() else rounded


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a model of this shape has, in Hugging Face's names and layout."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        linears = {
            "self_attn.q_proj": (q_size, hidden, config.attention_bias),
            "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
            "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
            "self_attn.o_proj": (hidden, q_size, config.attention_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        before = f"model.layers.{layer}."
        shapes[f"{before}input_layernorm.weight"] = (hidden,)
        shapes[f"{before}post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{before}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{before}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, paths: Iterable[Path]) -> None:
    """Raises ModelError, naming tensor and file, where the files don't hold exactly the model that `config` describes.

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
        if entry.dtype not in FLOATS:
            raise ModelError(f"{path}: tensor {name!r} is {entry.dtype}; weights must be one of {', '.join(FLOATS)}")
    for name, (path, _) in found.items():
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"{path}: tensor {name!r} is not part of a model as config.json describes it")
