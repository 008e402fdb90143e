"""Random weights that are cheap to make: random bits in the stored format, instead of rounded random numbers."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.config.settings import Quantization
from pipeline.kernels.matrix import Matrix
from pipeline.kernels.stored_matrix import BLOCK_BYTES, GROUP, Format
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.weights import Weights

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
ROUTERS = ("mlp.router.weight", "mlp.shared_expert_gate.weight")

SPREADS: dict[Format, float] = {"bf16": 1.53, "q8_0": 73.9, "q4_1": 4.61}
"""Standard deviation of the weights with random bits and a scale of one."""


class RandomWeights(Weights):
    """Any tensor, in the format in which prepare would store it. A matrix's outputs are about as large as its inputs,
    so that nothing overflows after many layers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quantization: Quantization, seed: int = 0) -> None:
        """`config` lists no files. Tensors that `prepare` doesn't quantize are floats of `dtype`."""
        assert not config.weight_files
        super().__init__(Path(config.name), config, "f32" if dtype == torch.float32 else "bf16")
        self._config, self._quantization = config, quantization
        self._random = np.random.Generator(np.random.SFC64(seed))

    def format_bytes(self) -> dict[str, int]:
        """About what its matrices will take: they don't exist before they are asked for."""
        if self._quantization != "q8_0" and self._quantization != "q4_1":
            return {}
        config = self._config
        inner = max(config.inner_sizes, default=0) * (1 if config.experts is None else config.experts.num)
        weights = config.num_layers * config.hidden_size * (2 * config.hidden_size + 3 * inner)
        return {self._quantization: weights // GROUP * BLOCK_BYTES[self._quantization]}

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A new random matrix, [rows, columns]."""
        scale = columns**-0.5
        match self._quantization:
            case "q8_0" | "q4_1" if columns % GROUP == 0 and not name.endswith(ROUTERS):
                format: Format = "q8_0" if name in TABLES else self._quantization
                return Matrix(format, self._blocks(format, rows, columns, scale), rows, columns)
        numbers = self._floats(rows, columns, scale)
        dtype = torch.float32 if self._float_format == "f32" else torch.bfloat16
        return Matrix(self._float_format, numbers.to(dtype), rows, columns)

    def vector(self, name: str, size: int) -> Tensor:
        """Ones, [size] float32: a norm without effect, or a bias as large as the values that it is added to."""
        return torch.ones(size)

    def _floats(self, rows: int, columns: int, scale: float) -> Tensor:
        """bfloat16 between a power of two and the next, of both signs: sign and mantissa are random."""
        exponent = round(float(np.log2(scale / SPREADS["bf16"]))) + 127
        bits = self._bytes(rows * columns * 2).view(np.uint16)
        bits &= 0x807F
        bits |= exponent << 7
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(rows, columns)

    def _blocks(self, format: Format, rows: int, columns: int, scale: float) -> Tensor:
        """Blocks in the layout of kernels/stored_matrix.py with random codes, all with the same scale."""
        data = self._bytes(rows * columns // GROUP * BLOCK_BYTES[format])
        blocks = data.reshape(-1, BLOCK_BYTES[format])
        if format == "q8_0":
            data |= 1  # quantizers don't produce the code -128
        step = np.float16(scale / SPREADS[format])
        heads = [step] if format == "q8_0" else [step, np.float16(-7.5 * float(step))]
        blocks[:, : 2 * len(heads)] = np.array(heads, np.float16).view(np.uint8)
        return torch.from_numpy(data).view(rows, -1)

    def _bytes(self, num_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        words = self._random.integers(0, 2**64, -(-num_bytes // 8), np.uint64)
        return words.view(np.uint8)[:num_bytes]
