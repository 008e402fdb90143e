"""The torch program with little memory: it dequantizes a matrix of a layer whenever it multiplies with it."""

from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.matrix import Matrix, as_matrix, as_tensor
from pipeline.stages.execute.cpu.program import Linear, Program
from pipeline.stages.execute.cpu.torch_calls import Buffer
from pipeline.stages.execute.cpu.torch_program import TorchProgram


class StreamedProgram(TorchProgram):
    """Computes the same as `TorchProgram`, several times slower. The embedding, the head and the matrices of experts
    are dequantized once."""

    def _multiply(self, out: Buffer, x: Buffer, linear: Linear) -> None:
        bias = None if linear.bias is None else as_tensor(linear.bias).to(self._ops.dtype)
        self._calls.add(multiply, out, x, [as_matrix(matrix) for matrix in linear.matrices], bias)


def multiply(out: Tensor, x: Tensor, matrices: list[Matrix], bias: Tensor | None) -> None:
    """out [N, M] = x [N, K] times stacked matrices, of M rows together, + bias [M]"""
    first = 0
    for matrix in matrices:
        end = first + matrix.num_rows
        out[:, first:end] = x @ matrix.dequantize(x.dtype).t()
        first = end
    if bias is not None:
        out += bias


def streamed_program(
    library: object, settings: Any, config: Any, inputs: Any, sampling_inputs: Any, scores: Any, kv: Any,
    num_threads: int, swap: Any = None, panels: object = None, lora: Any = None,
) -> Program:
    """`make_program` for the torch back end."""
    assert library is None and panels is None
    torch.set_num_threads(num_threads)
    return StreamedProgram(settings, config, inputs, sampling_inputs, scores, kv, swap, lora)
