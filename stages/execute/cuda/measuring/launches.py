"""Times each kernel of a step on the GPU with torch's profiler.

The profiler sees the kernels of replayed graphs. Events around launches would time the host, because most kernels take
less time than their launch. Profiling slows a process permanently, so make other measurements first. With programmatic
dependent launch a kernel's time includes its wait for the previous one, so the sum exceeds the step's time.
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
"""Limit for a kernel's name; cuBLAS's names are long."""

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of one kernel with one grid in a step. The grid distinguishes a layer's matmuls."""

    kernel: str
    grid: tuple[int, ...]
    num: float
    total_us: float


def traced(run: Callable[[], object], num_steps: int) -> list[Launches]:
    """The launches of one step, longest first. `run` computes `num_steps` steps and waits for them. Empty if kernels
    are interpreted."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CUDA] if torch.cuda.is_available() else [activity.CPU]
    with torch.profiler.profile(activities=wanted) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="pipeline-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return launches_of(json.loads(path.read_text())["traceEvents"], num_steps)


def launches_of(events: Sequence[dict[str, Any]], num_steps: int) -> list[Launches]:
    """The launches in a trace in Chrome's format, with times in microseconds."""
    num: Counter[tuple[str, tuple[int, ...]]] = Counter()
    total_us: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for event in events:
        if event.get("cat") not in KINDS:
            continue
        key = str(event["name"])[:NAME_LENGTH], tuple(event.get("args", {}).get("grid", ()))
        num[key] += 1
        total_us[key] += event["dur"]
    return [Launches(*key, num[key] / num_steps, us / num_steps) for key, us in total_us.most_common()]
