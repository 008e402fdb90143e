"""Heartbeats: a ping to every stage each second, which shows stages whose loop has stopped running. If no request was
open for a while, there is one each five seconds: a wake of every process is all that an idle server computes.

    pinged ──answer──► known to run ──HEARTBEAT_S, idle IDLE_HEARTBEAT_S──► pinged
       └──no answer within the timeout──► late ──answer──► back
                                            └──no answer for the hang timeout──► killed, and restarted

A late stage is not pinged again: it answers the ping that waits in its inbox. The log has a line when a stage goes late
and when it is back, and the gateways get `LateStages`, so that they refuse requests that would wait for it.

If the supervisor itself was suspended (`pipeline/runtime/process/suspension.py`), that time does not count.

A step may take long on a slow or busy machine, so an executor that uses the CPU gets `BUSY_FACTOR` times both timeouts:
it is neither late nor hangs while it computes.
"""

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from pipeline.runtime.messages import LateStages
from pipeline.supervisor.processes.child import Child

HEARTBEAT_S = 1.0
"""From a stage's answer to the next ping."""
IDLE_HEARTBEAT_S = 5.0
"""The same if the gateways have had no open request for `IDLE_AFTER_S`."""
IDLE_AFTER_S = 10.0
NEARLY_S = 0.25
"""A stage whose ping is due that soon is pinged with others."""
BUSY_FACTOR = 10
"""How many times longer an executor may be silent while it computes."""
IDLE_SHARE = 0.05
"""A process that uses less than this share of a core computes nothing."""
NONCE = 0
"""Of the pings; health rounds begin at 1."""


class _Beat(msgspec.Struct, eq=False):
    alive_s: float
    """When the stage was last known to run. All times are by time.monotonic()."""
    silent_since_s: float
    """The same, but not later if this process was suspended since."""
    pinged_s: float | None = None
    """When the ping was sent that it has not answered."""
    is_late: bool = False
    checked_s: float = 0.0
    """When the CPU time was read last: at the ping, at each timeout since, and when it went late."""
    checked_cpu_s: float = 0.0
    """CPU time that the process had used then."""
    is_killed: bool = False
    pid: int = 0
    """The process that was pinged. One that takes its place, ready already, has got no ping."""


class Heartbeats:
    """The beats of the stages that are ready."""

    def __init__(
        self,
        ping: Callable[[str, int], None],
        timeout_s: float,
        changed: Callable[[LateStages], None],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        hang_timeout_s: float = 0.0,
        cpu_s: Callable[[Child], float] = lambda child: child.usage().cpu_s,
    ) -> None:
        """`ping` sends `Ping` to a stage by its name. `changed` gets the stages that are late, whenever these change.
        A stage that is silent for `hang_timeout_s` is killed; 0 kills none. `cpu_s` is the CPU time of a process."""
        self._ping = ping
        self.timeout_s = timeout_s
        self._changed = changed
        self._log = log
        self._clock = clock
        self.hang_timeout_s = hang_timeout_s
        self._cpu_s = cpu_s
        self._executors: list[Child] = []
        self._worked_s = clock()
        """When a request was known to be open last, or a stage was not known to run."""
        self._beats: dict[str, _Beat] = {}
        self._lost: dict[str, _Beat] = {}
        """Those of stages that are being restarted, from when they died."""

    @property
    def interval_s(self) -> float:
        """From a stage's answer to the next ping."""
        return IDLE_HEARTBEAT_S if self._clock() >= self._worked_s + IDLE_AFTER_S else HEARTBEAT_S

    @property
    def rest_s(self) -> float:
        """How long the supervisor may wait, if it has no deadlines: while a ping is open it looks each second, to
        notice its own suspension."""
        return HEARTBEAT_S if any(beat.pinged_s is not None for beat in self._beats.values()) else self.interval_s

    @property
    def deadlines(self) -> list[float]:
        """When `turn` must be called next."""
        interval_s = self.interval_s
        return [
            beat.alive_s + interval_s if beat.pinged_s is None else beat.checked_s + self.timeout_s
            for beat in self._beats.values()
            if not beat.is_late
        ]  # hangs are found at the supervisor's regular turns

    def turn(self, children: Iterable[Child]) -> None:
        """Ping the stages that are due, and report those that have not answered in time. `children` are all stages."""
        now_s = self._clock()
        by_name = {child.name: child for child in children if child.state == "ready"}
        ready = by_name.keys()
        self._executors = [child for child in by_name.values() if child.stage == "execute"]
        replaced = {name for name, beat in self._beats.items() if name in ready and beat.pid != by_name[name].pid}
        has_changed = any(self._beats.pop(name).is_late for name in replaced)
        self._beats = {
            name: self._beats.get(name) or _Beat(now_s, now_s, pid=by_name[name].pid) for name in sorted(ready)
        }
        has_changed |= bool(back := self._lost.keys() & ready)
        for name in back:
            del self._lost[name]
        interval_s = self.interval_s
        rested_s = [now_s - beat.alive_s for beat in self._beats.values() if beat.pinged_s is None]
        is_due = max(rested_s, default=0.0) >= interval_s
        for name, beat in self._beats.items():
            if beat.is_late:
                self._kill_if_hung(by_name[name], beat, now_s)
                continue
            if beat.pinged_s is None:
                if is_due and now_s >= beat.alive_s + interval_s - NEARLY_S:
                    beat.pinged_s = now_s
                    self._check_cpu(by_name[name], beat, now_s)
                    self._ping(name, NONCE)
            elif now_s >= beat.checked_s + self.timeout_s:
                may_compute = now_s < beat.pinged_s + BUSY_FACTOR * self.timeout_s
                is_computing = may_compute and self._computes(by_name[name], beat, now_s)
                self._check_cpu(by_name[name], beat, now_s)
                if is_computing:
                    continue
                beat.is_late = has_changed = True
                self._log.warning(f"{name} is late", extra={"fields": {"silent_s": f"{now_s - beat.alive_s:.1f}"}})
        if self._lost or any(beat.is_late for beat in self._beats.values()):
            self._worked_s = now_s
        if has_changed:
            self._report()

    def suspended(self, seconds: float) -> None:
        """This process did not run for so long, so no stage could answer it."""
        for beat in (*self._beats.values(), *self._lost.values()):
            beat.alive_s += seconds
            beat.checked_s += seconds
            if beat.pinged_s is not None:
                beat.pinged_s += seconds
        if self._lost or any(beat.is_late for beat in self._beats.values()):
            self._report()

    def is_late(self, child: Child) -> bool:
        """Whether a stage that is ready has not answered in time."""
        beat = self._beats.get(child.name)
        return beat is not None and beat.is_late

    def _kill_if_hung(self, child: Child, beat: _Beat, now_s: float) -> None:
        silent_s = now_s - beat.alive_s
        if not self.hang_timeout_s or silent_s < self.hang_timeout_s or beat.is_killed:
            return
        if silent_s < BUSY_FACTOR * self.hang_timeout_s and self._computes(child, beat, now_s):
            return
        beat.is_killed = True
        self._log.error(f"{child.name} hangs; killing it", extra={"fields": {"silent_s": f"{silent_s:.1f}"}})
        child.abort()

    def is_computing(self, child: Child) -> bool:
        """Whether a stage that has not answered is an executor that computes, so that it is not late."""
        beat = self._beats.get(child.name)
        if beat is None or beat.is_late or child.stage != "execute":
            return False
        return beat.pinged_s is None or self._computes(child, beat, self._clock())

    def _check_cpu(self, child: Child, beat: _Beat, now_s: float) -> None:
        beat.checked_s = now_s
        beat.checked_cpu_s = self._executor_cpu_s() if child.stage == "execute" else 0.0

    def _computes(self, child: Child, beat: _Beat, now_s: float) -> bool:
        """Whether this is an executor that has used the CPU since the last check, or one of its ranks: the others may
        wait for it."""
        if child.stage != "execute":
            return False
        return self._executor_cpu_s() - beat.checked_cpu_s > IDLE_SHARE * (now_s - beat.checked_s)

    def _executor_cpu_s(self) -> float:
        return sum(map(self._cpu_s, self._executors))

    def lost(self, name: str) -> None:
        """A stage has died, and is being restarted: it is late until it is ready."""
        self._beats.pop(name, None)
        now_s = self._clock()
        self._lost[name] = _Beat(now_s, now_s)
        self._report()

    def forget(self, name: str) -> None:
        """A process is going to be removed."""
        beat = self._beats.pop(name, None)
        if self._lost.pop(name, None) is not None or (beat is not None and beat.is_late):
            self._report()

    def answered(self, name: str, num_open_requests: int = 0) -> None:
        """A stage has answered a ping, of a heartbeat or of a health round; a gateway with its open requests."""
        now_s = self._clock()
        if num_open_requests:
            self._worked_s = now_s
        beat = self._beats.get(name)
        if beat is None:
            return
        silent_s, was_late = now_s - beat.alive_s, beat.is_late
        beat.alive_s = beat.silent_since_s = now_s
        beat.pinged_s, beat.is_late = None, False
        if was_late:
            self._log.info(f"{name} is back", extra={"fields": {"silent_s": f"{silent_s:.1f}"}})
            self._report()

    def _report(self) -> None:
        late = self._lost | {name: beat for name, beat in self._beats.items() if beat.is_late}
        since_s = [beat.alive_s for beat in late.values()]
        self._changed(LateStages(list(late), since_s, [beat.silent_since_s for beat in late.values()]))
