"""A model's tensors, read from the safetensors files that its config names.

Files are mapped: a tensor that already has the right form is used in place, and its pages are loaded on first access.
Matrices with the same input are joined into one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.errors import UserError
from pipeline.kernels.matrix import BLOCK_BYTES, GROUP, FloatFormat, Format, Matrix
from pipeline.runtime.model_folder import ModelConfig, format_key

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS: dict[str, Format] = {format: format for format in BLOCK_BYTES}


class Weights:
    """The tensors of a model folder, by their Hugging Face names. Raises UserError if a file can't be read.

    Float matrices, and those joined from several formats, become "f32" or "bf16", depending on `dtype`. Quantized
    matrices keep their blocks.
    """

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self._float_format: FloatFormat = "f32" if dtype == torch.float32 else "bf16"
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._formats: dict[str, str] = {}
        self.taken: dict[str, None] = {}
        """Formats of the loaded matrices, in the order of their first use."""
        for path in config.weight_paths(folder):
            try:
                file: Any = safe_open(path, framework="pt")
            except Exception as error:  # the library raises nothing more precise; prepare has read the file before
                raise UserError(f"{path} can't be read any more: {error}") from error
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - the file is not a dict
                self._files[name] = file
                if (format := metadata.get(format_key(name))) is not None:
                    self._formats[name] = format

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A matrix of the model. Raises UserError if it is missing, or has another shape or an unknown format."""
        tensor = self._tensor(name)
        if tensor.dtype in FLOATS:
            self._check_shape(name, tensor, rows, columns)
            dtype = torch.float32 if self._float_format == "f32" else torch.bfloat16
            self.taken[self._float_format] = None
            return Matrix(self._float_format, tensor.to(dtype), rows, columns)
        found = self._formats.get(name, "")
        format = BLOCKS.get(found)
        if format is None or tensor.dtype != torch.uint8:
            raise UserError(
                f"tensor {name!r} of the model in {self._folder} is {tensor.dtype} in the format {found!r}; supported "
                f"are {', '.join(BLOCKS)}: prepare the model again"
            )
        num_bytes = columns // GROUP * BLOCK_BYTES[format]
        if columns % GROUP or tensor.shape != (rows, num_bytes):
            raise UserError(
                f"tensor {name!r} of the model in {self._folder} is {format} in bytes {list(tensor.shape)}, "
                f"but model.json makes it {[rows, columns]}"
            )
        self.taken[format] = None
        return Matrix(format, tensor, rows, columns)

    def matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> tuple[Matrix, ...]:
        """Matrices of shapes [rows[i], columns]."""
        return tuple(self.matrix(name, num, columns) for name, num in zip(names, rows, strict=True))

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight or a bias, [size] float32. Raises UserError if it is missing or has another shape."""
        tensor = self._tensor(name)
        self._check_shape(name, tensor, size)
        return tensor.to(torch.float32)

    def join_vectors(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
        """Vectors of these sizes, concatenated."""
        return torch.cat([self.vector(name, size) for name, size in zip(names, sizes, strict=True)])

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise UserError(f"the weights of the model in {self._folder} lack the tensor {name!r}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _check_shape(self, name: str, tensor: Tensor, *shape: int) -> None:
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"tensor {name!r} of the model in {self._folder} has shape {list(tensor.shape)}, "
                f"but model.json makes it {list(shape)}"
            )
