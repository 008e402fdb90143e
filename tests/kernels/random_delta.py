"""Random layers of the gated delta rule, and the steps that cut their rows into chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.recurrent.delta import DeltaOptions, DeltaVectors, delta_reference
from pipeline.kernels.recurrent.delta_shape import TAPS, DeltaShape
from pipeline.kernels.step_inputs import StepInputs

SHAPES = [
    DeltaShape(2, 4, 16, 32),
    DeltaShape(3, 3, 96, 192),
    DeltaShape(2, 4, 128, 128, tiled=True),
    DeltaShape(1, 5, 48, 64),
]
"""Key heads with several value heads and with one; OLMo hybrid's heads, Qwen3.5's, and odd ones."""
ROWS = [37, 1, 2, 3, 4, 20]
"""Tokens of each row."""
NUM_SLOTS = 12

Tokens = list[np.ndarray]
"""Of each row, float32 [tokens, ...]."""


def random_vectors(shape: DeltaShape, seed: int = 0) -> DeltaVectors:
    random = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=random)

    rates = -torch.rand(shape.value_heads, generator=random) * 2 - 0.01
    return DeltaVectors(
        normal(TAPS, shape.channels) * 0.5, rates, normal(shape.value_heads), 1 + 0.1 * normal(shape.value_dim)
    )


def random_inputs(shape: DeltaShape, rows: Sequence[int] = ROWS, seed: int = 1) -> Tokens:
    random = np.random.default_rng(seed)
    made = [random.standard_normal((num, shape.inputs)).astype(np.float32) * 1.5 for num in rows]
    # Where softplus is its argument, and where the decay is 1.
    made[0][1, -shape.value_heads :], made[0][2, -shape.value_heads :] = 30, -100
    return made


@dataclass
class Entry:
    row: int
    start: int
    count: int
    read: int
    write: int


def random_steps(rows: Sequence[int], seed: int) -> list[list[Entry]]:
    """Steps that compute all tokens of the rows in random chunks, in random order. Slots change now and then."""
    random = np.random.default_rng(seed)
    done, slots = [0] * len(rows), [-1] * len(rows)
    steps: list[list[Entry]] = []
    while any(at < num for at, num in zip(done, rows, strict=True)):
        chosen = [row for row, num in enumerate(rows) if done[row] < num and random.random() < 0.8]
        random.shuffle(chosen)
        free = [slot for slot in range(NUM_SLOTS) if slot not in slots]
        random.shuffle(free)
        entries = []
        for row in chosen:
            count = int(min(rows[row] - done[row], random.choice([1, 1, 2, 3, 5, 16])))
            write = free.pop() if slots[row] < 0 or random.random() < 0.3 else slots[row]
            entries.append(Entry(row, done[row], count, slots[row], write))
            done[row] += count
            slots[row] = write
        if entries:
            steps.append(entries)
    return steps


def whole_steps(rows: Sequence[int]) -> list[list[Entry]]:
    """A step for each row."""
    return [[Entry(row, 0, num, -1, row)] for row, num in enumerate(rows)]


def run_steps(
    steps: list[list[Entry]], tokens: Tokens, inputs: StepInputs, run: Callable[[np.ndarray], np.ndarray]
) -> tuple[Tokens, dict[int, int]]:
    """Fill the inputs for each step and `run` it over its tokens. Returns the results of each row, and its last
    slot."""
    made: list[list[np.ndarray]] = [[] for _ in tokens]
    slots: dict[int, int] = {}
    for entries in steps:
        counts = np.array([entry.count for entry in entries], np.int32)
        inputs.fill(
            np.zeros(counts.sum(), np.int32),
            np.array([entry.start for entry in entries], np.int32),
            counts,
            np.zeros((len(entries), inputs.block_tables.shape[1]), np.int32),
            np.ones(len(entries), np.uint8),
        )
        inputs.state_reads[: len(entries)] = [entry.read for entry in entries]
        inputs.state_writes[: len(entries)] = [entry.write for entry in entries]
        of_step = run(np.concatenate([tokens[e.row][e.start : e.start + e.count] for e in entries]))
        for entry, part in zip(entries, np.split(of_step, np.cumsum(counts)[:-1]), strict=True):
            made[entry.row].append(part.copy())
            slots[entry.row] = entry.write
    return [np.concatenate(parts) for parts in made], slots


def split_slot(slot: np.ndarray, options: DeltaOptions) -> tuple[np.ndarray, np.ndarray]:
    """S [V, key_dim, value_dim] and the last inputs of the convolution in a slot."""
    shape = options.shape
    of_layer = slot[options.layer : options.layer + shape.slot]
    slices = of_layer[: shape.state].reshape(shape.value_heads, -1, shape.key_dim, 32)
    state = slices.transpose(0, 2, 1, 3).reshape(shape.value_heads, shape.key_dim, -1)
    return state, of_layer[shape.state :].reshape(TAPS - 1, shape.channels)


def assert_formula(
    tokens: Tokens, made: Tokens, slots: list[np.ndarray], vectors: DeltaVectors, options: DeltaOptions
) -> None:
    """The results and slots of each row are those of the formula in float64."""
    for x, out, slot in zip(tokens, made, slots, strict=True):
        expected, state, last = delta_reference(torch.from_numpy(x), vectors, options)
        assert expected.std() > 0.1
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
        own_state, own_last = split_slot(slot, options)
        np.testing.assert_allclose(own_state, state, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(own_last, last)
