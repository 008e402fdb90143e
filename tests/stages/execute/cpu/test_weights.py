"""Weights are used as stored in the files: mapped, in their blocks, and rounded only on request."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import UserError
from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.stored_matrix import BLOCK_BYTES, Format
from pipeline.runtime.model.model_folder import format_key
from pipeline.stages.execute.weights import Weights
from tests.k_quants import quantize
from tests.stages.execute.checkpoints import config_of

BLOCKS: list[Format] = list(BLOCK_BYTES)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(rows: int, columns: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def weights_of(folder: Path, dtype: torch.dtype = torch.bfloat16, **tensors: Tensor | tuple[Tensor, str]) -> Weights:
    """Weights of a file with these tensors, some with a format."""
    plain = {name: tensor if isinstance(tensor, Tensor) else tensor[0] for name, tensor in tensors.items()}
    formats = {format_key(name): tensor[1] for name, tensor in tensors.items() if isinstance(tensor, tuple)}
    save_file(plain, folder / "model.safetensors", formats)
    return Weights(folder, config_of(), "f32" if dtype == torch.float32 else "bf16")


def blocks_of(values: Tensor, format: Format) -> tuple[Tensor, str]:
    return quantize(values, format).data, format


def is_mapped(tensor: Tensor, path: Path) -> bool:
    """Whether a tensor is in memory that is mapped from the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return True
    return False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", BLOCKS)
def test_quantized_matrices_keep_their_blocks_in_the_mapped_file(
    tmp_path: Path, format: Format, dtype: torch.dtype
) -> None:
    data, _ = stored = blocks_of(numbers(5, 256), format)
    matrix = as_matrix(weights_of(tmp_path, dtype, w=stored).matrix("w", 5, 256))
    assert (matrix.format, matrix.num_rows, matrix.num_columns) == (format, 5, 256)
    assert torch.equal(matrix.data, data)
    assert is_mapped(matrix.data, tmp_path / "model.safetensors")


@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_floats_become_bfloat16_and_bfloat16_is_mapped(tmp_path: Path, stored: torch.dtype) -> None:
    values = numbers(5, 33).to(stored)
    matrix = as_matrix(weights_of(tmp_path, w=values).matrix("w", 5, 33))
    assert matrix.format == "bf16"
    assert torch.equal(matrix.data, values.to(torch.bfloat16))
    assert is_mapped(matrix.data, tmp_path / "model.safetensors") == (stored == torch.bfloat16)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_in_float32_no_float_is_rounded(tmp_path: Path, stored: torch.dtype) -> None:
    values = numbers(5, 33).to(stored)
    matrix = as_matrix(weights_of(tmp_path, torch.float32, w=values).matrix("w", 5, 33))
    assert matrix.format == "f32"
    assert torch.equal(matrix.data, values.float())
    assert is_mapped(matrix.data, tmp_path / "model.safetensors") == (stored == torch.float32)


def test_the_loaded_formats_are_reported(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, a=numbers(16), b=blocks_of(numbers(16), "q4_1"), c=blocks_of(numbers(16), "q8_0"))
    for name in ("b", "a", "b"):
        weights.matrix(name, 16, 64)
    assert list(weights.taken) == ["q4_1", "bf16"], "tensors that were not loaded do not count"


def test_joined_matrices_keep_their_formats(tmp_path: Path) -> None:
    a, c = numbers(3), numbers(2, seed=2)
    weights = weights_of(tmp_path, torch.bfloat16, a=blocks_of(a, "q4_1"), c=blocks_of(c, "q8_0"))
    found = [as_matrix(matrix) for matrix in weights.matrices(["a", "c"], [3, 2], 64)]
    assert [matrix.format for matrix in found] == ["q4_1", "q8_0"]
    assert [matrix.num_rows for matrix in found] == [3, 2]
    assert torch.equal(found[1].data, quantize(c, "q8_0").data)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_vectors_are_float32(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    values = numbers(1, 7)[0].to(stored)
    vector = as_tensor(weights_of(tmp_path, dtype, v=values).vector("v", 7))
    assert vector.dtype == torch.float32
    assert torch.equal(vector, values.float())


@pytest.mark.parametrize(
    ("shape", "format", "words"),
    [
        ((5, 64), None, r"'w' of the model in .* has shape \[5, 64\], but model\.json makes it \[6, 64\]"),
        ((5, 64), "q4_1", r"'w' .* is q4_1 in bytes \[5, 40\], but model\.json makes it \[6, 64\]"),
        ((6, 32), "q8_0", r"'w' .* is q8_0 in bytes \[6, 34\], but model\.json makes it \[6, 64\]"),
    ],
)
def test_a_matrix_of_another_shape_is_rejected(tmp_path: Path, shape: Any, format: Format | None, words: str) -> None:
    values = numbers(*shape)
    weights = weights_of(tmp_path, w=values if format is None else blocks_of(values, format))
    with pytest.raises(UserError, match=words):
        weights.matrix("w", 6, 64)


def test_numbers_of_columns_that_do_not_fit_blocks_are_rejected(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, w=blocks_of(numbers(6), "q8_0"))
    with pytest.raises(UserError, match=r"makes it \[6, 65\]"):
        weights.matrix("w", 6, 65)


@pytest.mark.parametrize("format", [None, "", "q3_7"])
def test_unknown_formats_are_rejected(tmp_path: Path, format: str | None) -> None:
    data = torch.zeros(6, 68, dtype=torch.uint8)
    weights = weights_of(tmp_path, w=data if format is None else (data, format))
    with pytest.raises(UserError, match=rf"'w' .* is U8 in the format '{format or ''}'; supported are q8_0"):
        weights.matrix("w", 6, 64)


def test_numbers_that_are_neither_floats_nor_blocks_are_rejected(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, w=(torch.zeros(6, 68, dtype=torch.int8), "q8_0"))
    with pytest.raises(UserError, match=r"is I8 in the format 'q8_0'"):
        weights.matrix("w", 6, 64)


def test_missing_and_oversized_tensors_are_reported(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, v=torch.zeros(7))
    with pytest.raises(UserError, match="lack the tensor 'w'"):
        weights.matrix("w", 1, 1)
    with pytest.raises(UserError, match=r"has shape \[7\], but model\.json makes it \[8\]"):
        weights.vector("v", 8)


def test_joined_vectors_are_concatenated(tmp_path: Path) -> None:
    a, b = numbers(1, 7)[0], numbers(1, 3, seed=1)[0].to(torch.bfloat16)
    joined = as_tensor(weights_of(tmp_path, a=a, b=b).join_vectors(["a", "b"], [7, 3]))
    assert torch.equal(joined, torch.cat([a, b.float()]))


def test_vectors_that_are_not_floats_are_rejected(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, v=torch.zeros(7, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"'v' .* is U8; supported are BF16, F16, F32"):
        weights.vector("v", 7)


def test_tensors_that_are_not_aligned_in_the_file_are_copied(tmp_path: Path) -> None:
    """The format requires no alignment, and some writers don't align the header's end."""
    values = numbers(2, 32)
    path = tmp_path / "model.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[2,32],"data_offsets":[0,256]}} '
    header += b" " * (1 - len(header) % 2)  # odd
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.numpy().tobytes())
    matrix = as_matrix(Weights(tmp_path, config_of(), "f32").matrix("w", 2, 32))
    assert torch.equal(matrix.data, values)
    assert matrix.data.data_ptr() % 4 == 0 and not is_mapped(matrix.data, path)


@pytest.mark.parametrize("damage", [b"", b"short", b"\xff" * 100, struct.pack("<Q", 2) + b"{]", None])
def test_files_that_became_unreadable_are_reported(tmp_path: Path, damage: bytes | None) -> None:
    weights_of(tmp_path, w=numbers(64))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(UserError, match=r"model\.safetensors can't be read any more: "):
        Weights(tmp_path, config_of(), "bf16")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors can't be read any more: .*No such file"):
        Weights(tmp_path, config_of(), "bf16")
