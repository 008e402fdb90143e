"""Logprob records contain what a sort of the whole vocabulary finds, in the library for every instruction set and in
torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as fuzz
from hypothesis import settings
from hypothesis import strategies as st

from pipeline.kernels.sampling.logprob_inputs import LogprobInputs
from pipeline.kernels.sampling.logprobs import write_logprobs
from pipeline.runtime.token_outputs import logprob_dtype
from tests.kernels.cpu.samplers import ISAS, Rows, load
from tests.slices import part_of

INF = float("inf")
Record = Callable[..., bytes]


@pytest.fixture(scope="session", params=["torch", *ISAS])
def logprobs(request: pytest.FixtureRequest, sampler_cache: Path) -> Record:
    if request.param == "torch":
        return in_torch
    return Rows(load(request.param, sampler_cache)).logprobs


def in_torch(logits: np.ndarray, token: int, num_top: int, given: np.ndarray | None = None) -> bytes:
    """The second row of three; its neighbours request other logprobs."""
    token_outputs = LogprobInputs(8)
    addresses = np.array([0, 0 if given is None else given.ctypes.data, 0], np.uint64)
    token_outputs.lay_out(np.array([1, num_top, -1], np.int32), addresses)
    rows = torch.from_numpy(np.stack([logits[::-1], logits, logits]).astype(np.float32))
    write_logprobs(rows, np.array([0, token, 0], np.int32), token_outputs)
    return token_outputs.memory[12:].tobytes()


def expected(logits: np.ndarray, token: int, num_top: int) -> Any:
    clean = np.where(np.isnan(logits), -INF, logits).astype(np.float64)
    top = clean.max()
    if np.isfinite(top):
        logprobs = clean - top - np.log(np.exp(clean - top).sum())
    else:
        logprobs = np.where(clean == top, 0, -INF)
    with np.errstate(over="ignore"):
        logprobs = logprobs.astype(np.float32)
    order = np.lexsort((np.arange(len(clean)), -clean))[:num_top]
    result = np.zeros((), logprob_dtype(num_top))
    result["logprob"], result["top_ids"], result["top_logprobs"] = logprobs[token], -1, -INF
    result["top_ids"][: len(order)], result["top_logprobs"][: len(order)] = order, logprobs[order]
    return result


def check(logprobs: Record, logits: np.ndarray, token: int, num_top: int) -> None:
    logits = logits.astype(np.float32)
    found = np.frombuffer(logprobs(logits, token, num_top), logprob_dtype(num_top))[0]
    reference = expected(logits, token, num_top)
    np.testing.assert_array_equal(found["top_ids"], reference["top_ids"])
    for name in ("logprob", "top_logprobs"):
        np.testing.assert_allclose(found[name], reference[name], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [1, 7, 63, 64, 65, 2048, 32003, 49152])
@pytest.mark.parametrize("values", ["distinct", "ties", "equal", "most impossible"])
def test_the_most_likely_ids_are_those_of_a_sort(logprobs: Record, vocab_size: int, values: str) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 3, vocab_size)
    if values == "ties":
        logits = np.round(logits)
    elif values == "equal":
        logits[:] = -3.5
    elif values == "most impossible":
        logits[rng.random(vocab_size) < 0.99] = -INF
        logits[vocab_size // 2] = 1
    for num_top in (0, 1, 2, 5, 20, 100, 1024):
        check(logprobs, logits, int(rng.integers(vocab_size)), num_top)
    if vocab_size <= 2048:
        check(logprobs, logits, 0, vocab_size)


@pytest.mark.parametrize("vocab_size", [1, 65, 2048])
@pytest.mark.parametrize("num_given", [1, 2, 128])
def test_given_ids_replace_the_most_likely_ones(logprobs: Record, vocab_size: int, num_given: int) -> None:
    """In the given order, also if more are given than the vocabulary has ids."""
    rng = np.random.default_rng(num_given)
    logits = rng.normal(0, 3, vocab_size).astype(np.float32)
    logits[rng.random(vocab_size) < 0.1] = -INF
    given = rng.integers(0, vocab_size, num_given).astype(np.int32)
    token = int(rng.integers(vocab_size))
    found = np.frombuffer(logprobs(logits, token, num_given, given), logprob_dtype(num_given))[0]
    reference = expected(logits, token, vocab_size)
    of_id = dict(zip(reference["top_ids"].tolist(), reference["top_logprobs"].tolist(), strict=True))
    assert found["top_ids"].tolist() == given.tolist()
    np.testing.assert_allclose(found["top_logprobs"], [of_id[one] for one in given.tolist()], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(found["logprob"], reference["logprob"], rtol=1e-6, atol=2e-6)


LOGIT = st.one_of(
    st.sampled_from([-INF, float("nan"), 0.0, -0.0, 1.0, 1.5, -2.0, 1e-45, 3e38, -3e38, -3.4028235e38]),
    st.floats(-50, 50, width=32),
)


@settings(max_examples=part_of(200, 50), deadline=None)
@fuzz(st.lists(LOGIT | st.just(INF), min_size=1, max_size=90), st.integers(1, 9), st.integers(0, 1000), st.data())
def test_any_logits_have_logprobs_that_are_never_nan(
    logprobs: Record, values: list[float], times: int, num_top: int, data: st.DataObject
) -> None:
    logits = np.tile(np.array(values, np.float32), times)
    check(logprobs, logits, data.draw(st.integers(0, len(logits) - 1)), num_top)


def test_all_instruction_sets_return_the_same_bits(sampler_cache: Path) -> None:
    libraries = [Rows(load(isa, sampler_cache)) for isa in ISAS]
    for vocab_size in (7, 2048, 49152):
        logits = np.random.default_rng(vocab_size).normal(0, 4, vocab_size).astype(np.float32)
        token_outputs = {rows.logprobs(logits, vocab_size // 2, 20) for rows in libraries}
        assert len(token_outputs) == 1
