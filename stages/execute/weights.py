"""A model's tensors, read from the safetensors files that its config names.

Files are mapped, not read: a tensor that already has the wanted dtype is used where it lies, and the pages come in as
they are touched. Matrices that are always multiplied with the same input are joined into one.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.errors import UserError
from pipeline.model_folder import ModelConfig


class Weights:
    """The tensors of a model folder, by their Hugging Face names."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in config.weight_paths(folder):
            file: Any = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor. Raises UserError where it is missing or has another shape."""
        if name not in self._files:
            raise UserError(f"the weights of the model in {self._folder} lack the tensor {name!r}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"tensor {name!r} of the model in {self._folder} has shape {list(tensor.shape)}, "
                f"but model.json makes it {list(shape)}"
            )
        return tensor.to(self._dtype)

    def join(self, names: list[str], rows: list[int], *rest: int) -> Tensor:
        """Tensors of shapes [rows[i], *rest], one below the other."""
        return torch.cat([self.take(name, num, *rest) for name, num in zip(names, rows, strict=True)])
