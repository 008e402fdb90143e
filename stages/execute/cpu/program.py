"""The forward pass as a program: recorded once when the model is loaded, replayed for each step.

A model describes itself by calling the methods below in order; nothing is computed. A back end turns each call into
torch calls, ops of the CPU library, or a captured graph. All ops share one residual, float32 [tokens, hidden_size]: it
sums up all layers, and rounding it to bfloat16 in each would lose the most precision.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.kernels.matrix import Matrix

LogitArray = np.ndarray[Any, np.dtype[np.float32]]

SwapArray = np.ndarray[Any, np.dtype[np.uint8]]
"""Swap space: [num_swap_blocks, bytes of a block with all layers]. The program defines the layout of a block."""


AnyMatrix: TypeAlias = "StoredMatrix | Matrix"
"""A weight as it is stored, or in torch. The CPU library takes both, without importing torch."""

AnyVector: TypeAlias = "LogitArray | Tensor"
"""float32."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Stacked matrices [outputs, inputs] with the same input, and their bias, float32 [all outputs]."""

    matrices: tuple[AnyMatrix, ...]
    bias: "AnyVector | None" = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms of each head's queries and keys, before rotary embedding."""

    query: AnyVector
    key: AnyVector


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Self-attention and the norm before it."""

    norm: AnyVector
    qkv: Linear
    """Queries, keys and values, stacked."""
    out: Linear
    head_norms: HeadNorms | None = None
    window: int | None = None
    """Number of positions that a token attends to, including its own; None for no limit."""


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The gated feed-forward layer and the norm before it."""

    norm: AnyVector
    gate_up: Linear
    """Gate and up, stacked."""
    down: Linear


class MasksLate(RuntimeError):
    """Grammar masks did not arrive in time."""


class ProgramBuilder(ABC):
    """Records a model's forward pass when it is loaded."""

    last_norm: LogitArray
    """Weights of the norm in `sample`: float32 [hidden_size]."""

    @abstractmethod
    def embed(self, table: AnyMatrix) -> None:
        """residual = table[ids]"""

    @abstractmethod
    def attention(self, weights: AttentionWeights) -> None:
        """residual += out(attention(rotate(head_norms(qkv(norm(residual)))))). Writes the step's keys and values to the
        next layer's cache first."""

    @abstractmethod
    def mlp(self, weights: MlpWeights) -> None:
        """residual += down(silu(gate(x)) * up(x)), x = norm(residual)"""

    @abstractmethod
    def sample(self, norm: AnyVector, head: AnyMatrix) -> None:
        """ids = sample(head(norm(residual))), for the tokens to sample. Ends the program."""


class Program(ProgramBuilder):
    """A forward pass over the arrays of one `StepInputs`, one `SamplingInputs` and one `ScoreInputs`."""

    name: str
    """The back end, for logs."""

    def finish_loading(self) -> None:
        """Called once after the model is recorded."""

    @abstractmethod
    def run(self) -> IntArray:
        """Compute the step in the inputs. Returns the sampled ids, int32 [samples]; `NO_ID` if none can be sampled."""

    @abstractmethod
    def score(self) -> None:
        """Compute the logprobs that the `ScoreInputs` request for tokens of the last step. Overwrites `logits`."""

    @abstractmethod
    def residual(self) -> LogitArray:
        """Hidden states of the last step before the last norm: float32 [tokens, hidden_size]. Valid until the next
        step."""

    @abstractmethod
    def wait_for(self, word: int, expected: int, timeout_ms: int) -> None:
        """Make the next steps wait before sampling until the uint32 at address `word` equals `expected`. Address 0
        turns that off. After `timeout_ms` a step raises `MasksLate`, and its rows get no ids."""

    @abstractmethod
    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        """Copy KV blocks with all layers, in order; int32. Ids from the number of KV blocks on are swap blocks."""

    @abstractmethod
    def logits(self) -> LogitArray:
        """Logits of the last step: float32 [samples, vocab_size]. Complete only after `keep_logits`, because sampling
        may not need all of them."""

    @abstractmethod
    def keep_logits(self) -> None:
        """Keep all logits of every later step."""

    @abstractmethod
    def close(self) -> None:
        """Free threads and memory."""
