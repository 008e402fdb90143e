"""The kernels of a decode step, each with its GPU time, from torch's profiler.

Profiling slows a process down for good, so this section measures nothing else.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from pipeline.stages.execute.cuda.measuring.launches import Launches, traced
from tools.gpu_check.child import Context, Item
from tools.gpu_check.readings import Reading
from tools.gpu_check.speed.steps import MODELS, Model, SpeedRows, stand_in, started

NUM_STEPS = 6
NUM_IN_NOTE = 8
"""Kernels in the note. The JSON has all of them."""


def items(context: Context) -> list[Item]:
    return [Item(f"kernels of a step, {model.name}", partial(_model, model=model), 8, 60) for model in MODELS]


def _model(context: Context, model: Model) -> Iterator[Reading]:
    model = stand_in(context, model)
    num_steps = 4 * NUM_STEPS
    with started(model, num_steps, model.context + num_steps + 2) as runner:
        for target in model.targets:
            rows = SpeedRows(runner, model.config, target.batch, model.context, num_steps)
            rows.prefill()
            rows.decode(NUM_STEPS, 2)
            yield _reading(f"{model.name}, batch {target.batch}: kernels of a step", _profile(rows))
            rows.drop()


def _profile(rows: SpeedRows) -> list[Launches]:
    """The launches of a step, the longest first."""
    return traced(lambda: rows.decode(NUM_STEPS, 2), NUM_STEPS)


def _reading(case: str, launches: Sequence[Launches]) -> Reading:
    total_us = sum(each.total_us for each in launches)
    parts = [
        f"{each.kernel}{list(each.grid)} {each.num:g} × {each.total_us / each.num:.1f} ({each.total_us / total_us:.0%})"
        for each in launches[:NUM_IN_NOTE]
    ]
    numbers = {"launches": [[each.kernel, list(each.grid), each.num, each.total_us] for each in launches]}
    note = f"{sum(each.num for each in launches):g} launches; " + "; ".join(parts)
    return Reading(case, total_us, "µs", less_is_better=True, note=note, numbers=numbers)
