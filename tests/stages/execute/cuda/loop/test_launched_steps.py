"""Changes of rows while steps that compute them are in flight."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.runtime import messages as m
from pipeline.stages.execute.pooling.pool import Pool
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import i32, make_step, row_add, take

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter


@pytest.fixture(scope="module")
def driver(slight_dir: Path) -> CudaDriver:
    return CudaDriver(slight_dir, on_device())


class RecordedMasks:
    """Replaces `Runner.masks`: allows everything, and records the requests."""

    def __init__(self, runner: Any) -> None:
        self.words = np.full_like(runner.masks.words, 0xFFFF_FFFF)
        self.requests: list[dict[int, list[int]]] = []
        """For each step, all ids of each row"""

    def add(self, row: int, options: m.GenerationOptions, num_prompt: int) -> None:
        pass

    def drop(self, rows: Any) -> None:
        pass

    def request(self, rows: Any, ids: Any, num_ids: Any, num_drafts: Any = None) -> Any:
        self.requests.append({row: ids[row, : num_ids[row]].tolist() for row in rows.tolist() if row >= 0})
        return np.flatnonzero(rows >= 0)

    def is_done(self) -> bool:
        return True

    def take_failed(self) -> dict[int, str]:
        return {}


def test_a_pooled_row_that_is_dropped_still_returns_its_record(driver: CudaDriver) -> None:
    """The scheduler splits the records of a step by its plan."""
    driver.clear()
    runner = driver.runner
    options = [m.GenerationOptions(pooling=m.Pooling.MEAN), m.GenerationOptions(pooling=m.Pooling.LAST)]
    adds = [row_add(row, [5, 9, 7], [row], one) for row, one in enumerate(options)]
    runner.launch(make_step([(0, 0, 3, True), (1, 0, 3, True)], adds=adds), take)
    runner.launch(make_step(drops=[0]), take)
    first, _ = runner.drain()
    token_outputs = first.token_outputs.reshape(2, 4 * runner.facts.hidden_size)
    assert not token_outputs[0].any() and token_outputs[1].any()


def test_an_embedding_that_is_not_finite_fails_its_row(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.clear()
    runner, take_embedding = driver.runner, Pool.take

    def overflowing(pool: Pool, row: int, *args: Any) -> FloatArray:
        return take_embedding(pool, row, *args) * np.float32(np.nan if row == 0 else 1)

    monkeypatch.setattr(Pool, "take", overflowing)
    adds = [row_add(row, [5, 9, 7], [row], m.GenerationOptions(pooling=m.Pooling.MEAN)) for row in (0, 1)]
    runner.launch(make_step([(0, 0, 3, True), (1, 0, 3, True)], adds=adds), take)
    (result,) = runner.drain()
    assert result.errors == (m.NAN_LOGITS,) and result.finishes.tolist() == [m.Finish.ERROR, m.Finish.NONE]
    assert len(result.token_outputs) == 4 * runner.facts.hidden_size and result.token_outputs.any()


def test_masks_are_requested_only_for_running_rows_with_all_their_ids(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that has ended in flight needs none: its grammar is complete, or ended it."""
    driver.clear()
    runner = driver.runner
    masks = RecordedMasks(runner)
    monkeypatch.setattr(runner, "masks", masks)
    monkeypatch.setattr(runner._changes, "_masks", masks)
    ends = m.GenerationOptions(compiled_grammar="a", allowed_ids=i32([9]), stop_token_ids=[9])
    goes_on = m.GenerationOptions(compiled_grammar="a", temperature=0.0, ignore_eos=True)
    adds = [row_add(0, [5, 9, 7], [0], ends), row_add(1, [5, 9], [1], goes_on)]
    runner.launch(make_step([(0, 0, 3, True), (1, 0, 2, True)], adds=adds), take)
    runner.launch(make_step([(0, 3, 1, True), (1, 2, 1, True)]), take)
    last = runner.drain()[-1]
    assert masks.requests[0] == {0: [5, 9, 7], 1: [5, 9]}
    assert list(masks.requests[1]) == [1] and len(masks.requests[1][1]) == 3
    assert last.ids[0] == -1 and last.ids[1] >= 0 and last.errors == ()
