"""The weights of a model on a GPU, as its layers are recorded, and the memory of its steps.

Shapes: H hidden_size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.triton.gemm import linear
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix, Quantization
from pipeline.kernels.triton.gemm.segments import SegmentedMatrix
from pipeline.kernels.triton.gemm.tuned import SKINNY_TOKENS
from pipeline.kernels.triton.norm import NormWeights, Sublayer
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.runtime.model.kv_groups import KVLayout, undivided
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import DOWN, OUT, QKV, LoraPlan, gate_up
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.model.attention import AttentionLayer, DeviceAttention
from pipeline.stages.execute.cuda.model.experts import ExpertMatrices, ExpertMemory
from pipeline.stages.execute.cuda.model.linear import Gemm, GemmMemory
from pipeline.stages.execute.cuda.model.lora import DeviceLora, PackedAdapter
from pipeline.stages.execute.cuda.ranks.link import RankLink
from pipeline.stages.execute.program import (
    AnyVector,
    AttentionWeights,
    Embedding,
    ExpertsWeights,
    Head,
    Linear,
    MlpWeights,
    Norm,
    ProgramBuilder,
    RecurrentWeights,
)

EARLY_BYTES = 128 * 1024**2
"""Programmatic dependent launch is for layers whose matrices are floats of at most this size. On an H200, it makes a
step of 135 million weights a fifth shorter, and one of 8 billion 1 % longer (docs/performance.md)."""


@dataclass(frozen=True, slots=True)
class AttentionOnDevice:
    norm: NormWeights | None
    qkv: Gemm
    out: Gemm
    after: Sublayer
    layer: AttentionLayer


@dataclass(frozen=True, slots=True)
class MlpOnDevice:
    norm: NormWeights | None
    """None also if a parallel layer has the input of attention."""
    gate_up: Gemm
    down: Gemm
    after: Sublayer
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsOnDevice:
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


class DeviceLayers(ProgramBuilder):
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
        config and the weights are those of a rank (ranks/cut.py).

        With `early`, steps of few tokens use programmatic dependent launch, if the device has it and matrices are
        small: a launch loads weights before it waits for the previous one.
        """
        self._early = early and device.launches_early
        self._ranks = ranks
        self._quantization = quantization
        self._device, self._config, self._dtype = device, config, dtype
        max_num_samples = max(max_num_rows, max_num_samples)
        self._layers: list[tuple[AttentionOnDevice, MlpOnDevice | ExpertsOnDevice]] = []
        self._attentions: list[tuple[AttentionWeights, Gemm, Gemm]] = []
        self._mlps: list[MlpOnDevice | ExpertsOnDevice] = []
        where, hidden = device.where, config.hidden_size
        self._attention = DeviceAttention(config, dtype, max_num_tokens, max_num_rows, where)
        self._is_fusible = is_fusible(config)

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

    def recurrent(self, weights: RecurrentWeights) -> None:
        raise AssertionError("models with states are rejected before (models/features.py)")

    def mlp(self, weights: MlpWeights) -> None:
        self._mlps.append(self._mlp(weights))

    def _mlp(self, weights: MlpWeights, *, is_parallel: bool = False) -> MlpOnDevice:
        first = self._gemm(weights.gate_up, self._wide, gate_up(self._config))
        down = self._gemm(weights.down, self._narrow, DOWN)
        return MlpOnDevice(self._norm_weights(weights.norm), first, down, self._after(weights.post_norm), is_parallel)

    def experts(self, weights: ExpertsWeights) -> None:
        shared = None
        if weights.shared is not None:
            both, down = weights.shared
            shared = self._gemm(both, self._wide), self._gemm(down, self._narrow)
        where = self._device.where
        matrices = ExpertMatrices.of(weights, self._config, self._dtype, where, self._quantization)
        router = self._gemm(weights.router, self._router, quantizes=False)
        after = self._after(weights.post_norm)
        self._mlps.append(ExpertsOnDevice(self._norm_weights(weights.norm), router, matrices, shared, after))

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
        layer_locations = (layout or undivided(len(self._attentions))).layer_locations
        self._attention.use(max_model_len)
        for i, ((weights, qkv, out), mlp) in enumerate(zip(self._attentions, self._mlps, strict=True)):
            group, index = layer_locations[i]
            layer = self._attention.layer(weights, kv[index, 0], kv[index, 1], group)
            norm_weights, after = self._norm_weights(weights.norm), self._after(weights.post_norm)
            self._layers.append((AttentionOnDevice(norm_weights, qkv, out, after, layer), mlp))
        self._attentions, self._mlps = [], []
        self._early &= all(each.form == "float" and each.num_bytes <= EARLY_BYTES for each in self.matrices)

    @property
    def matrices(self) -> list[DeviceMatrix]:
        """The matrices that every token of a step is multiplied with."""
        pairs = [
            (layer.qkv, layer.out, *((mlp.gate_up, mlp.down) if isinstance(mlp, MlpOnDevice) else mlp.gemms))
            for layer, mlp in self._layers
        ]
        return [segment for gemms in pairs for gemm in gemms for segment in gemm.matrix.segments]

    @property
    def expert_matrices(self) -> list[DeviceMatrix]:
        """The matrices of experts, of which a token is multiplied with those of some experts."""
        return [matrix for _, mlp in self._layers if isinstance(mlp, ExpertsOnDevice) for matrix in mlp.matrices.all]

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


def is_fusible(config: ModelConfig) -> bool:
    """Whether layers are like Llama's, so that matmuls of few tokens can include the norm before them and SwiGLU."""
    has_rms = config.norm == "rms" and not config.norm_bias and config.pre_norms
    adds = not config.post_norms and config.residual_multiplier == 1 and not config.parallel
    return has_rms and adds and (not config.inner_sizes or (config.activation == "silu" and config.gated))
