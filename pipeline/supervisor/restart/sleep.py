"""The server's sleep: its executor leaves and comes back, and open streams go on (docs/sleep.md).

    awake ──SetSleep──► saving ──all ranks: KVSaved──► asleep ──SetSleep, WakeRequested──► waking ──all Ready──► awake
             FallAsleep to   │                       executors killed,              executors started     WakeUp to
             schedule        └─there is no room─► awake      channels renewed                             schedule

To the others, an executor that sleeps is one that has died and whose successor starts later. What it has saved is in
memory of the supervisor, or in a file. It stays there until a successor is ready, so any process may die meanwhile.
"""

import logging
import os
import time
from collections.abc import Callable

import msgspec

from pipeline.config.values.sizes import size_words
from pipeline.metrics.stats import SleepCounts
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.restart.restarts import Restarts
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.server_state import ServerState
from pipeline.supervisor.shared.resources import SharedResources
from pipeline.supervisor.stopping import EXIT_STAGE_DIED, Stopping

EXECUTOR_MODULES = (
    "pipeline.stages.execute.stage",
    "pipeline.stages.execute.cpu.steps",
    "pipeline.stages.execute.cpu.saved_kv",
    "pipeline.stages.execute.loop",
)
"""What an executor on a CPU imports, for half of the CPU time of a small model's wake: the fork server does it ahead,
while the one before saves its KV cache. None of these imports torch or starts a thread."""

Done = Callable[[str], None]
"""Called once, with an empty string or with the reason why the server does not do what was asked for."""


class Sleeper:
    """Owns whether the server sleeps."""

    def __init__(
        self,
        run_mode: RunMode,
        resources: SharedResources,
        state: ServerState,
        table: ChildTable,
        restarts: Restarts,
        forget: Callable[[str], None],
        log: logging.Logger,
    ) -> None:
        """`forget` is called with the name of each process that is going to sleep: it answers nothing any more."""
        self._run_mode, self._resources, self._state, self._table = run_mode, resources, state, table
        self._restarts, self._forget, self._log = restarts, forget, log
        self.phase = "awake"
        """Or saving, asleep, waking."""
        self.problem = ""
        """Why the last wake has failed; empty if the server is awake, or if no wake has failed since it fell asleep."""
        self._number = 0
        """Of the last `FallAsleep`."""
        self._began_s = 0.0
        """When saving or waking began, by time.monotonic()."""
        self._saved: dict[str, m.KVSaved] = {}
        """By rank."""
        self._wakes_on_request = False
        self._early: list[tuple[Done, bool]] = []
        """The arguments of `sleep`, which wait until the server has started."""
        self._is_for_others = False
        """It sleeps until `set_turn` wakes it: another model has its memory."""
        self._sleep_waiters: list[Done] = []
        self._wake_waiters: list[Done] = []
        self.counts = SleepCounts()

    @property
    def saved_bytes(self) -> int:
        """What the executor has saved; 0 if it is awake."""
        return sum(one.num_bytes for one in self._saved.values()) if self.phase != "awake" else 0

    @property
    def _ranks(self) -> list[str]:
        return topology.lives_with(self._resources.settings, topology.EXECUTE)

    # ------------------------------------------------------------------------------------------------------- asked

    def handle(self, message: m.SetSleep | m.AskSleep | m.KVSaved | m.WakeRequested, sender: str) -> None:
        """A message of a gateway, the executor or schedule."""

        def reply(nonce: int, problem: str = "") -> None:
            self._table.reply(sender, m.SleepSet(nonce, self.phase != "awake", problem))

        match message:
            case m.SetSleep(nonce, sleeps, wakes_on_request):
                self.change(sleeps, wakes_on_request, lambda problem: reply(nonce, problem))
            case m.AskSleep(nonce):
                reply(nonce)
            case m.KVSaved():
                self._take_saved(message, sender)
            case m.WakeRequested():
                self._requested()

    def set_turn(self, sleeps: bool, done: Done) -> None:
        """Of several models: go to sleep for another one, or wake up. Until then, nothing else wakes it."""
        if not sleeps:
            self._is_for_others = False
            self.wake(done)
        elif self.phase != "awake":
            done("it was put to sleep")
        else:
            self.sleep(done, wakes_on_request=False)
            self._is_for_others = self.phase != "awake"

    def change(self, sleeps: bool, wakes_on_request: bool, done: Done) -> None:
        """Go to sleep, or wake up."""
        if self._is_for_others:
            done("" if sleeps else "the model sleeps while others have their turn: it wakes at its own")
        elif sleeps:
            self.sleep(done, wakes_on_request=wakes_on_request)
        else:
            self.wake(done)

    def sleep(self, done: Done, *, wakes_on_request: bool) -> None:
        """Go to sleep. `done` is called when the executor has ended. A sleeping server stays as it is, except for
        `wakes_on_request`. One that starts goes to sleep when it has started."""
        if not self._state.is_serving:
            self._early.append((done, wakes_on_request))
        elif self.phase == "waking" or self._wake_waiters:
            done("the server is waking up: try again when it is awake")
        elif self.phase == "awake" and (problem := self._why_not()):
            done(problem)
        else:
            self._wakes_on_request = wakes_on_request
            if self.phase == "asleep":
                done("")
            else:
                self._sleep_waiters.append(done)
            if self.phase == "awake":
                self.phase, self._began_s, self._saved = "saving", time.monotonic(), {}
                self._number += 1
                self._table.preload(EXECUTOR_MODULES)
            self._tell_schedule()

    def _why_not(self) -> str:
        """Why the server can't sleep now; empty if it can."""
        settings, restarts = self._resources.settings, self._restarts
        if not self._state.takes_changes:
            return "the server is shutting down"
        if self._run_mode.is_debugged:
            return "a server whose stages are debugged can't sleep"
        if settings.execute.device != "cpu":
            return f"execute.device is {settings.execute.device!r}: only a server that computes on a CPU can sleep"
        if settings.execute.launcher != "process":
            return f"execute.launcher is {settings.execute.launcher!r}: an executor on another host can't sleep"
        for name in (topology.SCHEDULE, *self._ranks):
            if restarts.planned.is_planned(name) or self._table.children[name].state != "ready":
                return f"{name} is being restarted: try again later"
        return ""

    def wake(self, done: Done) -> None:
        """Wake up. `done` is called when the executor is ready and steps go on."""
        if self.phase == "awake":
            done("")
            return
        self._wake_waiters.append(done)
        if self.phase == "asleep":
            self._begin_wake()

    def _requested(self) -> None:
        """A request has come, or some are open while the server ends."""
        if self.phase not in ("saving", "asleep") or self._wake_waiters or self._is_for_others:
            return
        if self._state.is_ending:
            self._log.info("the server wakes to finish its open requests")
            self.wake(lambda _: None)
        elif self._wakes_on_request:
            self._log.info("a request wakes the server")
            self.wake(lambda _: None)

    # -------------------------------------------------------------------------------------------------- fall asleep

    def _tell_schedule(self) -> None:
        number = self._number if self.phase == "saving" else 0
        self._table.outboxes[topology.SCHEDULE].send(m.FallAsleep(number, self._wakes_on_request))

    def _take_saved(self, message: m.KVSaved, sender: str) -> None:
        """A rank has saved its KV cache, or has no room for it."""
        if self.phase != "saving" or message.number != self._number:
            return
        if message.problem:
            self._log.error(f"the server does not sleep: {message.problem}")
            self._clear()
            self._awake()
            self._is_for_others = False
            _call(self._sleep_waiters, message.problem)
            _call(self._wake_waiters, "")
            return
        self._saved[sender] = message
        if self._saved.keys() >= set(self._ranks):
            self._fall_asleep()

    def _fall_asleep(self) -> None:
        num_bytes = sum(one.num_bytes for one in self._saved.values())
        save_s = max(one.took_s for one in self._saved.values())
        saved_s = time.monotonic()
        self._leave()
        now_s = time.monotonic()
        took_s = now_s - self._began_s
        seconds = {
            "step_s": max(0.0, saved_s - self._began_s - save_s),  # until no step was in flight
            "save_s": save_s,
            "end_s": now_s - saved_s,
            "took_s": took_s,
        }
        fields = {"saved": size_words(num_bytes), **{name: f"{value:.2f}" for name, value in seconds.items()}}
        self._log.info("asleep", extra={"fields": fields})
        counts = self.counts
        self.counts = msgspec.structs.replace(
            counts,
            num_sleeps=counts.num_sleeps + 1,
            num_bytes=counts.num_bytes + num_bytes,
            sleep_s=counts.sleep_s + took_s,
            is_asleep=True,
        )
        _call(self._sleep_waiters, "")
        if self._wake_waiters:
            self._begin_wake()

    def _leave(self) -> None:
        """The executor ends."""
        for name in self._ranks:
            self._forget(name)
            self._state.reasons.pop(name, None)  # of a rank that could not start either
        self._resources.has_saved_kv = True
        if problem := self._restarts.put_to_sleep(self._ranks):
            self._state.reasons = {topology.EXECUTE: problem}
            raise Stopping(EXIT_STAGE_DIED)
        self.phase = "asleep"

    # ------------------------------------------------------------------------------------------------------ wake up

    def _begin_wake(self) -> None:
        self.phase, self._began_s = "waking", time.monotonic()
        self._restarts.wake(self._ranks)

    def turn(self) -> None:
        """Notice that the server has started, or that the executor is ready."""
        while self._early:
            done, wakes_on_request = self._early.pop(0)
            self.sleep(done, wakes_on_request=wakes_on_request)
        if self.phase != "waking" or any(self._table.children[name].state != "ready" for name in self._ranks):
            return
        self._clear()
        self._awake()
        took_s = time.monotonic() - self._began_s
        self._log.info("awake", extra={"fields": {"took_s": f"{took_s:.2f}"}})
        self.counts = msgspec.structs.replace(self.counts, wake_s=self.counts.wake_s + took_s, is_asleep=False)
        _call(self._wake_waiters, "")

    def _awake(self) -> None:
        self.phase, self.problem = "awake", ""
        self._table.outboxes[topology.SCHEDULE].send(m.WakeUp())

    def _clear(self) -> None:
        """Free what was saved."""
        self._resources.has_saved_kv = False
        for fd in self._resources.saved_kv_fds.values():
            os.ftruncate(fd, 0)

    # ------------------------------------------------------------------------------------------------------- deaths

    def ready(self, name: str) -> None:
        """A process has taken another one's place. Schedule does not know that the server sleeps."""
        if name == topology.SCHEDULE and self.phase != "awake":
            self._tell_schedule()

    def died(self, child: Child, reason: str | None) -> bool:
        """A process has died; `reason` is what it has said itself. Returns whether nothing else is to be done: an
        executor can't start, so the server sleeps on. Raises Stopping if the server ends: open requests fail then."""
        if child.stage != "execute":
            return False
        self._saved.clear()
        if self.phase != "waking" or reason is None:
            return False
        if self._state.is_ending:
            self._log.error(f"open requests can't be finished: {child.name} can't start: {reason}")
            self._state.reasons = {child.name: reason}
            self._table.mark_dead(child)
            _call(self._wake_waiters, reason)
            raise Stopping(EXIT_STAGE_DIED)
        self.problem = f"{child.name} can't start: {reason}"
        self._log.error(f"the server sleeps on: {self.problem}")
        self._leave()
        self._tell_schedule()  # the next request may wake the server again
        _call(self._wake_waiters, reason)
        return True


def _call(waiters: list[Done], problem: str) -> None:
    """Call all of them, and forget them."""
    while waiters:
        waiters.pop(0)(problem)
