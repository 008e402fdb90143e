"""Records with given ids contain the log probabilities of these ids, in their order, and change nothing else."""

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

GIVEN = [[7, 3, checkpoints.VOCAB_SIZE - 1, 3], [], [5], list(range(100, 228))]
NUM_TOP = [4, 2, 1, 128]
"""Logprobs in the records of each row; the second row has the most likely ids."""


@pytest.fixture(scope="module", params=["torch", *ISAS])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    if request.param == "torch":
        checkpoints.write(folder, checkpoints.config_of())
        made = Driver(folder, settings(max_num_seqs=16))
    else:
        write(folder, checkpoints.config_of())
        made = Native(folder, request.param)
    yield made
    made.runner.close()


def test_they_are_the_log_softmax_of_these_ids(driver: Driver) -> None:
    """One of the rows has logits processors, so that its logits are no longer the model's when the id is sampled."""
    driver.clear()
    adds = []
    for row, (given, num) in enumerate(zip(GIVEN, NUM_TOP, strict=True)):
        bias: dict[str, Any] = {"bias_ids": [7], "bias_values": [50.0]} if row == 0 else {}
        options = m.GenerationOptions(
            temperature=0.0, ignore_eos=True, num_logprobs=num, logprob_token_ids=given, **bias
        )
        adds.append(row_add(row, random_ids(5, row), driver.take_blocks(64), options))
    sampled = driver.step([(row, 0, 5, True) for row in range(len(GIVEN))], adds=adds)
    assert sampled.ids[0] == 7
    plain = [row_add(row, random_ids(5, row), driver.take_blocks(64)) for row in range(len(GIVEN))]
    driver.clear()
    driver.step([(row, 0, 5, True) for row in range(len(GIVEN))], adds=plain)
    exact = log_softmax(torch.from_numpy(driver.logits())).numpy()
    begin = 0
    for row, (given, num) in enumerate(zip(GIVEN, NUM_TOP, strict=True)):
        dtype = logprob_dtype(num)
        (record,) = sampled.token_outputs[begin : begin + dtype.itemsize].view(dtype)
        begin += dtype.itemsize
        ids = given or np.argsort(-exact[row], kind="stable")[:num].tolist()
        assert record["top_ids"].tolist() == ids
        np.testing.assert_allclose(record["top_logprobs"], exact[row, ids], rtol=0, atol=3e-6)
        np.testing.assert_allclose(record["logprob"], exact[row, sampled.ids[row]], rtol=0, atol=3e-6)
    assert begin == len(sampled.token_outputs)


def test_ids_outside_of_the_vocabulary_fail_an_assertion(driver: Driver) -> None:
    """Ingest rejects them, because the sampler reads logits at these indexes."""
    driver.clear()
    options = m.GenerationOptions(num_logprobs=1, logprob_token_ids=[checkpoints.VOCAB_SIZE])
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        driver.step([(0, 0, 5, True)], adds=[row_add(0, random_ids(5, 0), driver.take_blocks(64), options)])
