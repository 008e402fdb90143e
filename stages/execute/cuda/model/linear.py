"""The linear layers of a model on a GPU, and the memory of their results."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pipeline.kernels.triton.gemm import segments
from pipeline.kernels.triton.gemm.segments import SegmentedMatrix
from pipeline.kernels.triton.gemm.tuned import SKINNY_TOKENS
from pipeline.stages.execute.cuda.model.lora import LoraSite


@dataclass(frozen=True, slots=True)
class Gemm:
    """A linear layer on the device."""

    matrix: SegmentedMatrix
    bias: Tensor | None
    site: LoraSite | None = None
    """Where LoRA adapters change it, if they may."""

    def split_k_partials(self, memory: "GemmMemory", num: int) -> Tensor:
        """The memory of its result for `num` tokens: [P, num, outputs]."""
        return memory.view(*self._layout(num))

    def num_bytes(self, num: int) -> int:
        """Bytes of the result for `num` tokens."""
        shape, dtype = self._layout(num)
        return prod(shape) * dtype.itemsize

    def _layout(self, num: int) -> tuple[tuple[int, int, int], torch.dtype]:
        shape = segments.num_split_k_partials(self.matrix, num), num, self.matrix.num_rows
        return shape, segments.split_k_partials_dtype(self.matrix, num)


class GemmMemory:
    """Memory for the split-K partials of one linear layer at a time."""

    def __init__(self, max_num_tokens: int, where: torch.device) -> None:
        self._max_num_tokens, self._where = max_num_tokens, where
        self._bytes = torch.zeros(0, dtype=torch.uint8)

    def reserve(self, gemm: Gemm) -> None:
        """Reserve memory for the results of `gemm` for any number of tokens. Call it before computing anything."""
        few = range(1, min(SKINNY_TOKENS, self._max_num_tokens) + 1)
        most = max(gemm.num_bytes(num) for num in (*few, self._max_num_tokens))
        if most > len(self._bytes):
            self._bytes = torch.zeros(most, dtype=torch.uint8, device=self._where)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._bytes[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
