"""Sections of `tools/gpu_check` that fail, and a CPU executor in place of the GPU's."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tools.gpu_check import child, options
from tools.gpu_check.child import Context, Item, Task
from tools.gpu_check.readings import Reading


def _fine(context: Context) -> Iterator[Reading]:
    yield Reading("fine", 1.0, "s")


def _killed(context: Context) -> Iterator[Reading]:
    yield Reading("before the kill", 2.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(context: Context) -> Iterator[Reading]:
    child = subprocess.Popen(["sleep", "60"], process_group=0)
    yield Reading("before the hang", child.pid)
    time.sleep(60)


def _raises(context: Context) -> Iterator[Reading]:
    yield Reading("before the error", 4.0)
    raise ValueError("so it is")


SECTIONS = {
    "dies": [Item("killed", _killed), Item("then", _fine)],
    "hangs": [Item("hangs", _hangs, limit_s=0.3), Item("then", _fine)],
    "slow": [Item("hangs", _hangs, needs_s=0), Item("then", _fine)],
    "raises": [Item("raises", _raises), Item("then", _fine)],
    "late": [Item("never", _fine, needs_s=1e6), Item("then", _fine)],
}


def install() -> None:
    """Register the sections in this process."""
    for name, items in SECTIONS.items():
        module: Any = ModuleType(f"tools.gpu_check.fake_{name}")
        module.items = lambda context, items=items: items
        sys.modules[module.__name__] = module
        options.ALL[name] = options.CheckSection(f"fake_{name}", 30.0, "a fake")


def command_of(task: Task) -> list[str]:
    """Replaces `parent.command_of`."""
    return [sys.executable, "-m", "tests.tools.gpu_check_fakes", task.to_json()]


class LaunchedStep(SimpleNamespace):
    """Like the GPU's, with timestamps of 1 ms a step and gaps of 10 µs."""


class Steps:
    """Wraps a CPU runner as a GPU runner: a launched step is computed at once."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.launched_steps: deque[LaunchedStep] = deque()
        self.facts, self.model, self.num_launched = runner.facts, runner.program, 0
        self.changes_ids = False

    def capture_graphs(self) -> None:
        pass

    def launch(self, step: Any, take: Any) -> LaunchedStep:
        begin_ns = 1_000_000_000 + self.num_launched * 1_010_000
        self.num_launched += 1
        sampled = self._runner.step(step, take)
        launched_step = LaunchedStep(start_ns=begin_ns, end_ns=begin_ns + 1_000_000, launch_s=20e-6, sampled=sampled)
        self.launched_steps.append(launched_step)
        return launched_step

    def collect(self) -> Any:
        sampled = self.launched_steps.popleft().sampled
        if self.changes_ids and len(sampled.ids):
            sampled.ids[0] = (sampled.ids[0] + 1) % self.facts.vocab_size
        return sampled

    def step(self, step: Any, take: Any) -> Any:
        self.launch(step, take)
        return self.drain()[-1]

    def drain(self) -> list[Any]:
        return [self.collect() for _ in range(len(self.launched_steps))]

    def close(self) -> None:
        self._runner.close()


def make_runner(settings: Any, folder: Path, weights: Any = None) -> Steps:
    """Replaces `runners.make_runner`."""
    from unittest import mock

    from pipeline.stages.execute.cpu import runner

    if weights is None:
        return Steps(runner.CpuRunner(settings, folder))
    with mock.patch.object(runner, "Weights", lambda *_, **__: weights):
        return Steps(runner.CpuRunner(settings, folder))


if __name__ == "__main__":
    install()
    sys.exit(child.run(Task(**json.loads(sys.argv[1]))))
