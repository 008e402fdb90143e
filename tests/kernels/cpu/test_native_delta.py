"""The gated delta rule in the CPU library, for every instruction set."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.recurrent.delta import DeltaOptions, DeltaVectors, delta_reference
from pipeline.kernels.recurrent.delta_shape import DeltaShape
from tests.kernels.cpu.compile import library_of
from tests.kernels.cpu.quantized import random
from tests.kernels.cpu.recording import Recording, assert_groups, assert_kept, recording
from tests.kernels.random_delta import (
    NUM_SLOTS,
    ROWS,
    SHAPES,
    Entry,
    Tokens,
    random_inputs,
    random_steps,
    random_vectors,
    run_steps,
    split_slot,
    whole_steps,
)

LAYER, BEHIND = 24, 8
"""Floats of a slot before the layer's, and behind them."""
NAMES = ["delta_conv", "delta_rule", "delta_norm"]


class Layer:
    """A program of one layer."""

    def __init__(
        self, r: Recording, vectors: DeltaVectors, options: DeltaOptions, to: ActivationForm = ActivationForm.PLAIN
    ) -> None:
        self.recording, self.options, self.to = r, options, to
        shape, num = options.shape, r.inputs.max_num_tokens
        self.slots = r.floats(np.full((NUM_SLOTS, LAYER + shape.slot + BEHIND), np.nan))
        self.x = r.floats(np.full((num, shape.inputs), np.nan))
        widths = shape.channels, 2 * shape.value_heads, shape.values
        conv, gates, self.values = (r.floats(np.full((num, width), np.nan)) for width in widths)
        self.rows = r.rows(num, shape.values)
        weights = [r.floats(vector.numpy()).ctypes.data for vector in vectors]
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tiled
        layer = native.NativeDeltaLayer(*sizes, options.beta, options.eps, *weights, None, shape.value_heads)
        inputs = r.inputs
        state = native.NativeRowStates(
            *(self.slots.ctypes.data, self.slots.shape[1], options.layer),
            *(inputs.state_reads.ctypes.data, inputs.state_writes.ctypes.data),
        )
        r.library.program_delta(
            *(r.program, ctypes.byref(layer), ctypes.byref(state), self.x.ctypes.data, conv.ctypes.data),
            *(gates.ctypes.data, self.values.ctypes.data, self.rows, to, None),
        )

    def run(self, x: np.ndarray) -> np.ndarray:
        self.x[: len(x)] = x
        assert self.recording.run() == 0
        return self.recording.read_plain(self.rows, len(x), self.options.shape.values)

    def compute(self, steps: list[list[Entry]], tokens: Tokens) -> tuple[Tokens, list[np.ndarray]]:
        """The results and slots of each row."""
        made, last = run_steps(steps, tokens, self.recording.inputs, self.run)
        others = self.slots[:, :LAYER], self.slots[:, LAYER + self.options.shape.slot :]
        assert all(np.isnan(other).all() for other in others)
        return made, [self.slots[last[row]].copy() for row in range(len(tokens))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_it_is_the_formula(library: ctypes.CDLL, shape: DeltaShape, beta: float) -> None:
    options = DeltaOptions(shape, 1e-6, beta, LAYER)
    vectors, tokens = random_vectors(shape), random_inputs(shape)
    with recording(library, threads=2) as r:
        layer = Layer(r, vectors, options)
        made, slots = layer.compute(whole_steps(ROWS), tokens)
        names = [library.program_name(r.program, i).decode() for i in range(library.program_size(r.program))]
        assert names == NAMES
        for x, out, slot in zip(tokens, made, slots, strict=True):
            expected, state, last = delta_reference(torch.from_numpy(x), vectors, options)
            assert_kept(r, out, expected.numpy(), 2e-5)
            own_state, own_last = split_slot(slot, options)
            np.testing.assert_allclose(own_state, state, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(own_last, last)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_have_the_same_bits_for_any_chunks_neighbours_slots_and_threads(
    library: ctypes.CDLL, shape: DeltaShape, threads: int
) -> None:
    options = DeltaOptions(shape, 1e-6, 2.0, LAYER)
    vectors, tokens = random_vectors(shape), random_inputs(shape)
    with recording(library) as r:
        whole, slots = Layer(r, vectors, options).compute(whole_steps(ROWS), tokens)
    for seed in range(3):
        with recording(library, threads=threads) as r:
            made, others = Layer(r, vectors, options).compute(random_steps(ROWS, seed), tokens)
        for row in range(len(tokens)):
            np.testing.assert_array_equal(made[row], whole[row])
            np.testing.assert_array_equal(others[row], slots[row])


@pytest.mark.parametrize("to", [ActivationForm.BYTES, ActivationForm.WORDS, ActivationForm.SPLIT])
def test_the_results_are_quantized_for_the_matmul_behind(library: ctypes.CDLL, to: ActivationForm) -> None:
    options = DeltaOptions(SHAPES[1], 1e-6, 1.0, LAYER)
    vectors, (x, *_) = random_vectors(options.shape), random_inputs(options.shape)
    expected, _, _ = delta_reference(torch.from_numpy(x), vectors, options)
    with recording(library, threads=2) as r:
        layer = Layer(r, vectors, options, to)
        run_steps(whole_steps([len(x)]), [x], r.inputs, layer.run)
        kept = r.read_groups(layer.rows, len(x), options.shape.values, to)
    groups = np.abs(expected.numpy()).reshape(len(x), -1, 32)
    half = groups.max(-1).repeat(32, 1) / kept.largest / 2
    assert (np.abs(kept.values - expected.numpy()) <= half * 1.01 + 2e-5).all()


def test_the_cost_counts_each_rows_state_twice(library: ctypes.CDLL) -> None:
    options = DeltaOptions(SHAPES[2], 1e-6, 1.0, LAYER)
    shape = options.shape
    out = (ctypes.c_double * 3)()
    with recording(library) as r:
        Layer(r, random_vectors(shape), options)
        bytes_of = []
        for tokens, rows in ((1, 1), (2, 2), (2, 1)):
            library.program_cost(r.program, NAMES.index("delta_rule"), tokens, rows, rows, out)
            bytes_of.append(out[0])
    a_token = (shape.channels + shape.values) * 4
    state = 2 * shape.state * 4
    assert bytes_of == [state + a_token, 2 * (state + a_token), state + 2 * a_token]


def test_instruction_sets_compute_the_same_bits() -> None:
    """Those that round a * b + c once."""
    options = DeltaOptions(SHAPES[3], 1e-6, 2.0, LAYER)
    vectors, tokens = random_vectors(options.shape), random_inputs(options.shape)
    found: list[list[np.ndarray]] = []
    for isa in available():
        if isa == "portable":
            continue
        with recording(native_library.load(library_of(isa))) as r:
            layer = Layer(r, vectors, options)
            made: list[np.ndarray] = []
            for steps in whole_steps(ROWS):
                (entry,) = steps
                run_steps([[Entry(0, 0, entry.count, -1, 0)]], [tokens[entry.row]], r.inputs, layer.run)
                made += [layer.values[: entry.count].copy(), layer.slots[0].copy()]
            found.append(made)
    for others in found[1:]:
        for one, first in zip(others, found[0], strict=True):
            np.testing.assert_array_equal(one, first)


@pytest.mark.parametrize("to", [ActivationForm.PLAIN, ActivationForm.BYTES, ActivationForm.WORDS, ActivationForm.SPLIT])
@pytest.mark.parametrize("gate", [(1, False), (16, False), (4, True), (1, True)], ids=str)
def test_rows_are_gated_in_the_form_of_the_matmul_behind(
    library: ctypes.CDLL, to: ActivationForm, gate: tuple[int, bool]
) -> None:
    """A gate is for one column or for several, and its sigmoid or softplus."""
    columns, softplus = gate
    values, gates = random(1, 5, 256, scale=2), random(2, 5, 256 // columns, scale=4)
    gates[0, :3] = -100, 100, 0
    wide = gates.repeat(columns, axis=1).astype(np.float64)
    expected = values.astype(np.float64) * (np.log1p(np.exp(wide)) if softplus else 1 / (1 + np.exp(-wide)))
    with recording(library, threads=2) as r:
        rows, source, factors = r.rows(5, 256), r.floats(values), r.floats(gates)
        library.program_gate(r.program, rows, to, source.ctypes.data, factors.ctypes.data, 256, 0, 256, *gate)
        r.tokens(5)
        assert r.run() == 0
        error = 1e-6 * np.maximum(np.abs(values), np.abs(expected))
        if to is ActivationForm.PLAIN:
            assert_kept(r, r.read_plain(rows, 5, 256), expected, error)
        else:
            assert_groups(r.read_groups(rows, 5, 256, to), expected, error)
