"""The processes of the stages, with an outbox to each of them."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.curve import ClientKeys
from pipeline.runtime.transport.outbox import Outbox
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.processes.process import ChildProcess
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.resources import INCARNATION

LEAVES_FILES = ("prepare", "execute")
"""Stages that write files while they start: models, and compiled kernels."""
INTERRUPT_S = 1.0
"""Maximum time to remove them."""

if TYPE_CHECKING:
    from pipeline.hosts.hosts import Hosts


class ChildTable:
    """The children by name, in the order of their start. `poller` watches their pidfds."""

    def __init__(
        self,
        settings: Settings,
        run_mode: RunMode,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        hosts: "Hosts | None" = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """`hosts` start the processes that run on others than this one, `fork_server` the others. It belongs to the
        caller."""
        self.settings = settings
        self._run_mode = run_mode
        self._context = context
        self._poller = poller
        self._hosts = hosts
        self._fork_server = fork_server
        self.children: dict[str, Child] = {}
        self.outboxes: dict[str, Outbox[Any]] = {}
        """To the children that have begun."""
        self._watched: set[int] = set()
        """The pidfds that the poller watches."""
        self._addresses: dict[str, str] = {}
        """Of the children that wait."""

    def spawn(self, launch: m.Launch, *, waits: bool = False) -> Child:
        """Start a stage. If it `waits`, it runs after `begin_all`."""
        child = self._start(launch, waits=waits)
        self.children[child.name] = child
        self._watch(child)
        self._addresses[child.name] = launch.address
        if not waits:
            self._connect(child.name)
        return child

    def add(self, launch: m.Launch) -> Child:
        """Start a process that is new: it is `joining`."""
        child = self.start_successor(launch)
        child.state = "joining"
        self.children[child.name] = child
        self._addresses[child.name] = launch.address
        self._connect(child.name)
        return child

    def begin_all(self, model_dir: str) -> None:
        """Let all children run that wait, with the folder of the prepared model."""
        for child in self.children.values():
            if not child.has_begun:
                child.begin(model_dir)
                self._connect(child.name)

    def _connect(self, name: str) -> None:
        """Create a child's outbox. A child that waits has none: its inbox is missing, and libzmq would try again and
        again for as long as a model is downloaded."""
        self.outboxes[name] = Outbox(
            self._context,
            self._addresses.pop(name),
            m.Envelope(SUPERVISOR, INCARNATION),
            topology.bound_of(self.settings),
            keys=self._keys_to(name),
        )

    def _keys_to(self, name: str) -> ClientKeys | None:
        return None if self._hosts is None else self._hosts.keys_to(name)

    def lost(self, child: Child, address: str) -> None:
        """The process of a child has died. Its successor, which `replace` starts, has this inbox."""
        if self.is_watched(child):
            self.mark_dead(child)
        child.state = "recovering"
        self.outboxes[child.name].reconnect(address, keys=self._keys_to(child.name))

    def replace(self, launch: m.Launch) -> Child:
        """Start the successor of a child that was `lost`."""
        child = self.start_successor(launch)
        self.adopt(child)
        return child

    def start_successor(self, launch: m.Launch) -> Child:
        """Start a process that is going to take the place of another one. It belongs to the caller until `adopt`."""
        child = self._start(launch, waits=False)
        child.state = "recovering"
        self._watch(child)
        return child

    def adopt(self, child: Child) -> None:
        """A successor takes the place of a child that was `lost`."""
        before = self.children[child.name]
        child.num_restarts = before.num_restarts + 1
        self.children[child.name] = child
        before.close()

    def drop(self, child: Child) -> None:
        """Kill a successor that takes no place."""
        self.unwatch(child)
        child.close()

    def _start(self, launch: m.Launch, *, waits: bool) -> Child:
        launch = self._run_mode.launch(launch)
        if self._hosts is not None and topology.is_remote(self.settings, launch.name):
            return self._hosts.start(launch, waits=waits)
        return self._run_mode.start(launch, self._num_threads(launch), waits=waits, fork_server=self._fork_server)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules ahead for processes that start later."""
        if self._fork_server is not None:
            self._fork_server.preload(modules)

    def turn(self) -> None:
        """Start the fork server again if it has died."""
        if self._fork_server is not None:
            self._fork_server.turn()

    def _num_threads(self, launch: m.Launch) -> int:
        num_threads = self.settings.execute.num_threads if launch.stage == "execute" else 0
        return num_threads or len(os.sched_getaffinity(0))

    def mark_dead(self, child: Child) -> None:
        """Stop watching a child that has ended: its pidfd would stay readable."""
        child.state = "dead"
        self.unwatch(child)

    def is_watched(self, child: Child) -> bool:
        """Whether the end of this child has not been handled."""
        return child.pidfd in self._watched

    def _watch(self, child: Child) -> None:
        self._poller.register(child.pidfd, zmq.POLLIN)
        self._watched.add(child.pidfd)

    def unwatch(self, child: Child) -> None:
        """The end of a child was handled."""
        self._poller.unregister(child.pidfd)
        self._watched.discard(child.pidfd)

    def remove(self, child: Child) -> None:
        """Kill the child if it is alive, and forget it."""
        if child.pidfd in self._watched:
            self.unwatch(child)
        child.close()
        del self.children[child.name]
        if (outbox := self.outboxes.pop(child.name, None)) is not None:
            outbox.close()

    def in_flow_order(self) -> list[Child]:
        order = {name: index for index, name in enumerate(topology.FLOW)}
        return sorted(self.children.values(), key=lambda child: (order.get(child.stage, -1), child.name))

    def names_of_ready(self) -> list[str]:
        """Names of the stages that are ready, in flow order."""
        return [child.name for child in self.in_flow_order() if child.state == "ready"]

    def ping(self, name: str, nonce: int) -> None:
        self.outboxes[name].send(m.Ping(nonce))

    def reply(self, asker: str, message: m.GatewayInbox) -> None:
        """Send a reply to a gateway, unless it is gone."""
        if asker in self.outboxes:
            self.outboxes[asker].send(message)

    def tell_gateways(self, late: m.LateStages) -> None:
        for name in topology.among(self.children, "gateway"):
            self.reply(name, late)

    def end_starting(self) -> None:
        """End the children that prepare or compile, which have a moment to remove what is incomplete."""
        local = [child for child in self.children.values() if isinstance(child, ChildProcess)]
        starting = [child for child in local if child.stage in LEAVES_FILES and child.state == "starting"]
        for child in starting:
            child.interrupt()
        end = time.monotonic() + INTERRUPT_S
        for child in starting:
            child.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End all children."""
        self.end_starting()
        for child in list(self.children.values()):
            self.remove(child)
        for outbox in self.outboxes.values():
            outbox.close()
