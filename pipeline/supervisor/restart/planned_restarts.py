"""Restarts that someone asked for: `pipeline restart`.

    asked ──► successor spawned ──► Ready ──► takes over ──► served again     a stage that can run twice for a while
    asked ──► successor spawned ──► Ready ──► HandOver ──► Drained ──► takes over ──► served again          schedule
    asked ──► Drain ──► Drained ──► killed ──► restarted as if it had died    a gateway
    asked ──► killed ──► restarted as if it had died                          an executor on a GPU: memory is for one;
                                                                              an executor of several ranks,
                                                                              or on another host

A successor that does not become ready changes nothing. Only one is on its way at a time. If any stage dies meanwhile,
it takes over at once, because a process that is started then must know which channels the others use.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.messages.wire_version import wire_version
from pipeline.runtime.transport.inbox import Inbox
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.resources import Channels, SharedResources

HAND_OVER_S = 5.0
"""How long schedule may take to end its steps in flight. The successor computes again what is not settled by then."""
LAST_WORDS_S = 0.5
"""From the end of a successor's process until its `StageFailed` must have arrived."""

Done = Callable[[float, str], None]
"""Called once, with the pause in seconds and an empty string, or with the reason why nothing was restarted."""


class _Plan(msgspec.Struct, eq=False):
    reason: str
    done: Done
    deadline_s: float
    """By time.monotonic(), as all times."""
    successor: Child | None = None
    """Until it takes over."""
    before: Channels | None = None
    """Of the process that serves until then."""
    take_over_s: float | None = None
    """When the successor takes over at the latest, if the process before is handing over."""
    ended_s: float | None = None
    """When the successor's process ended."""
    is_ending: bool = False
    """The process before drains, or has been killed."""
    is_killed: bool = False
    """By this module, and its end has not been noticed yet."""


class PlannedRestarts:
    """Owns the successors that have not taken over."""

    def __init__(
        self,
        run_mode: RunMode,
        resources: SharedResources,
        table: ChildTable,
        inbox: Inbox[m.SupervisorInbox],
        log: logging.Logger,
        hand_over: Callable[[Child], None],
    ) -> None:
        """`hand_over` kills the process that a successor replaces, and puts the successor into the table."""
        self._run_mode = run_mode
        self._resources = resources
        self._table = table
        self._inbox = inbox
        self._log = log
        self._hand_over = hand_over
        self._plans: dict[str, _Plan] = {}

    @property
    def deadlines(self) -> list[float]:
        deadlines = [plan.deadline_s for plan in self._plans.values()]
        return deadlines + [plan.take_over_s for plan in self._plans.values() if plan.take_over_s is not None]

    def ask(self, name: str, reason: str, done: Done) -> None:
        """Restart the process of a stage that is ready. `turn` begins it. `reason` is shown in traces."""
        if problem := self._problem(name):
            done(0.0, problem)
            return
        timeout_s = self._resources.settings.supervisor.start_timeout_s
        if name.startswith("gateway."):
            timeout_s += self._resources.settings.supervisor.drain_timeout_s
        self._plans[name] = _Plan(reason, done, time.monotonic() + timeout_s)

    def _problem(self, name: str) -> str:
        if self._run_mode.is_debugged:
            return "stages that are debugged are not restarted"
        return f"{name} is being restarted already" if name in self._plans else ""

    def turn(self, model_dir: str, facts: m.ExecuteFacts) -> None:
        """Begin what was asked for, and let successors take over that are ready. `facts` are those of the first
        executor."""
        now_s = time.monotonic()
        for name, plan in list(self._plans.items()):
            if plan.successor is not None:
                self._check(name, plan, plan.successor, now_s)
            elif not plan.is_ending and self._may_begin(name):
                self._begin(name, plan, model_dir, facts)
            elif now_s >= plan.deadline_s:
                self._fail(name, "its successor was not ready in time")

    def _may_begin(self, name: str) -> bool:
        """Successors start one after the other: each is launched with the channels that the others use now."""
        is_alone = not any(plan.successor is not None for plan in self._plans.values())
        return is_alone and self._table.children[name].state == "ready"

    def suspended(self, seconds: float) -> None:
        """This process did not run for so long."""
        for plan in self._plans.values():
            plan.deadline_s += seconds
            if plan.take_over_s is not None:
                plan.take_over_s += seconds

    def is_planned(self, name: str) -> bool:
        """Whether a process is going to be replaced."""
        return name in self._plans

    def drained(self, name: str) -> None:
        """A gateway has closed its last stream: it is restarted as if it had died. Or schedule has handed over."""
        plan = self._plans.get(name)
        if plan is None:
            return
        if plan.take_over_s is not None:
            plan.take_over_s = 0.0
        elif plan.is_ending:
            self._kill(name, plan)

    def _kill(self, name: str, plan: _Plan) -> None:
        plan.is_killed = True
        self._table.children[name].kill()

    def take_over_now(self) -> None:
        """Let a successor take over now, ready or not."""
        for name, plan in list(self._plans.items()):
            if plan.successor is not None:
                self._take_over(name, plan, plan.successor)

    def has_killed(self, name: str) -> bool:
        """Whether the process of a stage has ended because it was asked for."""
        return name in self._plans and self._plans[name].is_killed

    def reason_of(self, name: str) -> str:
        """Why a stage is being restarted on purpose."""
        return self._plans[name].reason if name in self._plans else ""

    def noticed(self, name: str) -> None:
        """The end of a process has been noticed. If its successor ends too, that was not asked for."""
        if name in self._plans:
            self._plans[name].is_killed = False

    def ready(self, name: str, pause_s: float) -> None:
        """A process has taken another one's place and is ready."""
        if (plan := self._plans.pop(name, None)) is not None:
            plan.done(pause_s, "")

    def close(self) -> None:
        for plan in self._plans.values():
            if plan.successor is not None:
                self._table.drop(plan.successor)
            if plan.before is not None:
                self._resources.discard(plan.before)
        self._plans.clear()

    def _begin(self, name: str, plan: _Plan, model_dir: str, facts: m.ExecuteFacts) -> None:
        child = self._table.children[name]
        if child.stage == "gateway":
            plan.is_ending = True
            self._table.outboxes[name].send(m.Drain(self._resources.settings.supervisor.drain_timeout_s))
        elif child.stage == "execute" and self._runs_once():
            plan.is_ending = True
            self._kill(name, plan)
        else:
            try:
                plan.before = self._resources.replace(name)
            except (MemoryError, UserError) as error:
                self._fail(name, str(error))
                return
            plan.successor = self._table.start_successor(launch_of(name, self._resources, model_dir, facts))
            fields = {"pid": plan.successor.pid}
            self._log.info(f"{name} is being replaced", extra={"fields": fields})

    def _runs_once(self) -> bool:
        """Whether the executor can't run twice for a while."""
        execute = self._resources.settings.execute
        return execute.device == "cuda" or execute.num_ranks > 1 or execute.launcher != "process"

    def _check(self, name: str, plan: _Plan, successor: Child, now_s: float) -> None:
        if plan.take_over_s is not None:  # the process before does nothing any more, so there is no way back
            if now_s >= plan.take_over_s:
                self._take_over(name, plan, successor)
            return
        said = self._inbox.early_of(name)
        failures = [one.reason for one in said if isinstance(one, m.StageFailed)]
        if failures:
            self._fail(name, failures[0])
        elif not successor.is_alive:
            plan.ended_s = plan.ended_s or now_s
            if now_s >= plan.ended_s + LAST_WORDS_S:
                self._fail(name, successor.describe_end())
        elif any(isinstance(one, m.Ready) for one in said):
            if name == topology.SCHEDULE and self._table.outboxes[name].send(m.HandOver()):
                plan.take_over_s = now_s + HAND_OVER_S
            else:
                self._take_over(name, plan, successor)
        elif now_s >= plan.deadline_s:
            self._fail(name, "its successor was not ready in time (supervisor.start_timeout_s)")

    def _take_over(self, name: str, plan: _Plan, successor: Child) -> None:
        before, plan.successor, plan.before, plan.take_over_s = plan.before, None, None, None
        plan.is_ending = True
        self._hand_over(successor)
        if before is not None:
            self._resources.discard(before)

    def _fail(self, name: str, reason: str) -> None:
        """The process serves on."""
        plan = self._plans.pop(name)
        if plan.successor is not None:
            self._table.drop(plan.successor)
            self._inbox.drop_early(name)
        if plan.before is not None:
            self._resources.restore(plan.before)
        self._log.error(f"{name} was not restarted: {reason}")
        plan.done(0.0, reason)


def launch_of(name: str, resources: SharedResources, model_dir: str, facts: m.ExecuteFacts) -> m.Launch:
    """Of the successor of a process, with the newest channels and settings. A rank has its own back end."""
    stage, _, replica = name.partition(".")
    row = topology.row(stage)
    peers = topology.peers_of(row, resources.addresses, resources.settings, int(replica))
    launch = resources.launch(stage, row.entry, peers, int(replica))
    facts = msgspec.structs.replace(facts, backend=resources.backends.get(name, facts.backend))
    return msgspec.structs.replace(launch, model_dir=model_dir, facts=facts, wire_version=wire_version())
