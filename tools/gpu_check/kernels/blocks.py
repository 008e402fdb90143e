"""Random weights in the formats of GGUF files: random codes and scales, with factors of a useful size."""

import torch

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.stored_matrix import BLOCK_BYTES, BLOCK_COLUMNS, Format, row_bytes

FACTORS_AT: dict[Format, tuple[int, int]] = {
    "q5_0": (0, 2),
    "q5_1": (0, 4),
    "q4_k": (0, 4),
    "q5_k": (0, 4),
    "q6_k": (208, 210),
}
"""Bytes of a block that are float16."""
LARGEST: dict[Format, float] = {"q5_0": 16, "q5_1": 32, "q4_k": 63 * 15, "q5_k": 63 * 31, "q6_k": 128 * 32}
"""The largest code, times the largest small scale."""


def random_blocks(rows: int, columns: int, format: Format, seed: int) -> Matrix:
    """A matrix on the host whose values are below 4 / sqrt(columns)."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, row_bytes(format, columns)), generator=generator, dtype=torch.uint8)
    blocks = data.view(rows, columns // BLOCK_COLUMNS[format], BLOCK_BYTES[format])
    begin, end = FACTORS_AT[format]
    factors = torch.rand(*blocks.shape[:2], (end - begin) // 2, generator=generator) + 1
    blocks[:, :, begin:end] = (factors / (LARGEST[format] * columns**0.5)).half().view(torch.uint8)
    return Matrix(format, data, rows, columns)
