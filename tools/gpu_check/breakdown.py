"""Where the time of a step that decodes goes: its kernels, each with its own time on the GPU, by torch's profiler.

A process that was profiled is slower for the rest of its life, so nothing else is measured here. Launches of one kernel
are told apart by their grid, as those of a layer's products have to be.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.gpu_check.child import Context, Item
from tools.gpu_check.readings import Reading
from tools.gpu_check.speed import MODELS, Model, Rows, stand_in, started

NUM_STEPS = 6
NUM_TOLD = 8
"""Kernels in the note; all are in the JSON."""
NAME_LENGTH = 40
"""Of a kernel's name: cuBLAS's are long."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one kernel with one grid, in a step."""

    kernel: str
    grid: tuple[int, ...]
    num: float
    total_us: float


def items(context: Context) -> list[Item]:
    return [Item(f"kernels of a step, {model.name}", partial(_model, model=model), 8, 60) for model in MODELS]


def _model(context: Context, model: Model) -> Iterator[Reading]:
    model = stand_in(context, model)
    num_steps = 4 * NUM_STEPS
    with started(model, num_steps, model.context + num_steps + 2) as runner:
        for target in model.targets:
            rows = Rows(runner, model.config, target.batch, model.context, num_steps)
            rows.prefill()
            rows.decode(NUM_STEPS, 2)
            yield _reading(f"{model.name}, batch {target.batch}: kernels of a step", _profile(rows))
            rows.drop()


def _profile(rows: Rows) -> list[Launches]:
    """Of a step, the longest first."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CUDA] if torch.cuda.is_available() else [activity.CPU]
    with torch.profiler.profile(activities=wanted) as profiler:
        rows.decode(NUM_STEPS, 2)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return launches_of(json.loads(path.read_text())["traceEvents"], NUM_STEPS)


def launches_of(events: Sequence[dict[str, Any]], num_steps: int) -> list[Launches]:
    """From a trace as Chrome takes it, times in microseconds."""
    num: Counter[tuple[str, tuple[int, ...]]] = Counter()
    total_us: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        key = str(event["name"])[:NAME_LENGTH], tuple(event.get("args", {}).get("grid", ()))
        num[key] += 1
        total_us[key] += event["dur"]
    return [Launches(*key, num[key] / num_steps, us / num_steps) for key, us in total_us.most_common()]


def _reading(case: str, launches: Sequence[Launches]) -> Reading:
    total_us = sum(each.total_us for each in launches)
    parts = [
        f"{each.kernel}{list(each.grid)} {each.num:g} × {each.total_us / each.num:.1f} ({each.total_us / total_us:.0%})"
        for each in launches[:NUM_TOLD]
    ]
    numbers = {"launches": [[each.kernel, list(each.grid), each.num, each.total_us] for each in launches]}
    note = f"{sum(each.num for each in launches):g} launches; " + "; ".join(parts)
    return Reading(case, total_us, "µs", less_is_better=True, note=note, numbers=numbers)
