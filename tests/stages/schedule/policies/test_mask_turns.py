"""Rows whose grammar masks are slow run in turns, and hold up the others for a tenth of the time at most."""

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.schedule.policies.mask_turns import LATELY_S, SHARE
from pipeline.stages.schedule.row_flags import RowFlag
from tests.stages.schedule.bench import Bench, config

MASK_S = 0.2
STEP_S = 0.02
LONG = 200


class Masks:
    """A bench whose rows with the grammar "slow" have masks of MASK_S, which all rows of their step await."""

    def __init__(self, depth: int = 1, *, mask_s: float = MASK_S, num_blocks: int = 400) -> None:
        self.bench = Bench(config(num_blocks=num_blocks, max_num_seqs=80), depth)
        self.bench.plans_early = True
        self.mask_s = mask_s
        self.now_s = 100.0
        self.waited_s = 0.0
        self.most_together = 0
        self.sampled: list[int] = []
        """Of each step, the rows."""
        run = self.bench.executor.run

        def computed(step: m.Step) -> m.StepResult:
            rows = self.bench.executor.rows
            result = run(step)
            assert isinstance(result.rows, bytes)
            sampled = np.frombuffer(result.rows, np.int32).tolist()
            slow = [row for row in sampled if rows[row].options.compiled_grammar == "slow"] if self.mask_s else []
            self.waited_s += self.mask_s * len(slow)
            self.most_together = max(self.most_together, len(slow))
            self.now_s += STEP_S + self.mask_s * len(slow)
            self.sampled.append(len(sampled))
            return msgspec.structs.replace(result, slow_rows=slow, slow_s=[self.mask_s] * len(slow))

        self.bench.executor.run = computed  # type: ignore[method-assign]

    def steps(self, num: int) -> None:
        bench = self.bench
        for _ in range(num):
            bench.scheduler.now_s = self.now_s
            bench.fill()
            bench.answer()
            bench.report()
            bench.check()

    def admit(self, grammar: str = "", scope: str = "", max_tokens: int = LONG) -> int:
        prompt = np.random.default_rng(self.bench.scheduler.num_running).integers(0, 900, 5).tolist()
        return self.bench.admit(prompt, max_tokens, scope_id=scope, compiled_grammar=grammar)

    @property
    def num_paced(self) -> int:
        rows = self.bench.scheduler.rows
        return int(rows.have(RowFlag.PACED, rows.order).sum())

    def num_output(self, request_id: int) -> int:
        (sequence,) = self.bench.scheduler.requests[request_id].open_sequences.values()
        return int(self.bench.scheduler.rows.num_tokens[sequence.row]) - 5


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_masks_take_a_tenth_of_the_time_from_others(depth: int) -> None:
    masks = Masks(depth)
    other = masks.admit()
    slow = [masks.admit("slow") for _ in range(4)]
    masks.steps(5)
    assert masks.num_paced == 4
    began_s, waited_s, known = masks.now_s, masks.waited_s, masks.num_output(other)
    masks.most_together = 0
    masks.steps(150)
    assert masks.waited_s - waited_s <= (masks.now_s - began_s) * SHARE + MASK_S
    assert masks.most_together <= 1
    assert masks.num_output(other) - known >= 149, "it runs in each step"
    assert max(map(masks.num_output, slow)) - min(map(masks.num_output, slow)) <= 1, "each has its turns"


def test_requests_of_few_tokens_gain_nothing() -> None:
    """Each has one slow mask before it is known: a new one of the same key has to wait from its begin."""
    masks = Masks()
    masks.admit()
    began_s = masks.now_s
    for _ in range(60):
        masks.admit("slow", "a", max_tokens=2)
        masks.steps(3)
    assert masks.waited_s <= (masks.now_s - began_s) * SHARE + 3 * MASK_S
    quick = masks.admit("quick", "b")
    masks.steps(10)
    assert masks.num_output(quick) >= 8, "another key's have no slow masks"


def test_a_row_whose_masks_are_quick_again_is_as_others() -> None:
    masks = Masks()
    masks.admit()
    slow = masks.admit("slow", "a")
    masks.steps(6)
    masks.mask_s = 0.0
    masks.now_s += LATELY_S
    masks.steps(20)
    assert masks.num_paced == 0
    known = masks.num_output(slow)
    masks.steps(10)
    assert masks.num_output(slow) - known >= 9
    masks.admit("quick", "a")
    masks.steps(2)
    assert masks.num_paced == 0


def test_without_others_one_runs_in_each_step() -> None:
    masks = Masks()
    slow = [masks.admit("slow") for _ in range(3)]
    masks.steps(4)
    masks.most_together, num_steps = 0, len(masks.sampled)
    masks.steps(30)
    assert masks.most_together == 1 and masks.sampled[num_steps:] == [1] * (len(masks.sampled) - num_steps)
    assert max(map(masks.num_output, slow)) - min(map(masks.num_output, slow)) <= 1


def test_all_end_with_their_output_also_if_blocks_run_out() -> None:
    masks = Masks(2, num_blocks=12)
    for grammar in ("", "slow", "slow", "", "slow", "", "slow"):
        masks.admit(grammar, max_tokens=70)
    for _ in range(3000):
        masks.steps(1)
        if masks.bench.scheduler.lifecycle.is_idle:
            break
    assert len(masks.bench.finished) == 7
    assert masks.bench.scheduler.load().num_preemptions
    masks.bench.check_outputs()


def test_paced_rows_leave_rows_to_others() -> None:
    """They run in turns, so many of them get no further than a few: rows that they held would only be kept from
    others."""
    masks = Masks()
    for index in range(100):
        masks.admit("slow", f"attacker {index % 3}", max_tokens=120)
    masks.steps(40)
    other = masks.admit("", "other")
    masks.steps(25)
    assert masks.num_output(other) >= 18
    assert 8 <= masks.num_paced <= 24


def test_paced_rows_leave_blocks_to_others() -> None:
    masks = Masks(num_blocks=64)
    for index in range(12):
        masks.bench.admit(range(70), 60, scope_id=f"attacker {index % 3}", compiled_grammar="slow", salt=f"{index}")
    masks.steps(20)
    other = masks.bench.admit(range(200), 50, scope_id="other")
    masks.steps(40)
    (sequence,) = masks.bench.scheduler.requests[other].open_sequences.values()
    assert sequence.row >= 0 and masks.bench.scheduler.rows.num_tokens[sequence.row] > 210


def test_a_key_leaves_places_of_slow_masks_to_others() -> None:
    masks = Masks()
    for _ in range(60):
        masks.admit("slow", "attacker")
    masks.steps(100)
    slow = masks.admit("slow", "other")
    masks.steps(20)
    assert masks.num_output(slow) >= 2


def test_what_waits_for_a_place_ends_too() -> None:
    masks = Masks(2, num_blocks=60)
    num = 0
    for _ in range(6):
        for index in range(12):
            masks.admit("slow" if index % 3 else "", f"{index % 4}", max_tokens=12)
            num += 1
        masks.steps(30)
    for _ in range(6000):
        masks.steps(1)
        if masks.bench.scheduler.lifecycle.is_idle:
            break
    assert len(masks.bench.finished) == num
    masks.bench.check_outputs()
