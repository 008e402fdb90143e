"""A model's forward pass as kernel launches. They depend only on the step's shape, so that a graph can capture them.

There are three variants:

    many tokens   norm · linear (cuBLAS) · rotary · attention · linear · norm · linear · activation · linear
    decoding      rotary+attention is one launch
    few, decode   norm+linear · rotary+attention · linear · norm+linear+silu_mul · linear

The last is for steps that are bound by reading weights and by launches, and for layers like Llama's (`_is_fusible`). If
a matrix has so many programs that repeating the norm in each takes longer than a launch, the norm is a separate launch
there too. A linear layer returns split-K partials [P, M, N], and the next kernel sums them.

What models do beyond Llama is part of these launches (factors, norms after a layer), or a launch more:

    embedding        a norm of embeddings
    parallel         adds attention's result to the residual; the second norm, if there is one
    queries, keys    a norm of all heads, or a layer norm
    logits           bias, factor, cap
    the last layer   adds its result to the residual, if it is normed or has a factor

Shapes: T tokens of a step with padding, S samples, H hidden_size, P split-K partials.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.triton import activations, kv_cache, norm
from pipeline.kernels.triton.gemm import fused, linear
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix, Quantization
from pipeline.kernels.triton.gemm.fused import norm_swiglu
from pipeline.kernels.triton.gemm.segments import SegmentedMatrix, segmented_linear, segmented_norm_linear
from pipeline.kernels.triton.logits import finish_logits
from pipeline.kernels.triton.norm import PLAIN, NormWeights, Sublayer
from pipeline.kernels.triton.rows import StepArrays
from pipeline.kernels.triton.tuned import SKINNY_TOKENS, Op
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.runtime.kv_groups import KVLayout, undivided
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.adapters import DOWN, OUT, QKV, LoraPlan, gate_up
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
from pipeline.stages.execute.cuda.attention import AttentionLayer, DeviceAttention
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.experts import ExpertMatrices, ExpertMemory
from pipeline.stages.execute.cuda.linear import Gemm, GemmMemory
from pipeline.stages.execute.cuda.lora import DeviceLora, PackedAdapter
from pipeline.stages.execute.cuda.rank_link import RankLink

EARLY_BYTES = 128 * 1024**2
"""Programmatic dependent launch is for layers whose matrices are floats of at most this size. On an H200, it makes a
step of 135 million weights a fifth shorter, and one of 8 billion 1 % longer (docs/performance.md)."""


@dataclass(frozen=True, slots=True)
class _Attention:
    norm: NormWeights | None
    qkv: Gemm
    out: Gemm
    after: Sublayer
    layer: AttentionLayer


@dataclass(frozen=True, slots=True)
class _Mlp:
    norm: NormWeights | None
    """None also if a parallel layer has the input of attention."""
    gate_up: Gemm
    down: Gemm
    after: Sublayer
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class _Experts:
    """A mixture of experts; the shared expert is gate and up, and down."""

    norm: NormWeights | None
    router: Gemm
    matrices: ExpertMatrices
    shared: tuple[Gemm, Gemm] | None
    after: Sublayer
    is_parallel: bool = False

    @property
    def gemms(self) -> tuple[Gemm, ...]:
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


class DeviceModel(ProgramBuilder):
    """Owns the weights on the device and the activations' memory. KV memory belongs to the caller: [num_layers, 2, the
    shape in kv_cache.py]."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        dtype: torch.dtype,
        max_num_tokens: int,
        max_num_rows: int,
        quantization: Quantization | None = None,
        *,
        early: bool = False,
        adapters: LoraPlan | None = None,
        max_num_samples: int = 0,
        ranks: RankLink | None = None,
    ) -> None:
        """`quantization` applies to layers' matrices that are floats. Without `adapters`, none can be loaded. A step
        has at most `max_num_rows` entries, and as many samples unless `max_num_samples` is more. With `ranks`, the
        config and the weights are those of a rank (cut.py).

        With `early`, steps of few tokens use programmatic dependent launch, if the device has it and matrices are
        small: a launch loads weights before it waits for the previous one.
        """
        self._early = early and device.launches_early
        self._ranks = ranks
        self._quantization = quantization
        self._device, self._config, self._dtype = device, config, dtype
        max_num_samples = max(max_num_rows, max_num_samples)
        self._layers: list[tuple[_Attention, _Mlp | _Experts]] = []
        self._attentions: list[tuple[AttentionWeights, Gemm, Gemm]] = []
        self._mlps: list[_Mlp | _Experts] = []
        where, hidden = device.where, config.hidden_size
        self._attention = DeviceAttention(config, dtype, max_num_tokens, max_num_rows, where)
        self._is_fusible = _is_fusible(config)

        def memory(width: int, num: int = max_num_tokens, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num, width, dtype=dtype, device=where)

        self._residuals = memory(hidden, dtype=torch.float32), memory(hidden, SKINNY_TOKENS, torch.float32)
        self._last_residuals: dict[int, Tensor] = {}
        """The residual buffer that a step of few tokens ends with, by the number of tokens."""
        self._last_sums: dict[tuple[int, bool], Tensor] = {}
        """With ranks: what a step ends with besides the residual, by the number of tokens and whether it decodes."""
        self._normed = memory(hidden)
        self._parallel_normed = memory(hidden) if config.parallel else self._normed
        self._attended = memory(config.num_heads * config.head_dim)
        self._gated = memory(max(config.inner_sizes, default=1))
        self._last = memory(hidden, max_num_samples)
        num_logits = max_num_samples if ranks is None or ranks.is_first else 0
        self.logits = memory(config.vocab_size, num_logits, torch.float32)
        """[max_num_samples, V], of the last step; no rows on ranks that don't sample."""
        self._wide = GemmMemory(max_num_tokens, where)
        self._narrow = GemmMemory(max_num_tokens, where)
        self._router = GemmMemory(max_num_tokens, where)
        self._experts = None if config.experts is None else ExpertMemory(config, max_num_tokens, dtype, where)
        self._dequantized: Tensor | None = None
        self._lora = None if adapters is None else DeviceLora(device, adapters, config, dtype, max_num_tokens)
        self._step_adapters: Tensor | None = None
        """`adapters` of the step that is computed."""
        self._captured_layers: tuple[int, ...] = ()
        self.captured = memory(0, 0, torch.float32)
        """[max_num_tokens, H * captured layers], of the last step; see `capture`."""
        self._given: Tensor | None = None
        """[max_num_tokens, columns], what the first layer's attention reads, if that is not norm(residual)."""

    # ---------------------------------------------------------------------------------------------------- recording

    def capture(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states before each of these layers, side by side in `captured`."""
        self._captured_layers = layers
        num_tokens, hidden = self._residuals[0].shape
        self.captured = torch.zeros(num_tokens, hidden * len(layers), dtype=torch.float32, device=self._device.where)

    def embed(self, embedding: Embedding | None) -> None:
        assert embedding is not None, "hidden states come from an embedding here"
        self._embedding = embedding.table
        where, positions = self._device.where, embedding.positions
        self._table = DeviceMatrix.of((as_matrix(embedding.table),), self._dtype, where)
        self._positions = None if positions is None else DeviceMatrix.of((as_matrix(positions),), self._dtype, where)
        self._embedding_norm = self._norm_weights(embedding.norm)

    def attention(self, weights: AttentionWeights) -> None:
        qkv, out = self._gemm(weights.qkv, self._wide, QKV), self._gemm(weights.out, self._narrow, OUT)
        self._attentions.append((weights, qkv, out))

    def mlp(self, weights: MlpWeights) -> None:
        self._mlps.append(self._mlp(weights))

    def _mlp(self, weights: MlpWeights, *, is_parallel: bool = False) -> _Mlp:
        first = self._gemm(weights.gate_up, self._wide, gate_up(self._config))
        down = self._gemm(weights.down, self._narrow, DOWN)
        return _Mlp(self._norm_weights(weights.norm), first, down, self._after(weights.post_norm), is_parallel)

    def experts(self, weights: ExpertsWeights) -> None:
        shared = None
        if weights.shared is not None:
            both, down = weights.shared
            shared = self._gemm(both, self._wide), self._gemm(down, self._narrow)
        where = self._device.where
        matrices = ExpertMatrices.of(weights, self._config, self._dtype, where, self._quantization)
        router = self._gemm(weights.router, self._router, quantizes=False)
        after = self._after(weights.post_norm)
        self._mlps.append(_Experts(self._norm_weights(weights.norm), router, matrices, shared, after))

    def parallel(self, attention: AttentionWeights, mlp: MlpWeights) -> None:
        self.attention(attention)
        self._mlps.append(self._mlp(mlp, is_parallel=True))

    def sample(self, head: Head) -> None:
        if self._lora is not None:
            self._lora.allocate()
        assert head.norm is not None
        vectors = head.norm.weight, head.norm.bias
        weight, bias = (None if vector is None else as_tensor(vector).float().cpu().numpy() for vector in vectors)
        assert weight is not None
        self.last_norm = Norm(weight, bias)
        self._norm = self._norm_weights(head.norm)
        self._head_bias = None if head.bias is None else self._vector(head.bias)
        # A tied head shares the embedding's memory.
        tied = head.matrix is self._embedding
        where = self._device.where
        self._head = self._table if tied else DeviceMatrix.of((as_matrix(head.matrix),), self._dtype, where)

    def use(self, kv: Tensor, max_model_len: int, layout: KVLayout | None = None) -> None:
        """Set the KV memory and the longest sequence, once all weights are loaded. Without a layout, each layer has its
        own memory."""
        places = (layout or undivided(len(self._attentions))).places
        self._attention.use(max_model_len)
        for i, ((weights, qkv, out), mlp) in enumerate(zip(self._attentions, self._mlps, strict=True)):
            group, place = places[i]
            layer = self._attention.layer(weights, kv[place, 0], kv[place, 1], group)
            norm_weights, after = self._norm_weights(weights.norm), self._after(weights.post_norm)
            self._layers.append((_Attention(norm_weights, qkv, out, after, layer), mlp))
        self._attentions, self._mlps = [], []
        self._early &= all(each.form == "float" and each.num_bytes <= EARLY_BYTES for each in self.matrices)

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
    def norm(self) -> NormWeights | None:
        """The norm before the head."""
        return self._norm

    @property
    def head_bias(self) -> Tensor | None:
        """What is added to the logits, [V] float32."""
        return self._head_bias

    @property
    def head(self) -> DeviceMatrix:
        """The matrix that every sample of a step is multiplied with."""
        return self._head

    @property
    def table(self) -> DeviceMatrix:
        """The embedding; it may be tied to the head."""
        return self._table

    def pack_adapter(self, file: AdapterFile) -> PackedAdapter:
        """A LoRA adapter as `put_adapter` takes it. Any thread may call this."""
        assert self._lora is not None, "adapters are off"
        return self._lora.pack(file)

    def put_adapter(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a slot."""
        assert self._lora is not None, "adapters are off"
        self._lora.put(slot, packed)

    def _gemm(
        self, weights: Linear, memory: GemmMemory, targets: tuple[Target, ...] = (), *, quantizes: bool = True
    ) -> Gemm:
        """A linear layer of the last layer whose attention was recorded. Adapters may change these projections."""
        matrices = [as_matrix(matrix) for matrix in weights.matrices]
        quantization = self._quantization if quantizes else None
        matrix = SegmentedMatrix.of(matrices, self._dtype, self._device.where, quantization, weights.group)
        if matrix.has_codes and self._dequantized is None:
            self._dequantized = linear.dequantize_scratch(self._dtype, self._device.where)
        site = None
        if self._lora is not None and targets:
            layer = len(self._mlps)
            site = self._lora.site(layer, targets, matrix.num_columns)
        gemm = Gemm(matrix, None if weights.bias is None else self._vector(weights.bias), site)
        memory.reserve(gemm)
        return gemm

    def _norm_weights(self, norm: Norm | None) -> NormWeights | None:
        if norm is None:
            return None
        bias = None if norm.bias is None else self._vector(norm.bias)
        return NormWeights(self._vector(norm.weight), bias, centers=self._config.norm == "layer")

    def _after(self, post_norm: Norm | None) -> Sublayer:
        return Sublayer(self._norm_weights(post_norm), float(self._config.residual_multiplier))

    def _vector(self, values: AnyVector) -> Tensor:
        return as_tensor(values).to(self._device.where, torch.float32).contiguous()

    # ---------------------------------------------------------------------------------------------------- computing

    def forward(self, step: StepArrays, *, decodes: bool) -> None:
        """Compute the logits of the step's samples. `decodes`: each entry has one token."""
        has_adapters = step.adapters is not None
        self._step_adapters = step.adapters
        self._attention.plan(step, one_each=decodes)
        self._embed(step)
        if self._is_fused(step.num_tokens, decodes=decodes, has_adapters=has_adapters):
            self._few(step)
        else:
            self._many(step, decodes=decodes)
        self.score(self.hidden_states(step.num_tokens, decodes=decodes, has_adapters=has_adapters), step.sampled)

    def _embed(self, step: StepArrays) -> None:
        config, residual = self._config, self._residuals[0][: step.num_tokens]
        learned, positions = self._positions, None if self._positions is None else step.positions
        ranks = self._ranks
        part = None if ranks is None else ranks.share.vocab
        norm.embed(
            *(residual, self._table, step.ids, float(config.embedding_scale)),
            *(learned, positions, config.position_offset, part),
        )
        if ranks is not None:
            ranks.sum_embeddings(residual)
        if self._embedding_norm is not None:
            norm.add_norm(residual, residual, None, self._embedding_norm, float(config.rms_norm_eps))

    def _is_fused(self, num_tokens: int, *, decodes: bool, has_adapters: bool) -> bool:
        """Adapters change what is between fused launches."""
        return self._is_fusible and decodes and num_tokens <= SKINNY_TOKENS and not has_adapters

    def hidden_states(self, num_tokens: int, *, decodes: bool, has_adapters: bool = False) -> HiddenStates:
        """The hidden states of the last `forward`, which had these arguments; valid until the next step."""
        residual = self._residuals[0][:num_tokens]
        if self._is_fused(num_tokens, decodes=decodes, has_adapters=has_adapters):
            residual = self._last_residuals[num_tokens]
        if not self._layers or not self._layers[-1][1].after.is_plain:
            return HiddenStates(residual, None)
        if self._ranks is not None:
            return HiddenStates(residual, self._last_sums[num_tokens, decodes])
        last = self._layers[-1][1]
        if isinstance(last, _Experts):
            assert self._experts is not None
            return HiddenStates(residual, self._experts.result(num_tokens))
        return HiddenStates(residual, last.down.split_k_partials(self._narrow, num_tokens))

    def _many(self, step: StepArrays, *, decodes: bool) -> None:
        num, eps = step.num_tokens, float(self._config.rms_norm_eps)
        residual, normed, attended = self._residuals[0][:num], self._normed[:num], self._attended[:num]
        split_k_partials: Tensor | None = None
        before = PLAIN
        for index, (layer, mlp) in enumerate(self._layers):
            norm.add_norm(normed, residual, split_k_partials, layer.norm, eps, before)
            self._keep_captured(index, residual)
            source = normed
            if mlp.is_parallel and mlp.norm is not None:
                source = self._parallel_normed[:num]
                norm.add_norm(source, residual, None, mlp.norm, eps)
            given = normed if index or self._given is None else self._given[:num]
            qkv = self._linear(self._wide, given, layer.qkv)
            self._attend(attended, qkv, step, layer, decodes=decodes)
            split_k_partials = self._sum(self._linear(self._narrow, attended, layer.out))
            if mlp.is_parallel:
                norm.add_norm(None, residual, split_k_partials, None, eps, layer.after)
            else:
                norm.add_norm(normed, residual, split_k_partials, mlp.norm, eps, layer.after)
            split_k_partials = self._sum(self._compute_mlp(source, mlp))
            before = mlp.after
        if not before.is_plain:
            norm.add_norm(None, residual, split_k_partials, None, eps, before)
        self._keep_last(split_k_partials, num, decodes=decodes)

    def _sum(self, split_k_partials: Tensor) -> Tensor:
        """The sum over ranks, if there are several, as split-K partials."""
        return split_k_partials if self._ranks is None else self._ranks.sum(split_k_partials)

    def _keep_last(self, split_k_partials: Tensor | None, num: int, *, decodes: bool) -> None:
        if self._ranks is not None and split_k_partials is not None:
            self._last_sums[num, decodes] = split_k_partials

    def _keep_captured(self, index: int, residual: Tensor) -> None:
        """Copy the hidden states before this layer, if they are captured."""
        if index in self._captured_layers:
            num, hidden = residual.shape
            begin = self._captured_layers.index(index) * hidden
            self.captured[:num, begin : begin + hidden].copy_(residual)

    def _compute_mlp(self, x: Tensor, mlp: _Mlp | _Experts) -> Tensor:
        """The result of a feed-forward layer: split-K partials."""
        if isinstance(mlp, _Mlp):
            return self._feed_forward(x, mlp.gate_up, mlp.down)
        assert self._experts is not None
        logits = self._linear(self._router, x, mlp.router)
        shared = None if mlp.shared is None else self._feed_forward(x, *mlp.shared)
        return self._experts.compute(x, logits, mlp.matrices, shared)

    def _feed_forward(self, x: Tensor, gate_up: Gemm, down: Gemm) -> Tensor:
        gated, config = self._gated_of(len(x), down), self._config
        activations.activate(gated, self._linear(self._wide, x, gate_up), config.activation, gated=config.gated)
        return self._linear(self._narrow, gated, down)

    def _gated_of(self, num: int, down: Gemm) -> Tensor:
        """The memory of what a layer's last matmul reads. Layers may have different sizes."""
        width = down.matrix.num_columns
        return self._gated.view(-1)[: num * width].view(num, width)

    def _few(self, step: StepArrays) -> None:
        num, eps = step.num_tokens, float(self._config.rms_norm_eps)
        normed, attended = self._normed[:num], self._attended[:num]
        # A fused norm reads one residual buffer and writes the other, so its programs don't race.
        residual, other = (each[:num] for each in self._residuals)
        split_k_partials: Tensor | None = None
        for index, (layer, mlp) in enumerate(self._layers):
            qkv = layer.qkv.split_k_partials(self._wide, num)
            if self._fuses("linear", layer.qkv, num, split_k_partials):
                weight = _weight(layer.norm)
                segmented_norm_linear(
                    *(qkv, other, residual, split_k_partials, weight, eps, layer.qkv.matrix, layer.qkv.bias),
                    pdl=self._early,
                )
                residual, other = (residual, other) if split_k_partials is None else (other, residual)
            else:
                norm.add_norm(normed, residual, split_k_partials, layer.norm, eps)
                segmented_linear(qkv, normed, layer.qkv.matrix, layer.qkv.bias, pdl=self._early)
            self._keep_captured(index, residual)
            self._attend(attended, qkv, step, layer, decodes=True)
            split_k_partials = self._sum(self._linear(self._narrow, attended, layer.out))
            if isinstance(mlp, _Experts):
                norm.add_norm(normed, residual, split_k_partials, mlp.norm, eps)
                split_k_partials = self._sum(self._compute_mlp(normed, mlp))
                continue
            gate_up, gated = mlp.gate_up, self._gated_of(num, mlp.down)
            whole = gate_up.matrix.segments[0] if len(gate_up.matrix.segments) == 1 else None
            if whole is not None and self._fuses("swiglu", gate_up, num, split_k_partials):
                norm_swiglu(
                    *(gated, other, residual, split_k_partials, _weight(mlp.norm), eps, whole, gate_up.bias),
                    pdl=self._early,
                )
                residual, other = other, residual
            else:
                norm.add_norm(normed, residual, split_k_partials, mlp.norm, eps)
                if whole is not None:
                    fused.swiglu(gated, normed, whole, gate_up.bias, pdl=self._early)
                else:  # a program of the fused kernel has rows of gate and up, which have different formats here
                    activations.silu_mul(gated, self._linear(self._wide, normed, gate_up))
            split_k_partials = self._sum(self._linear(self._narrow, gated, mlp.down))
        self._last_residuals[num] = residual
        self._keep_last(split_k_partials, num, decodes=True)

    def _attend(self, attended: Tensor, qkv: Tensor, step: StepArrays, layer: _Attention, *, decodes: bool) -> None:
        early = self._early and step.num_tokens <= SKINNY_TOKENS
        self._attention.compute(attended, qkv, step, layer.layer, decodes=decodes, pdl=early)

    @staticmethod
    def _fuses(op: Op, gemm: Gemm, num: int, split_k_partials: Tensor | None) -> bool:
        """Whether the matmul includes the norm before it, given the split-K partials that it reads."""
        matrix = gemm.matrix
        num_partials_in = 0 if split_k_partials is None else len(split_k_partials)
        return fused.fuses(num, num_partials_in, matrix.num_columns, matrix.num_programs(op, num))

    def score(self, hidden_states: HiddenStates, places: Tensor) -> Tensor:
        """Logits of tokens `places` [S] int32 of the last step: [S, V] float32; on ranks that don't sample, no rows."""
        last, logits = self._last[: len(places)], self.logits[: len(places)]
        norm.take_norm(
            last,
            hidden_states.residual,
            hidden_states.split_k_partials,
            places,
            self._norm,
            float(self._config.rms_norm_eps),
        )
        ranks = self._ranks
        if ranks is None:
            linear.logits(logits, last, self._head)
        else:
            linear.logits(ranks.own_logits(len(places)), last, self._head)
            ranks.gather_logits(logits, len(places))
            if not ranks.is_first:
                return logits
        config = self._config
        if self._head_bias is not None or config.logit_scale != 1 or config.logit_softcap is not None:
            finish_logits(logits, self._head_bias, float(config.logit_scale), config.logit_softcap)
        return logits

    def _linear(self, memory: GemmMemory, x: Tensor, gemm: Gemm) -> Tensor:
        split_k_partials = gemm.split_k_partials(memory, len(x))
        early = self._early and len(x) <= SKINNY_TOKENS
        segmented_linear(split_k_partials, x, gemm.matrix, gemm.bias, self._dequantized, pdl=early)
        if self._step_adapters is not None and gemm.site is not None:
            assert self._lora is not None
            self._lora.add(split_k_partials, x, self._step_adapters, gemm.site)
        return split_k_partials


def _is_fusible(config: ModelConfig) -> bool:
    """Whether layers are like Llama's, so that matmuls of few tokens can include the norm before them and SwiGLU."""
    has_rms = config.norm == "rms" and not config.norm_bias and config.pre_norms
    adds = not config.post_norms and config.residual_multiplier == 1 and not config.parallel
    return has_rms and adds and (not config.inner_sizes or (config.activation == "silu" and config.gated))


def _weight(norm: NormWeights | None) -> Tensor:
    """The weight of an RMS norm that is part of a matmul."""
    assert norm is not None and norm.bias is None and not norm.centers
    return norm.weight


def allocate_kv(
    config: ModelConfig, num_blocks: int, dtype: torch.dtype, where: torch.device, num_places: int | None = None
) -> Tensor:
    """KV memory of blocks with `num_places` layers, by default all. It is zeroed, because kernels read unwritten slots
    under a mask, and NaN passes it."""
    layer = kv_cache.shape_of(num_blocks, config.num_kv_heads, config.head_dim, dtype)
    return torch.zeros((num_places or config.num_layers, 2, *layer), dtype=dtype, device=where)
