"""Reads safetensors files and checks that they hold the tensors of a model.

The format: the header's length as u64, the header as JSON (name → dtype, shape, begin and end of its bytes), then the
data (https://github.com/huggingface/safetensors#format). The library can't read a tensor piece by piece, and numpy has
no bfloat16.
"""

import json
import math
import os
import struct
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import safe_open

from pipeline.runtime.model.model_config import ModelConfig, Piece
from pipeline.runtime.model.weight_headers import TensorEntry
from pipeline.stages.prepare.files import MAX_SHOWN_BYTES, open_regular, shown, without_duplicates, wrong_file
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.feed_forward_shapes import (
    expert_linears,
    expert_vectors,
    mlp_linears,
    mlp_vectors,
    norm_shapes,
)
from pipeline.stages.prepare.weights.recurrent_shapes import Linears, recurrent_shapes
from pipeline.stages.prepare.weights.recurrent_shapes import Shape as Shape

STORED: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
"""The supported dtypes of weights, and the numpy dtypes to read them with."""
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of every safetensors dtype of whole bytes, also of those that weights must not have."""
MAX_HEADER_BYTES = 32 * 1024**2
"""A header with ten thousand layers takes 16 MB."""
MAX_TENSORS = 2**18
"""Of a file. Models have some thousands; each entry takes up to 2 KiB while it is checked."""
MAX_DIMS = 16


class _RawEntry(msgspec.Struct):
    """Any entry of a header: a tensor's, or `__metadata__`, whose values are strings under arbitrary names."""

    dtype: str | None = None
    shape: tuple[int, ...] | str | None = None
    data_offsets: tuple[int, int] | str | None = None


_header_decoder = msgspec.json.Decoder(dict[str, _RawEntry])


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name, with offsets from its beginning.

    Raises ModelError unless it is a complete safetensors file whose tensors have neither gaps nor overlaps.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise _unreadable(path, f"it has {size} bytes, less than the 8 of the header's length")
        if (wrong := wrong_file(path, head + file.read(MAX_SHOWN_BYTES))) is not None:
            raise wrong
        file.seek(len(head))
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise _unreadable(path, f"its header has {length} bytes; at most {MAX_HEADER_BYTES} are supported")
        if length > size - 8:
            raise _unreadable(path, f"its header has {length} bytes, but only {size - 8} are left")
        text = file.read(length)
    try:
        if text[:1] != b"{":
            raise ValueError("its header does not begin with '{'")
        if text.count(b"{") > 2 * MAX_TENSORS:  # also of texts in its metadata
            raise ValueError(f"its header has more than {MAX_TENSORS} tensors")
        raw_entries = _header_decoder.decode(text)
        if len(raw_entries) > MAX_TENSORS:
            raise ValueError(f"its header has {len(raw_entries)} entries; at most {MAX_TENSORS} are supported")
        json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    raw_entries.pop("__metadata__", None)
    entries = {name: _entry(path, name, raw) for name, raw in raw_entries.items()}
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, _ = entry.data_offsets
        if begin != end:
            what = "overlaps" if begin < end else "leaves a gap after"
            raise ModelError(f"{path}: tensor {shown(name)} begins at {begin}, which {what} {shown(before)}")
        _, end = entry.data_offsets
        before = name
    base = 8 + length
    if size < base + end:
        raise ModelError(f"{path} is truncated: {size} bytes of {base + end}; copy or download it again")
    if size > base + end:
        raise ModelError(f"{path} has {size} bytes, but its tensors end at {base + end}; copy or download it again")
    try:
        with safe_open(path, framework="np"):  # the executor opens it with the library
            pass
    except Exception as error:  # the library raises nothing more precise
        raise _unreadable(path, error) from error
    return {
        name: TensorEntry(entry.dtype, entry.shape, (base + entry.data_offsets[0], base + entry.data_offsets[1]))
        for name, entry in entries.items()
    }


def _unreadable(path: Path, fault: object) -> ModelError:
    return ModelError(f"{path} is not a complete safetensors file: {fault}")


def _entry(path: Path, name: str, raw: _RawEntry) -> TensorEntry:
    """A tensor's entry. Raises ModelError unless its shape, dtype and offsets agree."""
    where = f"{path}: tensor {shown(name)}"
    if raw.dtype is None or not isinstance(raw.shape, tuple) or not isinstance(raw.data_offsets, tuple):
        raise ModelError(f"{where} must have dtype, shape and data_offsets")
    bits = DTYPE_BITS.get(raw.dtype)
    if bits is None:
        raise ModelError(f"{where} has dtype {shown(raw.dtype)}; weights must be one of {', '.join(STORED)}")
    if len(raw.shape) > MAX_DIMS or min(raw.shape, default=0) < 0:
        raise ModelError(
            f"{where} has shape {shown(list(raw.shape))}; it must have at most {MAX_DIMS} dimensions, none negative"
        )
    begin, end = raw.data_offsets
    num_bytes = math.prod(raw.shape) * bits // 8
    if begin < 0 or end - begin != num_bytes:
        raise ModelError(
            f"{where} has data_offsets {shown(list(raw.data_offsets))}; its shape and dtype take {shown(num_bytes)} "
            "bytes"
        )
    if begin % (bits // 8):
        raise ModelError(f"{where} begins at {begin}, which is not a multiple of the {bits // 8} bytes of {raw.dtype}")
    return TensorEntry(raw.dtype, raw.shape, (begin, end))


def float_rows(path: Path, entry: TensorEntry, rows_at_once: int) -> Iterator["np.ndarray[Any, Any]"]:
    """A tensor as exact float32, at most `rows_at_once` rows at a time. Those of a tensor with more than two dimensions
    are of all its matrices. The file is mapped, not read as a whole."""
    begin, _ = entry.data_offsets
    shape = (entry.shape or (1,)) if len(entry.shape) < 3 else (math.prod(entry.shape[:-1]), entry.shape[-1])
    stored = np.memmap(path, STORED[entry.dtype], mode="r", offset=begin, shape=shape)
    for start in range(0, shape[0], rows_at_once):
        piece = stored[start : start + rows_at_once]
        if entry.dtype == "BF16":  # bfloat16 is the upper half of a float32
            yield (piece.astype(np.uint32) << 16).view(np.float32)
        else:
            yield piece.astype(np.float32)


def model_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every matrix and vector that a model computes with, by Llama's names. Those of other models
    have names of the same kind."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    if config.position_embeddings:
        shapes["model.embed_positions.weight"] = (config.position_embeddings, hidden)
    if config.token_types:
        shapes["model.embed_token_types.weight"] = (config.token_types, hidden)
    if config.embedding_norm and config.embedding_norm_weights:
        shapes |= norm_shapes(config, "model.embed_norm")
    if config.distance_buckets:
        shapes["model.distance_bias.weight"] = (config.distance_buckets, config.num_heads)
    if (inputs := config.per_layer_inputs) is not None:
        shapes["model.per_layer_embeddings.weight"] = (inputs.vocab_size, config.num_layers * inputs.size)
        shapes["model.per_layer_projection.weight"] = (config.num_layers * inputs.size, hidden)
        shapes["model.per_layer_norm.weight"] = (inputs.size,)
    for layer in range(config.num_layers):
        shapes |= layer_shapes(config, layer)
    if not config.residual_norms:
        shapes |= norm_shapes(config, "model.norm")
    if not config.tie_embeddings and config.generates:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """The tensors of one layer."""
    before = f"model.layers.{layer}."
    linears, vectors = recurrent_shapes(config) if config.is_recurrent(layer) else _attention_shapes(config, layer)
    shapes: dict[str, Shape] = {f"{before}{name}": shape for name, shape in vectors.items()}
    if config.has_experts(layer):
        linears |= expert_linears(config)
        shapes |= expert_vectors(config, before)
    if config.has_dense(layer):
        linears |= mlp_linears(config, layer)
        shapes |= mlp_vectors(config, before)
    norms = ["self_attn_residual_norm", "mlp_residual_norm"] if config.residual_norms else []
    if config.has_pre_norms(layer):
        norms += [] if config.skips_first_norm and layer == 0 else ["input_layernorm"]
        norms += [] if config.shared_norm else ["post_attention_layernorm"]
    if config.has_post_norms(layer):
        norms += ["self_attn_post_norm", "mlp_post_norm"]
    for norm in norms:
        shapes |= norm_shapes(config, f"{before}{norm}")
    if (inputs := config.per_layer_inputs) is not None:
        linears["per_layer.gate_proj"] = (inputs.size, config.hidden_size, False)
        linears["per_layer.out_proj"] = (config.hidden_size, inputs.size, False)
        shapes |= norm_shapes(config, f"{before}per_layer.post_norm")
    if config.layer_scales:
        shapes[f"{before}layer_scale.weight"] = (1,)
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{before}{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{before}{name}.bias"] = (rows,)
    return shapes


def _attention_shapes(config: ModelConfig, layer: int) -> tuple[Linears, dict[str, Shape]]:
    """The matrices of attention in a layer, and its other tensors."""
    hidden, heads = config.hidden_size, config.heads_of(layer)
    q_size, kv_size = heads.query_size, heads.kv_size
    linears: Linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.out_bias),
    }
    has_keys = config.kv_source(layer) == layer
    unused = ["v_proj"] if config.values_are_keys(layer) else []
    for name in unused if has_keys else ["k_proj", "v_proj"]:
        del linears[f"self_attn.{name}"]
    if config.attention_gate:
        num = heads.num if config.gate_per_head else q_size
        linears["self_attn.gate_proj"] = (num, hidden, config.qkv_bias and not config.gate_per_head)
    vectors: dict[str, Shape] = {}
    if config.qk_norm and config.qk_norm_weights:
        whole = config.qk_norm_kind != "head"
        vectors["self_attn.q_norm.weight"] = (q_size if whole else heads.dim,)
        if has_keys:
            vectors["self_attn.k_norm.weight"] = (kv_size if whole else heads.dim,)
    if config.sinks:
        vectors["self_attn.sinks"] = (config.num_heads,)
    return linears, vectors


def expected_shapes(config: ModelConfig, of_model: dict[str, Shape] | None = None) -> dict[str, Shape]:
    """Name and shape of every tensor of a model, in the names and layout of its weight files. `of_model` are those of
    the model by Llama's names, by default `model_shapes`."""
    shapes: dict[str, Shape] = {}
    stacked: dict[str, int] = {}
    """The number of experts of tensors with all of them."""
    for name, shape in (model_shapes(config) if of_model is None else of_model).items():
        stored, piece = config.layout.find(name)
        if piece.index is not None:
            stacked[stored] = piece.index + 1
            if piece.index:
                continue
        if stored in shapes:  # several pieces are rows of one tensor
            before = shapes[stored]
            before = before[::-1] if piece.transposed and len(shape) == 2 else before
            shape = (before[0] + shape[0], *shape[1:])
        if piece.as_row:
            shape = (1, *shape)
        if config.qk_norm_kind == "each_head" and ("q_norm" in name or "k_norm" in name):
            shape = (shape[0] // config.head_dim, config.head_dim)
        shapes[stored] = shape[::-1] if piece.transposed and len(shape) == 2 else shape
    return {name: (stacked[name], *shape) if name in stacked else shape for name, shape in shapes.items()}


def first_pieces(config: ModelConfig) -> dict[str, tuple[str, Piece]]:
    """Llama's name of each tensor of the weight files, and the piece with that name. If several pieces are rows of one
    tensor, those of the first."""
    found: dict[str, tuple[str, Piece]] = {}
    for name in model_shapes(config):
        stored, piece = config.layout.find(name)
        found.setdefault(stored, (name, piece))
    return found


Found = dict[str, tuple[Path, TensorEntry]]
"""The file and header entry of each tensor of a checkpoint, by its name there."""


def find_tensors(paths: Iterable[Path], *, last_counts: bool = False) -> tuple[Found, list[str]]:
    """All tensors of a checkpoint, and lines about those that are in several files.

    With `last_counts`, the last of these files counts, as in transformers and vLLM. Raises ModelError if a file is
    invalid, and without `last_counts` also if two have the same tensor.
    """
    found: Found = {}
    again: dict[tuple[str, str, bool], list[str]] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in found:
                before = found[name][0]
                if not last_counts:
                    raise ModelError(f"{path}: tensor {shown(name)} is also in {before.name}")
                is_same = same_bytes(found[name], (path, entry))
                again.setdefault((before.name, path.name, is_same), []).append(name)
            found[name] = (path, entry)
    lines = [
        f"{shown(before)} and {shown(after)} both have {shown(names[0])}"
        + (f" and {len(names) - 1} more tensors" if names[1:] else "")
        + (
            ", with the same values"
            if is_same
            else f", with different values: {shown(after)} counts, because it is the last"
        )
        for (before, after, is_same), names in again.items()
    ]
    return found, lines


COMPARED_BYTES = 16 * 1024**2


def same_bytes(one: tuple[Path, TensorEntry], other: tuple[Path, TensorEntry]) -> bool:
    """Whether two tensors have the same dtype, shape and bytes. Reads them up to the first difference."""
    (path, entry), (other_path, other_entry) = one, other
    if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
        return False
    begin, end = entry.data_offsets
    shift = other_entry.data_offsets[0] - begin
    with open_regular(path) as file, open_regular(other_path) as other_file:
        for start in range(begin, end, COMPARED_BYTES):
            size = min(COMPARED_BYTES, end - start)
            file.seek(start)
            other_file.seek(start + shift)
            if file.read(size) != other_file.read(size):
                return False
    return True


def check_tensors(config: ModelConfig, found: Found) -> Found:
    """The file and header entry of each tensor of a model.

    Raises ModelError, naming tensor and file, unless the files have all of them with the shapes of `config`. The files
    may have others, see stages/prepare/weights/unused_tensors.py.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(
                f"the weights have no tensor {name!r}, which config.json requires{_hint(config, name, found)}"
            )
        path, entry = found[name]
        if entry.shape != shape:
            raise ModelError(f"{path}: tensor {name!r} has shape {shown(entry.shape)}, config.json says {shape}")
        if entry.dtype not in STORED:
            raise ModelError(f"{path}: tensor {name!r} is {entry.dtype}; weights must be one of {', '.join(STORED)}")
    return {name: found[name] for name in expected}


def _hint(config: ModelConfig, name: str, found: Container[str]) -> str:
    """Why a tensor may be missing, for the error."""
    if _is_packed(name, found):
        return ": they are quantized, but config.json has no quantization_config"
    if name == config.layout.find("lm_head.weight")[0]:
        return " because tie_word_embeddings is false: set it to true if the LM head is the embedding"
    return ""


def _is_packed(name: str, found: Container[str]) -> bool:
    """Whether the files have a weight in the form of a quantized checkpoint."""
    module = name.removesuffix(".weight")
    return any(f"{module}.{part}" in found for part in ("qweight", "weight_packed", "weight_blocks"))
