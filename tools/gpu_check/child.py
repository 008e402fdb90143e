"""One section: its items, one after the other. What goes wrong in one is noted, and the next has its turn."""

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
from tools.gpu_check.readings import Begun, Ended, FailedItem, Reading, write

BROKEN = 3
"""Exit code of a process whose GPU can't be used any more; what is left may go on in another."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a section's process is told."""

    section: str
    lines: str
    """File for `readings.write`."""
    left_s: float
    interpreted: bool = False
    quick: bool = False
    model: str | None = None
    out: str | None = None
    process: int = 0
    """Of `num_processes`, among which the section's items are divided."""
    num_processes: int = 1
    done: list[str] = field(default_factory=list)
    """Items that have been tried."""
    rates: dict[str, float] = field(default_factory=dict)
    """What the first section has found of the machine, by case."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Context:
    """What items read: the task, and the time."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.interpreted = task.interpreted
        self.small = task.quick or task.interpreted
        """Fewer cases and repeats."""
        self._end_s = time.monotonic() + task.left_s

    @property
    def left_s(self) -> float:
        """Of the section's time."""
        return self._end_s - time.monotonic()

    def say(self, text: str) -> None:
        print(f"    {self.task.section}: {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a section that fails by itself."""

    name: str
    run: Callable[[Context], Iterable[Reading]]
    needs_s: float = 2.0
    """It is not begun with less time left."""
    limit_s: float = 60.0
    """It is ended after so long."""


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
            note = f"needs about {item.needs_s:.0f} s, {max(0.0, context.left_s):.0f} s were left"
            write(path, Reading(item.name, result="cut", note=note, section=task.section))
            continue
        write(path, Begun(item.name, item.limit_s))
        began_s = time.monotonic()
        problem = _tried(partial(_run_item, item, context, path))
        if "torch" in sys.modules and not task.interpreted:
            # What went wrong in its last launches, which nobody has waited for, is its own too.
            problem = problem or _tried(_settle)
        if problem:
            print(problem, flush=True)
            write(path, FailedItem(item.name, problem))
            if not _works():
                return BROKEN
        write(path, Ended(item.name, time.monotonic() - began_s))
    return 0


def _run_item(item: Item, context: Context, path: Path) -> None:
    for reading in item.run(context):
        write(path, replace(reading, section=context.task.section))
        context.say(line_of(reading))


def _tried(run: Callable[[], None]) -> str:
    """The traceback of what went wrong; nothing where nothing did. What the error held is free then."""
    try:
        run()
    except Exception:  # noqa: BLE001 - the report has the traceback
        return traceback.format_exc()
    return ""


def _settle() -> None:
    """Wait for the GPU, and give back what this process keeps of its memory: it may be another's."""
    from tools.gpu_check import gpu

    gpu.synchronize()
    gc.collect()
    gpu.free_memory()


def _works() -> bool:
    """Whether the GPU still does what it is told in this process: after some errors it never does again."""
    return not _tried(_settle)


def line_of(reading: Reading) -> str:
    """A reading in a line, while the rest is on its way."""
    value = "" if reading.value is None else f"{number(reading.value)} {reading.unit}".rstrip()
    words = [reading.case, value, reading.verdict, reading.note]
    return "  ".join(word for word in words if word)


def number(value: float) -> str:
    """Three digits that mean something; whole where it is large."""
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
