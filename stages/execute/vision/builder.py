"""What a vision tower's program has beyond that of a language model."""

from abc import abstractmethod
from dataclasses import dataclass

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.runtime.model.model_config import Activation
from pipeline.stages.execute.program import Linear, Norm, ProgramBuilder


@dataclass(frozen=True, slots=True)
class PatchWeights:
    """What makes hidden states of the bytes of patches."""

    linear: Linear
    """[hidden_size, numbers of a patch]. It multiplies bytes minus CENTER (kernels/patches.py)."""
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class ProjectorMatrix:
    """A matrix of the projector."""

    linear: Linear
    activation: Activation | None = None


class TowerBuilder(ProgramBuilder):
    """Records a tower: `patches` first, then layers, `pool`, and `project` last, once for each projector."""

    @abstractmethod
    def capture(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states before each of these layers, in rising order. Called before any is recorded."""

    @abstractmethod
    def patches(self, weights: PatchWeights) -> None:
        """residual = norm(residual + linear(pixels)). The caller writes the positions into `residual` before each
        step, and the pixels of the tokens into the `PatchInputs`."""

    @abstractmethod
    def project(self, matrices: tuple[ProjectorMatrix, ...], max_num_rows: int) -> None:
        """The next projector, which `projected` computes."""

    @abstractmethod
    def op_costs(self) -> FloatArray:
        """How long each part of the program takes for the step in its inputs, compared with the others: float32
        [parts]. Parts are what `run_ops` can end with."""

    @abstractmethod
    def run_ops(self, first: int, end: int) -> None:
        """Compute the ops from `first` to before `end`, which do not include the projector. All ops of a step are
        computed in their order, and meanwhile the inputs stay the same."""

    @abstractmethod
    def projected(self, rows: FloatArray, index: int = 0) -> FloatArray:
        """A projector's results of rows, float32 [rows, outputs of the last matrix], of float32 [rows, inputs of the
        first one]. Valid until the next call."""
