"""A program in torch, op by op: the reference for the other back ends, and the fallback where they can't run.

Every op works in bfloat16 or in float32 throughout. Quantized weights are dequantized when the program is recorded.
"""

import ctypes
import time

import torch
from torch import Tensor

from pipeline.config.settings import Settings
from pipeline.kernels.kv_layout import LayerKV, layers_of
from pipeline.kernels.logprob_inputs import ScoreInputs
from pipeline.kernels.logprobs import write_logprobs
from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.paged_attention import AttentionPlan
from pipeline.kernels.sampling_inputs import SamplingInputs
from pipeline.kernels.select import select
from pipeline.kernels.step_inputs import IntArray, StepInputs
from pipeline.runtime.model_folder import ModelConfig
from pipeline.shm.fence import Fence
from pipeline.stages.execute.cpu.program import (
    AnyMatrix,
    AnyVector,
    AttentionWeights,
    Linear,
    LogitArray,
    MasksLate,
    MlpWeights,
    Program,
    SwapArray,
)
from pipeline.stages.execute.cpu.sampler import Sampler
from pipeline.stages.execute.cpu.torch_calls import Extent, TorchCalls
from pipeline.stages.execute.kv import kv_dtype
from pipeline.stages.execute.rope import rope_frequencies

POLL_S = 50e-6
"""Poll interval for grammar masks."""


class TorchProgram(Program):
    """Raises ValueError for a device without kernels."""

    def __init__(
        self,
        settings: Settings,
        config: ModelConfig,
        inputs: StepInputs,
        sampling_inputs: SamplingInputs,
        scores: ScoreInputs,
        num_blocks: int,
        swap: SwapArray | None = None,
    ) -> None:
        self._ops = ops = select(settings.execute.device, getattr(torch, settings.execute.dtype))
        self.name = ops.name
        self._config = config
        self._inputs = inputs
        self._num_layers = 0
        self._table: tuple[AnyMatrix, Tensor] | None = None
        self._memory = ops.kv_allocate(
            config.num_layers,
            num_blocks,
            config.num_kv_heads,
            config.head_dim,
            getattr(torch, kv_dtype(settings.execute)),
            ops.device,
        )
        self.kv: list[LayerKV] = layers_of(self._memory, config.num_kv_heads, config.head_dim)
        self._swapped = None if swap is None else ops.kv_swap(torch.from_numpy(swap), self._memory)
        self._sampler = Sampler(ops, sampling_inputs)
        self._scores = scores
        self._head: Tensor | None = None
        self._word, self._expected, self._timeout_ms = 0, 0, 0
        self._fence = Fence()
        self._calls = calls = TorchCalls(inputs, ops.dtype)
        self._residual = calls.buffer(config.hidden_size, dtype=torch.float32)
        self._x = calls.buffer(config.hidden_size)
        self._qkv = calls.buffer((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self._attended = calls.buffer(config.num_heads * config.head_dim)
        self._gate_up = calls.buffer(2 * config.intermediate_size)
        self._gated = calls.buffer(config.intermediate_size)
        self._last = calls.buffer(config.hidden_size, Extent.SAMPLES)
        self._logits = calls.buffer(config.vocab_size, Extent.SAMPLES, torch.float32)
        self._cos = calls.buffer(config.head_dim, dtype=torch.float32)
        self._sin = calls.buffer(config.head_dim, dtype=torch.float32)
        self._plans: dict[int | None, AttentionPlan] = {}

    def embed(self, table: AnyMatrix) -> None:
        config, calls, ops = self._config, self._calls, self._ops
        frequencies = torch.from_numpy(rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
        calls.add(ops.rotary_angles, self._cos, self._sin, calls.positions, frequencies)
        self._table = table, as_matrix(table).dequantize(ops.dtype)
        calls.add(ops.take_rows, self._residual, self._table[1], calls.ids)

    def attention(self, weights: AttentionWeights) -> None:
        calls, ops, kv = self._calls, self._ops, self.kv[self._num_layers]
        self._num_layers += 1
        calls.add(ops.rms_norm, self._x, self._residual, as_tensor(weights.norm), self._config.rms_norm_eps)
        calls.add(ops.linear, self._qkv, self._x, *self._linear(weights.qkv))
        if (norms := weights.head_norms) is not None:
            calls.add(
                ops.head_norm, self._qkv, as_tensor(norms.query), as_tensor(norms.key), kv, self._config.rms_norm_eps
            )
        calls.add(ops.rotary_write, self._qkv, self._cos, self._sin, calls.slots, kv)
        calls.add(ops.attention, self._attended, self._qkv, kv, self._plan(weights.window))
        calls.add(ops.linear, self._x, self._attended, *self._linear(weights.out))
        calls.add(ops.add, self._residual, self._x)

    def mlp(self, weights: MlpWeights) -> None:
        calls, ops = self._calls, self._ops
        calls.add(ops.rms_norm, self._x, self._residual, as_tensor(weights.norm), self._config.rms_norm_eps)
        calls.add(ops.linear, self._gate_up, self._x, *self._linear(weights.gate_up))
        calls.add(ops.silu_mul, self._gated, self._gate_up)
        calls.add(ops.linear, self._x, self._gated, *self._linear(weights.down))
        calls.add(ops.add, self._residual, self._x)

    def sample(self, norm: AnyVector, head: AnyMatrix) -> None:
        weight_of_norm = as_tensor(norm)
        self.last_norm = weight_of_norm.numpy()
        calls, ops = self._calls, self._ops
        calls.add(ops.rms_norm, self._x, self._residual, weight_of_norm, self._config.rms_norm_eps)
        calls.add(ops.take_rows, self._last, self._x, calls.sampled)
        # A tied head shares the embedding's memory.
        tied = self._table is not None and self._table[0] is head
        weight = self._table[1] if self._table is not None and tied else as_matrix(head).dequantize(ops.dtype)
        calls.add(ops.logits, self._logits, self._last, weight)
        self._head = weight

    def run(self) -> IntArray:
        with torch.inference_mode():
            self._calls.run()
            self._wait()
            return self._sampler.sample(self._calls.view(self._logits))

    def score(self) -> None:
        scores, ops = self._scores, self._ops
        assert self._head is not None
        with torch.inference_mode():
            last, logits = self._last.storage[: scores.num], self._logits.storage[: scores.num]
            ops.take_rows(last, self._calls.view(self._x), torch.from_numpy(scores.places[: scores.num]))
            ops.logits(logits, last, self._head)
            write_logprobs(logits, scores.ids[: scores.num], scores.logprobs)

    def residual(self) -> LogitArray:
        array: LogitArray = self._calls.view(self._residual).numpy()
        return array

    def wait_for(self, word: int, expected: int, timeout_ms: int) -> None:
        self._word, self._expected, self._timeout_ms = word, expected, timeout_ms

    def _wait(self) -> None:
        if not self._word:
            return
        word, end = ctypes.c_uint32.from_address(self._word), time.monotonic() + self._timeout_ms / 1000
        while word.value != self._expected:
            if time.monotonic() > end:
                raise MasksLate(f"masks did not arrive within {self._timeout_ms} ms")
            time.sleep(POLL_S)
        self._fence()

    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        self._ops.copy_blocks(self._memory, self._swapped, sources.tolist(), targets.tolist())

    def logits(self) -> LogitArray:
        array: LogitArray = self._calls.view(self._logits).numpy()
        return array

    def keep_logits(self) -> None:
        self._sampler.sampling_inputs.keeps_logits = True
        self._sampler.sampling_inputs.greedy[:] = 0

    def close(self) -> None:
        pass

    def _plan(self, window: int | None) -> AttentionPlan:
        """The attention plan of all layers with this window. It is prepared before the first of them."""
        if window not in self._plans:
            self._plans[window] = self._ops.attention_plan(window, self._ops.dtype)
            self._calls.add(self._plans[window].prepare, self._inputs)
        return self._plans[window]

    def _linear(self, linear: Linear) -> tuple[Tensor, Tensor | None]:
        bias = None if linear.bias is None else as_tensor(linear.bias).to(self._ops.dtype)
        return torch.cat([as_matrix(matrix).dequantize(self._ops.dtype) for matrix in linear.matrices]), bias
