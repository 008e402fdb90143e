"""Changes the number of processes of a stage while the server serves: `pipeline reload --set ingest.replicas=2`.

    more        others learn of the new processes ──► spawned ──► Ready, Start ──► Rescaled: they get work
    fewer       Rescaled: they get no new work ──► drained ──► stopped ──► others learn that they are gone
    gateways    the same, but the others give up a part of their limits (Rescaled) before more start, and get one when
                fewer are left

A process that is new is to the others the successor of one that never was, and one that is gone has none: they do what
they do after a death (`PeerRestarted`), so nothing is lost that was on its way to it. If a new process dies before it
gets work, or is not ready in time, all are removed again, and the number stays what it was. Pure: `Processes` does the
work, and this decides when.
"""

import time
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

GATEWAY = "gateway"
STOP_S = 2.0
"""Maximum time from `Stop` to the end of a process that has drained."""
DRAIN_SLACK_S = 3.0
"""After supervisor.drain_timeout_s, a gateway fails what is open, which takes a moment."""

Done = Callable[[str], None]
"""Called once, with an empty string, or with the reason why the number stays what it was."""


class Processes(Protocol):
    """What can be done with the processes of stages. A process has a name, such as `ingest.1`."""

    def add(self, name: str) -> None:
        """Make channels for a new process, and inform the others. Raises MemoryError or OSError."""

    def may_start(self, name: str) -> bool:
        """Whether enough of the others are informed."""

    def start(self, name: str) -> None: ...

    def join(self, name: str) -> None:
        """It gets work from now on, and is restarted like others."""

    def may_leave(self, name: str) -> bool:
        """Whether it is ready, and not being restarted."""

    def leave(self, name: str) -> None:
        """It is going to be removed, and is not restarted any more."""

    def drain(self, name: str) -> bool:
        """Let it finish its work. Returns whether there is nothing to wait for; else `Scaling.drained` is called when
        it has."""

    def stop(self, name: str) -> None:
        """Let it end. `Scaling.died` is called when it has."""

    def remove(self, name: str) -> None:
        """Kill it if it lives, free its channels, and inform the others."""

    def is_known(self, name: str) -> bool:
        """Whether all others have answered that they know that it was added or removed."""

    def rescale(self, stage: str, num: int) -> tuple[int, set[str]]:
        """Distribute new work to this many processes of a stage. Returns an epoch, and who must answer with it."""


class Wait(NamedTuple):
    """Until when the next step waits."""

    is_over: Callable[[], bool]
    timeout_s: float = float("inf")
    problem: str = ""
    """If the time is up: why the change fails. Empty: it goes on."""


Steps = Generator[Wait, None, str]


class ScalingFailed(Exception):
    """In words for the user."""


class Scaling:
    """Owns the change that is under way; there is one at a time. Times are by time.monotonic()."""

    def __init__(self, processes: Processes, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._clock = clock
        self._steps: Steps | None = None
        self._wait = Wait(lambda: True)
        self._deadline_s = float("inf")
        self._done: Done = lambda _: None
        self._names: list[str] = []
        """The processes that are added or removed."""
        self._is_growing = False
        self._problem = ""
        self._ready: set[str] = set()
        self._drained: set[str] = set()
        self._ended: set[str] = set()
        self._epoch = 0
        self._awaited: set[str] = set()
        """Processes that have not answered `Rescaled`."""

    @property
    def is_busy(self) -> bool:
        """Whether a change is under way."""
        return self._steps is not None

    @property
    def deadlines(self) -> list[float]:
        """When `turn` must be called next."""
        return [self._deadline_s] if self._steps is not None else []

    def suspended(self, seconds: float) -> None:
        """This process did not run for so long."""
        self._deadline_s += seconds

    def owns(self, name: str) -> bool:
        """Whether a process is being added or removed."""
        return self._steps is not None and name in self._names

    def ask(
        self, stage: str, before: int, after: int, start_timeout_s: float, drain_timeout_s: float, done: Done
    ) -> None:
        """Change the number of processes of a stage. `turn` begins it."""
        assert self._steps is None, "one change at a time"
        names = [f"{stage}.{replica}" for replica in range(min(before, after), max(before, after))]
        self._is_growing = after > before
        self._problem, self._done = "", done
        self._ready, self._drained, self._ended = set(), set(), set()
        if self._is_growing:
            self._names = names
            self._steps = self._grow(stage, before, after, start_timeout_s, drain_timeout_s)
        else:
            self._names = []  # until they leave
            self._steps = self._shrink(names[::-1], stage, after, start_timeout_s, drain_timeout_s)
        self._wait, self._deadline_s = Wait(lambda: True), float("inf")

    def turn(self) -> None:
        """Take the steps that are due."""
        while self._steps is not None:
            try:
                if self._problem:
                    problem, self._problem = self._problem, ""
                    self._wait = self._steps.throw(ScalingFailed(problem))
                elif self._wait.is_over():
                    self._wait = next(self._steps)
                elif self._clock() < self._deadline_s:
                    return
                elif self._wait.problem:
                    self._wait = self._steps.throw(ScalingFailed(self._wait.problem))
                else:
                    self._wait = next(self._steps)
            except StopIteration as end:
                self._steps = None
                self._done(end.value)
            else:
                self._deadline_s = self._clock() + self._wait.timeout_s

    def cancel(self) -> None:
        """The server ends: remove what is new."""
        if (steps := self._steps) is not None:
            self._steps = None
            steps.close()
            self._awaited = set()
            if self._is_growing:
                for name in self._names[::-1]:
                    self._processes.remove(name)
            self._done("the server is shutting down")

    # ------------------------------------------------------------------------------------------------ what happens

    def ready(self, name: str) -> None:
        """A new process has got `Start`."""
        self._ready.add(name)

    def drained(self, name: str) -> None:
        """A process has finished its work."""
        self._drained.add(name)

    def answered(self, name: str, epoch: int) -> None:
        """A process has answered `Rescaled`, or something else."""
        if epoch == self._epoch:
            self._awaited.discard(name)

    def died(self, name: str, reason: str) -> bool:
        """A process has ended. Returns whether it was being added or removed: it is not restarted then."""
        self._awaited.discard(name)  # its successor begins with the newest number
        if not self.owns(name):
            return False
        self._ended.add(name)
        if self._is_growing:
            self._problem = f"{name}: {reason}"
        return True

    # ------------------------------------------------------------------------------------------------------- steps

    def _grow(self, stage: str, before: int, after: int, start_timeout_s: float, drain_timeout_s: float) -> Steps:
        processes, names = self._processes, self._names
        added: list[str] = []
        is_used = False
        try:
            if stage == GATEWAY:
                is_used = True
                yield self._rescale(
                    stage,
                    after,
                    drain_timeout_s,
                    "a gateway has more open sequences or bytes than its new share of gateway.max_open_sequences and "
                    "gateway.max_open_bytes, and they did not end within supervisor.drain_timeout_s",
                )
            for name in names:
                processes.add(name)
                added.append(name)
            late = "the new process was not ready in time (supervisor.start_timeout_s)"
            yield Wait(lambda: all(map(processes.may_start, names)), start_timeout_s, late)
            for name in names:
                processes.start(name)
            is_ready = lambda: self._ready.issuperset(names) and all(map(processes.is_known, names))  # noqa: E731
            yield Wait(is_ready, start_timeout_s, late)
            if stage != GATEWAY:
                is_used = True
                yield self._rescale(stage, after)
        except (ScalingFailed, MemoryError, OSError) as error:
            self._is_growing = False
            # They get no new work before they go.
            wait = self._rescale(stage, before) if is_used and stage != GATEWAY else Wait(lambda: True)
            for name in added[::-1]:
                processes.remove(name)
            yield wait
            yield Wait(lambda: all(map(processes.is_known, added)))
            if is_used and stage == GATEWAY:
                yield self._rescale(stage, before)
            return str(error)
        for name in names:
            processes.join(name)
        return ""

    def _shrink(
        self, names: list[str], stage: str, after: int, start_timeout_s: float, drain_timeout_s: float
    ) -> Steps:
        processes = self._processes
        try:
            late = f"{names[0]} is being restarted"
            yield Wait(lambda: all(map(processes.may_leave, names)), start_timeout_s, late)
        except ScalingFailed as error:
            return str(error)
        self._names = names
        for name in names:
            processes.leave(name)
        if stage != GATEWAY:
            yield self._rescale(stage, after)
        self._drained |= {name for name in names if processes.drain(name)}
        is_drained = lambda: (self._drained | self._ended).issuperset(names)  # noqa: E731
        yield Wait(is_drained, drain_timeout_s + DRAIN_SLACK_S)
        for name in names:
            if name not in self._ended:
                processes.stop(name)
        yield Wait(lambda: self._ended.issuperset(names), STOP_S)
        for name in names:
            processes.remove(name)
        yield Wait(lambda: all(map(processes.is_known, names)))
        if stage == GATEWAY:
            yield self._rescale(stage, after)
        return ""

    def _rescale(self, stage: str, num: int, timeout_s: float = float("inf"), problem: str = "") -> Wait:
        self._epoch, self._awaited = self._processes.rescale(stage, num)
        return Wait(lambda: not self._awaited, timeout_s, problem)
