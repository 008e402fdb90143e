"""The short convolution in torch: the formula, and the same bits for any chunks, rows and slots."""

import numpy as np
import pytest
import torch

from pipeline.kernels.recurrent.short_conv import short_conv, short_conv_reference
from pipeline.kernels.step_inputs import StepInputs
from tests.kernels.random_delta import NUM_SLOTS, ROWS, Entry, Tokens, random_steps, run_steps, whole_steps

LAYER = 24
"""Floats of a slot before the layer's."""


def random_layer(channels: int, taps: int) -> tuple[torch.Tensor, Tokens]:
    """The weights, and the inputs of each row."""
    random = np.random.default_rng(channels + taps)
    weights = torch.from_numpy(random.standard_normal((taps, channels)).astype(np.float32))
    return weights, [random.standard_normal((num, 3 * channels)).astype(np.float32) for num in ROWS]


def compute(steps: list[list[Entry]], tokens: Tokens, weights: torch.Tensor) -> tuple[Tokens, list[np.ndarray]]:
    """The results and states of each row."""
    taps, channels = weights.shape
    size = (taps - 1) * channels
    slots = torch.full((NUM_SLOTS, LAYER + size + 8), torch.nan)
    inputs = StepInputs(128, 16, 4)

    def run(x: np.ndarray) -> np.ndarray:
        out = torch.full((len(x), channels), torch.nan)
        short_conv(out, torch.from_numpy(x), slots, inputs, weights, LAYER)
        return out.numpy()

    made, last = run_steps(steps, tokens, inputs, run)
    assert slots[:, :LAYER].isnan().all() and slots[:, LAYER + size :].isnan().all()
    return made, [slots[last[row], LAYER : LAYER + size].view(taps - 1, channels).numpy() for row in range(len(tokens))]


@pytest.mark.parametrize("taps", [2, 3, 7])
def test_it_is_the_formula(taps: int) -> None:
    weights, tokens = random_layer(48, taps)
    made, states = compute(whole_steps(ROWS), tokens, weights)
    for x, out, state in zip(tokens, made, states, strict=True):
        expected, last = short_conv_reference(torch.from_numpy(x), weights)
        assert expected.std() > 0.1
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(state, last, rtol=1e-6)


@pytest.mark.parametrize("taps", [3, 7])
def test_rows_have_the_same_bits_for_any_chunks_neighbours_and_slots(taps: int) -> None:
    weights, tokens = random_layer(48, taps)
    whole, states = compute(whole_steps(ROWS), tokens, weights)
    for seed in range(4):
        made, others = compute(random_steps(ROWS, seed), tokens, weights)
        for row in range(len(tokens)):
            np.testing.assert_array_equal(made[row], whole[row])
            np.testing.assert_array_equal(others[row], states[row])
