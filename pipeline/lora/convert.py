"""Converts an adapter in PEFT's format, or in llama.cpp's (gguf_adapter.py), into the file that the executor maps
(adapter_file.py).

Names in a PEFT adapter are those of the model's modules in Transformers (module_names.py), which a `Layout` of the
prepared model maps to Llama's: a module that stacks several projections becomes several pairs with the same A.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from pipeline.config.settings import LoraSettings, Settings
from pipeline.lora.adapter_file import AdapterFile, Dtype, Pair, PairShape, Target, path_of, write_each
from pipeline.lora.gguf_adapter import SUFFIX, GgufAdapter, Module, Part
from pipeline.lora.module_names import in_files, layout_of
from pipeline.lora.peft_config import CONFIG, AdapterError, NotAnAdapter, NotWritten, PeftConfig, read_config
from pipeline.lora.supported import unsupported
from pipeline.lora.tensors import AdapterTensors, FloatMatrix, bf16_to_float, float_to_bf16, scaled
from pipeline.runtime.files.regular_files import RegularFile
from pipeline.runtime.model.model_config import ModelConfig, Piece

FORMAT = 2
"""Raise it when a conversion changes, so that older files are not used."""
WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(?:\.[\w-]+)?\.weight\Z")
_TARGETS: tuple[Target, ...] = get_args(Target)

MAX_UNUSED = 4
"""Rows of a module's B for each one that belongs to a projection of this model: gates of attention double them."""


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
    be served, NotWritten if its file can't be written, and NotAnAdapter if it can't be read."""
    digest = hashlib.blake2b(f"{FORMAT}|{dtype}|".encode(), digest_size=16)
    model = ModelConfig.load(model_dir)
    if (why := unsupported(model)) is not None:
        raise AdapterError(f"{source}: LoRA adapters are not supported for {model.name} ({model.architecture}): {why}")
    modules: list[Module] = []
    if source.suffix.lower() == SUFFIX:
        weights = source

        def check_gguf(file: GgufAdapter) -> None:
            modules.extend(_checked(weights, file.modules(model), model, max_rank))

        with _opened(source, max_bytes, deadline_s, folders) as file:
            digest.update(GgufAdapter(file, check_gguf).data)
    else:
        weights = source / WEIGHTS
        config, config_bytes = read_config(source, deadline_s, folders)

        def check_peft(tensors: AdapterTensors) -> None:
            modules.extend(_checked(weights, _modules_of_peft(config, tensors, model), model, max_rank))

        with _opened(weights, max_bytes, deadline_s, folders) as file:
            tensors = AdapterTensors(file, check_peft)
        digest.update(config_bytes)
        digest.update(tensors.data)
    adapter_id = digest.hexdigest()
    path = path_of(model_dir, adapter_id)
    try:
        AdapterFile(path)
    except (OSError, ValueError):
        shapes = [
            PairShape(layer, target, len_a, inputs, _num_rows(outputs, piece))
            for _, parts, (len_a, inputs), (outputs, _), _ in modules
            for layer, target, piece in parts
        ]
        pairs = (pair for module in modules for pair in _pairs(weights, module, dtype))
        try:
            write_each(path, dtype, shapes, pairs)
        except OSError as error:
            raise NotWritten(f"{path}: {error.strerror}") from error
    else:
        with suppress(OSError):  # a cache that may only be read has no time of use
            os.utime(path)
    return adapter_id


@contextmanager
def _opened(path: Path, max_bytes: int, deadline_s: float, folders: Sequence[str]) -> Iterator[RegularFile]:
    """The file of an adapter's weights. Raises NotAnAdapter if it can't be opened, or read while it is open."""
    try:
        with RegularFile(path, max_bytes, deadline_s, folders) as file:
            yield file
    except OSError as error:
        hint = "; weights must be in this safetensors file" if path.name == WEIGHTS else ""
        raise NotAnAdapter(f"{path}: {error.strerror}{hint}") from error


def dtype_of(settings: Settings) -> Dtype:
    """The numbers that adapters are stored in: those that the model is computed with."""
    return "bf16" if settings.execute.dtype == "bfloat16" else "f32"


def _modules_of_peft(config: PeftConfig, tensors: AdapterTensors, model: ModelConfig) -> Iterator[Module]:
    parts, modules = _parts_of_model(model), _modules(tensors)
    if not modules:
        raise AdapterError(f"{tensors.path}: it has no tensors of a LoRA adapter")
    seen: dict[str, str] = {}
    for module, names in modules.items():
        stored_name = in_files(module, model)
        if stored_name not in parts:
            raise AdapterError(
                f"{tensors.path}: tensor {names['A' if 'A' in names else 'B']!r} changes {module!r}; supported are the "
                f"projections of this model's layers: {', '.join(sorted({_last(name) for name in parts}))}"
            )
        if (other := seen.setdefault(stored_name, module)) != module:
            raise AdapterError(f"{tensors.path}: {other!r} and {module!r} are the same module of this model")
        if missing := {"A", "B"} - set(names):
            raise AdapterError(f"{tensors.path}: {module!r} has no lora_{missing.pop()}.weight")
        a, b = tensors.shape(names["A"]), tensors.shape(names["B"])
        rank = a[0]
        if rank != b[1] or rank != config.rank(module):
            raise AdapterError(
                f"{tensors.path}: {module!r} has matrices of the shapes {list(a)} and {list(b)}, but r or "
                f"rank_pattern in {CONFIG} give it rank {config.rank(module)}"
            )
        read = partial(_read_peft, tensors, names, config.scaling(module, rank))
        yield Module(module, parts[stored_name], a, b, read)


def _read_peft(tensors: AdapterTensors, names: dict[str, str], factor: float) -> tuple[FloatMatrix, FloatMatrix]:
    return tensors.matrix(names["A"]), scaled(tensors.matrix(names["B"]), factor)


def _checked(path: Path, modules: Iterable[Module], model: ModelConfig, max_rank: int) -> Iterator[Module]:
    """Modules whose ranks and shapes are those of the model, by the file's header. Raises AdapterError."""
    for module in modules:
        a, b = module.a_shape, module.b_shape
        _check_rank(a[0], max_rank, path)
        for _, target, piece in module.parts:
            shape = shape_of(model, target)
            is_far_longer = b[0] > MAX_UNUSED * sum(shape_of(model, part[1])[0] for part in module.parts)
            if (_num_rows(b[0], piece), a[1]) != shape or is_far_longer:
                raise AdapterError(
                    f"{path}: {module.name!r} has matrices of the shapes {list(a)} and {list(b)}, but {target} of "
                    f"this model has {shape[1]} inputs and {shape[0]} outputs"
                )
        yield module


def _pairs(path: Path, module: Module, dtype: Dtype) -> Iterator[Pair]:
    """The projections of a module. Reads it. Raises AdapterError."""
    name = module.name
    a, b = module.read()
    stored = _stored(a, dtype, name, "lora_A", path)
    for layer, target, piece in module.parts:
        yield Pair(layer, target, stored, _stored(_rows_of(b, piece), dtype, name, "lora_B", path))


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
            tensor, piece = layout_of(model).find(f"model.layers.{layer}.{block}.{target}.weight")
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


def _num_rows(num_outputs: int, piece: Piece) -> int:
    """How many rows of a stacked module's B belong to one projection; 0 if they can't be divided."""
    if num_outputs % piece.groups:
        return 0
    return piece.groups * len(range(num_outputs // piece.groups)[piece.begin : piece.end])


def _rows_of(b: FloatMatrix, piece: Piece) -> FloatMatrix:
    """The rows of a stacked module's B that belong to one projection."""
    if piece.groups == 1 and piece.begin == 0 and piece.end is None:
        return b
    groups = b.reshape(piece.groups, len(b) // piece.groups, b.shape[1])
    return groups[:, piece.begin : piece.end].reshape(-1, b.shape[1])


def _last(module: str) -> str:
    return module.rpartition(".")[2]
