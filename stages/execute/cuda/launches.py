"""The kernels of steps, each with its own time on the GPU, by torch's profiler.

It sees what is replayed from graphs, as it is when serving; events around launches would time the host, for most of a
step's kernels take less time than their launch. A process that was profiled is slower for the rest of its life, so
whatever else is measured comes first. Where a kernel may start before the one before it has ended, the time that it
waits is in its own: the sum is then above the step's time.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NAME_LENGTH = 40
"""Of a kernel's name: cuBLAS's are long."""

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one kernel with one grid, in a step. Launches of one kernel are told apart by their grid, as those of a
    layer's products have to be."""

    kernel: str
    grid: tuple[int, ...]
    num: float
    total_us: float


def traced(run: Callable[[], object], num_steps: int) -> list[Launches]:
    """What `run`, which computes so many steps and waits for them, launches in one of them; the longest first. Nothing
    where kernels are interpreted."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CUDA] if torch.cuda.is_available() else [activity.CPU]
    with torch.profiler.profile(activities=wanted) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="pipeline-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return launches_of(json.loads(path.read_text())["traceEvents"], num_steps)


def launches_of(events: Sequence[dict[str, Any]], num_steps: int) -> list[Launches]:
    """From a trace as Chrome takes it, times in microseconds."""
    num: Counter[tuple[str, tuple[int, ...]]] = Counter()
    total_us: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for event in events:
        if event.get("cat") not in KINDS:
            continue
        key = str(event["name"])[:NAME_LENGTH], tuple(event.get("args", {}).get("grid", ()))
        num[key] += 1
        total_us[key] += event["dur"]
    return [Launches(*key, num[key] / num_steps, us / num_steps) for key, us in total_us.most_common()]
