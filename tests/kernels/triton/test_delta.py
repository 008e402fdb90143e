"""The gated delta rule on a GPU: the formula, and the same bits for any chunks, neighbours and slots."""

import numpy as np
import pytest
import torch

from pipeline.kernels.recurrent.delta import DeltaOptions, DeltaVectors
from pipeline.kernels.recurrent.delta_shape import DeltaShape
from pipeline.kernels.step_inputs import StepInputs
from pipeline.kernels.triton.delta import delta_rule
from tests.kernels.random_delta import (
    NUM_SLOTS,
    Entry,
    Tokens,
    assert_formula,
    random_inputs,
    random_steps,
    random_vectors,
    run_steps,
    whole_steps,
)
from tests.kernels.triton.steps import make_step

SHAPES = [DeltaShape(2, 4, 16, 32), DeltaShape(2, 4, 48, 64, tiled=True), DeltaShape(1, 2, 128, 128)]
ROWS = [9, 1, 2, 3, 6]
LAYER = 24
"""Floats of a slot before the layer's."""


def compute(
    steps: list[list[Entry]], tokens: Tokens, vectors: DeltaVectors, options: DeltaOptions
) -> tuple[Tokens, list[np.ndarray]]:
    """The results and slots of each row. Steps have an entry that has ended, and padding."""
    shape = options.shape
    slots = torch.full((NUM_SLOTS, LAYER + shape.slot + 8), torch.nan)
    inputs = StepInputs(64, 16, 4)

    def run(x: np.ndarray) -> np.ndarray:
        num, count = inputs.num_rows, inputs.num_tokens
        entries = [*zip(inputs.starts[:num].tolist(), inputs.counts[:num].tolist(), strict=True), (7, 0)]
        made = make_step(entries, 1, 16, torch.float32, num_entries=num + 3, num_tokens=count + 5)
        assert made.step.offsets[:num].tolist() == inputs.offsets[:num].tolist()
        reads, writes = torch.full((num + 3,), 3, dtype=torch.int32), torch.full((num + 3,), 5, dtype=torch.int32)
        reads[:num] = torch.from_numpy(inputs.state_reads[:num])
        writes[:num] = torch.from_numpy(inputs.state_writes[:num])
        padded = torch.cat([torch.from_numpy(x), torch.full((5, shape.inputs), torch.nan)])
        out, values = torch.full((2, count + 5, shape.values), torch.nan).unbind()
        delta_rule(out, values, padded, slots, reads, writes, made.step, vectors, options)
        return out[:count].numpy()

    made, last = run_steps(steps, tokens, inputs, run)
    assert slots[:, :LAYER].isnan().all() and slots[:, LAYER + shape.slot :].isnan().all()
    return made, [slots[last[row]].numpy() for row in range(len(tokens))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_it_is_the_formula(shape: DeltaShape, beta: float) -> None:
    options = DeltaOptions(shape, 1e-6, beta, LAYER)
    vectors, tokens = random_vectors(shape), random_inputs(shape, ROWS)
    made, slots = compute(whole_steps(ROWS), tokens, vectors, options)
    assert_formula(tokens, made, slots, vectors, options)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_rows_have_the_same_bits_for_any_chunks_neighbours_and_slots(shape: DeltaShape) -> None:
    options = DeltaOptions(shape, 1e-6, 2.0, LAYER)
    vectors, tokens = random_vectors(shape), random_inputs(shape, ROWS)
    whole, slots = compute(whole_steps(ROWS), tokens, vectors, options)
    for seed in range(3):
        made, others = compute(random_steps(ROWS, seed), tokens, vectors, options)
        for row in range(len(tokens)):
            np.testing.assert_array_equal(made[row], whole[row])
            np.testing.assert_array_equal(others[row], slots[row])
