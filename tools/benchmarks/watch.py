"""Samples memory and descriptors of a server's processes during a load, and checks whether they stay flat."""

import threading
import time
from collections.abc import Sequence
from statistics import median
from types import TracebackType

import msgspec
import psutil

from pipeline.runtime.process.process_usage import usage_of

MAX_GROWTH = 0.03
SLACK_BYTES = 8e6
"""Growth allowed for each process, because an allocator returns memory at its own discretion."""
SLACK_FDS = 8
"""Allowed growth of descriptors: connections come and go with the load."""


class Sample(msgspec.Struct, frozen=True):
    """The resources of all processes at one moment, by stage."""

    at_s: float
    rss_bytes: dict[str, int]
    num_fds: dict[str, int]
    cpu_s: dict[str, float]


class Flatness(msgspec.Struct, frozen=True):
    """The medians of the second and the last quarter of a series. In the first quarter processes still grow."""

    name: str
    second: float
    last: float
    bound: float
    """Upper limit of `last`."""
    most: float
    """The largest sample."""

    @property
    def is_flat(self) -> bool:
        return self.last <= self.bound


def flatness(name: str, values: Sequence[float], slack: float, growth: float = MAX_GROWTH) -> Flatness:
    """Compare the quarters of a series of at least four samples."""
    assert len(values) >= 4, f"{name}: {len(values)} samples have no quarters"
    quarter = len(values) // 4
    second, last = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return Flatness(name, second, last, second * (1 + growth) + slack, max(values))


def memory_of(samples: Sequence[Sample]) -> list[Flatness]:
    """Of each process's resident memory, in bytes."""
    return [
        flatness(name, [sample.rss_bytes[name] for sample in samples], SLACK_BYTES) for name in samples[0].rss_bytes
    ]


def descriptors_of(samples: Sequence[Sample]) -> list[Flatness]:
    return [flatness(name, [sample.num_fds[name] for sample in samples], SLACK_FDS, 0) for name in samples[0].num_fds]


def sample(pids: dict[str, int]) -> Sample:
    usage = {name: usage_of(pid) for name, pid in pids.items()}
    return Sample(
        time.monotonic(),
        {name: one.rss_bytes for name, one in usage.items()},
        {name: num_fds(pid) for name, pid in pids.items()},
        {name: one.cpu_s for name, one in usage.items()},
    )


def num_fds(pid: int) -> int:
    """Open descriptors of a process of this user; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).num_fds())
    except psutil.NoSuchProcess:
        return 0


class Watch:
    """Samples in a thread while the context is entered. Reading /proc for six processes takes under a millisecond."""

    def __init__(self, pids: dict[str, int], every_s: float = 1.0) -> None:
        self.samples: list[Sample] = []
        self._pids = pids
        self._every_s = every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            self.samples.append(sample(self._pids))
            if self._end.wait(self._every_s):
                return

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
