"""Converts an adapter in PEFT's format, or in llama.cpp's (gguf_adapter.py), into the file that the executor maps
(adapter_file.py).

Names in a PEFT adapter are those of the model's modules in Transformers, which `Layout` of the prepared model maps to
Llama's: a module that stacks several projections becomes several pairs with the same A.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from pipeline.config.settings import LoraSettings, Settings
from pipeline.lora.adapter_file import AdapterFile, Dtype, Pair, Target, path_of, write
from pipeline.lora.gguf_adapter import SUFFIX, GgufAdapter, Part
from pipeline.lora.peft_config import CONFIG, AdapterError, PeftConfig, read_config
from pipeline.lora.tensors import AdapterTensors, FloatMatrix, bf16_to_float, float_to_bf16, scaled
from pipeline.runtime.model_folder import ModelConfig, Piece

FORMAT = 2
"""Raise it when a conversion changes, so that older files are not used."""
WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(?:\.[\w-]+)?\.weight\Z")
_TARGETS: tuple[Target, ...] = get_args(Target)

Module = tuple[str, list[Part], FloatMatrix, FloatMatrix]
"""A module's name, the projections in it, A, and B with the scaling."""


def convert(
    source: Path,
    model_dir: Path,
    dtype: Dtype,
    max_rank: int,
    max_bytes: int = LoraSettings().max_adapter_bytes,
    deadline_s: float = math.inf,
    folders: Sequence[str] = (),
) -> str:
    """Convert the adapter in `source`, a PEFT folder or a .gguf file, for the prepared model in `model_dir`, unless
    that was done before. Returns its id. Its files must be regular ones of at most `max_bytes`, in one of `folders`,
    resolved paths, if there are any, and be read at `deadline_s`, by time.monotonic(). Raises AdapterError if it can't
    be served or written, and NotAnAdapter if it can't be read."""
    digest = hashlib.blake2b(f"{FORMAT}|{dtype}|".encode(), digest_size=16)
    modules: Callable[[ModelConfig], Iterator[Module]]
    if source.suffix.lower() == SUFFIX:
        file, ranks, weights = GgufAdapter(source, max_bytes, deadline_s, folders), source, source
        modules = file.modules
        digest.update(file.data)
    else:
        ranks, weights = source / CONFIG, source / WEIGHTS
        config, config_bytes = read_config(source, deadline_s, folders)
        tensors = AdapterTensors(weights, max_bytes, deadline_s, folders)
        modules = partial(_modules_of_peft, config, tensors)
        digest.update(config_bytes)
        digest.update(tensors.data)
    adapter_id = digest.hexdigest()
    path = path_of(model_dir, adapter_id)
    try:
        rank = AdapterFile(path).header.max_rank
    except (OSError, ValueError):
        model = ModelConfig.load(model_dir)
        pairs = [pair for module in modules(model) for pair in _pairs(weights, module, model, dtype, max_rank)]
        try:
            write(path, dtype, pairs)
        except OSError as error:
            raise AdapterError(f"{path}: {error.strerror}") from error
    else:
        _check_rank(rank, max_rank, ranks)
        with suppress(OSError):  # a cache that may only be read has no time of use
            os.utime(path)
    return adapter_id


def dtype_of(settings: Settings) -> Dtype:
    """The numbers that adapters are stored in: those that the model is computed with."""
    return "bf16" if settings.execute.dtype == "bfloat16" else "f32"


def _modules_of_peft(config: PeftConfig, tensors: AdapterTensors, model: ModelConfig) -> Iterator[Module]:
    parts, modules = _parts_of_model(model), _modules(tensors)
    if not modules:
        raise AdapterError(f"{tensors.path}: it has no tensors of a LoRA adapter")
    for module, names in modules.items():
        if module not in parts:
            raise AdapterError(
                f"{tensors.path}: tensor {names['A' if 'A' in names else 'B']!r} changes {module!r}; supported are the "
                f"projections of this model's layers: {', '.join(sorted({_last(name) for name in parts}))}"
            )
        if missing := {"A", "B"} - set(names):
            raise AdapterError(f"{tensors.path}: {module!r} has no lora_{missing.pop()}.weight")
        a, b = tensors.matrix(names["A"]), tensors.matrix(names["B"])
        rank = len(a)
        if rank != b.shape[1] or rank != config.rank(module):
            raise AdapterError(
                f"{tensors.path}: {module!r} has matrices of the shapes {list(a.shape)} and {list(b.shape)}, but r or "
                f"rank_pattern in {CONFIG} give it rank {config.rank(module)}"
            )
        yield module, parts[module], a, scaled(b, config.scaling(module, rank))


def _pairs(path: Path, module: Module, model: ModelConfig, dtype: Dtype, max_rank: int) -> Iterator[Pair]:
    name, parts, a, b = module
    _check_rank(len(a), max_rank, path)
    for layer, target, piece in parts:
        rows = _rows_of(b, piece)
        shape = shape_of(model, target)
        if (len(rows), a.shape[1]) != shape:
            raise AdapterError(
                f"{path}: {name!r} has matrices of the shapes {list(a.shape)} and {list(b.shape)}, but {target} of "
                f"this model has {shape[1]} inputs and {shape[0]} outputs"
            )
        yield Pair(layer, target, _stored(a, dtype, name, "lora_A", path), _stored(rows, dtype, name, "lora_B", path))


def _stored(matrix: FloatMatrix, dtype: Dtype, module: str, part: str, path: Path) -> "np.ndarray[Any, Any]":
    """A matrix in the stored numbers. Raises AdapterError if one of them is not finite: it would make NaN of every
    request with the adapter."""
    stored = float_to_bf16(matrix) if dtype == "bf16" else matrix
    kept = bf16_to_float(stored) if dtype == "bf16" else matrix
    if not (np.isfinite(matrix).all() and np.isfinite(kept).all()):
        raise AdapterError(
            f"{path}: {part} of {module!r} has values that are not finite as {dtype}, after the scaling by lora_alpha"
        )
    return stored


def _check_rank(rank: int, max_rank: int, path: Path) -> None:
    if rank > max_rank:
        raise AdapterError(f"{path}: the rank is {rank}, but lora.max_lora_rank is {max_rank}")


def _modules(tensors: AdapterTensors) -> dict[str, dict[str, str]]:
    """The names of A and B for each module. Raises AdapterError for tensors of another kind."""
    modules: dict[str, dict[str, str]] = {}
    for name in tensors.names:
        found = _NAME.match(name)
        if found is None:
            what = next(
                (words for mark, words in _OTHERS.items() if mark in name),
                "a tensor that is not part of a LoRA adapter",
            )
            raise AdapterError(f"{tensors.path}: {name[:200]!r} is {what}, which is not supported")
        part = modules.setdefault(found["module"], {})
        if found["part"] in part:
            raise AdapterError(f"{tensors.path}: {found['module']!r} has several matrices lora_{found['part']}")
        part[found["part"]] = name
    return modules


_OTHERS = {
    "lora_magnitude_vector": "the magnitude of DoRA",
    "lora_embedding": "an adapter of an embedding",
    "modules_to_save": "a whole module (modules_to_save)",
    ".bias": "a bias",
}


def _parts_of_model(model: ModelConfig) -> dict[str, list[Part]]:
    """The projections that adapters may change, by the name of the module that holds them."""
    parts: dict[str, list[Part]] = {}
    for layer in range(model.num_layers):
        for target in _TARGETS:
            block = "self_attn" if target in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            if block == "mlp" and (model.has_experts(layer) or (target == "gate_proj" and not model.gated)):
                continue
            tensor, piece = model.layout.find(f"model.layers.{layer}.{block}.{target}.weight")
            if not piece.transposed and not piece.bare:
                parts.setdefault(tensor.removesuffix(".weight"), []).append((layer, target, piece))
    return parts


def shape_of(model: ModelConfig, target: Target) -> tuple[int, int]:
    """Outputs and inputs of a projection."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    match target:
        case "q_proj":
            return queries, hidden
        case "k_proj" | "v_proj":
            return keys, hidden
        case "o_proj":
            return hidden, queries
        case "gate_proj" | "up_proj":
            return inner, hidden
        case "down_proj":
            return hidden, inner


def _rows_of(b: FloatMatrix, piece: Piece) -> FloatMatrix:
    """The rows of a stacked module's B that belong to one projection."""
    if piece.groups == 1 and piece.begin == 0 and piece.end is None:
        return b
    if len(b) % piece.groups:
        return b[:0]  # refused for its shape
    groups = b.reshape(piece.groups, len(b) // piece.groups, b.shape[1])
    return groups[:, piece.begin : piece.end].reshape(-1, b.shape[1])


def _last(module: str) -> str:
    return module.rpartition(".")[2]
