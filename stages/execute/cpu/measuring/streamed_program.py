"""The torch program with little memory: it dequantizes a matrix of a layer whenever it multiplies with it."""

import torch
from torch import Tensor

from pipeline.config.settings import Settings
from pipeline.kernels.matrix import Matrix, as_matrix, as_tensor
from pipeline.kernels.sampling.logprob_inputs import ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import StepInputs
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import LoraPlan
from pipeline.stages.execute.cpu.backend import Library
from pipeline.stages.execute.cpu.native.panel_file import PanelLocation
from pipeline.stages.execute.cpu.program import Program
from pipeline.stages.execute.cpu.pytorch.calls import Buffer
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.cpu.ranks.group import RankGroup
from pipeline.stages.execute.cpu.ranks.pp_link import PPLink
from pipeline.stages.execute.kv import KVPlan, SwapArray
from pipeline.stages.execute.program import Linear
from pipeline.stages.execute.ranks.layer_split import Part


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
    library: Library | None,
    settings: Settings,
    config: ModelConfig,
    inputs: StepInputs,
    sampling_inputs: SamplingInputs,
    scores: ScoreInputs,
    kv: KVPlan,
    num_threads: int,
    swap: SwapArray | None = None,
    panels: PanelLocation | None = None,
    lora: LoraPlan | None = None,
    ranks: RankGroup | None = None,
    part: Part | None = None,
    link: PPLink | None = None,
) -> Program:
    """`make_program` for torch."""
    assert library is None and panels is None and ranks is None and link is None, "the library needs no torch"
    torch.set_num_threads(num_threads)
    return StreamedProgram(settings, config, inputs, sampling_inputs, scores, kv, swap, lora)
