"""The gated delta rule in torch: the formula, and the same bits for any chunks, rows and slots."""

import numpy as np
import pytest
import torch

from pipeline.kernels.recurrent.delta import DeltaOptions, DeltaVectors, delta_rule
from pipeline.kernels.recurrent.delta_shape import DeltaShape
from pipeline.kernels.step_inputs import StepInputs
from tests.kernels.random_delta import (
    NUM_SLOTS,
    ROWS,
    SHAPES,
    Entry,
    Tokens,
    assert_formula,
    random_inputs,
    random_steps,
    random_vectors,
    run_steps,
    whole_steps,
)

LAYER = 24
"""Floats of a slot before the layer's."""


def compute(
    steps: list[list[Entry]], tokens: Tokens, vectors: DeltaVectors, options: DeltaOptions
) -> tuple[Tokens, list[np.ndarray]]:
    """The results and slots of each row."""
    slots = torch.full((NUM_SLOTS, LAYER + options.shape.slot + 8), torch.nan)
    inputs = StepInputs(128, 16, 4)

    def run(x: np.ndarray) -> np.ndarray:
        out = torch.full((len(x), options.shape.values), torch.nan)
        delta_rule(out, torch.from_numpy(x), slots, inputs, vectors, options)
        return out.numpy()

    made, last = run_steps(steps, tokens, inputs, run)
    assert slots[:, :LAYER].isnan().all() and slots[:, LAYER + options.shape.slot :].isnan().all()
    return made, [slots[last[row]].numpy() for row in range(len(tokens))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_it_is_the_formula(shape: DeltaShape, beta: float) -> None:
    options = DeltaOptions(shape, 1e-6, beta, LAYER)
    vectors, tokens = random_vectors(shape), random_inputs(shape)
    made, slots = compute(whole_steps(ROWS), tokens, vectors, options)
    assert_formula(tokens, made, slots, vectors, options)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_rows_have_the_same_bits_for_any_chunks_neighbours_and_slots(shape: DeltaShape) -> None:
    options = DeltaOptions(shape, 1e-6, 2.0, LAYER)
    vectors, tokens = random_vectors(shape), random_inputs(shape)
    whole, slots = compute(whole_steps(ROWS), tokens, vectors, options)
    for seed in range(4):
        made, others = compute(random_steps(ROWS, seed), tokens, vectors, options)
        for row in range(len(tokens)):
            np.testing.assert_array_equal(made[row], whole[row])
            np.testing.assert_array_equal(others[row], slots[row])


def test_a_slot_that_is_only_read_stays_as_it_is() -> None:
    """So several rows continue the same state."""
    options = DeltaOptions(SHAPES[0], 1e-6, 1.0, LAYER)
    vectors, (prompt, *_) = random_vectors(options.shape), random_inputs(options.shape)
    tokens = [prompt, prompt]
    steps = [[Entry(0, 0, 20, -1, 3)], [Entry(0, 20, 17, 3, 4), Entry(1, 20, 17, 3, 5)]]
    made, slots = compute(steps, tokens, vectors, options)
    np.testing.assert_array_equal(made[1], made[0][20:])
    np.testing.assert_array_equal(slots[1], slots[0])
    whole, whole_slots = compute([[Entry(0, 0, 37, -1, 3)]], [prompt], vectors, options)
    np.testing.assert_array_equal(made[0], whole[0])
    np.testing.assert_array_equal(slots[0], whole_slots[0])
