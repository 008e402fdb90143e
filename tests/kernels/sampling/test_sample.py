"""Samples follow the right distribution and depend only on (seed, index, position)."""

import os

import numpy as np
import pytest
import torch

from pipeline.kernels.sampling.noise import exponential, halves
from pipeline.kernels.sampling.noise_keys import noise_keys, sequence_key, splitmix64
from pipeline.kernels.sampling.sample import argmax, probabilities_reference, sample, thresholds
from tests.slices import part_of

NUM_DRAWS = 40_000 if os.environ.get("PIPELINE_ALL_CASES") else 4_000


def keys_for(seeds: list[int], positions: list[int], index: int = 0) -> torch.Tensor:
    return halves(noise_keys(np.array([sequence_key(seed, index) for seed in seeds], np.uint64), np.array(positions)))


def logits_row(vocab_size: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def sample_ids(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1,
    min_p: float = 0,
) -> torch.Tensor:
    num = len(keys)
    return sample(
        logits.expand(num, -1),
        torch.full((num,), temperature),
        torch.full((num,), top_k),
        torch.full((num,), top_p),
        torch.full((num,), min_p),
        keys,
    )


def assert_follows(ids: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square test, rare ids counted together; the bound is six standard deviations above its mean."""
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    expected = probabilities * len(ids)
    assert counts[probabilities == 0].sum() == 0
    common = expected >= 10
    seen, expected_counts = counts[common], expected[common]
    if expected[~common].sum() >= 10:
        seen = torch.cat([seen, counts[~common].sum()[None]])
        expected_counts = torch.cat([expected_counts, expected[~common].sum()[None]])
    degrees = len(expected_counts) - 1
    statistic = float(((seen - expected_counts) ** 2 / expected_counts).sum())
    assert statistic < degrees + 6 * (2 * max(degrees, 1)) ** 0.5, (statistic, degrees)


def test_splitmix64_gives_the_published_numbers() -> None:
    golden = 0x9E3779B97F4A7C15
    states = [1234567 + i * golden for i in range(3)]
    assert [splitmix64(state & (2**64 - 1)) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_noise_is_exponential() -> None:
    noise = exponential(keys_for([7] * 64, list(range(64))), 4096).double().flatten()
    assert noise.min() > 0 and torch.isfinite(noise).all()
    num = len(noise)
    assert abs(float(noise.mean()) - 1) < 5 / num**0.5
    # Equally likely bins of its distribution function.
    bins = (-torch.expm1(-noise) * 64).long().clamp(max=63)
    assert_follows(bins, torch.full((64,), 1 / 64, dtype=torch.float64))


@pytest.mark.parametrize("other", ["seed", "index", "position"])
def test_noise_of_neighbouring_keys_is_independent(other: str) -> None:
    a = exponential(keys_for([5], [9], index=3), 20_000)[0]
    b = {
        "seed": lambda: exponential(keys_for([6], [9], index=3), 20_000)[0],
        "index": lambda: exponential(keys_for([5], [9], index=4), 20_000)[0],
        "position": lambda: exponential(keys_for([5], [10], index=3), 20_000)[0],
    }[other]()
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / 20_000**0.5


def test_seeds_differ_in_all_64_bits() -> None:
    seeds = [0, 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    keys = keys_for(seeds, [0] * len(seeds))
    assert len({tuple(key) for key in keys.tolist()}) == len(seeds)
    assert sample_ids(logits_row(1000), keys).shape == (len(seeds),)


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_follow_the_softmax(along: str, temperature: float) -> None:
    logits = logits_row(60)
    numbers = list(range(NUM_DRAWS))
    keys = keys_for(numbers, [11] * NUM_DRAWS) if along == "seeds" else keys_for([11] * NUM_DRAWS, numbers)
    assert_follows(sample_ids(logits, keys, temperature), probabilities_reference(logits, temperature, 0, 1, 0))


def test_unlikely_ids_have_the_right_frequency() -> None:
    logits = torch.full((4000,), -8.0)
    logits[123] = 5.0
    rare = 1 - float(torch.softmax(logits.double(), 0)[123])
    num = part_of(10_000, 4000)
    ids = torch.cat([sample_ids(logits, keys_for([3] * 500, list(range(i, i + 500)))) for i in range(0, num, 500)])
    assert abs(int((ids != 123).sum()) - num * rare) < 5 * (num * rare) ** 0.5


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1, 0), (0, 0.7, 0), (0, 1, 0.1), (8, 0.8, 0), (0, 0.9, 0.05), (12, 0.9, 0.02), (1, 1, 0), (0, 1e-9, 0)],
)
def test_filtered_samples_follow_the_filtered_distribution(top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_row(60, seed=4)
    keys = keys_for([21] * NUM_DRAWS, list(range(NUM_DRAWS)))
    ids = sample_ids(logits, keys, 1.3, top_k, top_p, min_p)
    assert_follows(ids, probabilities_reference(logits, 1.3, top_k, top_p, min_p))


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_thresholds_follow_the_definitions_for_any_vocabulary(spread: float) -> None:
    rng = np.random.default_rng(5)
    for trial in range(30):
        vocab_size = int(rng.choice([3, 300, 5000]))
        logits = logits_row(vocab_size, trial, spread)
        temperature = float(rng.uniform(0.3, 2))
        top_k = int(rng.choice([0, 1, 2, 50, vocab_size, vocab_size + 7]))
        top_p = float(np.float32(rng.choice([1, 0.05, 0.5, 0.95, 0.999])))
        min_p = float(np.float32(rng.choice([0, 0.01, 0.3])))
        scaled = (logits - logits.max()) / temperature
        floor = thresholds(scaled[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
        kept = int((scaled >= floor).sum())
        expected = int((probabilities_reference(logits, temperature, top_k, top_p, min_p) > 0).sum())
        # The two round differently, so a value at the edge may be on either side.
        assert abs(kept - expected) <= 1 + (kept > 1000), (vocab_size, top_k, top_p, min_p, kept, expected)


def test_each_row_of_a_batch_samples_with_its_own_parameters_as_it_does_alone() -> None:
    logits = torch.stack([logits_row(700, i) for i in range(6)])
    temperature = torch.tensor([0.5, 1.0, 1.0, 2.0, 1.0, 0.7])
    top_k = torch.tensor([0, 3, 0, 40, 0, 1])
    top_p = torch.tensor([1.0, 1.0, 0.6, 0.9, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.01, 0.2, 0.0])
    keys = keys_for([1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60])
    together = sample(logits, temperature, top_k, top_p, min_p, keys)
    for i in range(6):
        one = slice(i, i + 1)
        alone = sample(logits[one], temperature[one], top_k[one], top_p[one], min_p[one], keys[one])
        assert alone.item() == together[i]
    assert together[5] == logits[5].argmax()


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e6, 3e38])
def test_any_temperature_and_large_logits_return_an_id_of_the_vocabulary(temperature: float) -> None:
    logits = torch.tensor([3e38, -3e38, 0.0, 1e30])
    ids = sample_ids(logits, keys_for([1] * 50, list(range(50))), temperature, top_p=0.9)
    assert ids.min() >= 0 and ids.max() < 4
    if temperature <= 1:
        assert (ids == 0).all()


def test_argmax_returns_the_largest() -> None:
    assert argmax(torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 4.9]])).tolist() == [1, 0]
