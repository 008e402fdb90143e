"""A program in torch, op by op: the reference for the other back ends, and the fallback where they can't run.

Every op works in bfloat16 or in float32 throughout. Quantized weights are dequantized when the program is recorded.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.activations import xielu
from pipeline.kernels.experts import ExpertActivation, ExpertMatrices
from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.sampling.logprobs import write_logprobs
from pipeline.kernels.select import select
from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.take_rows import add_encoded_rows, put_encoded_rows, take_known_rows
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.shm.fence import Fence
from pipeline.stages.execute.adapters.slots import DOWN, OUT, QKV, gate_up
from pipeline.stages.execute.cpu.program import MasksLate, Program, ProgramPlan
from pipeline.stages.execute.cpu.pytorch.attention import TorchAttention
from pipeline.stages.execute.cpu.pytorch.calls import Buffer, Extent, TorchCalls
from pipeline.stages.execute.cpu.pytorch.lora import Matrices, TorchLora
from pipeline.stages.execute.cpu.pytorch.recurrent import TorchRecurrent
from pipeline.stages.execute.cpu.pytorch.token_inputs import TorchTokenInputs
from pipeline.stages.execute.cpu.sampler import Sampler
from pipeline.stages.execute.kv import SwapArray
from pipeline.stages.execute.layers.route_options import route_options
from pipeline.stages.execute.program import (
    AnyMatrix,
    AttentionWeights,
    Embedding,
    ExpertsWeights,
    Head,
    Linear,
    LogitArray,
    MlpWeights,
    Norm,
    PerLayerWeights,
    RecurrentWeights,
    ShortConvWeights,
    TokenInputs,
)

POLL_S = 50e-6
"""Poll interval for grammar masks."""


class TorchProgram(Program):
    """Raises ValueError for a device without kernels."""

    def __init__(self, plan: ProgramPlan) -> None:
        config, inputs, kv, lora, execute = plan.config, plan.inputs, plan.kv, plan.lora, plan.settings.execute
        self._ops = ops = select(execute.device, getattr(torch, execute.dtype))
        self.name = ops.name
        self._config = config
        self._inputs = inputs
        self._num_layers = 0
        self._table: tuple[AnyMatrix, Tensor] | None = None
        self._calls = calls = TorchCalls(inputs, ops.dtype)
        self._attention = TorchAttention(ops, calls, plan)
        self._memory, self.kv = self._attention.memory, self._attention.kv
        self._lora = None if lora is None else TorchLora(lora, config, inputs)
        encoded = plan.encoded.rows
        self._encoded = None if encoded is None else torch.split(torch.from_numpy(encoded), config.hidden_size, 1)
        """Embeddings, and what is added behind the first layers."""
        self.num_encoded_layers = plan.encoded.num_layers
        self._swapped = None if plan.swap is None else ops.kv_swap(torch.from_numpy(plan.swap), self._memory)
        self._sampler, self._scores = Sampler(ops, plan.sampling_inputs), plan.scores
        self._head: Tensor | None = None
        self._finish: list[tuple[Callable[[Tensor, Any], None], Any]] = []
        """What happens to logits after the last matmul."""
        self._word, self._expected, self._timeout_ms = 0, 0, 0
        self._fence = Fence()
        self._residual = calls.buffer(config.hidden_size, dtype=torch.float32)
        self._captured: list[Buffer] = []
        self._given: Buffer | None = None
        self._x = calls.buffer(config.hidden_size)
        self._parallel_x = calls.buffer(config.hidden_size) if config.parallel else self._x
        self._branch = calls.buffer(config.hidden_size) if config.parallel else self._x
        self._gate_ups = {
            size: (calls.buffer((2 if config.gated else 1) * size), calls.buffer(size))
            for size in {config.inner_of(layer) for layer in range(max(1, config.num_layers))}
        }
        """By intermediate size."""
        self._token_inputs: TorchTokenInputs | None = None
        self._recurrent = TorchRecurrent(ops, calls, config, kv) if config.has_states else None
        if (experts := config.experts) is not None:
            self._routed = calls.buffer(config.hidden_size)
            self._router_logits = calls.buffer(experts.num + experts.shared_gate)
            self._chosen = calls.buffer(experts.num_per_token, dtype=torch.int64)
            self._expert_weights = calls.buffer(experts.num_per_token, dtype=torch.float32)
            shared = experts.shared_intermediate_size
            self._shared_gate_up = calls.buffer((2 if config.gated else 1) * shared)
            self._shared_gated = calls.buffer(shared)
        self._last = calls.buffer(config.hidden_size, Extent.SAMPLES)
        self._logits = calls.buffer(config.vocab_size if config.generates else 1, Extent.SAMPLES, torch.float32)

    def embed(self, embedding: Embedding | None) -> None:
        config, calls, ops = self._config, self._calls, self._ops
        self._attention.begin()
        if embedding is None:
            return
        table = embedding.table
        self._table = table, as_matrix(table).dequantize(ops.dtype)
        if self._encoded is None:
            calls.add(ops.take_rows, self._residual, self._table[1], calls.ids)
        else:
            calls.add(take_known_rows, self._residual, self._table[1], calls.ids)
        if config.embedding_scale != 1:
            calls.add(ops.scale, self._residual, config.embedding_scale)
        if self._encoded is not None:
            calls.add(put_encoded_rows, self._residual, self._encoded[0], calls.ids)
        if embedding.positions is not None:
            learned = as_matrix(embedding.positions).dequantize(ops.dtype)[config.position_offset :]
            calls.add(ops.take_rows, self._x, learned, calls.position_rows)
            calls.add(ops.add, self._residual, self._x, 1.0)
        if embedding.norm is not None:
            self._norm(self._residual, self._residual, embedding.norm)

    def token_inputs(self, weights: TokenInputs) -> None:
        inputs = self._token_inputs = TorchTokenInputs(self._ops, self._calls, self._config, weights)
        self._norm(self._x, self._residual, None)
        self._multiply(inputs.projected, self._x, weights.project)
        self._calls.add(inputs.fill, inputs.projected, self._calls.ids)

    def per_layer(self, weights: PerLayerWeights) -> None:
        inputs = self._token_inputs
        assert inputs is not None
        self._norm(self._x, self._residual, None)
        self._multiply(inputs.gates, self._x, weights.gate)
        self._calls.add(inputs.gate, inputs.gated, inputs.gates, inputs.projected, self._num_layers - 1)
        self._multiply(self._x, inputs.gated, weights.out)
        self._add(self._x, weights.post_norm, scale=weights.residual_scale)

    def attention(self, weights: AttentionWeights) -> None:
        self._capture_residual()
        self._norm(self._x, self._residual, weights.norm)
        self._attend(self._x, self._x, weights)
        self._add(self._x, weights.post_norm, weights.residual_norm)

    def add_encoded(self, layer: int) -> None:
        if self._encoded is not None:
            self._calls.add(add_encoded_rows, self._residual, self._encoded[layer + 1], self._calls.ids)

    def recurrent(self, weights: RecurrentWeights) -> None:
        assert self._recurrent is not None
        layers = self._recurrent.layers
        self._capture_residual()
        self._num_layers += 1
        self._norm(self._x, self._residual, weights.norm)
        self._multiply(layers.inputs, self._x, weights.inputs)
        layers.record(weights)
        self._multiply(self._x, layers.out, weights.out)
        self._add(self._x, weights.post_norm if isinstance(weights, ShortConvWeights) else None)

    def attention_of_given(self, weights: AttentionWeights, width: int) -> None:
        self._given = self._calls.buffer(width, dtype=torch.float32)
        x = self._calls.buffer(width)
        self._calls.add(self._ops.copy, x, self._given)
        self._attend(self._x, x, weights)
        self._add(self._x, weights.post_norm)

    def _capture_residual(self) -> None:
        if self._num_layers in self.captured_layers:
            self._captured.append(self._calls.buffer(self._config.hidden_size, dtype=torch.float32))
            self._calls.add(self._ops.copy, self._captured[-1], self._residual)

    def mlp(self, weights: MlpWeights) -> None:
        self._norm(self._x, self._residual, weights.norm)
        self._feed_forward(self._x, self._x, weights)
        self._add(self._x, weights.post_norm, weights.residual_norm, weights.residual_scale)

    def experts(self, weights: ExpertsWeights) -> None:
        config, calls, ops, x = self._config, self._calls, self._ops, self._x
        sizes = config.experts
        assert sizes is not None
        if weights.router_norm is not None:
            self._norm(x, self._residual, weights.router_norm)
            self._multiply(self._router_logits, x, weights.router)
        self._norm(x, self._residual, weights.norm)
        if weights.router_norm is None:
            self._multiply(self._router_logits, x, weights.router)
        bias, factors = (None if one is None else as_tensor(one) for one in (weights.selection_bias, weights.factors))
        chosen, form = (self._chosen, self._expert_weights), route_options(sizes, factors)
        calls.add(ops.route, *chosen, self._router_logits, bias, form)
        activation = ExpertActivation(config.activation, config.gated, config.swiglu_alpha, config.swiglu_limit)
        matrices = self._expert_matrices(weights, sizes.num)
        routed = self._routed, x, self._chosen, self._expert_weights, matrices, activation, ops.linear
        calls.add(ops.experts, *routed)
        if weights.shared is not None:
            gate_up, down = weights.shared
            self._multiply(self._shared_gate_up, x, gate_up)
            self._activate(self._shared_gated, self._shared_gate_up)
            self._multiply(x, self._shared_gated, down)
            calls.add(ops.add_gated, self._routed, x, self._router_logits if sizes.shared_gate else None)
        if weights.dense is None:
            self._add(self._routed, weights.post_norm)
            return
        assert weights.post_norm is not None
        self._norm(self._routed, self._routed, weights.post_norm)
        self._norm(x, self._residual, weights.dense.norm)
        self._feed_forward(x, x, weights.dense)
        self._norm(x, x, weights.dense.post_norm)
        calls.add(ops.add, self._routed, x, 1.0)
        self._add(self._routed, weights.sum_norm, scale=weights.residual_scale)

    def parallel(self, attention: AttentionWeights, mlp: MlpWeights) -> None:
        self._capture_residual()
        self._norm(self._x, self._residual, attention.norm)
        source = self._x
        if mlp.norm is not None:
            source = self._parallel_x
            self._norm(source, self._residual, mlp.norm)
        self._attend(self._branch, self._x, attention)
        self._feed_forward(self._x, source, mlp)
        self._add(self._branch, attention.post_norm)
        self._add(self._x, mlp.post_norm)

    def borrow_head(self, other: Program) -> None:
        assert isinstance(other, TorchProgram)
        self._head = other._head

    def pool(self, norm: Norm | None) -> None:
        self.last_norm = None if norm is None else norm.as_arrays()

    def sample(self, head: Head) -> None:
        config, calls, ops = self._config, self._calls, self._ops
        self.pool(head.norm)
        self._norm(self._x, self._residual, head.norm)
        calls.add(ops.take_rows, self._last, self._x, calls.sampled)
        if self._head is None:
            # A tied head shares the embedding's memory.
            tied = self._table is not None and self._table[0] is head.matrix
            self._head = self._table[1] if self._table and tied else as_matrix(head.matrix).dequantize(ops.dtype)
        calls.add(ops.logits, self._logits, self._last, self._head)
        if head.bias is not None:
            self._finish.append((ops.add_vector, as_tensor(head.bias)))
        if config.logit_scale != 1:
            self._finish.append((ops.scale, config.logit_scale))
        if config.logit_softcap is not None:
            self._finish.append((ops.softcap, config.logit_softcap))
        for op, argument in self._finish:
            calls.add(op, self._logits, argument)

    # The methods below record the parts of a layer.

    def _norm(self, out: Buffer, x: Buffer, norm: Norm | None) -> None:
        """out = norm(x)"""
        calls, ops, eps = self._calls, self._ops, self._config.rms_norm_eps
        eps = eps if norm is None or norm.eps is None else norm.eps
        if norm is None:
            calls.add(ops.copy, out, x)
        elif self._config.norm == "layer":
            bias = None if norm.bias is None else as_tensor(norm.bias)
            calls.add(ops.layer_norm, out, x, as_tensor(norm.weight), bias, eps)
        else:
            calls.add(ops.rms_norm, out, x, as_tensor(norm.weight), eps)

    def _attend(self, out: Buffer, x: Buffer, weights: AttentionWeights) -> None:
        layer = self._attention.layer(weights, self._num_layers)
        self._num_layers += 1
        self._project(layer.qkv, x, weights.qkv, QKV)
        if weights.gate is not None:
            self._multiply(self._attention.gate(weights.gate), x, weights.gate)
        self._attention.record(weights, layer)
        self._project(out, layer.attended, weights.out, OUT)

    def _feed_forward(self, out: Buffer, x: Buffer, weights: MlpWeights) -> None:
        stacked, gated = self._gate_ups[weights.down.matrices[0].num_columns]
        self._project(stacked, x, weights.gate_up, gate_up(self._config))
        if weights.xielu is None:
            self._activate(gated, stacked)
        else:
            self._calls.add(xielu, gated, stacked, *weights.xielu)
        self._project(out, gated, weights.down, DOWN)

    def _project(self, out: Buffer, x: Buffer, linear: Linear, targets: tuple[Target, ...]) -> None:
        """A matmul of the layer that attention was recorded for last, which adapters may change."""
        self._multiply(out, x, linear)
        if self._lora is not None:
            self._calls.add(self._lora.add, out, x, self._lora.site(self._num_layers - 1, targets))

    def _multiply(self, out: Buffer, x: Buffer, linear: Linear) -> None:
        self._calls.add(self._ops.linear, out, x, *self._linear(linear))

    def _activate(self, out: Buffer, x: Buffer) -> None:
        """What is between the two matmuls of a feed-forward layer."""
        config, calls, ops = self._config, self._calls, self._ops
        if not config.gated:
            calls.add(ops.activate, out, x, config.activation)
        elif config.activation == "silu":
            calls.add(ops.silu_mul, out, x)
        else:
            calls.add(ops.activate_mul, out, x, config.activation)

    def _expert_matrices(self, weights: ExpertsWeights, num: int) -> ExpertMatrices:
        (gate_up, gate_up_bias), (down, down_bias) = self._linear(weights.gate_up), self._linear(weights.down)
        return ExpertMatrices(
            gate_up.view(num, -1, gate_up.shape[1]),
            down.view(num, -1, down.shape[1]),
            None if gate_up_bias is None else gate_up_bias.view(num, -1),
            None if down_bias is None else down_bias.view(num, -1),
        )

    def _add(self, x: Buffer, post_norm: Norm | None, residual_norm: Norm | None = None, scale: float = 1.0) -> None:
        """residual = residual_norm(residual + post_norm(x) * residual_multiplier) * scale"""
        if post_norm is not None:
            self._norm(x, x, post_norm)
        self._calls.add(self._ops.add, self._residual, x, self._config.residual_multiplier)
        if residual_norm is not None:
            self._norm(self._residual, self._residual, residual_norm)
        if scale != 1:
            self._calls.add(self._ops.scale, self._residual, scale)

    def run(self) -> IntArray:
        with torch.inference_mode():
            self._calls.run()
        return self.sample_again()

    def sample_again(self) -> IntArray:
        with torch.inference_mode():
            self._wait()
            return self._sampler.sample(self._calls.view(self._logits))

    def score(self) -> None:
        scores, ops = self._scores, self._ops
        assert self._head is not None
        with torch.inference_mode():
            last, logits = self._last.storage[: scores.num], self._logits.storage[: scores.num]
            ops.take_rows(last, self._calls.view(self._x), torch.from_numpy(scores.token_indices[: scores.num]))
            ops.logits(logits, last, self._head)
            for op, argument in self._finish:
                op(logits, argument)
            write_logprobs(logits, scores.ids[: scores.num], scores.logprobs)

    def residual(self) -> LogitArray:
        array: LogitArray = self._calls.view(self._residual).numpy()
        return array

    def captured(self) -> LogitArray:
        array: LogitArray = torch.cat([self._calls.view(states) for states in self._captured], 1).numpy()
        return array

    def given(self) -> LogitArray:
        assert self._given is not None
        array: LogitArray = self._calls.view(self._given).numpy()
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

    def copy_blocks(self, sources: IntArray, targets: IntArray, other: SwapArray | None = None) -> None:
        swap = self._swapped if other is None else self._ops.kv_swap(torch.from_numpy(other), self._memory)
        self._ops.copy_blocks(self._memory, swap, sources.tolist(), targets.tolist())

    def copy_states(self, swapped: SwapArray, sources: IntArray, targets: IntArray) -> None:
        assert self._recurrent is not None
        self._recurrent.copy(torch.from_numpy(swapped).view(torch.float32), sources.tolist(), targets.tolist())

    def logits(self) -> LogitArray:
        array: LogitArray = self._calls.view(self._logits).numpy()
        return array

    def keep_logits(self) -> None:
        self._sampler.sampling_inputs.keeps_logits = True
        self._sampler.sampling_inputs.greedy[:] = 0

    def pack_adapter(self, file: AdapterFile) -> list[Matrices]:
        assert self._lora is not None, "adapters are off"
        return self._lora.pack(file)

    def put_adapter(self, slot: int, packed: list[Matrices]) -> None:
        assert self._lora is not None, "adapters are off"
        self._lora.put(slot, packed)

    def close(self) -> None:
        pass

    def _linear(self, linear: Linear) -> tuple[Tensor, Tensor | None]:
        bias = None if linear.bias is None else as_tensor(linear.bias).to(self._ops.dtype)
        return torch.cat([as_matrix(matrix).dequantize(self._ops.dtype) for matrix in linear.matrices]), bias
