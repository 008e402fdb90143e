"""Ids are those of kernels/sampling/sample.py, for any mix of rows, and NO_ID if no id can be sampled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pipeline.kernels.sampling import noise
from pipeline.kernels.sampling.noise import exponential, halves
from pipeline.kernels.sampling.noise_keys import noise_keys
from pipeline.kernels.sampling.sample import probabilities_reference
from pipeline.kernels.sampling.sample import sample as sample_in_torch
from pipeline.kernels.sampling.sampling_inputs import NO_ID
from pipeline.kernels.triton.rows import Field
from pipeline.kernels.triton.sampling.noise import log_noise, noise_bits, noise_key
from pipeline.kernels.triton.sampling.sample import BLOCK, SamplingScratch, sample
from tests.kernels.sampling.test_sample import assert_follows
from tests.kernels.triton.params import Row, params_of

INF, NAN = float("inf"), float("nan")
UNTOUCHED = -7

# The interpreter uses numpy, which warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


def sampled(logits: torch.Tensor, rows: list[Row], filtered: bool | None = None) -> list[int]:
    """One sample of each row, last row first; the last sample is padding, which changes nothing."""
    num = len(rows)
    # Behind each row is memory that does not belong to it.
    memory = torch.full((num + 1, logits.shape[1] + 3), INF)
    memory[:num, :-3], memory[num, :-3] = logits.flip(0), NAN
    logits = memory[:, :-3]
    ids = torch.full((num + 1,), UNTOUCHED, dtype=torch.int32)
    sample_rows = torch.tensor([*range(num - 1, -1, -1), num], dtype=torch.int32)
    scratch = SamplingScratch(num + 2, logits.shape[1], "cpu")
    for buffer in (scratch.largest, scratch.scores):
        buffer.fill_(NAN)
    before = memory.clone()
    if filtered is None:
        filtered = any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in rows)
    params = params_of(rows)
    num_known = params[sample_rows.long(), Field.NUM_IDS].contiguous()
    sample(ids, logits, params, sample_rows, num_known, scratch, filtered=filtered)
    assert ids[num] == UNTOUCHED and torch.equal(memory.view(torch.int32), before.view(torch.int32))
    return ids[:num].flip(0).tolist()


def in_torch(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    keys = noise_keys(np.array([row.key for row in rows], np.uint64), np.array([row.num_ids for row in rows]))
    return sample_in_torch(
        logits.float(),
        torch.tensor([row.temperature for row in rows]),
        torch.tensor([row.top_k for row in rows]),
        torch.tensor([row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
        halves(keys),
    ).tolist()


def normal(num: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@triton.jit
def _noise(bits, logs, params, position, BLOCK: tl.constexpr):
    low, high = noise_key(tl.load(params), tl.load(params + 1), tl.load(position))
    ids = tl.arange(0, BLOCK)
    tl.store(bits + ids, noise_bits(low, high, ids))
    tl.store(logs + ids, log_noise(low, high, ids))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 1), (12345, 131071)])
def test_noise_equals_that_of_the_cpu_exactly(seed: int, position: int) -> None:
    row, num = Row(seed=seed), 4096
    bits, logs = torch.zeros(num, dtype=torch.int32), torch.zeros(num)
    key = torch.from_numpy(np.array([row.key], np.uint64).view(np.int32))
    _noise[(1,)](bits, logs, key, torch.tensor([position], dtype=torch.int32), num)
    keys = halves(noise_keys(np.array([row.key], np.uint64), np.array([position])))
    expected_ids = noise._mix(noise._mix(torch.arange(num, dtype=torch.int32) ^ keys[0, 0]) ^ keys[0, 1]) & 0x7FFFFFFF
    assert torch.equal(bits, expected_ids)
    np.testing.assert_allclose(logs, exponential(keys, num)[0].log(), rtol=0, atol=4e-6)


@pytest.mark.parametrize("vocab_size", [1, BLOCK, 5003])
def test_greedy_and_sampled_rows_of_one_batch_have_the_ids_of_torch(vocab_size: int) -> None:
    logits = normal(7, vocab_size, vocab_size)
    rows = [Row(temperature, seed=i, num_ids=3 * i) for i, temperature in enumerate([1, 0, 0.3, 1.7, 1e-4, 40, 1e-6])]
    found, expected_ids = sampled(logits, rows), in_torch(logits, rows)
    largest = logits.argmax(-1).tolist()
    assert found == [largest[i] if row.temperature < 1e-5 else expected_ids[i] for i, row in enumerate(rows)]


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_filters_keep_the_same_ids_as_in_torch(spread: float) -> None:
    rows = [
        Row(1.0),
        Row(0.0, top_k=2, top_p=0.1),
        Row(0.8, top_k=7),
        Row(1.1, top_p=0.9, ended=True),
        Row(1.1, top_p=0.9),
        Row(1.5, min_p=0.2),
        Row(0.9, top_k=50, top_p=0.7, min_p=0.01),
        Row(2.0, top_k=10_000, top_p=1e-9),
    ]
    logits = normal(len(rows), 4500, 2, spread)
    expected_ids = in_torch(logits, [replace(row, temperature=row.temperature or 1.0) for row in rows])
    expected_ids[1], expected_ids[3] = int(logits[1].argmax()), UNTOUCHED
    assert sampled(logits, rows) == expected_ids


def test_a_row_samples_the_same_id_in_any_batch() -> None:
    logits = normal(3, 3000)
    rows = [Row(temperature=0.2 + i / 2, seed=i) for i in range(3)]
    assert sampled(logits, rows) == [sampled(logits[i : i + 1], rows[i : i + 1])[0] for i in range(3)]


def test_rows_that_have_ended_sample_nothing() -> None:
    logits = normal(3, 100)
    assert sampled(logits, [Row(ended=True), Row(0), Row(ended=True)]) == [
        UNTOUCHED,
        int(logits[1].argmax()),
        UNTOUCHED,
    ]


def test_samples_follow_the_softmax() -> None:
    logits = normal(1, 5, 3, 1.5)
    num = 60
    ids = sampled(logits.expand(num, -1), [Row(1.3, seed=5, num_ids=i) for i in range(num)])
    assert_follows(torch.tensor(ids), probabilities_reference(logits[0], 1.3, 0, 1, 0))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-5, 3e38])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, NO_ID),
        ({7: NAN}, NO_ID),
        ({7: NAN, 2 * BLOCK: -3.0}, 2 * BLOCK),
        ({9: INF, 2: 3e38, BLOCK + 3: INF}, 9),
        ({BLOCK + 3: INF, 2: NAN}, BLOCK + 3),
        ({4: -3e38}, 4),
    ],
)
def test_nan_logits_are_never_sampled(temperature: float, values: dict[int, float], expected: int) -> None:
    logits = torch.full((1, 2 * BLOCK + 1), -INF)
    for index, value in values.items():
        logits[0, index] = value
    assert sampled(logits, [Row(temperature)]) == [expected]
    if temperature == 1:
        assert sampled(logits, [Row(temperature, top_p=0.5, top_k=3)]) == [expected]


def test_greedy_returns_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, 2 * BLOCK + 9)
    logits[0, [BLOCK + 5, BLOCK + 4, 2 * BLOCK]] = 1
    logits[1, 0] = -0.0
    logits[2] = -1
    logits[2, BLOCK - 1 : BLOCK + 1] = torch.tensor([0.0, -0.0])
    assert sampled(logits, [Row(0)] * 3) == [BLOCK + 4, 0, BLOCK - 1]


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e6, 3e38])
def test_one_huge_logit_among_others(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3e38, -3e38, 1e30]]).expand(6, -1)
    ids = sampled(logits, [Row(temperature, num_ids=i) for i in range(6)])
    assert set(ids) == {1} if temperature < 1e30 else set(ids) <= {0, 1, 2, 3} and len(set(ids)) > 1


def test_filtered_samples_are_only_kept_ids() -> None:
    """Equal logits are kept or dropped together."""
    logits = torch.tensor([[1.0, 3.0, 2.5, 2.5, 2.5, 0.9, 2.6]]).expand(6, -1)
    ids = sampled(logits, [Row(20.0, top_k=3, num_ids=i) for i in range(6)])
    assert set(ids) <= {1, 2, 3, 4, 6} and len(set(ids)) > 2


def test_blocks_without_likely_ids_do_not_count_in_a_nucleus() -> None:
    """Each block weighs its ids by its own maximum; 2048 ids of this one have a negligible probability."""
    logits = torch.full((1, 2 * BLOCK), -20.0)
    logits[0, BLOCK + 5], logits[0, BLOCK + 6] = 10.0, 9.9
    assert sampled(logits.expand(6, -1), [Row(1.0, top_p=0.5, num_ids=i) for i in range(6)]) == [BLOCK + 5] * 6


def test_top_p_is_a_share_of_the_ids_that_top_k_keeps() -> None:
    """The first of the two has 0.62 of their weight, but a tiny share of the total."""
    logits = torch.full((1, 3000), 9.0)
    logits[0, 7], logits[0, 2500] = 9.5, 10.0
    assert sampled(logits.expand(8, -1), [Row(1.0, top_k=2, top_p=0.6, num_ids=i) for i in range(8)]) == [2500] * 8
    assert set(sampled(logits.expand(8, -1), [Row(1.0, top_k=2, top_p=0.7, num_ids=i) for i in range(8)])) == {7, 2500}
