"""Sample the stack of the process that this runs in; `pipeline profile` draws a flame graph of the samples.

The kernel's profiling timer counts the CPU time of the process and signals after each `INTERVAL_S` of it. Python then
interrupts its main thread between two instructions, and the stack at this place is one sample. A sample costs some
microseconds, and samples fall where CPU is used, not where the stage waits. Time in native code goes to the Python line
that called it. If the main thread used hardly any CPU since the last sample, the sample is counted for the other
threads, ZeroMQ's.
"""

import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec

from pipeline.errors import UserError

INTERVAL_S = 0.001
OTHER = "(other threads: ZeroMQ)"
MAX_DEPTH = 128


class Stacks(msgspec.Struct, array_like=True, frozen=True):
    """How often each stack was seen, outermost frame first, frames separated by `;`."""

    counts: dict[str, int]
    interval_s: float
    """Average CPU time between two samples: kernels count it in ticks of 1 to 10 ms."""


class StackSampler:
    """Samples from `start` to `stop`. `start` raises UserError outside the main thread: only it receives signals."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[tuple[str, int], str] = {}
        self._main_s = self._begun_s = 0.0
        self._is_on = False

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UserError("a stage that runs as a thread can't be sampled")
        self._counts.clear()
        self._main_s = time.thread_time()
        self._begun_s = time.process_time()
        self._is_on = True
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop(self) -> Stacks:
        if not self._is_on:
            raise UserError("nothing is being sampled")
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # a pending signal would end the process by default
        self._is_on = False
        used_s = time.process_time() - self._begun_s
        return Stacks(dict(self._counts), used_s / max(1, self._counts.total()))

    def _sample(self, _: int, frame: FrameType | None) -> None:
        now_s = time.thread_time()
        is_main, self._main_s = now_s - self._main_s > INTERVAL_S / 2, now_s
        if not is_main:
            self._counts[OTHER] += 1
            return
        names: list[str] = []
        while frame is not None and len(names) < MAX_DEPTH:
            names.append(self._name(frame))
            frame = frame.f_back
        self._counts[";".join(reversed(names))] += 1

    def _name(self, frame: FrameType) -> str:
        code = frame.f_code
        key = code.co_filename, code.co_firstlineno
        if key not in self._names:
            parts = Path(code.co_filename).parts[-2:]
            module = "/".join(parts).replace(";", ",").replace(" ", "_")
            self._names[key] = f"{code.co_qualname} ({module}:{code.co_firstlineno})".replace(";", ",")
        return self._names[key]
