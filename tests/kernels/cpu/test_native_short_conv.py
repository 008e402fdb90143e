"""The short convolution in the CPU library, for every instruction set."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.recurrent.short_conv import short_conv_reference
from tests.kernels.cpu.compile import library_of
from tests.kernels.cpu.recording import Recording, assert_kept, recording
from tests.kernels.random_delta import NUM_SLOTS, ROWS, Entry, Tokens, random_steps, run_steps, whole_steps
from tests.kernels.test_short_conv import random_layer

LAYER, BEHIND = 24, 8
"""Floats of a slot before the layer's, and behind them."""
SIZES = [(16, 2), (80, 3), (176, 7), (64, 8)]
"""Channels and taps."""


class Layer:
    """A program of one layer, whose results are activations, or floats."""

    def __init__(self, r: Recording, weights: torch.Tensor, *, floats: bool = False) -> None:
        self.recording, self._floats = r, floats
        taps, self._channels = weights.shape
        num, self._size = r.inputs.max_num_tokens, (taps - 1) * weights.shape[1]
        self._slots = r.floats(np.full((NUM_SLOTS, LAYER + self._size + BEHIND), np.nan))
        self._x = r.floats(np.full((num, 3 * self._channels), np.nan))
        self._rows, self._out = r.rows(num, self._channels), r.floats(np.full((num, self._channels), np.nan))
        out = native.NativeRows(self._out.ctypes.data, 4 * self._channels) if floats else self._rows
        state = native.NativeRowStates(
            *(self._slots.ctypes.data, self._slots.shape[1], LAYER),
            *(r.inputs.state_reads.ctypes.data, r.inputs.state_writes.ctypes.data),
        )
        r.library.program_short_conv(
            *(r.program, ctypes.byref(state), self._x.ctypes.data, r.floats(weights.numpy()).ctypes.data),
            *(self._channels, taps, out, floats),
        )

    def run(self, x: np.ndarray) -> np.ndarray:
        self._x[: len(x)] = x
        assert self.recording.run() == 0
        if self._floats:
            return self._out[: len(x)].copy()
        return self.recording.read_plain(self._rows, len(x), self._channels)

    def compute(self, steps: list[list[Entry]], tokens: Tokens) -> tuple[Tokens, list[np.ndarray]]:
        """The results and states of each row."""
        made, last = run_steps(steps, tokens, self.recording.inputs, self.run)
        own = slice(LAYER, LAYER + self._size)
        assert np.isnan(self._slots[:, :LAYER]).all() and np.isnan(self._slots[:, own.stop :]).all()
        return made, [self._slots[last[row], own].copy() for row in range(len(tokens))]


@pytest.mark.parametrize(("channels", "taps"), SIZES)
@pytest.mark.parametrize("floats", [False, True])
def test_it_is_the_formula(library: ctypes.CDLL, channels: int, taps: int, floats: bool) -> None:
    weights, tokens = random_layer(channels, taps)
    with recording(library, threads=2) as r:
        made, states = Layer(r, weights, floats=floats).compute(whole_steps(ROWS), tokens)
        for x, out, state in zip(tokens, made, states, strict=True):
            expected, last = short_conv_reference(torch.from_numpy(x), weights)
            if floats:
                np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
            else:
                assert_kept(r, out, expected.numpy(), 2e-5)
            np.testing.assert_allclose(state.reshape(last.shape), last, rtol=1e-6)


@pytest.mark.parametrize(("channels", "taps"), SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_have_the_same_bits_for_any_chunks_neighbours_slots_and_threads(
    library: ctypes.CDLL, channels: int, taps: int, threads: int
) -> None:
    weights, tokens = random_layer(channels, taps)
    with recording(library) as r:
        whole, states = Layer(r, weights).compute(whole_steps(ROWS), tokens)
    for seed in range(3):
        with recording(library, threads=threads) as r:
            made, others = Layer(r, weights).compute(random_steps(ROWS, seed), tokens)
        for row in range(len(tokens)):
            np.testing.assert_array_equal(made[row], whole[row])
            np.testing.assert_array_equal(others[row], states[row])


def test_instruction_sets_compute_the_same_bits() -> None:
    """Those that round a * b + c once."""
    weights, tokens = random_layer(80, 3)
    found = []
    for isa in available():
        if isa != "portable":
            with recording(native_library.load(library_of(isa))) as r:
                found.append(Layer(r, weights, floats=True).compute(whole_steps(ROWS), tokens))
    for made, states in found[1:]:
        for one, first in zip([*made, *states], [*found[0][0], *found[0][1]], strict=True):
            np.testing.assert_array_equal(one, first)
