"""Runs one stage between fake neighbours: real sockets and segments, the stage in a thread."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.process import heap
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.runtime.transport.memories import Memories
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm import segment
from pipeline.shm.arena import Arena
from pipeline.shm.arrays import Array, ShmRef

PATIENCE_S = 30.0
HINTS = (m.ExpectGrammars,)
"""Messages that may be lost: tests that don't name them don't see them."""
MAX_ARENA_BYTES = 2 * 1024**2
"""Size of each segment. It is small because thousands of tests create segments."""

INBOXES: dict[str, Any] = {
    "supervisor": m.SupervisorInbox,
    "gateway": m.GatewayInbox,
    "ingest": m.IngestInbox,
    "schedule": m.ScheduleInbox,
    "execute": m.ExecuteInbox,
    "detokenize": m.DetokenizeInbox,
}

_numbers = itertools.count()

# A stage freezes the heap once, when its process has loaded everything. Here one process has many stages, one after the
# other, and what they leave must be freed.
heap.freeze = lambda: None


class Rig:
    """Runs `stage` in a thread. `receive(name)` returns what the stage sent to a neighbour (`gateway` is its first
    replica, `gateway.1` the second), `send(message, sender)` sends as a neighbour, `memory(segment)` reads what the
    stage shares, and `arena(segment)` is a neighbour's arena.

    Use it as a context manager: on exit it sends `Stop`, joins the thread, and raises what the stage raised.
    """

    def __init__(
        self,
        stage: str,
        settings: Settings | None = None,
        model_dir: str | Path = "",
        listen_fd: int = -1,
        siblings: int = 0,
        record: Path | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self._server = f"rig-{os.getpid()}-{next(_numbers)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        row = topology.row(stage)
        others = [name for other in topology.TOPOLOGY for name in topology.replicas_of(self.settings, other.name)]
        names = ["supervisor.0", *others]
        addresses = {name: address_of(self._server, name, 1) for name in names}
        peers = topology.peers_of(row, addresses, self.settings)
        for replica in range(1, siblings + 1):  # the stage's other replicas
            peers.append(m.PeerInbox(f"{stage}.{replica}", address_of(self._server, f"{stage}.{replica}", 1), 64))
        # The first replica of a neighbour has the name of its stage.
        self._inboxes = {
            peer.name.removesuffix(".0"): Inbox[Any](self._context, peer.address, INBOXES[peer.name.split(".")[0]])
            for peer in peers
        }
        self._queues: dict[str, list[Any]] = {name: [] for name in self._inboxes}
        self._address = addresses[f"{stage}.0"]
        self._incarnations: dict[str, int] = {}
        """Of neighbours that were restarted."""
        self._outboxes: dict[str, Outbox[Any]] = {}
        self._fds: list[int] = []
        self._memories = Memories()
        self._arenas: dict[str, Arena] = {}
        segments = []
        own = [f"{stage}.0"] if row.has_arena else []
        for name in (*own, *(read for owner in row.reads for read in topology.replicas_of(self.settings, owner))):
            size = min(MAX_ARENA_BYTES, topology.arena_bytes(self.settings, name.split(".")[0]))
            fd = segment.create(name, size)
            self._fds.append(fd)
            segments.append(m.Segment(name, fd, size, writable=name in own))
            self._memories.add(name, segment.attach(fd, size, writable=True))
            if name not in own:
                self._arenas[name] = Arena(name, segment.attach(fd, size, writable=True))
        for name, size in topology.private_segments(self.settings, stage).items():
            fd = segment.create(name, size, topology.SWAP_KEY)
            self._fds.append(fd)
            segments.append(m.Segment(name, fd, size, writable=True))
            self._memories.add(name, segment.attach(fd, size, writable=True))
        death_read, self._death_write = os.pipe()
        self._fds += [death_read, self._death_write]
        self.launch = m.Launch(
            stage=stage,
            replica=0,
            rank=0,
            incarnation=1,
            entry=row.entry,
            settings=self.settings,
            model_dir=str(model_dir),
            address=self._address,
            peers=peers,
            segments=segments,
            death_fd=death_read,
            listen_fd=listen_fd,
            record=m.Record(0, str(record)) if record is not None else None,
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"rig-{stage}", daemon=True)

    def _run(self) -> None:
        try:
            import_module(self.launch.entry).run(self.launch)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._error = error

    def suspect(self, *request_ids: int) -> None:
        """A process of the stage before this one has crashed with these requests in work. Call it before they come,
        and if the rig records, before it is entered."""
        self.launch.crash_counts.update(dict.fromkeys(request_ids, 1))

    def __enter__(self) -> "Rig":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.send(m.Stop())
        self._thread.join(PATIENCE_S)
        alive = self._thread.is_alive()
        for inbox in self._inboxes.values():
            inbox.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._context.term()
        for fd in self._fds:
            os.close(fd)
        self._memories.clear()
        if self._error is not None:
            raise self._error
        assert not alive, "the stage did not stop"

    def send(self, message: Any, sender: str = "supervisor.0", incarnation: int = 0) -> None:
        """Send to the stage as `sender`, whose newest process it is unless `incarnation` names another one."""
        incarnation = incarnation or self._incarnations.get(sender, 1)
        key = f"{sender}#{incarnation}"
        if key not in self._outboxes:
            self._outboxes[key] = Outbox(self._context, self._address, m.Envelope(sender, incarnation), 100_000)
        assert self._outboxes[key].send(message)

    def receive(self, stage: str, what: type | None = None, timeout_s: float = PATIENCE_S) -> Any:
        """The next message that the stage sent to a neighbour, hints aside, or the next of type `what`, which keeps the
        others for later. Raises TimeoutError, or the stage's exception."""
        queue = self._queues[stage]
        end = time.monotonic() + timeout_s
        while True:
            for index, message in enumerate(queue):
                if (what is None and not isinstance(message, HINTS)) or (
                    what is not None and isinstance(message, what)
                ):
                    return queue.pop(index)
            if self._error is not None:
                raise self._error
            if time.monotonic() > end:
                raise TimeoutError(f"no {what.__name__ if what else 'message'} for {stage}; waiting there: {queue}")
            queue += self._inboxes[stage].wait_all(0.05)

    def nothing(self, stage: str, while_s: float = 0.1) -> bool:
        """Whether no message for a neighbour is there, or arrives within `while_s`. Raises the stage's exception if
        none will."""
        self._queues[stage] += self._inboxes[stage].wait_all(while_s)
        found = [message for message in self._queues[stage] if not isinstance(message, HINTS)]
        if not found and self._error is not None:
            raise self._error
        return not found

    def start(self, facts: m.ExecuteFacts) -> m.Ready:
        """Wait for `Ready`, then send `Start`."""
        ready: m.Ready = self.receive("supervisor", m.Ready)
        self.send(m.Start(facts))
        return ready

    def restart(self, name: str, crash_counts: dict[int, int] | None = None) -> None:
        """Replace a neighbour's process, such as `schedule.0`: tell the stage, and wait until it has answered. What was
        sent to the dead process is lost."""
        epoch = next(_numbers)
        self._incarnations[name] = incarnation = self._incarnations.get(name, 1) + 1
        address = ""
        if (key := name.removesuffix(".0")) in self._inboxes:
            address = address_of(self._server, name, incarnation)
            self._inboxes[key].close()
            self._inboxes[key] = Inbox[Any](self._context, address, INBOXES[name.partition(".")[0]])
            self._queues[key].clear()
        bound = topology.bound_of(self.settings)
        peer = m.PeerInbox(name, address, bound)
        self.send(m.PeerRestarted(epoch, peer, incarnation, [], crash_counts=crash_counts or {}))
        reconnected = self.receive("supervisor", m.Reconnected)
        assert reconnected == m.Reconnected(epoch)

    def add(self, name: str) -> None:
        """Give a stage one process more, such as `ingest.1`: tell the stage, and wait until it has answered."""
        self._incarnations[name] = incarnation = self._incarnations.get(name, 0) + 2
        address = address_of(self._server, name, incarnation)
        self._inboxes[name] = Inbox[Any](self._context, address, INBOXES[name.partition(".")[0]])
        self._queues[name] = []
        peer = m.PeerInbox(name, address, topology.bound_of(self.settings))
        self._tell(m.PeerRestarted(next(_numbers), peer, incarnation, []))

    def remove(self, name: str) -> None:
        """A process is gone for good: tell the stage, and wait until it has answered."""
        self._inboxes.pop(name).close()
        peer = m.PeerInbox(name, "", topology.bound_of(self.settings))
        self._tell(m.PeerRestarted(next(_numbers), peer, self._incarnations.get(name, 1), [], is_removed=True))

    def rescale(self, stage: str, num_replicas: int) -> None:
        """New work goes to this many processes of a stage: tell the stage, and wait until it has answered."""
        self._tell(m.Rescaled(next(_numbers), stage, num_replicas))

    def _tell(self, message: m.PeerRestarted | m.Rescaled) -> None:
        self.send(message)
        assert self.receive("supervisor", m.Reconnected) == m.Reconnected(message.epoch)

    def load(self) -> Any:
        """The stage's stats, once it has handled all earlier messages: messages of two neighbours have no order, so
        each of them pings."""
        newest: dict[str, int] = {"supervisor.0": 1}
        for sender, _, incarnation in (key.partition("#") for key in self._outboxes):
            newest[sender] = max(newest.get(sender, self._incarnations.get(sender, 0)), int(incarnation))
        awaited = set()
        for name, last in newest.items():
            awaited.add(nonce := next(_numbers))
            self.send(m.Ping(nonce), name, last)
        while awaited:
            pong = self.receive("supervisor", m.Pong)
            awaited.discard(pong.nonce)
        return pong.load

    def until(self, condition: Callable[[Any], bool], timeout_s: float = PATIENCE_S) -> Any:
        """Ping until the stage's stats fulfil a condition, and return them."""
        end = time.monotonic() + timeout_s
        while not condition(load := self.load()):
            assert time.monotonic() < end, f"still {load}"
        return load

    def arena(self, name: str) -> Arena:
        return self._arenas[name]

    def memory(self, name: str) -> memoryview:
        """A segment, as the stage maps it."""
        memory = self._memories.get(name)
        assert memory is not None
        return memory

    def bytes_of(self, array: Array) -> bytes:
        """The bytes of an array from the stage."""
        if isinstance(array, ShmRef):
            return bytes(self._memories.data_of(array))
        return array


def raw(struct: msgspec.Struct) -> msgspec.Raw:
    """A struct as it is sent, not decoded."""
    return msgspec.Raw(msgspec.msgpack.encode(struct))
