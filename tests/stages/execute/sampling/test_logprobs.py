"""Log probabilities of sampled ids use the model's own distribution, and requesting them changes nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.kernels.sampling.logprobs import log_softmax
from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_dtype
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write

GREEDY = m.GenerationOptions(temperature=0.0, ignore_eos=True)
OPTIONS = [
    GREEDY,
    m.GenerationOptions(temperature=1.3, seed=5, ignore_eos=True),
    m.GenerationOptions(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, seed=2**64 - 1, ignore_eos=True),
    m.GenerationOptions(temperature=2.0, top_p=0.5, seed=11, ignore_eos=True),
]
NUM_STEPS = 12


@pytest.fixture(scope="module", params=["torch", *ISAS])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    if request.param == "torch":
        checkpoints.write(folder, checkpoints.config_of())
        made = Driver(folder, settings(max_num_seqs=16))
    else:
        write(folder, checkpoints.config_of())
        made = Native(folder, request.param, keep_logits=False)
    yield made
    made.runner.close()


def with_logprobs(options: m.GenerationOptions) -> m.GenerationOptions:
    return m.GenerationOptions(
        **{name: getattr(options, name) for name in m.GenerationOptions.__struct_fields__} | {"num_logprobs": 0}
    )


def generate(driver: Driver, options: list[m.GenerationOptions]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """One row for each, with prompts of different lengths. Returns ids [steps, rows], log probabilities [steps, rows
    with logprobs], and the kept logits."""
    driver.clear()
    adds = [row_add(row, random_ids(3 + 3 * row, row), driver.take_blocks(64), one) for row, one in enumerate(options)]
    ids, logprobs, logits = [], [], []
    for step in range(NUM_STEPS):
        starts = [3 + 3 * row for row in range(len(options))]
        entries = [
            (row, start + step - 1, 1, True) if step else (row, 0, start, True) for row, start in enumerate(starts)
        ]
        sampled = driver.step(entries, adds=adds if step == 0 else ())
        ids.append(sampled.ids)
        logprobs.append(sampled.token_outputs.view(logprob_dtype(0))["logprob"])
        logits.append(driver.logits())
    return np.array(ids), np.array(logprobs), logits


def exact(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    wide = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    return wide[np.arange(len(ids)), ids]


def test_they_are_the_log_softmax_of_the_unchanged_logits(driver: Driver) -> None:
    ids, logprobs, logits = generate(driver, [with_logprobs(one) for one in OPTIONS])
    for step in range(NUM_STEPS):
        np.testing.assert_allclose(logprobs[step], exact(logits[step], ids[step]), rtol=0, atol=2e-6)
    assert logprobs.dtype == np.float32 and (logprobs < 0).all()
    assert logprobs.std() > 0.1, "they differ enough for a comparison"


def test_requesting_logprobs_changes_no_id_of_any_row(driver: Driver) -> None:
    """Including greedy rows, which keep no logits if no row requests logprobs."""
    plain = OPTIONS * 2
    ids, logprobs, _ = generate(driver, plain)
    assert logprobs.shape == (NUM_STEPS, 0), "there are logprobs without a request"
    some = [with_logprobs(one) if row % 3 == 0 else one for row, one in enumerate(plain)]
    each = [with_logprobs(one) for one in plain]
    (some_ids, some_logprobs, _), (each_ids, each_logprobs, _) = generate(driver, some), generate(driver, each)
    np.testing.assert_array_equal(some_ids, ids)
    np.testing.assert_array_equal(each_ids, ids)
    has_logprobs = np.arange(len(plain)) % 3 == 0
    np.testing.assert_array_equal(some_logprobs, each_logprobs[:, has_logprobs])


def test_a_step_without_requested_logprobs_returns_none(driver: Driver) -> None:
    generate(driver, [with_logprobs(one) for one in OPTIONS])
    _, logprobs, _ = generate(driver, OPTIONS)
    assert logprobs.shape == (NUM_STEPS, 0)
    assert len(driver.runner.sampling_inputs.logprobs.memory) == 0


def test_an_ended_row_and_a_step_without_samples_have_no_logprobs(driver: Driver) -> None:
    first = int(generate(driver, [GREEDY])[0][0, 0])
    driver.clear()
    stopping = m.GenerationOptions(temperature=0.0, ignore_eos=True, stop_token_ids=[first], num_logprobs=0)
    adds = [
        row_add(row, random_ids(3, 0), driver.take_blocks(16), one)
        for row, one in enumerate((stopping, with_logprobs(GREEDY)))
    ]
    sampled = driver.step([(0, 0, 3, True), (1, 0, 3, True)], adds=adds)
    assert sampled.finishes.tolist() == [m.Finish.STOP, m.Finish.NONE]
    first, second = sampled.token_outputs.view(np.float32)
    assert first == second < 0, "the id that stops counts"
    after = driver.step([(0, 3, 1, True), (1, 3, 1, True)])
    assert after.ids[0] == -1 and len(after.token_outputs) == 4 and after.token_outputs.view(np.float32)[0] < 0
    assert len(driver.step([(0, 4, 1, True)]).token_outputs) == 0
    adds = [row_add(2, random_ids(9, 1), driver.take_blocks(16), with_logprobs(GREEDY))]
    assert len(driver.step([(2, 0, 5, False)], adds=adds).token_outputs) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0, 1e30])
def test_the_torch_function_is_stable(scale: float) -> None:
    logits = (np.random.default_rng(3).standard_normal((20, 77)) * scale).astype(np.float32)
    ids = np.arange(20)
    found = log_softmax(torch.from_numpy(logits)).numpy()[ids, ids]
    np.testing.assert_allclose(found, exact(logits, ids), rtol=1e-6, atol=1e-6)


def test_infinite_logits_never_return_nan() -> None:
    inf = np.inf
    rows: list[Any] = [[inf, 0, inf, 1], [-inf, 0, 0, -inf], [-inf] * 4, [np.nan, 1, -inf, 1]]
    logits = torch.tensor(rows)
    for ids, expected in (([0, 1, 0, 1], [0, -np.log(2), 0, -np.log(2)]), ([1, 0, 3, 2], [-inf, -inf, 0, -inf])):
        np.testing.assert_allclose(log_softmax(logits).numpy()[range(4), ids], expected, rtol=1e-6)
