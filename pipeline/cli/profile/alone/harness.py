"""A stage's process, and the other ends of its sockets and shared memory."""

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.runtime.transport.memories import Memories
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm import segment
from pipeline.shm.arena import Arena
from pipeline.shm.arrays import Array, ShmRef
from pipeline.supervisor.processes.process import ChildProcess

START_S = 60.0
STOP_S = 5.0
LAST_WORDS_S = 0.5
"""From the end of the stage's process until its `StageFailed` must have arrived."""

INBOXES: dict[str, Any] = {
    "supervisor": m.SupervisorInbox,
    "gateway": m.GatewayInbox,
    "ingest": m.IngestInbox,
    "schedule": m.ScheduleInbox,
    "execute": m.ExecuteInbox,
    "detokenize": m.DetokenizeInbox,
}


class Harness:
    """Runs `stage` like its supervisor. Use as a context manager. `send(message, sender)` sends it a neighbour's
    message. `received()` returns what it has sent to its neighbours since the last call. `bytes_of(array)` reads an
    array that it shared, and `arena(name)` is a neighbour's arena."""

    def __init__(self, stage: str, settings: Settings, model_dir: Path, *, listens: bool = False) -> None:
        self.settings = settings
        self.stage = stage
        self.num_in: dict[str, int] = {}
        self.num_out: dict[str, int] = {}
        """By type of message."""
        server = f"profile-{os.getpid()}-{secrets.token_hex(4)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        row = topology.row(stage)
        others = [name for one in topology.TOPOLOGY for name in topology.replicas_of(settings, one.name)]
        addresses = {name: address_of(server, name, 1) for name in (SUPERVISOR, *others)}
        peers = topology.peers_of(row, addresses, settings)
        self._inboxes = {
            peer.name: Inbox[Any](self._context, peer.address, INBOXES[peer.name.partition(".")[0]]) for peer in peers
        }
        self._address = addresses[f"{stage}.0"]
        self._outboxes: dict[str, Outbox[Any]] = {}
        self._memories = Memories()
        self._arenas: dict[str, Arena] = {}
        self._fds: list[int] = []
        self.poller = zmq.Poller()
        segments = []
        own = [f"{stage}.0"] if row.has_arena else []
        try:
            for name in (*own, *(one for owner in row.reads for one in topology.replicas_of(settings, owner))):
                size = topology.arena_bytes(settings, name.partition(".")[0])
                fd = segment.create(name, size)
                self._fds.append(fd)
                segments.append(m.Segment(name, fd, size, writable=name in own))
                self._memories.add(name, segment.attach(fd, size, writable=True))
                if name not in own:
                    self._arenas[name] = Arena(name, segment.attach(fd, size, writable=True))
            death_read, death_write = os.pipe()
            self._fds += [death_read, death_write]
            listen_fd = -1
            self.address: tuple[str, int] = ("", 0)
            if listens:
                listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
                self.address = listener.getsockname()
                listen_fd = listener.detach()
                self._fds.append(listen_fd)
            self._launch = m.Launch(
                stage=stage,
                replica=0,
                rank=0,
                incarnation=1,
                entry=row.entry,
                settings=settings,
                model_dir=str(model_dir),
                address=self._address,
                peers=peers,
                segments=segments,
                death_fd=death_read,
                listen_fd=listen_fd,
            )
            self.child = ChildProcess(self._launch, 1)
        except BaseException:
            self._give_back()
            raise
        for inbox in self._inboxes.values():
            self.poller.register(inbox.fileno(), zmq.POLLIN)

    def start(self, facts: m.ExecuteFacts) -> None:
        """Wait until the stage is ready, and start it. Raises UserError with its message if it fails."""
        self.wait_for(lambda message: isinstance(message, m.Ready), START_S, "to be ready")
        self.send(m.Start(facts), SUPERVISOR)
        self.send(m.Ping(0), SUPERVISOR)
        self.wait_for(lambda message: isinstance(message, m.Pong), START_S, "to begin")

    def ask(self, control_request: m.ControlRequest) -> m.Answer:
        """Send a control request, and return the answer. Raises UserError if there is none."""
        self.send(control_request, SUPERVISOR)
        found = self.wait_for(lambda message: isinstance(message, m.Answer), START_S, "to answer")
        assert isinstance(found, m.Answer)
        if found.error:
            raise UserError(found.error)
        return found

    def wait_for(self, condition: Callable[[Any], bool], timeout_s: float, what: str) -> Any:
        """The first message to the supervisor that meets a condition. Raises UserError."""
        end_s, is_alive = time.monotonic() + timeout_s, True
        inbox = self._inboxes[SUPERVISOR]
        while time.monotonic() < end_s:
            for message in inbox.wait_all(0.05):
                if isinstance(message, m.StageFailed):
                    raise UserError(f"{self.stage} failed: {message.reason}")
                if condition(message):
                    return message
            if is_alive and not self.child.is_alive:
                is_alive, end_s = False, time.monotonic() + LAST_WORDS_S
        self.check()
        raise UserError(f"waited {timeout_s:g} s for {self.stage} {what}")

    def check(self) -> None:
        """Raise UserError if the stage has ended."""
        if not self.child.is_alive:
            raise UserError(f"{self.stage} {self.child.describe_end()}")

    def send(self, message: Any, sender: str) -> None:
        if sender not in self._outboxes:
            self._outboxes[sender] = Outbox(self._context, self._address, m.Envelope(sender, 1), 100_000)
        assert self._outboxes[sender].send(message), f"{self.stage} accepts no more messages of {sender}"
        kind = type(message).__name__
        self.num_in[kind] = self.num_in.get(kind, 0) + 1

    def received(self) -> list[Any]:
        """Messages to its neighbours, without those to the supervisor."""
        messages: list[Any] = []
        for name, inbox in self._inboxes.items():
            if name != SUPERVISOR:
                messages += inbox.receive_all()
        for message in messages:
            kind = type(message).__name__
            self.num_out[kind] = self.num_out.get(kind, 0) + 1
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a message for a neighbour arrives, or an event of `poller`. Returns whether a message did."""
        if any(inbox.has_message() for name, inbox in self._inboxes.items() if name != SUPERVISOR):
            return True
        return bool(self.poller.poll(round(timeout_s * 1000)))

    def arena(self, name: str) -> Arena:
        return self._arenas[name]

    def bytes_of(self, array: Array) -> bytes:
        """The bytes of an array that the stage sent."""
        if isinstance(array, ShmRef):
            return bytes(self._memories.data_of(array))
        return array

    def release(self, array: Array, reader: str) -> None:
        """Tell the stage that a neighbour has read its array."""
        if isinstance(array, ShmRef):
            self.send(m.Release([array.offset], [array.generation], reader), reader)

    def released(self, message: m.Release, owner: str) -> None:
        """The stage has read arrays of a neighbour."""
        for offset, generation in zip(message.offsets, message.generations, strict=True):
            self._arenas[owner].release(offset, generation, message.reader)

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.child.is_alive:
                self.send(m.Stop(), SUPERVISOR)
                self.child.wait(STOP_S)
        finally:
            self.child.close()
            self._give_back()

    def _give_back(self) -> None:
        for inbox in self._inboxes.values():
            inbox.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._context.term()
        for fd in self._fds:
            os.close(fd)
