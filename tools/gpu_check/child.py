"""Runs the items of one section in order. An item that fails is reported, and the next one runs."""

import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu_check.options import ALL
from tools.gpu_check.readings import Ended, FailedItem, Reading, Started, write

GPU_BROKEN = 3
"""Exit code of a process whose GPU context is broken. Another process runs the remaining items."""
MIN_WAIT_S, INTERPRETED_WAIT_S = 10.0, 300.0
"""How long items wait for their processes."""


@dataclass(frozen=True, slots=True)
class Task:
    """The arguments of a section's process."""

    section: str
    lines: str
    """File for `readings.write`."""
    left_s: float
    interpreted: bool = False
    quick: bool = False
    model: str | None = None
    out: str | None = None
    process: int = 0
    """Index among `num_processes`, which share the section's items."""
    num_processes: int = 1
    done: list[str] = field(default_factory=list)
    """Items that have already run."""
    rates: dict[str, float] = field(default_factory=dict)
    """Results of the `machine` section, by case."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Context:
    """What items read: the task and the remaining time."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.interpreted = task.interpreted
        self.small = task.quick or task.interpreted
        """Run fewer cases and repeats."""
        self._began_s = time.monotonic()
        self._end_s = self._began_s + task.left_s

    @property
    def left_s(self) -> float:
        """Seconds left for the section."""
        return self._end_s - time.monotonic()

    @property
    def wait_s(self) -> float:
        """How long an item may wait for the processes that it has started. A section that is interpreted has no time
        limit: its processes may take much longer, beside others."""
        return INTERPRETED_WAIT_S if self.interpreted else max(MIN_WAIT_S, self.left_s)

    def say(self, text: str) -> None:
        print(f"    {self.task.section}, {time.monotonic() - self._began_s:.1f} s: {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Item:
    """A unit of work in a section. An error in one item does not affect the others."""

    name: str
    run: Callable[[Context], Iterable[Reading]]
    needs_s: float = 2.0
    """The item is skipped if less time is left."""
    limit_s: float = 60.0
    """The item is killed after this time."""


def run(task: Task) -> int:
    """Run a section in this process. Returns its exit code."""
    path = Path(task.lines)
    context = Context(task)
    module: Any = importlib.import_module(f"tools.gpu_check.{ALL[task.section].module}")
    items: Sequence[Item] = module.items(context)
    for item in items[task.process :: task.num_processes]:
        if item.name in task.done:
            continue
        if context.left_s < item.needs_s and not task.interpreted:
            note = f"needs about {item.needs_s:.0f} s; {max(0.0, context.left_s):.0f} s left"
            write(path, Reading(item.name, result="cut", note=note, section=task.section))
            continue
        write(path, Started(item.name, item.limit_s))
        began_s = time.monotonic()
        problem = _error_of(partial(_run_item, item, context, path))
        if "torch" in sys.modules and not task.interpreted:
            # An asynchronous error of the item's last launches belongs to the item too.
            problem = problem or _error_of(_synchronize)
        if problem:
            print(problem, flush=True)
            write(path, FailedItem(item.name, problem))
            if not _gpu_works():
                return GPU_BROKEN
        write(path, Ended(item.name, time.monotonic() - began_s))
    return 0


def _run_item(item: Item, context: Context, path: Path) -> None:
    for reading in item.run(context):
        write(path, replace(reading, section=context.task.section))
        context.say(line_of(reading))


def _error_of(run: Callable[[], None]) -> str:
    """The traceback of the error that `run` raised, or an empty string. Frees everything that the error held."""
    try:
        run()
    except Exception:  # noqa: BLE001 - the report has the traceback
        return traceback.format_exc()
    return ""


def _synchronize() -> None:
    """Wait for the GPU, and free the memory that torch caches: other processes may need it."""
    from tools.gpu_check import gpu

    gpu.synchronize()
    gc.collect()
    gpu.free_memory()


def _gpu_works() -> bool:
    """Whether the GPU still works in this process. After some errors the context stays broken."""
    return not _error_of(_synchronize)


def line_of(reading: Reading) -> str:
    """A progress line for one reading."""
    value = "" if reading.value is None else f"{number(reading.value)} {reading.unit}".rstrip()
    words = [reading.case, value, reading.verdict, reading.note]
    return "  ".join(word for word in words if word)


def number(value: float) -> str:
    """A number with three significant digits; integers from 1,000 on."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.1e}" if 0 < size < 0.01 else f"{value:.3f}"
