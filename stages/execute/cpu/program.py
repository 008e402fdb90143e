"""The forward pass as a program: recorded once when the model is loaded, replayed for each step.

A model says what it is made of, in fused steps, by calling the methods below in order; nothing is computed. A back end
turns each into whatever it replays fastest: calls of torch, ops of the CPU library, a captured graph. All of them work
on one residual, float32 [tokens, hidden_size], whatever the dtype of the rest: it sums up every layer, and rounding it
at each of them is what bfloat16 would lose most by.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.step_inputs import IntArray

LogitArray = np.ndarray[Any, np.dtype[np.float32]]

SwapArray = np.ndarray[Any, np.dtype[np.uint8]]
"""Swap space: [num_swap_blocks, bytes of a block with all layers]. How a block lies there is the program's business."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Matrices [outputs, inputs] of one input, one below the other, and what is added behind them, float32
    [all outputs]."""

    matrices: tuple[Matrix, ...]
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms that each head's queries and keys go through before they turn."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Self-attention and the norm before it."""

    norm: Tensor
    qkv: Linear
    """Queries, keys and values, one below the other."""
    out: Linear
    head_norms: HeadNorms | None = None
    window: int | None = None
    """How many positions are seen, its own among them; None: all before it."""


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The gated feed-forward layer and the norm before it."""

    norm: Tensor
    gate_up: Linear
    """Gate and up, one below the other."""
    down: Linear


class MasksLate(RuntimeError):
    """A grammar's masks did not come in time."""


class ProgramBuilder(ABC):
    """What a model is told to, once, when it is loaded."""

    last_norm: LogitArray
    """Weights of the norm that `sample` begins with: float32 [hidden_size]."""

    @abstractmethod
    def embed(self, table: Matrix) -> None:
        """residual = table[ids]"""

    @abstractmethod
    def attention(self, weights: AttentionWeights) -> None:
        """residual += out(attention(turn(head_norms(qkv(norm(residual)))))), over the keys and values of the next
        layer, in which those of this step are written first."""

    @abstractmethod
    def mlp(self, weights: MlpWeights) -> None:
        """residual += down(silu(gate(x)) * up(x)), x = norm(residual)"""

    @abstractmethod
    def sample(self, norm: Tensor, head: Matrix) -> None:
        """ids = draw(head(norm(residual))), of the tokens that are sampled. Ends the program."""


class Program(ProgramBuilder):
    """A forward pass over the arrays of one `StepInputs`, one `SamplingInputs` and one `ScoreInputs`."""

    name: str
    """Which back end it is, for people."""

    @abstractmethod
    def run(self) -> IntArray:
        """Compute the step that the inputs hold. Returns the ids drawn, int32 [samples]; -1 where none can be."""

    @abstractmethod
    def score(self) -> None:
        """Leave the records that the `ScoreInputs` ask for, of tokens of the last step. `logits` are not the step's any
        more then."""

    @abstractmethod
    def residual(self) -> LogitArray:
        """What the last step's tokens came to, before the last norm: float32 [tokens, hidden_size]. Good until the next
        step."""

    @abstractmethod
    def wait_for(self, word: int, expected: int, timeout_ms: int) -> None:
        """Let the next steps wait, before they draw, until the uint32 at the address `word` is `expected`; an address
        of 0 ends that. A step whose masks are late raises `MasksLate` and leaves rows without ids."""

    @abstractmethod
    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        """Copy whole KV blocks, with all layers, one after the other; int32. Ids from the number of KV blocks on are
        blocks of swap space."""

    @abstractmethod
    def logits(self) -> LogitArray:
        """Those of the last step: float32 [samples, vocab_size]. Where they are not needed for a draw, they are there
        only after `keep_logits`."""

    @abstractmethod
    def keep_logits(self) -> None:
        """Keep all logits of every step from now on."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads and memory."""
