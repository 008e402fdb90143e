"""Weights that are random and cheap to make: bits are drawn, not numbers that would be rounded to a format."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.config.settings import Quantization
from pipeline.kernels.matrix import BLOCK_BYTES, GROUP, Format, Matrix
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.weights import Weights

TABLES = ("model.embed_tokens.weight", "lm_head.weight")

SPREADS: dict[Format, float] = {"bf16": 1.53, "q8_0": 73.9, "q4_1": 4.61}
"""Standard deviation of the numbers that all bits drawn stand for, at a scale of one."""


class RandomWeights(Weights):
    """Every tensor that is asked for, of the format that prepare would store it in. Outputs of a matrix are about as
    large as its inputs, so that nothing overflows however many layers follow."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quantization: Quantization, seed: int = 0) -> None:
        """`config` names no files. What `prepare` doesn't store as codes are floats of `dtype`, bfloat16 or float32."""
        assert not config.weight_files
        super().__init__(Path(config.name), config, dtype)
        self._quantization = quantization
        self._random = np.random.Generator(np.random.SFC64(seed))

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A new matrix each time, [rows, columns]."""
        scale = columns**-0.5
        match self._quantization:
            case "q8_0" | "q4_1" if columns % GROUP == 0:
                format: Format = "q8_0" if name in TABLES else self._quantization
                return Matrix(format, self._blocks(format, rows, columns, scale), rows, columns)
        numbers = self._floats(rows, columns, scale)
        dtype = torch.float32 if self._float_format == "f32" else torch.bfloat16
        return Matrix(self._float_format, numbers.to(dtype), rows, columns)

    def vector(self, name: str, size: int) -> Tensor:
        """Ones, [size] float32: a norm that changes nothing, a bias of the size of what it is added to."""
        return torch.ones(size)

    def _floats(self, rows: int, columns: int, scale: float) -> Tensor:
        """bfloat16 of both signs between a power of two and the next: sign and mantissa are drawn."""
        exponent = round(float(np.log2(scale / SPREADS["bf16"]))) + 127
        bits = self._bytes(rows * columns * 2).view(np.uint16)
        bits &= 0x807F
        bits |= exponent << 7
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(rows, columns)

    def _blocks(self, format: Format, rows: int, columns: int, scale: float) -> Tensor:
        """Blocks as kernels/matrix.py draws them, all of one scale: codes are drawn."""
        data = self._bytes(rows * columns // GROUP * BLOCK_BYTES[format])
        blocks = data.reshape(-1, BLOCK_BYTES[format])
        if format == "q8_0":
            data |= 1  # a quantizer leaves no code of -128
        step = np.float16(scale / SPREADS[format])
        heads = [step] if format == "q8_0" else [step, np.float16(-7.5 * float(step))]
        blocks[:, : 2 * len(heads)] = np.array(heads, np.float16).view(np.uint8)
        return torch.from_numpy(data).view(rows, -1)

    def _bytes(self, num_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        words = self._random.integers(0, 2**64, -(-num_bytes // 8), np.uint64)
        return words.view(np.uint8)[:num_bytes]
