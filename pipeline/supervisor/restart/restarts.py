"""Restarts stages that have died: a new process with new channels, which the other stages are informed of.

    died ──► channels renewed, others informed ──delay──► spawned ──► Ready ──► Start ──► serves again
    asked ──► spawned ──► Ready ──► the one before is killed, others informed ──► Start ──► serves

If a rank of the executor dies, the others are killed, and all of them start anew with new shared memory.

What the stages do with `PeerRestarted` is theirs: the owner of a fact sends it to the successor again.
"""

import logging
import time
from collections.abc import Callable, Sequence

from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.transport.inbox import Inbox
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.restart.planned_restarts import PlannedRestarts, launch_of
from pipeline.supervisor.restart.recovery import Recovery, RestartBudget
from pipeline.supervisor.restart.restart_log import RestartLog
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.resources import SharedResources

LIVING = ("starting", "recovering", "waking", "joining", "ready", "leaving")


class Restarts:
    """Owns the restarts that are under way."""

    def __init__(
        self,
        run_mode: RunMode,
        resources: SharedResources,
        table: ChildTable,
        inbox: Inbox[m.SupervisorInbox],
        log: logging.Logger,
    ) -> None:
        self._run_mode = run_mode
        self._resources = resources
        self._table = table
        self._inbox = inbox
        self._log = log
        self.budget = RestartBudget(resources.settings.supervisor.max_restarts)
        self.recovery = Recovery()
        self._due_s: dict[str, float] = {}
        """When successors start, by name. All times are by time.monotonic()."""
        self._died_s: dict[str, float] = {}
        """When the process died whose successor is not ready yet."""
        self.has_host: Callable[[str], bool] = lambda _: True
        """Whether the host of a process is ready for it."""
        self.spans = RestartLog()
        self.planned = PlannedRestarts(run_mode, resources, table, inbox, log, self._hand_over)

    @property
    def deadlines(self) -> list[float]:
        """When `turn` must be called next."""
        due_s = [due_s for name, due_s in self._due_s.items() if self._may_start(name)]
        return [*due_s, *self.planned.deadlines]

    def died(self, child: Child, reason: str) -> str:
        """A stage's process has died for this reason: restart it. Returns an empty string, or why it can't be
        restarted."""
        name, now_s = child.name, time.monotonic()
        if self._run_mode.inline or name == self._run_mode.foreground:
            return "it is being debugged"
        # Processes that start from here on are informed of the newest channels, so the others must use them too.
        self.planned.take_over_now()
        if self._table.children[name] is not child:
            return ""  # its successor has started already
        delay_s: float | str = 0.0
        failing: m.FailRequests | None = None
        if self.planned.has_killed(name):
            self._begin_span(child, "restarts", self.planned.reason_of(name))
            self.planned.noticed(name)
        else:
            self._begin_span(child, "died", reason)
            suspects = self._suspects(child)
            was_ready = child.state == "ready" or bool(suspects)
            delay_s = self.budget.died(name, now_s, was_ready=was_ready, suspects=suspects)
            failing = self._resources.crash_counts.crashed(child.stage, suspects)
        if isinstance(delay_s, str):
            return delay_s
        together = [self._table.children[one] for one in topology.lives_with(self._resources.settings, name)]
        try:
            for one in together:
                if one is not child:
                    self._begin_span(one, "restarts", f"{name} has ended")
                    one.kill()
                self._resources.renew(one.name)
        except (MemoryError, OSError, UserError) as error:  # OSError: no descriptor is left, for example
            return str(error)
        if failing is not None:  # before they learn of the successor, which must not get them
            for other in (topology.SCHEDULE, *topology.among(self._table.children, "gateway")):
                if other != name and self._is_living(self._table.children[other]):
                    self._send(other, failing)
        for one in together:
            self._due_s[one.name] = now_s + delay_s
            self._lose(one)
        return ""

    def put_to_sleep(self, names: Sequence[str]) -> str:
        """End the processes with these names, which live together. Their successors have channels, and start with
        `wake`. Returns an empty string, or why there can be none."""
        self.planned.take_over_now()
        try:
            for name in names:
                self._resources.renew(name)
        except (MemoryError, OSError, UserError) as error:
            return str(error)
        children = [self._table.children[name] for name in names]
        for child in children:
            child.kill()
            self._due_s.pop(child.name, None)
        for child in children:
            self._lose(child)
            child.state = "sleeping"
            del self._died_s[child.name]
        return ""

    def wake(self, names: Sequence[str]) -> None:
        """Start the processes that sleep."""
        now_s = time.monotonic()
        for name in names:
            self._table.children[name].state = "waking"
            self._due_s[name] = self._died_s[name] = now_s

    def _suspects(self, child: Child) -> list[int]:
        """The requests of which each may be the reason why this process has died: none if it did no work. One that has
        named a request did, though its `Ready` may be lost."""
        if child.is_lost:
            return []
        black_boxes, incarnations = self._resources.black_boxes, self._resources.incarnations
        if child.state == "ready":
            return black_boxes.suspects(child.name, incarnations)
        return black_boxes.at_work(child.name, incarnations[child.name])

    def _hand_over(self, successor: Child) -> None:
        """A successor that has started, perhaps with the channels in the resources, takes the place of its child."""
        child = self._table.children[successor.name]
        self._begin_span(child, "restarts", self.planned.reason_of(child.name))
        child.kill()
        self._lose(child)
        self._table.adopt(successor)

    def _begin_span(self, child: Child, what: str, reason: str) -> None:
        self.spans.begin(child.name, what, reason=reason, pid=child.pid, incarnation=child.incarnation)

    def _lose(self, child: Child) -> None:
        """The process of a child has died, and its successor has channels: inform the others."""
        name = child.name
        self._table.lost(child, self._resources.addresses[name])
        self._inbox.replaced(name, self._resources.incarnations[name])
        self._died_s.setdefault(name, time.monotonic())
        self.inform(name)

    def inform(self, name: str) -> None:
        """Inform the others of the newest channels of a process, or that it is gone."""
        stages, gateways = self._neighbours(name)
        epoch = self.recovery.died(name, stages, gateways)
        for other in stages:
            self._tell(other, name, epoch)
        self._tell_gateways()

    def answered(self, name: str, epoch: int) -> None:
        """A stage uses the channels to a successor."""
        self.recovery.answered(name, epoch)
        self._tell_gateways()

    def turn(self, model_dir: str, facts: m.ExecuteFacts) -> None:
        """Start the processes that are due. `facts` are those of the first executor."""
        self.planned.turn(model_dir, facts)
        now_s = time.monotonic()
        for name, due_s in list(self._due_s.items()):
            if now_s < due_s:
                continue
            self.planned.take_over_now()
            if self._may_start(name):
                del self._due_s[name]
                self._start(name, model_dir, facts)
        for name in self._died_s.keys() - self._due_s.keys():
            child = self._table.children[name]
            took_s = now_s - child.started_s - child.suspended_s
            if took_s >= self._resources.settings.supervisor.start_timeout_s and child.is_alive:
                self._log.error(f"{name} is not ready in time (supervisor.start_timeout_s); killing it")
                child.abort()

    def _may_start(self, name: str) -> bool:
        return self.recovery.may_start(name) and self.has_host(name)

    def hosts_found(self) -> None:
        """Another host was found for the processes of one that was lost: they have other addresses there."""
        for name in topology.lives_with(self._resources.settings, topology.EXECUTE):
            if name in self._due_s:
                self._resources.renew(name)
                self._lose(self._table.children[name])

    def suspended(self, seconds: float) -> None:
        """This process did not run for so long."""
        self.planned.suspended(seconds)
        for name in self._died_s.keys() - self._due_s.keys():
            self._table.children[name].suspended_s += seconds

    def ready(self, child: Child, facts: m.ExecuteFacts) -> None:
        """A successor is ready: it begins with `Start`, as all stages did."""
        self._table.outboxes[child.name].send(m.Start(facts))
        self._resources.black_boxes.keep_only(child.name, child.incarnation)
        took_s = time.monotonic() - self._died_s.pop(child.name)
        self.planned.ready(child.name, took_s)
        self.spans.end(child.name, restarts=child.num_restarts, next_pid=child.pid)
        fields = {"pid": child.pid, "restarts": child.num_restarts, "took_s": f"{took_s:.2f}"}
        self._log.info(f"{child.name} is back", extra={"fields": fields})

    def _start(self, name: str, model_dir: str, facts: m.ExecuteFacts) -> None:
        was_asleep = self._table.children[name].state == "waking"
        child = self._table.replace(launch_of(name, self._resources, model_dir, facts))
        child.state = "waking" if was_asleep else child.state
        self._log.debug("restarted", extra={"fields": {"stage": name, "pid": child.pid}})

    def _is_living(self, child: Child) -> bool:
        return child.state in LIVING and child.is_alive

    def _neighbours(self, name: str) -> tuple[list[str], list[str]]:
        """The living stages that share an edge with a process, and the gateways."""
        living = [child.name for child in self._table.children.values() if self._is_living(child)]
        known = [other for other in living if other != name and self._resources.restart_of(name, other, 0) is not None]
        gateways = [other for other in known if other.startswith("gateway.")]
        return [other for other in known if other not in gateways], gateways

    def _tell_gateways(self) -> None:
        for one in self.recovery.rounds_for_gateways():
            for gateway in sorted(one.gateways):
                self._tell(gateway, one.name, one.epoch)

    def _tell(self, other: str, name: str, epoch: int) -> None:
        found = self._resources.restart_of(name, other, epoch)
        assert found is not None, f"{other} and {name} share no edge"
        self._send(other, found[0], epoch, found[1])

    def _send(
        self, other: str, message: m.PeerRestarted | m.FailRequests, epoch: int = 0, fds: Sequence[int] = ()
    ) -> None:
        """Send a message to a process, after its descriptors."""
        child = self._table.children[other]
        try:
            if (not fds or child.send_descriptors(epoch, list(fds))) and self._table.outboxes[other].send(message):
                return
        except ConnectionError:
            return  # it has closed its socket and is ending; its successor begins with the newest channels
        # It has read nothing for hundreds of messages. Its successor begins with the newest channels too.
        self._log.error(f"{other} does not accept messages; killing it")
        child.abort()
