"""A model's forward pass as kernel launches. They depend only on the step's shape, so that a graph can capture them.

There are three variants:

    many tokens   norm · linear (cuBLAS) · rotary · attention · linear · norm · linear · activation · linear
    decoding      rotary+attention is one launch
    few, decode   norm+linear · rotary+attention · linear · norm+linear+silu_mul · linear

The last is for steps that are bound by reading weights and by launches, and for layers like Llama's (`is_fusible` in
layers.py). If a matrix has so many programs that repeating the norm in each takes longer than a launch, the norm
is a separate launch there too. A linear layer returns split-K partials [P, M, N], and the next kernel sums them.

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

from pipeline.kernels.triton import activations, kv_cache, norm
from pipeline.kernels.triton.gemm import fused, linear
from pipeline.kernels.triton.gemm.fused import norm_swiglu
from pipeline.kernels.triton.gemm.segments import segmented_linear, segmented_norm_linear
from pipeline.kernels.triton.gemm.tuned import SKINNY_TOKENS, Op
from pipeline.kernels.triton.logits import finish_logits
from pipeline.kernels.triton.norm import PLAIN, NormWeights
from pipeline.kernels.triton.rows import StepArrays
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.model.layers import AttentionOnDevice, DeviceLayers, ExpertsOnDevice, MlpOnDevice
from pipeline.stages.execute.cuda.model.linear import Gemm, GemmMemory


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


class DeviceModel(DeviceLayers):
    """Computes steps."""

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
        if isinstance(last, ExpertsOnDevice):
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

    def _compute_mlp(self, x: Tensor, mlp: MlpOnDevice | ExpertsOnDevice) -> Tensor:
        """The result of a feed-forward layer: split-K partials."""
        if isinstance(mlp, MlpOnDevice):
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
            if isinstance(mlp, ExpertsOnDevice):
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

    def _attend(
        self, attended: Tensor, qkv: Tensor, step: StepArrays, layer: AttentionOnDevice, *, decodes: bool
    ) -> None:
        early = self._early and step.num_tokens <= SKINNY_TOKENS
        self._attention.compute(attended, qkv, step, layer.layer, decodes=decodes, pdl=early)

    @staticmethod
    def _fuses(op: Op, gemm: Gemm, num: int, split_k_partials: Tensor | None) -> bool:
        """Whether the matmul includes the norm before it, given the split-K partials that it reads."""
        matrix = gemm.matrix
        num_partials_in = 0 if split_k_partials is None else len(split_k_partials)
        return fused.fuses(num, num_partials_in, matrix.num_columns, matrix.num_programs(op, num))

    def score(self, hidden_states: HiddenStates, token_indices: Tensor) -> Tensor:
        """Logits of tokens `token_indices` [S] int32 of the last step: [S, V] float32; on ranks that don't sample, no
        rows."""
        last, logits = self._last[: len(token_indices)], self.logits[: len(token_indices)]
        norm.take_norm(
            last,
            hidden_states.residual,
            hidden_states.split_k_partials,
            token_indices,
            self._norm,
            float(self._config.rms_norm_eps),
        )
        ranks = self._ranks
        if ranks is None:
            linear.logits(logits, last, self._head)
        else:
            linear.logits(ranks.own_logits(len(token_indices)), last, self._head)
            ranks.gather_logits(logits, len(token_indices))
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


def _weight(norm: NormWeights | None) -> Tensor:
    """The weight of an RMS norm that is part of a matmul."""
    assert norm is not None and norm.bias is None and not norm.centers
    return norm.weight


def allocate_kv(
    config: ModelConfig, num_blocks: int, dtype: torch.dtype, where: torch.device, layers_per_group: int | None = None
) -> Tensor:
    """KV memory of blocks with `layers_per_group` layers, by default all. It is zeroed, because kernels read unwritten
    slots under a mask, and NaN passes it."""
    layer = kv_cache.shape_of(num_blocks, config.num_kv_heads, config.head_dim, dtype)
    return torch.zeros((layers_per_group or config.num_layers, 2, *layer), dtype=dtype, device=where)
