"""Our logits equal those of transformers, for any split of a sequence into steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stages.execute import checkpoints
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.exactness.step_cases import StepCases, compute_in_chunks
from tests.stages.execute.native_driver import random_ids

MAX_ERROR = 1e-4


class Checked:
    """A driver that keeps all logits, to compare them with the reference."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        self.driver = Driver(folder, settings())
        self._model = model
        self._expected: dict[tuple[int, ...], np.ndarray] = {}
        self._made: list[tuple[tuple[int, ...], np.ndarray]] = []

    def clear(self) -> None:
        self.driver.clear()
        self._made = []

    def step(self, entries: list[tuple[int, int, int, bool]], adds: Sequence[Any] = ()) -> None:
        self.driver.step(entries, adds=adds)
        table = self.driver.runner.rows
        sampling = [entry for entry in entries if entry[3]]
        for (row, start, count, _), logits in zip(sampling, self.driver.logits(), strict=True):
            self._made.append((tuple(table.ids[row, : start + count].tolist()), logits))

    def compare(self) -> int:
        """Compare all kept logits. Returns how many rows that were."""
        # The longest first: the reference computes the logits of all its prefixes with it.
        for ids, logits in sorted(self._made, key=lambda made: -len(made[0])):
            np.testing.assert_allclose(logits, self.reference(ids), rtol=0, atol=MAX_ERROR)
        return len(self._made)

    def reference(self, ids: tuple[int, ...]) -> np.ndarray:
        """The logits after `ids`: [vocab_size]."""
        if ids not in self._expected:
            for end, row in enumerate(checkpoints.reference_logits(self._model, list(ids)).numpy(), 1):
                self._expected[ids[:end]] = row
        return self._expected[ids]


@pytest.fixture(scope="module", params=checkpoints.VARIANTS.values(), ids=[*checkpoints.VARIANTS])
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder = tmp_path_factory.mktemp("checkpoint")
    return Checked(folder, checkpoints.write(folder, checkpoints.config_of(**request.param)))


@pytest.fixture
def model(checked: Checked) -> Checked:
    checked.clear()
    return checked


def test_logits_of_random_models_differ_enough_to_detect_errors(model: Checked) -> None:
    assert model.reference(tuple(random_ids(60, 0))).std() > 100 * MAX_ERROR


class TestSteps(StepCases):
    pass


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_prompt_in_chunks(model: Checked, chunk: int) -> None:
    compute_in_chunks(model, chunk)


def test_rows_of_all_kinds_in_one_step(model: Checked) -> None:
    lengths = [40, 3, 17, 64, 30]
    adds = [row_add(row, random_ids(num, row), model.driver.take_blocks(90)) for row, num in enumerate(lengths)]
    model.step([(0, 0, 40, True), (1, 0, 3, True), (2, 0, 9, False)], adds)
    model.step([(1, 3, 1, True), (0, 40, 1, True), (2, 9, 8, True), (3, 0, 50, False), (4, 0, 30, True)])
    model.step([(4, 30, 1, True), (0, 41, 1, True), (2, 17, 1, True), (1, 4, 1, True), (3, 50, 14, True)])
    for step in range(12):
        model.step([(row, num + step + (row in (0, 1)) + (row in (0, 1, 2, 4)), 1, True) for row, num in
                    enumerate(lengths)])  # fmt: skip
    assert model.compare() == 2 + 4 + 5 + 12 * 5
