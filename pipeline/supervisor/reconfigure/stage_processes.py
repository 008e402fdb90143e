"""What `Scaling` does with processes: channels, listening sockets, children, and the messages to the others."""

import logging
import socket
import time
from collections.abc import Callable

from pipeline.client.connection.zmq_address import check_free
from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.transport.inbox import Inbox
from pipeline.supervisor.processes import heartbeats
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.restart.planned_restarts import launch_of
from pipeline.supervisor.restart.restarts import LIVING, Restarts
from pipeline.supervisor.shared.listeners import add_listener, remove_listener, set_active_listeners, zmq_address
from pipeline.supervisor.shared.resources import SharedResources

PING_S = 0.05
"""Interval of the questions whether an ingest has work left."""
RECEIVERS = {"ingest": ("gateway",), "detokenize": ("schedule",), "gateway": ("gateway",)}
"""The stages that distribute a stage's work, or share its limits."""


class StageProcesses:
    """Implements `scaling.Processes` for the processes of a server."""

    def __init__(
        self,
        resources: SharedResources,
        table: ChildTable,
        inbox: Inbox[m.SupervisorInbox],
        restarts: Restarts,
        listeners: list[socket.socket],
        admins: list[socket.socket],
        log: logging.Logger,
        use: Callable[[Settings], None],
        forget: Callable[[str], None],
    ) -> None:
        """`listeners` has one socket for each gateway, in order; so has `admins`, unless it is empty. `use` changes the
        settings. `forget` is called with a process that is going to be removed."""
        self._resources = resources
        self._table = table
        self._inbox = inbox
        self._restarts = restarts
        self._groups = [group for group in (listeners, admins) if group]
        """Of listening sockets."""
        self._listeners = listeners
        self._log = log
        self._use = use
        self._forget = forget
        self._model_dir = ""
        self._facts: m.ExecuteFacts | None = None
        self._asked_s: dict[str, float] = {}
        """Ingests that are asked whether they have work left, and when they were last."""

    def turn(self, model_dir: str, facts: m.ExecuteFacts) -> None:
        """Ask again the ingests that have work left. New processes start with this model, and these facts of the first
        executor."""
        self._model_dir, self._facts = model_dir, facts
        now_s = time.monotonic()
        for name, asked_s in self._asked_s.items():
            if now_s >= asked_s + PING_S:
                self._ask(name)

    @property
    def deadlines(self) -> list[float]:
        """When `turn` must be called next."""
        return [asked_s + PING_S for asked_s in self._asked_s.values()]

    # ------------------------------------------------------------------------------------------------------- more

    def add(self, name: str) -> None:
        self._restarts.planned.take_over_now()
        if topology.stage_of(name) == "gateway":
            self._listen(topology.replica_of(name))
        try:
            self._resources.add(name)
        except (MemoryError, OSError):
            self._close_listeners(name)
            raise
        self._inbox.replaced(name, self._resources.incarnations[name])
        self._restarts.inform(name)

    def _listen(self, replica: int) -> None:
        if (address := zmq_address(self._resources.settings, self._listeners, replica)) is not None:
            check_free(address)
        try:
            for group in self._groups:
                add_listener(group)
                set_active_listeners(group, self._num_serving)  # the new one gets connections when its gateway runs
        except OSError:
            self._close_listeners(f"gateway.{replica}")
            raise

    @property
    def _num_serving(self) -> int:
        """Gateways that are not joining."""
        return sum(child.stage == "gateway" and child.state != "joining" for child in self._table.children.values())

    def _close_listeners(self, name: str) -> None:
        if topology.stage_of(name) == "gateway":
            for group in self._groups:
                if len(group) > topology.replica_of(name):
                    remove_listener(group)

    def may_start(self, name: str) -> bool:
        return self._restarts.recovery.may_start(name)

    def start(self, name: str) -> None:
        self._restarts.planned.take_over_now()
        assert self._facts is not None
        child = self._table.add(launch_of(name, self._resources, self._model_dir, self._facts))
        self._log.debug("started", extra={"fields": {"stage": name, "pid": child.pid}})

    def join(self, name: str) -> None:
        child = self._table.children[name]
        child.state = "ready"
        if child.stage == "gateway":
            for group in self._groups:
                set_active_listeners(group, len(group))
        self._log.info(f"{name} has joined", extra={"fields": {"pid": child.pid}})

    # ------------------------------------------------------------------------------------------------------ fewer

    def may_leave(self, name: str) -> bool:
        return self._table.children[name].state == "ready" and not self._restarts.planned.is_planned(name)

    def leave(self, name: str) -> None:
        self._table.children[name].state = "leaving"
        self._forget(name)

    def drain(self, name: str) -> bool:
        match topology.stage_of(name):
            case "gateway":
                for group in self._groups:
                    set_active_listeners(group, topology.replica_of(name))
                timeout_s = self._resources.settings.supervisor.drain_timeout_s
                self._table.outboxes[name].send(m.Drain(timeout_s, is_leaving=True))
            case "ingest":
                self._ask(name)
            case _:
                return True  # the sequences of a detokenize move to others when it is removed
        return False

    def _ask(self, name: str) -> None:
        self._asked_s[name] = time.monotonic()
        self._table.outboxes[name].send(m.Ping(heartbeats.NONCE))

    def is_idle(self, name: str, load: m.Load) -> bool:
        """A process has answered a ping with this load. Returns whether it leaves, and has nothing left to do."""
        return name in self._asked_s and isinstance(load, m.PlainLoad) and load.num_open == 0

    def stop(self, name: str) -> None:
        self._asked_s.pop(name, None)
        self._table.outboxes[name].send(m.Stop())

    def remove(self, name: str) -> None:
        if name not in self._resources.incarnations:
            return  # it was never added
        self._asked_s.pop(name, None)
        self._forget(name)
        if (child := self._table.children.get(name)) is not None:
            self._table.remove(child)
        self._inbox.removed(name, self._resources.incarnations[name])
        self._resources.remove(name)
        self._close_listeners(name)
        self._restarts.inform(name)
        self._log.info(f"{name} is removed")

    # ------------------------------------------------------------------------------------------------- the others

    def is_known(self, name: str) -> bool:
        return self._restarts.recovery.is_known(name)

    def rescale(self, stage: str, num: int) -> tuple[int, set[str]]:
        self._restarts.planned.take_over_now()
        self._use(topology.with_replicas(self._resources.settings, stage, num))
        epoch = self._restarts.recovery.next_epoch()
        awaited = set()
        for child in self._table.children.values():
            if child.stage in RECEIVERS[stage] and child.state in LIVING and child.is_alive:
                self._table.outboxes[child.name].send(m.Rescaled(epoch, stage, num))
                awaited.add(child.name)
        return epoch, awaited
