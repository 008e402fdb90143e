"""The torch program with little memory: it dequantizes a matrix of a layer whenever it multiplies with it."""

import functools

from torch import Tensor

from pipeline.kernels.matrix import Matrix, as_matrix, as_tensor
from pipeline.stages.execute.cpu.backend import make_program
from pipeline.stages.execute.cpu.pytorch.calls import Buffer
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.program import Linear


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


streamed_program = functools.partial(make_program, torch_program=StreamedProgram)
