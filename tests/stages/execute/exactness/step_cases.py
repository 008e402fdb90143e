"""Tests of every program that computes logits: they are those of the reference, however a sequence is divided into
steps. A file of tests inherits them with a fixture `model`."""

from collections.abc import Sequence
from typing import Any, Protocol

from tests.stages.execute.driver import Driver, row_add
from tests.stages.execute.native_driver import random_ids


class Checked(Protocol):
    """Keeps all logits, to compare them with the reference."""

    @property
    def driver(self) -> Driver: ...

    def step(self, entries: list[tuple[int, int, int, bool]], adds: Sequence[Any] = ()) -> None:
        """Compute (row, start, count, is sampled) of each row."""

    def compare(self) -> int:
        """Compare all kept logits. Returns how many rows that were."""


def compute_in_chunks(model: Checked, chunk: int) -> None:
    """A prompt in chunks of this size, then a token."""
    ids = random_ids(50, 2)
    adds = [row_add(0, ids, model.driver.take_blocks(64))]
    for start in range(0, 50, chunk):
        count = min(chunk, 50 - start)
        model.step([(0, start, count, start + count == 50)], adds)
        adds = []
    model.step([(0, 50, 1, True)])
    assert model.compare() == 2


class StepCases:
    def test_a_prompt_at_once_then_token_by_token(self, model: Checked) -> None:
        ids = random_ids(60, 1)
        model.step([(0, 0, 60, True)], [row_add(0, ids, model.driver.take_blocks(80))])
        for position in range(60, 75):
            model.step([(0, position, 1, True)])
        assert model.compare() == 16

    def test_a_row_with_a_prefix_from_an_earlier_step(self, model: Checked) -> None:
        prefix = random_ids(48, 3)
        blocks = model.driver.take_blocks(48)
        model.step([(0, 0, 48, True)], [row_add(0, prefix, blocks)])
        adds = [
            row_add(1, prefix + random_ids(9, 4), blocks + model.driver.take_blocks(16)),
            row_add(2, prefix[:32] + random_ids(30, 5), blocks[:2] + model.driver.take_blocks(32)),
            row_add(3, prefix, [*blocks[:2], *model.driver.take_blocks(16)]),
        ]
        model.step([(1, 48, 9, True), (2, 32, 30, True), (3, 32, 16, True)], adds)
        assert model.compare() == 4

    def test_a_row_with_a_prefix_from_the_same_step(self, model: Checked) -> None:
        prefix = random_ids(32, 6)
        blocks = model.driver.take_blocks(32)
        adds = [
            row_add(0, prefix + random_ids(5, 7), blocks + model.driver.take_blocks(16)),
            row_add(1, prefix + random_ids(20, 8), blocks + model.driver.take_blocks(32)),
            row_add(2, [*prefix, 44], blocks + model.driver.take_blocks(16)),
        ]
        # The row that computes the prefix comes last: order within a step must not matter.
        model.step([(2, 32, 1, True), (1, 32, 20, True), (0, 0, 37, True)], adds)
        assert model.compare() == 3

    def test_reused_blocks_of_another_sequence(self, model: Checked) -> None:
        blocks = model.driver.take_blocks(64)
        model.step([(0, 0, 60, True)], [row_add(0, random_ids(60, 9), blocks)])
        model.driver.step(drops=[0])
        model.step([(0, 0, 20, True)], [row_add(0, random_ids(20, 10), blocks[::-1])])
        for position in range(20, 36):
            model.step([(0, position, 1, True)])
        assert model.compare() == 18
