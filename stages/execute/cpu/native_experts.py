"""The mixtures of experts of a program in the CPU library.

    router ─► route ─► gather ─► gate and up of the experts ─► down of the experts ─► combine ─► residual

The panels of all experts of a layer are one matrix, those of an expert behind those of the one before, so one address
and one entry in the file of panels hold them.
"""

import ctypes
from collections.abc import Callable

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import Form
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.model_folder import Experts, ModelConfig
from pipeline.stages.execute.cpu.native_memory import PAIR, NativeMemory, have_one_format, swiglu_order
from pipeline.stages.execute.cpu.program import ExpertsWeights, Linear

SPARE_ROWS = 16
"""Tiles read sixteen rows at a time, from any row on."""


def inputs_of(weights: ExpertsWeights) -> Linear:
    """The matrices that read the norm's results."""
    shared = () if weights.shared is None else weights.shared[0].matrices
    return Linear((*weights.router.matrices, *weights.gate_up.matrices[:2], *shared))


class NativeExperts:
    """Records the mixtures of experts of one program, and owns the memory between their ops."""

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: NativeMemory,
        config: ModelConfig,
        max_num_tokens: int,
        normed_rows: Callable[[Form], native.NativeRows],
    ) -> None:
        """`normed_rows` are the results of the norm before a layer, in a form."""
        experts = config.experts
        assert experts is not None
        self._library, self._memory, self._config, self._experts = library, memory, config, experts
        self._max_num_tokens, self._normed_rows = max_num_tokens, normed_rows
        self._num_rows = max_num_tokens * experts.num_per_token + SPARE_ROWS
        inner, self._shared_inner = experts.intermediate_size, experts.shared_intermediate_size
        self._logits = memory.floats(max_num_tokens, experts.num + experts.shared_gate)
        self._gathered: dict[Form, native.NativeRows] = {}
        self._inner = memory.rows(self._num_rows, inner)
        self._wide = memory.floats(self._num_rows, _padded(inner))
        self._parts = memory.floats(self._num_rows, config.hidden_size)
        if self._shared_inner:
            self._shared_rows = memory.rows(max_num_tokens, self._shared_inner)
            self._shared_wide = memory.floats(max_num_tokens, _padded(self._shared_inner))
            self._shared_out = memory.floats(max_num_tokens, config.hidden_size)

    def record(self, program: int, weights: ExpertsWeights, to: int, adds: bool) -> None:
        """Record a layer after its norm: to = its results, or to += them times the config's factor. `to` is the address
        of float32 [tokens, hidden_size]."""
        library, config, experts, memory = self._library, self._config, self._experts, self._memory
        num_logits = experts.num + experts.shared_gate
        router = memory.pack(weights.router.matrices, bias=weights.router.bias)
        form = memory.form(weights.router.matrices[0])
        library.program_linear(program, self._logits, self._normed_rows(form), router, num_logits)
        routing = self._route(program, weights, num_logits)
        self._gate_up(program, weights.gate_up, memory.form(weights.down.matrices[0]), routing)
        self._down(program, weights.down, routing)
        shared = native.NativeSharedExpert(None, None, num_logits)
        if weights.shared is not None:
            self._shared(program, *weights.shared)
            shared.out = self._shared_out
            shared.logits = self._logits + 4 * experts.num if experts.shared_gate else None
        factor = config.residual_multiplier if adds else 1.0
        shared_expert = ctypes.byref(shared)
        library.program_combine(program, to, adds, self._parts, routing, config.hidden_size, shared_expert, factor)

    def _route(self, program: int, weights: ExpertsWeights, num_logits: int) -> int:
        """Record the choice of experts, and the rows in expert order. Returns the address of the library's routing."""
        experts, hidden = self._experts, self._config.hidden_size
        forms = dict.fromkeys(self._memory.form(matrix) for matrix in weights.gate_up.matrices[:2])
        gathered = (native.NativeGatheredRows * len(forms))()
        for rows, form in zip(gathered, forms, strict=True):
            rows.source, rows.target = self._normed_rows(form), self._gathered_rows(form)
            rows.bytes = self._library.activation_bytes(form, hidden)
        bias = None if weights.selection_bias is None else self._memory.vector(weights.selection_bias)
        route_form = native.NativeRouteForm(native.SCORINGS[experts.scoring], experts.normalized, experts.scale, bias)
        sizes = experts.num, experts.num_per_token, self._max_num_tokens
        return int(
            self._library.program_route(
                program, self._logits, num_logits, ctypes.byref(route_form), *sizes, gathered, len(gathered)
            )
        )

    def _gathered_rows(self, form: Form) -> native.NativeRows:
        if form not in self._gathered:
            self._gathered[form] = self._memory.rows(self._num_rows, self._config.hidden_size, form)
        return self._gathered[form]

    def _gate_up(self, program: int, linear: Linear, form_of_down: Form, routing: int) -> None:
        config, experts, memory = self._config, self._experts, self._memory
        inner, activation = experts.intermediate_size, native.ACTIVATIONS[config.activation]
        parts = stacked_parts(linear, experts, is_gated=config.gated)
        products = (native.NativeProduct * len(parts))()
        for product, (part, order) in zip(products, parts, strict=True):
            product.matrix = memory.pack(part.matrices, order, part.bias)
            product.rows = self._gathered_rows(memory.form(part.matrices[0]))
        rows, floats = self._inner, False
        if form_of_down is not Form.PLAIN:
            rows, floats = native.NativeRows(self._wide, inner * 4), True
        self._library.program_experts_gate_up(
            *(program, rows, floats, products, len(products), activation, config.swiglu_alpha, config.swiglu_limit),
            *(0 if config.gated else inner, routing),
        )

    def _down(self, program: int, linear: Linear, routing: int) -> None:
        library, memory, inner, hidden = (
            self._library,
            self._memory,
            self._experts.intermediate_size,
            self._config.hidden_size,
        )
        form = memory.form(linear.matrices[0])
        if form is not Form.PLAIN:
            library.program_experts_quantize(program, self._inner, form, self._wide, inner, routing)
        packed = memory.pack(linear.matrices, stacked_order(hidden, self._experts.num), linear.bias)
        library.program_experts_down(program, self._parts, self._inner, packed, hidden, routing)

    def _shared(self, program: int, gate_up: Linear, down: Linear) -> None:
        """Record the expert that computes every token."""
        library, config, memory, inner = self._library, self._config, self._memory, self._shared_inner
        (matrix,) = down.matrices
        form, activation = memory.form(matrix), native.ACTIVATIONS[config.activation]
        rows, floats = self._shared_rows, False
        if form is not Form.PLAIN:
            rows, floats = native.NativeRows(self._shared_wide, inner * 4), True
        order = np.arange((2 if config.gated else 1) * inner, dtype=np.int32)
        if config.gated and have_one_format(gate_up.matrices):
            order = swiglu_order(inner)
        products = memory.products(gate_up, order, self._normed_rows)
        if config.gated:
            library.program_swiglu(program, rows, floats, products, len(products), activation)
        else:
            library.program_activate(program, rows, floats, products, len(products), activation, inner)
        if form is not Form.PLAIN:
            library.program_quantize(program, self._shared_rows, form, self._shared_wide, inner)
        packed = memory.pack(down.matrices)
        library.program_linear(program, self._shared_out, self._shared_rows, packed, config.hidden_size)


def stacked_parts(linear: Linear, experts: Experts, *, is_gated: bool) -> list[tuple[Linear, IntArray]]:
    """The matrices of all experts that are packed into one, and the order of their rows: one if gate and up have the
    same format, else gate and up by themselves."""
    inner, num = experts.intermediate_size, experts.num
    if not is_gated:
        return [(linear, stacked_order(inner, num))]
    if have_one_format(linear.matrices):
        order = swiglu_order(inner)
        each = np.arange(num, dtype=np.int32)[:, None] * (2 * inner)
        return [(linear, np.where(order < 0, -1, order + each).reshape(-1).astype(np.int32))]
    bias = None if linear.bias is None else np.asarray(linear.bias, np.float32).reshape(num, 2, inner)
    return [
        (
            Linear(linear.matrices[part::2], None if bias is None else bias[:, part].reshape(-1)),
            stacked_order(inner, num),
        )
        for part in range(2)
    ]


def stacked_order(rows: int, num: int) -> IntArray:
    """The order of the rows of `num` matrices of `rows` rows each, padded to whole panels."""
    padded = np.arange(_padded(rows, native.PANEL))
    each = np.arange(num)[:, None] * rows
    return np.where(padded < rows, padded + each, -1).reshape(-1).astype(np.int32)


def _padded(size: int, multiple: int = PAIR) -> int:
    return -(-size // multiple) * multiple
