"""The mixtures of experts of a program in the CPU library.

    router ─► route ─► gather ─► gate and up of the experts ─► down of the experts ─► combine ─► residual

The panels of all experts of a layer are one matrix, those of an expert behind those of the one before, so one address
and one entry in the file of panels hold them.
"""

import ctypes

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.special_layers import Experts
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.memory import PAIR, NativeMemory, have_one_format, swiglu_order
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.cpu.native.ranks import RankMemory
from pipeline.stages.execute.program import ExpertsWeights, Linear
from pipeline.stages.execute.ranks.share import Share

ROUTER_SLOT = 1
"""Of the rows that the router reads, if it has a norm of its own."""
SPARE_ROWS = 16
"""Tiles read sixteen rows at a time, from any row on."""


def inputs_of(weights: ExpertsWeights) -> Linear:
    """The matrices that read the norm's results."""
    shared = () if weights.shared is None else weights.shared[0].matrices
    router = () if weights.router_norm is not None else weights.router.matrices
    return Linear((*router, *weights.gate_up.matrices[:2], *shared))


class NativeExperts:
    """Records the mixtures of experts of one program, and owns the memory between their ops."""

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: NativeMemory,
        config: ModelConfig,
        max_num_tokens: int,
        norms: NativeNorms,
        gathered: RankMemory,
        share: Share,
    ) -> None:
        """Ranks choose the same experts, each for
        itself, and compute their share of each; what is between the matmuls of an expert is `gathered`."""
        experts = config.experts
        assert experts is not None
        self._library, self._memory, self._config, self._experts = library, memory, config, experts
        self._max_num_tokens, self._norms = max_num_tokens, norms
        self._gather, self._share = gathered, share
        self._num_rows = max_num_tokens * experts.num_per_token + SPARE_ROWS
        inner, self._shared_inner = experts.intermediate_size, experts.shared_intermediate_size
        self._logits = memory.floats(max_num_tokens, experts.num + experts.shared_gate)
        self._gathered: dict[ActivationForm, native.NativeRows] = {}
        self._inner = gathered.rows(self._num_rows, inner)
        self._wide = gathered.floats(self._num_rows, _padded(inner))
        self._parts = memory.floats(self._num_rows, len(share.hidden))
        if self._shared_inner:
            self._shared_rows = gathered.rows(max_num_tokens, self._shared_inner)
            self._shared_wide = gathered.floats(max_num_tokens, _padded(self._shared_inner))
            self._shared_out = memory.floats(max_num_tokens, len(share.hidden))
        self._branch = memory.floats(max_num_tokens, config.hidden_size) if experts.beside_dense else 0
        """The address of the results of experts beside a dense layer."""

    def emit_layer(self, program: int, weights: ExpertsWeights, residual: int, layers: NativeLayers) -> None:
        """Record a layer after its norm, and how its results reach the residual. If there is a dense layer, its normed
        results are in `layers.branch`."""
        if weights.post_norm is None:
            self.emit(program, weights, residual, layers.last, adds=True)
        elif weights.sum_norm is None:
            self.emit(program, weights, layers.branch, layers.last, adds=False)
            layers.add_branch(weights.post_norm, "experts")
        else:
            self.emit(program, weights, self._branch, layers.last, adds=False)
            layers.norm_branch(weights.post_norm, self._branch)
            layers.add_branch(weights.sum_norm, "experts", weights.residual_scale)

    def emit(self, program: int, weights: ExpertsWeights, to: int, layer: int, *, adds: bool) -> None:
        """Record a layer after its norm: to = its results, or to += them times the config's factor. `to` is the address
        of float32 [tokens, hidden_size]."""
        library, config, experts, memory = self._library, self._config, self._experts, self._memory
        num_logits = experts.num + experts.shared_gate
        slot = 0
        if weights.router_norm is not None:
            slot = ROUTER_SLOT
            self._norms.emit_before(program, weights.router_norm, weights.router, slot)
        router = memory.pack(weights.router.matrices, bias=weights.router.bias)
        form = memory.form(weights.router.matrices[0])
        library.program_linear(program, self._logits, self._norms.rows(form, slot), router, num_logits)
        routing = self._route(program, weights, num_logits)
        self._gate_up(program, weights.gate_up, memory.form(weights.down.matrices[0]), routing)
        if weights.shared is not None:
            self._shared_gate_up(program, *weights.shared)
        self._gather.barrier(program, "experts gate_up", layer)
        self._down(program, weights.down, routing)
        shared = native.NativeSharedExpert(None, None, num_logits)
        if weights.shared is not None:
            self._shared_down(program, weights.shared[1])
            shared.out = self._shared_out
            shared.logits = self._logits + 4 * experts.num if experts.shared_gate else None
        factor = config.residual_multiplier if adds else 1.0
        shared_expert, part = ctypes.byref(shared), self._share.hidden
        library.program_stride(program, config.hidden_size)
        library.program_combine(
            program, to + 4 * part.start, adds, self._parts, routing, len(part), shared_expert, factor
        )
        self._gather.barrier(program, "experts", layer)

    def _route(self, program: int, weights: ExpertsWeights, num_logits: int) -> int:
        """Record the choice of experts, and the rows in expert order. Returns the address of the library's routing."""
        experts, hidden = self._experts, self._config.hidden_size
        forms = dict.fromkeys(self._memory.form(matrix) for matrix in weights.gate_up.matrices[:2])
        gathered = (native.NativeGatheredRows * len(forms))()
        for rows, form in zip(gathered, forms, strict=True):
            rows.source, rows.target = self._norms.rows(form), self._gathered_rows(form)
            rows.bytes = self._library.activation_bytes(form, hidden)
        bias, factors = (
            None if one is None else self._memory.vector(one) for one in (weights.selection_bias, weights.factors)
        )
        route_form = native.NativeRouteOptions(
            *(native.SCORINGS[experts.scoring], experts.normalized, experts.scale, bias),
            *(experts.num_groups, experts.groups_per_token, experts.best_of_group, factors, experts.softcap),
        )
        sizes = experts.num, experts.num_per_token, self._max_num_tokens
        return int(
            self._library.program_route(
                program, self._logits, num_logits, ctypes.byref(route_form), *sizes, gathered, len(gathered)
            )
        )

    def _gathered_rows(self, form: ActivationForm) -> native.NativeRows:
        if form not in self._gathered:
            self._gathered[form] = self._memory.rows(self._num_rows, self._config.hidden_size, form)
        return self._gathered[form]

    def _gate_up(self, program: int, linear: Linear, form_of_down: ActivationForm, routing: int) -> None:
        config, experts, memory = self._config, self._experts, self._memory
        inner, activation = experts.intermediate_size, native.ACTIVATIONS[config.activation]
        part_of_each = self._share.experts_inner
        parts = stacked_parts(linear, experts, part_of_each, is_gated=config.gated)
        products = (native.NativeProduct * len(parts))()
        for product, (part, order) in zip(products, parts, strict=True):
            product.matrix = memory.pack(part.matrices, order, part.bias)
            product.rows = self._gathered_rows(memory.form(part.matrices[0]))
        rows, floats = self._columns_of(self._inner, part_of_each), False
        if form_of_down is not ActivationForm.PLAIN:
            rows, floats = native.NativeRows(self._wide + 4 * part_of_each.start, inner * 4), True
        self._library.program_experts_gate_up(
            *(program, rows, floats, products, len(products), activation, config.swiglu_alpha, config.swiglu_limit),
            *(0 if config.gated else len(part_of_each), routing),
        )

    def _down(self, program: int, linear: Linear, routing: int) -> None:
        library, memory, inner = self._library, self._memory, self._experts.intermediate_size
        hidden, part = self._config.hidden_size, self._share.hidden
        form = memory.form(linear.matrices[0])
        if form is not ActivationForm.PLAIN:
            library.program_experts_quantize(program, self._inner, form, self._wide, inner, routing)
        packed = memory.pack(linear.matrices, stacked_order(hidden, self._experts.num, part), linear.bias)
        library.program_experts_down(program, self._parts, self._inner, packed, len(part), routing)

    def _columns_of(self, rows: native.NativeRows, part: range) -> native.NativeRows:
        """Rows of plain activations from a share's first column on."""
        return native.NativeRows(rows.data + part.start * self._library.act_bytes(), rows.stride)

    def _shared_gate_up(self, program: int, gate_up: Linear, down: Linear) -> None:
        """Record the first half of the expert that computes every token."""
        library, config, memory, inner = self._library, self._config, self._memory, self._shared_inner
        form, activation = memory.form(down.matrices[0]), native.ACTIVATIONS[config.activation]
        part = self._share.shared_inner
        rows, floats = self._columns_of(self._shared_rows, part), False
        if form is not ActivationForm.PLAIN:
            rows, floats = native.NativeRows(self._shared_wide + 4 * part.start, inner * 4), True
        outputs = np.arange(part.start, part.stop, dtype=np.int32)
        order = np.concatenate([outputs, inner + outputs]) if config.gated else outputs
        if config.gated and have_one_format(gate_up.matrices):
            order = swiglu_order(inner, part)
        products = memory.products(gate_up, order, self._norms.rows)
        if config.gated:
            library.program_swiglu(program, rows, floats, products, len(products), activation)
        else:
            library.program_activate(
                program, rows, floats, products, len(products), activation, len(part), native.NativeXieluForm()
            )

    def _shared_down(self, program: int, down: Linear) -> None:
        """Record its second half."""
        library, memory, inner, part = self._library, self._memory, self._shared_inner, self._share.hidden
        form = memory.form(down.matrices[0])
        if form is not ActivationForm.PLAIN:
            library.program_quantize(program, self._shared_rows, form, self._shared_wide, inner)
        packed = memory.pack(down.matrices, np.arange(part.start, part.stop, dtype=np.int32))
        library.program_linear(program, self._shared_out, self._shared_rows, packed, len(part))


def stacked_parts(linear: Linear, experts: Experts, part: range, *, is_gated: bool) -> list[tuple[Linear, IntArray]]:
    """The matrices of all experts that are packed into one, and the order of their rows: one if gate and up have the
    same format, else gate and up by themselves. `part` are the outputs of gate, and of up, that are wanted of each."""
    inner, num = experts.intermediate_size, experts.num
    if not is_gated:
        return [(linear, stacked_order(inner, num, part))]
    if have_one_format(linear.matrices):
        order = swiglu_order(inner, part)
        each = np.arange(num, dtype=np.int32)[:, None] * (2 * inner)
        return [(linear, np.where(order < 0, -1, order + each).reshape(-1).astype(np.int32))]
    bias = None if linear.bias is None else np.asarray(linear.bias, np.float32).reshape(num, 2, inner)
    return [
        (
            Linear(linear.matrices[kind::2], None if bias is None else bias[:, kind].reshape(-1)),
            stacked_order(inner, num, part),
        )
        for kind in range(2)
    ]


def stacked_order(rows: int, num: int, part: range) -> IntArray:
    """The order of the rows of `part` of `num` matrices of `rows` rows each, padded to whole panels."""
    padded = part.start + np.arange(_padded(len(part), native.PANEL))
    each = np.arange(num)[:, None] * rows
    return np.where(padded < part.stop, padded + each, -1).reshape(-1).astype(np.int32)


def _padded(size: int, multiple: int = PAIR) -> int:
    return -(-size // multiple) * multiple
