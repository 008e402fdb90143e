"""Writes the indexes of tensors that stay in their .gguf file: matrices whose blocks the kernels read as they are."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from gguf import GGMLQuantizationType as Kind

from pipeline.runtime.model import in_place
from pipeline.runtime.model.in_place import GgufIndex
from pipeline.runtime.model.model_folder import format_key
from pipeline.stages.prepare.gguf.conversions import NATIVE
from pipeline.stages.prepare.gguf.file import GgufTensor
from pipeline.stages.prepare.weights.weight_file import DTYPES, Stored


def is_kept(tensor: GgufTensor, target: Stored) -> bool:
    """Whether a tensor's bytes in the file are those that would be stored."""
    return len(target.shape) > 1 and (
        NATIVE.get(tensor.kind) == target.format or (tensor.kind, target.format) == (Kind.BF16, "bf16")
    )


def write_indexes(
    paths: Iterable[Path], folder: Path, kept: Mapping[str, tuple[GgufTensor, Stored]], heads: Mapping[str, int]
) -> list[str]:
    """Write an index for each part of a model with tensors that stay in it. `heads` has the sizes of heads of those
    whose rows are in llama.cpp's order. Returns the names of the files. Raises OSError."""
    names = []
    for number, path in enumerate(paths, 1):
        here = {name: both for name, both in kept.items() if both[0].path == path}
        if not here:
            continue
        stat = path.stat()
        interleaved = {name: head_dim for name, head_dim in heads.items() if name in here}
        index = GgufIndex(str(path.resolve()), stat.st_size, stat.st_mtime_ns, _header(here), interleaved)
        names.append(index.save(folder, number))
    return names


def moved(paths: list[Path], folder: Path) -> None:
    """Let the indexes of a folder, of the same files under other names, name these. Raises OSError."""
    for number, path in enumerate(paths, 1):
        index = folder / f"{in_place.PREFIX}{number}{in_place.SUFFIX}"
        if index.is_file():
            msgspec.structs.replace(in_place.load(index), file=str(path.resolve())).save(folder, number)


def _header(kept: Mapping[str, tuple[GgufTensor, Stored]]) -> dict[str, Any]:
    metadata = {format_key(name): target.format for name, (_, target) in kept.items() if target.format not in DTYPES}
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, (tensor, target) in kept.items():
        offsets = [tensor.at, tensor.at + len(tensor.data)]
        header[name] = {"dtype": target.dtype, "shape": list(target.stored_shape), "data_offsets": offsets}
    return header
