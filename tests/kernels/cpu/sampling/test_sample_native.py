"""The sampler of sample.h filters by definition and samples by key, for every instruction set."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.kernels.cpu.sample_reference import kept_reference, sample_reference, weights_reference
from pipeline.kernels.sampling.noise_keys import noise_keys, sequence_key
from pipeline.kernels.sampling.penalties import penalize
from pipeline.kernels.sampling.sample import probabilities_reference
from tests.kernels.cpu.samplers import ISAS
from tests.kernels.cpu.sampling.native import INF, Native
from tests.slices import part_of

VOCABULARIES = [1, 7, 63, 64, 65, 2048, 32003, 49152]

# The relative error of a float32 weight, which is what rounding may change.
ROUNDING = 1e-6


def keys_of(num: int, seed: int = 1) -> np.ndarray:
    """The keys of a sequence's positions 0 .. num."""
    return noise_keys(np.full(num, sequence_key(seed, 0), np.uint64), np.arange(num, dtype=np.int32))


def key_at(share: float) -> np.uint64:
    """The key whose uniform number is `share`, in [0, 1)."""
    return np.uint64(int(share * 2**53) << 11)


def logits_row(vocab_size: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32)


def float32(number: float) -> float:
    return float(np.float32(number))


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    weights = weights_reference(logits, float32(temperature))
    weights[~kept_reference(logits, float32(temperature), top_k, float32(top_p), float32(min_p))] = 0
    return weights / weights.sum()


def assert_follows(ids: np.ndarray, expected_shares: np.ndarray) -> None:
    """Pearson's chi-square test, rare ids counted together; the bound is six standard deviations above its mean."""
    seen = np.bincount(ids, minlength=len(expected_shares)).astype(float)
    expected = expected_shares * len(ids)
    assert seen[expected == 0].sum() == 0, "sampled an impossible id"
    common = expected >= 10
    rare_seen, rare_expected = seen[~common].sum(), expected[~common].sum()
    seen, expected = seen[common], expected[common]
    if rare_expected >= 10:
        seen, expected = np.append(seen, rare_seen), np.append(expected, rare_expected)
    degrees = len(expected) - 1
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert statistic < degrees + 6 * (2 * max(degrees, 1)) ** 0.5, (statistic, degrees)


def assert_keeps_right(
    native: Native, logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """min_p and top_k exactly; for top_p, the fewest that hold enough, up to the rounding of float32 weights."""
    temperature, top_p, min_p = float32(temperature), float32(top_p), float32(min_p)
    kept = native.kept(logits, temperature, top_k, top_p, min_p)
    candidates = kept_reference(logits, temperature, top_k, 1.0, min_p)
    if top_p == 1:
        np.testing.assert_array_equal(kept, candidates)
        return
    assert kept.any() and not (kept & ~candidates).any()
    smallest = logits[kept].min()
    np.testing.assert_array_equal(kept, candidates & (logits >= smallest))
    weights = np.where(candidates, weights_reference(logits, temperature), 0)
    expected = top_p * weights.sum()
    assert weights[kept].sum() >= expected * (1 - ROUNDING)
    above = weights[candidates & (logits > smallest)].sum()
    assert above < expected * (1 + ROUNDING) or above == 0


def assert_samples_right(
    native: Native,
    logits: np.ndarray,
    keys: np.ndarray,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> None:
    """Each key's number lies in the interval of the sampled id, over the kept ids, up to rounding."""
    kept = native.kept(logits, temperature, top_k, top_p, min_p)
    weights = np.where(kept, weights_reference(logits, float32(temperature)), 0)
    ends = np.cumsum(weights) / weights.sum()
    starts = np.append(0, ends[:-1])
    ids = native.sample(logits, keys, temperature, top_k, top_p, min_p)
    shares = (keys >> np.uint64(11)).astype(float) * 2.0**-53
    assert kept[ids].all()
    assert (shares >= starts[ids] - ROUNDING).all() and (shares <= ends[ids] + ROUNDING).all()


FILTERS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.1),
    (8, 0.8, 0.0),
    (0, 0.9, 0.05),
    (12, 1.0, 0.02),
    (12, 0.9, 0.02),
    (1, 1.0, 0.0),
    (0, 1e-9, 0.0),
]


@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_samples_follow_the_filtered_softmax(
    native: Native, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_row(67, seed=4)
    ids = native.sample(logits, keys_of(40_000), temperature, top_k, top_p, min_p)
    expected = probabilities(logits, temperature, top_k, top_p, min_p)
    assert_follows(ids, expected)
    # The torch sampler is tested with the same distribution.
    torch_expected = probabilities_reference(torch.from_numpy(logits), temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(expected, torch_expected.numpy(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (50, 0.95, 0.0), (0, 0.9, 0.0), (0, 0.95, 0.01)])
def test_samples_follow_the_filtered_softmax_over_a_real_vocabulary(
    compiled: Callable[[str], Native], top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_row(49152, seed=2, spread=2.5)
    ids = compiled(ISAS[0]).sample(logits, keys_of(20_000), 0.8, top_k, top_p, min_p)
    assert_follows(ids, probabilities(logits, 0.8, top_k, top_p, min_p))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_every_id_has_its_interval_of_the_uniform_number(native: Native, vocab_size: int) -> None:
    logits = logits_row(vocab_size, spread=1.5)
    assert_samples_right(native, logits, keys_of(2000), 1.0)
    assert_samples_right(native, logits, keys_of(300), 0.7, top_k=40, top_p=0.9)


def test_unlikely_ids_have_their_whole_interval(native: Native) -> None:
    """Each of 4095 ids of probability e^-15, at both ends of an interval that is 3e-7 wide."""
    logits = np.full(4096, -15, np.float32)
    logits[1234] = 0
    ends = np.cumsum(probabilities(logits, 1.0, 0, 1.0, 0.0))
    starts = np.append(0, ends[:-1])
    for share_of_interval in (0.02, 0.5, 0.98):
        keys = np.array([key_at(share) for share in starts + share_of_interval * (ends - starts)])
        np.testing.assert_array_equal(native.sample(logits, keys), np.arange(4096))


def test_the_key_determines_the_sample_as_in_the_reference(native: Native) -> None:
    for trial, (top_k, top_p, min_p) in enumerate(FILTERS):
        logits = logits_row(5000, trial, spread=3)
        keys = keys_of(200, seed=trial)
        expected = [sample_reference(logits, 1.0, top_k, float32(top_p), float32(min_p), int(key)) for key in keys]
        np.testing.assert_array_equal(native.sample(logits, keys, 1.0, top_k, top_p, min_p), expected)


@pytest.mark.parametrize("vocab_size", [7, 32003, 49152])
def test_all_instruction_sets_sample_the_same_ids(compiled: Callable[[str], Native], vocab_size: int) -> None:
    keys = keys_of(30, seed=3)
    for seed, spread in enumerate([0.0, 1.0, 5.0]):
        logits = logits_row(vocab_size, seed, spread)
        for top_k, top_p, min_p in FILTERS:
            samples = [compiled(isa).sample(logits, keys, 1.1, top_k, top_p, min_p) for isa in ISAS]
            assert all((ids == samples[0]).all() for ids in samples)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("values", ["distinct", "ties", "equal", "one far below", "most impossible"])
def test_filters_follow_their_definitions(native: Native, vocab_size: int, values: str) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = logits_row(vocab_size, 7, 3)
    if values == "ties":
        logits = np.round(logits)
    elif values == "equal":
        logits[:] = -3.5
    elif values == "one far below":
        logits[rng.integers(vocab_size)] = -3e38
    elif values == "most impossible":
        logits[rng.random(vocab_size) < 0.97] = -INF
        logits[vocab_size // 2] = 1
    for top_k in (0, 1, 2, 50, 700, vocab_size - 1, vocab_size, vocab_size + 7):
        for top_p, min_p in [
            (1.0, 0.0),
            (0.95, 0.0),
            (0.05, 0.0),
            (1.0, 0.02),
            (0.8, 1e-4),
            (0.999999, 0.0),
            (1.0, 1.0),
        ]:
            assert_keeps_right(native, logits, float(rng.choice([0.3, 1, 30])), top_k, top_p, min_p)


def test_a_nucleus_ends_where_it_holds_enough(native: Native) -> None:
    """Powers of two add up exactly: 1/2, then twice 1/8, then four times 1/16."""
    logits = np.log(np.array([1, 2, 8, 1, 2, 1, 1])).astype(np.float32)
    for top_p, num_kept in [(0.499, 1), (0.501, 3), (0.749, 3), (0.751, 7), (1.0, 7)]:
        assert native.kept(logits, 1.0, 0, top_p, 0.0).sum() == num_kept
    # All equal logits stay, although the first few hold enough.
    for top_p in (0.01, 0.5, 0.99):
        assert native.kept(np.zeros(1000, np.float32), 1.0, 0, top_p, 0.0).all()
    assert native.kept(np.zeros(1000, np.float32), 1.0, 3, 0.5, 1.0).all()


LOGIT = st.one_of(
    st.sampled_from([-INF, float("nan"), 0.0, -0.0, 1.0, 1.5, -2.0, 1e-45, -1e-45, 3e38, -3e38, 88.0]),
    st.floats(-50, 50, width=32),
)


@settings(max_examples=part_of(150, 40), deadline=None)
@given(
    st.lists(LOGIT, min_size=1, max_size=90),
    st.integers(1, 40),
    st.sampled_from([1e-5, 0.01, 0.7, 1.0, 5.0, 100.0, 1e38]),
    st.sampled_from([0, 1, 2, 3, 17, 100]),
    st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
    st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_any_logits_are_filtered_and_sampled_correctly(
    native: Native,
    values: list[float],
    times: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: int,
) -> None:
    logits = np.tile(np.array(values, np.float32), times)
    assume(np.isfinite(logits).any())
    assert_keeps_right(native, logits, temperature, top_k, top_p, min_p)
    keys = np.array([key, 0, 2**64 - 1], np.uint64)
    assert_samples_right(native, logits, keys, temperature, top_k, top_p, min_p)


@settings(max_examples=part_of(150, 40), deadline=None)
@given(st.lists(st.one_of(LOGIT, st.just(INF)), min_size=1, max_size=200), st.integers(0, 2**64 - 1))
def test_greedy_returns_the_first_of_the_largest(native: Native, values: list[float], key: int) -> None:
    logits = np.array(values, np.float32)
    clean = np.where(np.isnan(logits), -INF, logits)
    expected = clean.argmax() if clean.max() > -INF else -1
    assert native.greedy(logits) == expected
    # Either one id is infinitely likely or none is: the sample is the same.
    if not np.isfinite(clean.max()):
        assert native.sample(logits, np.array([key], np.uint64), 1.0, 3, 0.9, 0.1)[0] == expected
    assert native.sample(logits, np.array([key], np.uint64), 0.0)[0] == expected


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_greedy_finds_the_largest_wherever_it_is(native: Native, vocab_size: int) -> None:
    for index in {0, vocab_size // 3, max(0, vocab_size - 2), vocab_size - 1}:
        logits = np.minimum(logits_row(vocab_size), 20)
        logits[index] = 21
        logits[index:][1:][-1:] = 21
        assert native.greedy(logits) == index


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 100.0])
def test_the_only_possible_id_is_sampled_with_any_key(
    native: Native, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    keys = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    for index in (0, 70, 999):
        logits = np.full(1000, -INF, np.float32)
        logits[index] = -7
        assert (native.sample(logits, keys, temperature, top_k, top_p, min_p) == index).all()


@pytest.mark.parametrize("vocab_size", [7, 64, 1000, 32003])
def test_the_ends_of_the_uniform_range_sample_the_first_and_last_kept_id(native: Native, vocab_size: int) -> None:
    """Many seeds, because the sum determines whether the largest number times the sum rounds to the sum."""
    for seed in range(20):
        logits = logits_row(vocab_size, seed, 1)
        logits[-3:] = -INF
        logits[:2] = -INF
        first, last = native.sample(logits, np.array([0, 2**64 - 1], np.uint64), 2.0)
        assert (first, last) == (2, vocab_size - 4)
        kept = np.flatnonzero(native.kept(logits, 2.0, 0, 0.5, 0.0))
        first, last = native.sample(logits, np.array([0, 2**64 - 1], np.uint64), 2.0, top_p=0.5)
        assert (first, last) == (kept[0], kept[-1])


def test_the_end_of_the_range_samples_no_impossible_id_despite_rounded_sums(native: Native) -> None:
    """Weights from 1 down to e^-87 can't be summed exactly, so the order of summation shows."""
    for seed in range(400):
        logits = logits_row(256, seed, spread=12)
        logits[seed % 200 :][16:] = -INF
        for top_k in (0, 30):
            id = native.sample(logits, np.array([2**64 - 1], np.uint64), 1.0, top_k)[0]
            assert np.isfinite(logits[id])


def test_a_small_temperature_is_greedy_and_a_large_one_is_uniform(native: Native) -> None:
    logits = logits_row(49, spread=3)
    assert (native.sample(logits, keys_of(500), 1e-5) == logits.argmax()).all()
    assert_follows(native.sample(logits, keys_of(40_000), 1e38), np.full(49, 1 / 49))


def test_numbers_of_successive_positions_are_independent(native: Native) -> None:
    """Pairs of samples from 16 equally likely ids at neighbouring positions fill 16 x 16 bins evenly."""
    ids = native.sample(np.zeros(16, np.float32), keys_of(128_000, seed=11))
    assert_follows(ids, np.full(16, 1 / 16))
    for distance in (1, 2, 64):
        assert_follows(ids[:-distance] * 16 + ids[distance:], np.full(256, 1 / 256))


@pytest.mark.parametrize("vocab_size", [1, 7, 31, 32, 33, 1000, 32003])
def test_a_mask_forbids_ids_without_a_bit(native: Native, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = logits_row(vocab_size)
    for share in (0.0, 0.01, 0.5, 1.0):
        allowed = rng.random(vocab_size) < share
        np.testing.assert_array_equal(native.masked(logits, allowed), np.where(allowed, logits, -INF))
    whole_words = np.repeat(rng.random(vocab_size // 32 + 1) < 0.5, 32)[:vocab_size]
    np.testing.assert_array_equal(native.masked(logits, whole_words), np.where(whole_words, logits, -INF))


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 0.3), (1.1, -0.5, 0.25), (0.8, 1.5, -2.0)],
)
def test_penalties_equal_the_torch_reference_exactly(
    native: Native, repetition: float, presence: float, frequency: float
) -> None:
    rng = np.random.default_rng(1)
    for vocab_size, num_ids, num_prompt in [(7, 0, 0), (7, 30, 12), (7, 30, 30), (1000, 400, 0), (32003, 3000, 1700)]:
        logits = logits_row(vocab_size, num_ids)
        logits[rng.integers(vocab_size)] = -INF
        # A few of them are outside of the vocabulary.
        ids = rng.integers(-2, vocab_size + 3, num_ids).astype(np.int32)
        expected = torch.from_numpy(logits.copy())
        arguments = (float32(repetition), float32(presence), float32(frequency))
        penalize(expected, torch.from_numpy(ids), num_prompt, *arguments)
        np.testing.assert_array_equal(native.penalized(logits, ids, num_prompt, *arguments), expected.numpy())
