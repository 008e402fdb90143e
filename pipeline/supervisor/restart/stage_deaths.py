"""What a process's end means: it is restarted, or was meant to end, or the server can't go on."""

import logging
import time
from collections.abc import Callable

from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.transport.inbox import Inbox
from pipeline.supervisor.admin.questions import Questions
from pipeline.supervisor.crashes.crash_reports import CrashReports
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.processes.heartbeats import Heartbeats
from pipeline.supervisor.reconfigure.scaling import Scaling
from pipeline.supervisor.restart.restarts import LIVING, Restarts
from pipeline.supervisor.restart.sleep import Sleeper
from pipeline.supervisor.server_state import ServerState
from pipeline.supervisor.shared.resources import SharedResources
from pipeline.supervisor.stopping import EXIT_NOT_STARTED, EXIT_STAGE_DIED, StageKilled, Stopping

LAST_MESSAGES_S = 0.5
"""Maximum time to wait for the last messages of a child that has ended."""
RESULT_S = 10.0
"""The same for a prepare that has ended well: its result is on the way, however busy the machine is."""


class StageDeaths:
    """Notices the ends of children, and informs the parts that must act."""

    def __init__(
        self,
        resources: SharedResources,
        state: ServerState,
        table: ChildTable,
        inbox: Inbox[m.SupervisorInbox],
        drain_inbox: Callable[[], None],
        restarts: Restarts,
        scaling: Scaling,
        questions: Questions,
        heartbeats: Heartbeats,
        sleeper: Sleeper,
        crash_reports: CrashReports,
        log: logging.Logger,
    ) -> None:
        """`drain_inbox` handles the messages that have arrived."""
        self._resources = resources
        self._state = state
        self._table = table
        self._inbox = inbox
        self._drain_inbox = drain_inbox
        self._restarts = restarts
        self._scaling = scaling
        self._questions = questions
        self._heartbeats = heartbeats
        self._sleeper = sleeper
        self._crash_reports = crash_reports
        self._log = log

    def check(self) -> None:
        """Restart stages that have ended and should be running. Raises Stopping if one can't be restarted, StageKilled
        if a signal ended one before the server was ready."""
        for child in list(self._table.children.values()):
            if child.state in LIVING and not child.is_alive and self._table.is_watched(child):
                self._receive_last_messages(child)
                self._ended(child)

    def _ended(self, child: Child) -> None:
        state = self._state
        if child.stage == "prepare" and state.prepared is not None:
            return
        if child.name in state.drained:
            self._table.mark_dead(child)
            return
        if child.stage == "gateway" and state.keeps_sockets:
            # The next server has its sockets, and its clients' connections have ended with it.
            self._log.error(
                f"{child.name} died, and is not restarted: {state.reasons.get(child.name, child.describe_end())}"
            )
            state.drained.add(child.name)
            self._table.mark_dead(child)
            return
        if child.state == "leaving" and not self._scaling.owns(child.name):
            state.drained.add(child.name)  # the server ends
            self._table.mark_dead(child)
            return
        said = state.reasons.pop(child.name, None)
        reason = child.describe_end() if said is None else said
        self._questions.lost(child.name)
        if self._sleeper.died(child, said):
            return
        if self._scaling.died(child.name, reason):
            self._left(child, reason)
        else:
            self._died(child, reason)

    def _left(self, child: Child, reason: str) -> None:
        """A process that was being added or removed has ended: it is not restarted."""
        self._table.unwatch(child)
        if child.exit_code:
            fields = self._crash_reports.died(child, reason)
            self._log.error(f"{child.name} died while it was {child.state}: {reason}", extra={"fields": fields})

    def _died(self, child: Child, reason: str) -> None:
        is_asked_for = self._restarts.planned.has_killed(child.name)
        fields = {} if is_asked_for else self._crash_reports.died(child, reason)
        if not self._state.is_serving:
            self._table.mark_dead(child)
            if (child.exit_code or 0) < 0 and child.stage != "prepare":
                raise StageKilled(child.name, reason)
            self._state.problem = f"{child.stage}: {reason}"
            self._log.error(f"cannot start: {self._state.problem}", extra={"fields": fields})
            raise Stopping(EXIT_NOT_STARTED)
        why_not = self._restarts.died(child, reason)
        if not is_asked_for:
            text = f"{child.name} died: {reason}{f'; not restarted: {why_not}' if why_not else ''}"
            self._log.error(text, extra={"fields": fields})
        if why_not:
            self._state.reasons = {child.name: reason}
            self._table.mark_dead(child)
            raise Stopping(EXIT_STAGE_DIED)
        for name in topology.lives_with(self._resources.settings, child.name):
            self._questions.lost(name)
            self._heartbeats.lost(name)

    def _receive_last_messages(self, child: Child) -> None:
        """Wait for the messages that a child sent before it ended: they may still be on the way."""
        if child.state == "leaving":
            self._drain_inbox()
            return
        has_result = child.stage == "prepare" and child.exit_code == 0
        end = time.monotonic() + (RESULT_S if has_result else LAST_MESSAGES_S)
        self._drain_inbox()

        def is_complete() -> bool:  # prepare's last message is its result, and it exits with 0
            return child.name in self._state.reasons or (child.stage == "prepare" and self._state.prepared is not None)

        while not is_complete() and (child.exit_code or 0) >= 0:
            left_s = end - time.monotonic()
            if left_s <= 0 or not self._inbox.wait(left_s):
                return
            self._drain_inbox()
