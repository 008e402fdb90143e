"""Steps for an executor whose stages compute several steps at once."""

import numpy as np
import pytest

from pipeline.runtime import messages as m
from tests.fakes import inline
from tests.stages.schedule.bench import Bench, config


def entries(step: m.Step) -> list[tuple[int, int, bool]]:
    """Row, number of tokens, and whether it samples."""
    rows, counts = (np.frombuffer(inline(array), np.int32).tolist() for array in (step.rows, step.counts))
    return list(zip(rows, counts, np.frombuffer(inline(step.samples), np.bool_).tolist(), strict=True))


def sampled(step: m.Step) -> set[int]:
    return {row for row, _, samples in entries(step) if samples}


def run(bench: Bench) -> list[m.Step]:
    """All steps until the server is idle. No row of a step is sampled by the ones in flight before it, of which there
    may be one less than stages."""
    taken: list[m.Step] = []
    take, num_before = bench.front.take, bench.scheduler.config.num_stages - 1

    def checked(step: m.Step) -> None:
        for before in list(bench.steps)[-num_before:]:
            assert not {row for row, *_ in entries(step)} & sampled(before), "a stage lacks an id"
        taken.append(step)
        take(step)

    bench.front.take = checked  # type: ignore[method-assign]
    bench.run()
    bench.check_outputs()
    assert len(bench.finished) == len(bench.opened)
    return taken


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("plans_early", [False, True])
def test_no_row_is_in_two_steps_at_once(num_stages: int, plans_early: bool) -> None:
    num_rows = 7
    bench = Bench(config(num_blocks=64, max_num_seqs=8, num_stages=num_stages), depth=1)
    bench.plans_early = plans_early
    for i in range(num_rows):
        bench.admit([i, 1, 2], max_tokens=40, seed=i)
    steps = run(bench)
    assert (bench.num_early_plans > 0) == plans_early
    assert max(len(sampled(step)) for step in steps if not step.adds) == -(-num_rows // num_stages)
    # All stages have something to do, nearly always.
    assert len(steps) <= 40 * num_stages + num_rows


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_row_that_decodes_alone_is_in_every_step(num_stages: int) -> None:
    bench = Bench(config(num_blocks=64, num_stages=num_stages), depth=1)
    bench.admit([1, 2, 3], max_tokens=20)
    assert len(run(bench)) == 20


def test_chunks_of_a_prompt_follow_each_other() -> None:
    bench = Bench(config(num_blocks=64, max_model_len=512, max_num_batched_tokens=32, num_stages=3), depth=1)
    bench.admit(range(200), max_tokens=1)
    bench.fill()
    assert [entries(step) for step in bench.steps] == [[(0, 32, False)]] * 3
    run(bench)


def test_more_steps_in_flight_than_stages_are_planned_by_the_same_rule() -> None:
    bench = Bench(config(num_blocks=64, max_num_seqs=8, num_stages=2), depth=4)
    for i in range(6):
        bench.admit([i, 1, 2], max_tokens=30, seed=i)
    run(bench)
