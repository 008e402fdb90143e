"""A model's forward pass as kernel launches. They depend only on the step's shape, so that a graph can capture them.

There are three variants:

    many tokens   norm · linear (cuBLAS) · rotary · attention · linear · norm · linear · silu_mul · linear
    decoding      rotary+attention is one launch
    few, decode   norm+linear · rotary+attention · linear · norm+linear+silu_mul · linear

The last is for steps that are bound by reading weights and by launches. If a matrix has so many programs that repeating
the norm in each takes longer than a launch, the norm is a separate launch there too. A linear layer returns split-K
partials [P, M, N], and the next kernel sums them.

Shapes: T tokens of a step with padding, S samples, H hidden_size, P split-K partials.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.triton import kv_cache, norm, swiglu
from pipeline.kernels.triton.attention.decode import attend_decode
from pipeline.kernels.triton.attention.prefill import attend
from pipeline.kernels.triton.attention.tasks import AttentionTasks, Scratch
from pipeline.kernels.triton.gemm import fused, linear, segments
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix, Quantization
from pipeline.kernels.triton.gemm.fused import norm_swiglu
from pipeline.kernels.triton.gemm.segments import SegmentedMatrix, segmented_linear, segmented_norm_linear
from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.kernels.triton.rotary import rotary_write
from pipeline.kernels.triton.rows import StepArrays
from pipeline.kernels.triton.tuned import SKINNY_TOKENS, Op
from pipeline.runtime.kv_groups import KVLayout, undivided
from pipeline.runtime.model_folder import ModelConfig, Rope
from pipeline.stages.execute.cpu.program import (
    AnyVector,
    AttentionWeights,
    Embedding,
    ExpertsWeights,
    Head,
    Linear,
    MlpWeights,
    Norm,
    ProgramBuilder,
)
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.experts import ExpertMatrices, ExpertMemory
from pipeline.stages.execute.key_center import key_center
from pipeline.stages.execute.models.features import Feature
from pipeline.stages.execute.rope import rope_table, rotations


@dataclass(frozen=True, slots=True)
class _Gemm:
    """A linear layer on the device."""

    matrix: SegmentedMatrix
    bias: Tensor | None

    def split_k_partials(self, memory: "_Memory", num: int) -> Tensor:
        """The memory of its result for `num` tokens: [P, num, outputs]."""
        return memory.view(*self._layout(num))

    def num_bytes(self, num: int) -> int:
        """Bytes of the result for `num` tokens."""
        shape, dtype = self._layout(num)
        return prod(shape) * dtype.itemsize

    def _layout(self, num: int) -> tuple[tuple[int, int, int], torch.dtype]:
        shape = segments.num_split_k_partials(self.matrix, num), num, self.matrix.num_rows
        return shape, segments.split_k_partials_dtype(self.matrix, num)


@dataclass(frozen=True, slots=True)
class _Attention:
    norm: Tensor
    qkv: _Gemm
    out: _Gemm
    head_norms: tuple[Tensor, Tensor, float] | None
    keys: Tensor
    values: Tensor
    tasks: AttentionTasks
    group: int
    """The KV group."""
    cos: Tensor
    """[max_model_len, head_dim / 2], of the layer's rotary embedding"""
    sin: Tensor
    center: Tensor | None
    """[num_kv_heads, head_dim], of keys in 8 bits"""


@dataclass(frozen=True, slots=True)
class _Mlp:
    norm: Tensor
    gate_up: _Gemm
    down: _Gemm


@dataclass(frozen=True, slots=True)
class _Experts:
    """A mixture of experts; the shared expert is gate and up, and down."""

    norm: Tensor
    router: _Gemm
    matrices: ExpertMatrices
    shared: tuple[_Gemm, _Gemm] | None

    @property
    def gemms(self) -> tuple[_Gemm, ...]:
        return self.router, *(self.shared or ())


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of a step before the last norm: a residual [T, H], and split-K partials [P, T, H] to add to it."""

    residual: Tensor
    split_k_partials: Tensor | None

    def of(self, begin: int, end: int) -> Tensor:
        """The hidden states of tokens begin .. end, [end - begin, H] float32, in new memory."""
        total = self.residual[begin:end].clone()
        if self.split_k_partials is not None:
            for part in self.split_k_partials:  # in the order of the kernels, without further allocations
                total += part[begin:end]
        return total


class _Memory:
    """Memory for the split-K partials of one linear layer at a time."""

    def __init__(self, max_num_tokens: int, where: torch.device) -> None:
        self._max_num_tokens, self._where = max_num_tokens, where
        self._bytes = torch.zeros(0, dtype=torch.uint8)

    def reserve(self, gemm: _Gemm) -> None:
        """Reserve memory for the results of `gemm` for any number of tokens. Call it before computing anything."""
        few = range(1, min(SKINNY_TOKENS, self._max_num_tokens) + 1)
        most = max(gemm.num_bytes(num) for num in (*few, self._max_num_tokens))
        if most > len(self._bytes):
            self._bytes = torch.zeros(most, dtype=torch.uint8, device=self._where)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._bytes[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


class DeviceModel(ProgramBuilder):
    """Owns the weights on the device and the activations' memory. KV memory belongs to the caller: [num_layers, 2, the
    shape in kv_cache.py]."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        dtype: torch.dtype,
        max_num_tokens: int,
        max_num_samples: int,
        quantization: Quantization | None = None,
        *,
        early: bool = False,
    ) -> None:
        """`quantization` applies to layers' matrices that are floats.

        With `early`, steps of few tokens use programmatic dependent launch: a launch loads weights before it waits for
        the previous one.
        """
        self._early = early and not INTERPRETED
        self._quantization = quantization
        self._scratch: Scratch | None = None
        self._device, self._config, self._dtype = device, config, dtype
        self._max_num_tokens, self._max_num_samples = max_num_tokens, max_num_samples
        self._layers: list[tuple[_Attention, _Mlp | _Experts]] = []
        self._attentions: list[tuple[AttentionWeights, _Gemm, _Gemm]] = []
        self._mlps: list[_Mlp | _Experts] = []
        self._tasks: dict[int | None, AttentionTasks] = {}
        where, hidden = device.where, config.hidden_size

        def memory(width: int, num: int = max_num_tokens, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num, width, dtype=dtype, device=where)

        self._residuals = memory(hidden, dtype=torch.float32), memory(hidden, SKINNY_TOKENS, torch.float32)
        self._last_residuals: dict[int, Tensor] = {}
        """The residual buffer that a step of few tokens ends with, by the number of tokens."""
        self._normed = memory(hidden)
        self._queries = memory(config.num_heads * config.head_dim)
        self._attended = memory(config.num_heads * config.head_dim)
        self._gated = memory(max(config.inner_sizes, default=1))
        self._last = memory(hidden, max_num_samples)
        self.logits = memory(config.vocab_size, max_num_samples, torch.float32)
        """[max_num_samples, V], of the last step."""
        self._wide = _Memory(max_num_tokens, where)
        self._narrow = _Memory(max_num_tokens, where)
        self._router = _Memory(max_num_tokens, where)
        self._experts = None if config.experts is None else ExpertMemory(config, max_num_tokens, dtype, where)
        self._dequantized: Tensor | None = None
        self._kv = self.logits

    # ---------------------------------------------------------------------------------------------------- recording

    def embed(self, embedding: Embedding) -> None:
        self._embedding = embedding.table
        self._table = DeviceMatrix.of((as_matrix(embedding.table),), self._dtype, self._device.where)

    def attention(self, weights: AttentionWeights) -> None:
        qkv, out = self._gemm(weights.qkv, self._wide), self._gemm(weights.out, self._narrow)
        self._attentions.append((weights, qkv, out))

    def mlp(self, weights: MlpWeights) -> None:
        gate_up, down = self._gemm(weights.gate_up, self._wide), self._gemm(weights.down, self._narrow)
        self._mlps.append(_Mlp(self._norm_vector(weights.norm), gate_up, down))

    def experts(self, weights: ExpertsWeights) -> None:
        shared = None
        if weights.shared is not None:
            gate_up, down = weights.shared
            shared = self._gemm(gate_up, self._wide), self._gemm(down, self._narrow)
        matrices = ExpertMatrices.of(weights.gate_up, weights.down, self._dtype, self._device.where, self._quantization)
        router = self._gemm(weights.router, self._router, quantizes=False)
        self._mlps.append(_Experts(self._norm_vector(weights.norm), router, matrices, shared))

    def parallel(self, attention: AttentionWeights, mlp: MlpWeights) -> None:
        raise NotImplementedError(Feature.PARALLEL.value)  # `available.why_not` refuses it

    def sample(self, head: Head) -> None:
        self.last_norm = Norm(as_tensor(head.norm.weight).float().cpu().numpy())
        self._norm = self._norm_vector(head.norm)
        # A tied head shares the embedding's memory.
        tied = head.matrix is self._embedding
        where = self._device.where
        self._head = self._table if tied else DeviceMatrix.of((as_matrix(head.matrix),), self._dtype, where)

    def use(self, kv: Tensor, max_model_len: int, layout: KVLayout | None = None) -> None:
        """Set the KV memory and the longest sequence, once all weights are loaded. Without a layout, each layer has its
        own memory."""
        places = (layout or undivided(len(self._attentions))).places
        config = self._config
        self._kv = kv
        angles: dict[Rope | None, list[Tensor]] = {}
        for rope, rotation in rotations(config, max_model_len).items():
            tables = rope_table(rotation.frequencies, max_model_len, rotation.magnitudes)
            angles[rope] = [torch.from_numpy(table).to(self._device.where) for table in tables]
        for i, ((weights, qkv, out), mlp) in enumerate(zip(self._attentions, self._mlps, strict=True)):
            head_norms = None
            if (norms := weights.head_norms) is not None:
                head_norms = self._vector(norms.query), self._vector(norms.key), float(config.rms_norm_eps)
            attention = _Attention(
                norm=self._norm_vector(weights.norm),
                qkv=qkv,
                out=out,
                head_norms=head_norms,
                keys=kv[places[i][1], 0],
                values=kv[places[i][1], 1],
                tasks=self._tasks_of(weights.window),
                group=places[i][0],
                cos=angles[weights.rope][0],
                sin=angles[weights.rope][1],
                center=self._center(weights, max_model_len),
            )
            self._layers.append((attention, mlp))
        self._attentions, self._mlps = [], []

    def _center(self, weights: AttentionWeights, max_model_len: int) -> Tensor | None:
        center = key_center(self._config, weights, max_model_len) if kv_cache.is_quantized(self._kv) else None
        return None if center is None else torch.from_numpy(center).to(self._device.where)

    @property
    def matrices(self) -> list[DeviceMatrix]:
        """The matrices that every token of a step is multiplied with."""
        pairs = [
            (layer.qkv, layer.out, *((mlp.gate_up, mlp.down) if isinstance(mlp, _Mlp) else mlp.gemms))
            for layer, mlp in self._layers
        ]
        return [segment for gemms in pairs for gemm in gemms for segment in gemm.matrix.segments]

    @property
    def expert_matrices(self) -> list[DeviceMatrix]:
        """The matrices of experts, of which a token is multiplied with those of some experts."""
        return [matrix for _, mlp in self._layers if isinstance(mlp, _Experts) for matrix in mlp.matrices.all]

    @property
    def head(self) -> DeviceMatrix:
        """The matrix that every sample of a step is multiplied with."""
        return self._head

    @property
    def table(self) -> DeviceMatrix:
        """The embedding; it may be tied to the head."""
        return self._table

    def _tasks_of(self, window: int | None) -> AttentionTasks:
        if window not in self._tasks:
            config = self._config
            self._tasks[window] = AttentionTasks(
                self._max_num_samples,
                self._max_num_tokens,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                self._dtype,
                self._device.where,
                window,
                scratch=self._scratch,
                quantized=kv_cache.is_quantized(self._kv),
            )
            self._scratch = self._tasks[window].scratch
        return self._tasks[window]

    def _gemm(self, weights: Linear, memory: _Memory, *, quantizes: bool = True) -> _Gemm:
        matrices = [as_matrix(matrix) for matrix in weights.matrices]
        quantization = self._quantization if quantizes else None
        matrix = SegmentedMatrix.of(matrices, self._dtype, self._device.where, quantization)
        if matrix.has_codes and self._dequantized is None:
            self._dequantized = linear.dequantize_scratch(self._dtype, self._device.where)
        gemm = _Gemm(matrix, None if weights.bias is None else self._vector(weights.bias))
        memory.reserve(gemm)
        return gemm

    def _norm_vector(self, norm: Norm | None) -> Tensor:
        assert norm is not None and norm.bias is None
        return self._vector(norm.weight)

    def _vector(self, values: AnyVector) -> Tensor:
        return as_tensor(values).to(self._device.where, torch.float32).contiguous()

    # ---------------------------------------------------------------------------------------------------- computing

    def forward(self, step: StepArrays, *, decodes: bool) -> None:
        """Compute the logits of the step's samples. `decodes`: each entry has one token."""
        for tasks in self._tasks.values():
            tasks.plan(step, one_each=decodes)
        norm.embed(self._residuals[0][: step.num_tokens], self._table, step.ids)
        if decodes and step.num_tokens <= SKINNY_TOKENS:
            self._few(step)
        else:
            self._many(step, decodes=decodes)
        self.score(self.hidden_states(step.num_tokens, decodes=decodes), step.sampled)

    def hidden_states(self, num_tokens: int, *, decodes: bool) -> HiddenStates:
        """The hidden states of the last `forward`, which had these arguments; valid until the next step."""
        residual = self._residuals[0][:num_tokens]
        if decodes and num_tokens <= SKINNY_TOKENS:
            residual = self._last_residuals[num_tokens]
        if not self._layers:
            return HiddenStates(residual, None)
        last = self._layers[-1][1]
        if isinstance(last, _Experts):
            assert self._experts is not None
            return HiddenStates(residual, self._experts.result(num_tokens))
        return HiddenStates(residual, last.down.split_k_partials(self._narrow, num_tokens))

    def _many(self, step: StepArrays, *, decodes: bool) -> None:
        num, eps = step.num_tokens, float(self._config.rms_norm_eps)
        residual, normed = self._residuals[0][:num], self._normed[:num]
        queries, attended = self._queries[:num], self._attended[:num]
        split_k_partials: Tensor | None = None
        for layer, mlp in self._layers:
            norm.add_norm(normed, residual, split_k_partials, layer.norm, eps)
            qkv = self._linear(self._wide, normed, layer.qkv)
            if decodes:
                self._attend_decode(attended, qkv, step, layer)
            else:
                arrays = step.of_group(layer.group)
                cache = layer.keys, layer.values, layer.head_norms, layer.center
                rotary_write(queries, qkv, layer.cos, layer.sin, arrays, *cache)
                attend(attended, queries, layer.keys, layer.values, arrays, layer.tasks)
            split_k_partials = self._linear(self._narrow, attended, layer.out)
            norm.add_norm(normed, residual, split_k_partials, mlp.norm, eps)
            if isinstance(mlp, _Experts):
                split_k_partials = self._compute_experts(normed, mlp)
            else:
                split_k_partials = self._feed_forward(normed, mlp.gate_up, mlp.down)

    def _feed_forward(self, x: Tensor, gate_up: _Gemm, down: _Gemm) -> Tensor:
        gated = self._gated_of(len(x), down)
        swiglu.silu_mul(gated, self._linear(self._wide, x, gate_up))
        return self._linear(self._narrow, gated, down)

    def _gated_of(self, num: int, down: _Gemm) -> Tensor:
        """The memory of what a layer's last matmul reads. Layers may have different sizes."""
        width = down.matrix.num_columns
        return self._gated.view(-1)[: num * width].view(num, width)

    def _compute_experts(self, x: Tensor, layer: _Experts) -> Tensor:
        """Its result, as one split-K partial."""
        assert self._experts is not None
        logits = self._linear(self._router, x, layer.router)
        shared = None if layer.shared is None else self._feed_forward(x, *layer.shared)
        return self._experts.compute(x, logits, layer.matrices, shared)

    def _few(self, step: StepArrays) -> None:
        num, eps = step.num_tokens, float(self._config.rms_norm_eps)
        normed, attended = self._normed[:num], self._attended[:num]
        # A fused norm reads one residual buffer and writes the other, so its programs don't race.
        residual, other = (each[:num] for each in self._residuals)
        split_k_partials: Tensor | None = None
        for layer, mlp in self._layers:
            qkv = layer.qkv.split_k_partials(self._wide, num)
            if self._fuses("linear", layer.qkv, num, split_k_partials):
                segmented_norm_linear(
                    *(qkv, other, residual, split_k_partials, layer.norm, eps, layer.qkv.matrix, layer.qkv.bias),
                    pdl=self._early,
                )
                residual, other = (residual, other) if split_k_partials is None else (other, residual)
            else:
                norm.add_norm(normed, residual, split_k_partials, layer.norm, eps)
                segmented_linear(qkv, normed, layer.qkv.matrix, layer.qkv.bias, pdl=self._early)
            self._attend_decode(attended, qkv, step, layer)
            split_k_partials = self._linear(self._narrow, attended, layer.out)
            if isinstance(mlp, _Experts):
                norm.add_norm(normed, residual, split_k_partials, mlp.norm, eps)
                split_k_partials = self._compute_experts(normed, mlp)
                continue
            gate_up, gated = mlp.gate_up, self._gated_of(num, mlp.down)
            whole = gate_up.matrix.segments[0] if len(gate_up.matrix.segments) == 1 else None
            if whole is not None and self._fuses("swiglu", gate_up, num, split_k_partials):
                norm_swiglu(
                    *(gated, other, residual, split_k_partials, mlp.norm, eps, whole, gate_up.bias),
                    pdl=self._early,
                )
                residual, other = other, residual
            else:
                norm.add_norm(normed, residual, split_k_partials, mlp.norm, eps)
                if whole is not None:
                    fused.swiglu(gated, normed, whole, gate_up.bias, pdl=self._early)
                else:  # a program of the fused kernel has rows of gate and up, which have different formats here
                    swiglu.silu_mul(gated, self._linear(self._wide, normed, gate_up))
            split_k_partials = self._linear(self._narrow, gated, mlp.down)
        self._last_residuals[num] = residual

    def _attend_decode(self, attended: Tensor, qkv: Tensor, step: StepArrays, layer: _Attention) -> None:
        cache = layer.keys, layer.values, layer.tasks, layer.head_norms, layer.center
        early = self._early and step.num_tokens <= SKINNY_TOKENS
        attend_decode(attended, qkv, layer.cos, layer.sin, step.of_group(layer.group), *cache, pdl=early)

    @staticmethod
    def _fuses(op: Op, gemm: _Gemm, num: int, split_k_partials: Tensor | None) -> bool:
        """Whether the matmul includes the norm before it, given the split-K partials that it reads."""
        matrix = gemm.matrix
        num_partials_in = 0 if split_k_partials is None else len(split_k_partials)
        return fused.fuses(num, num_partials_in, matrix.num_columns, matrix.num_programs(op, num))

    def score(self, hidden_states: HiddenStates, places: Tensor) -> Tensor:
        """Logits of tokens `places` [S] int32 of the last step: [S, V] float32."""
        last, logits = self._last[: len(places)], self.logits[: len(places)]
        norm.take_norm(
            last,
            hidden_states.residual,
            hidden_states.split_k_partials,
            places,
            self._norm,
            float(self._config.rms_norm_eps),
        )
        linear.logits(logits, last, self._head)
        return logits

    def _linear(self, memory: _Memory, x: Tensor, gemm: _Gemm) -> Tensor:
        split_k_partials = gemm.split_k_partials(memory, len(x))
        early = self._early and len(x) <= SKINNY_TOKENS
        segmented_linear(split_k_partials, x, gemm.matrix, gemm.bias, self._dequantized, pdl=early)
        return split_k_partials


def allocate_kv(
    config: ModelConfig, num_blocks: int, dtype: torch.dtype, where: torch.device, num_places: int | None = None
) -> Tensor:
    """KV memory of blocks with `num_places` layers, by default all. It is zeroed, because kernels read unwritten slots
    under a mask, and NaN passes it."""
    layer = kv_cache.shape_of(num_blocks, config.num_kv_heads, config.head_dim, dtype)
    return torch.zeros((num_places or config.num_layers, 2, *layer), dtype=dtype, device=where)
