"""Runs of a scheduler with its fake executor that count what is computed."""

import numpy as np

from tests.fakes import inline
from tests.stages.schedule.bench import Bench


def num_computed(bench: Bench) -> int:
    """Run until idle and check all ids. Returns how many positions were computed."""
    num_positions = 0
    while not bench.scheduler.lifecycle.is_idle:
        bench.fill()
        num_positions += int(np.frombuffer(inline(bench.steps[0].counts), np.int32).sum())
        bench.answer()
        bench.report()
        bench.check()
    bench.check_outputs()
    return num_positions
