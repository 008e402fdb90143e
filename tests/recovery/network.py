"""Channels of a model of the whole server in one process: what a stage's code sees of the others, without sockets.

There is one FIFO for each pair of a sender's and a receiver's incarnation. `ModelInbox` and `ModelOutbox` follow the
rules of pipeline.runtime.transport.inbox, and `ModelStage` those of pipeline.runtime.transport.peer_channels.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.control_requests import ControlRequests
from pipeline.runtime.process.black_box import NUM_BYTES, Breadcrumb, SuspectList
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.stage import Stage
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.tracing import Tracer
from pipeline.runtime.transport.arrays import Arrays
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.memories import Memories
from pipeline.runtime.transport.outbox import Outbox

INDEX_BYTES = 4096
ARENA_BYTES = 16 * 1024
"""So small that some arrays find no room and are sent inline."""
CLOCK_STEP_S = 0.0001


class TurnOver(Exception):
    """All messages of a turn are handled. Ends the loop of a stage that would wait for more."""


class Arrival(NamedTuple):
    """A message in a FIFO."""

    sender: str
    incarnation: int
    body: bytes


Edge = tuple[str, int, str, int]
"""Sender and its incarnation, receiver and its incarnation."""


class Network:
    """Owns the FIFOs and the segments. A process is known by its name, such as `ingest.0`."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.fifos: dict[Edge, deque[bytes]] = {}
        self.incarnations: dict[str, int] = {SUPERVISOR: 1}
        """Of the newest inbox of each process. The process itself may not have started yet."""
        self.last_of_removed: dict[str, int] = {}
        """The last incarnations of processes that are gone for good."""
        self.refusal_rate = 0.0
        """How often an edge that may be full refuses a message."""
        self.segments: dict[str, memoryview] = {}
        """The newest one of each process that has an arena."""
        self._segments_of: dict[tuple[str, int], memoryview] = {}
        """All of them, by name and incarnation."""
        self.indices = {
            name: memoryview(bytearray(INDEX_BYTES)) for name in (topology.KV_INDEX, topology.OFFLOAD_INDEX)
        }
        """The supervisor's; they outlive each scheduler."""
        self._encoder = msgspec.msgpack.Encoder()

    def open(self, name: str) -> None:
        """Give the next process of this name an inbox and a segment."""
        # Above the number after the last one, as in SharedResources.remove.
        last = self.last_of_removed[name] + 1 if name in self.last_of_removed else 0
        self.incarnations[name] = self.incarnations.get(name, last) + 1
        if topology.row(name.partition(".")[0]).has_arena:
            self.segments[name] = memoryview(bytearray(ARENA_BYTES))
            self._segments_of[name, self.incarnations[name]] = self.segments[name]

    def segment(self, name: str, incarnation: int) -> memoryview | None:
        """That of one process, as a message about its start brings it, however late."""
        return self._segments_of.get((name, incarnation))

    def send(self, edge: Edge, *messages: Any) -> bool:
        """Send one message, or several as one, of which the receiver may take some earlier than the others."""
        _, _, receiver, incarnation = edge
        if _may_be_full(edge, messages[0]) and self.rng.random() < self.refusal_rate:
            return False
        if self.incarnations.get(receiver) == incarnation:  # else its reader is dead
            self.fifos.setdefault(edge, deque()).extend(map(self._encoder.encode, messages))
        return True

    def killed(self, name: str) -> None:
        """A process has died: any prefix of what it has sent on an edge arrives."""
        for edge, fifo in self.fifos.items():
            if edge[0] == name and edge[1] == self.incarnations[name]:
                for _ in range(self.rng.randint(0, len(fifo)) if self.rng.random() < 0.7 else 0):
                    fifo.pop()

    def renew(self, name: str) -> None:
        """The supervisor has noticed a death: nothing is read from the dead process's inbox any more."""
        self.open(name)
        self.fifos = {edge: fifo for edge, fifo in self.fifos.items() if edge[2] != name}
        self.fifos = {edge: fifo for edge, fifo in self.fifos.items() if edge[0] != name or edge[2] != SUPERVISOR}

    def forget(self, name: str) -> None:
        """A process is gone for good: nothing is read from its inbox any more."""
        self.last_of_removed[name] = self.incarnations.pop(name)
        self.segments.pop(name, None)
        self.fifos = {edge: fifo for edge, fifo in self.fifos.items() if edge[2] != name}
        self.fifos = {edge: fifo for edge, fifo in self.fifos.items() if edge[0] != name or edge[2] != SUPERVISOR}

    def edges_to(self, name: str) -> list[Edge]:
        """The edges on which a message waits for the newest process of this name."""
        newest = self.incarnations[name]
        return [edge for edge, fifo in self.fifos.items() if fifo and edge[2] == name and edge[3] == newest]

    def take(self, edge: Edge) -> Arrival:
        return Arrival(edge[0], edge[1], self.fifos[edge].popleft())

    @property
    def num_queued(self) -> int:
        return sum(map(len, self.fifos.values()))


def _may_be_full(edge: Edge, message: object) -> bool:
    """Whether an edge may refuse a message: output for a slow peer, and what a gateway sends to busy stages. Other
    edges have room for all messages of open requests."""
    sender, _, receiver, _ = edge
    if SUPERVISOR in (sender, receiver) or isinstance(message, m.ResetPrefixCache):
        return False
    return receiver.startswith("detokenize.") or sender.startswith(("detokenize.", "gateway."))


class ModelInbox(Inbox[Any]):
    """An inbox that is filled before each turn."""

    def __init__(self, union: Any, incarnations: dict[str, int]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)
        self._incarnations = dict(incarnations)
        self._arrived: deque[Arrival] = deque()
        self._late: list[Arrival] = []
        self._is_taken = False
        self.on_peer_restarted: Callable[[m.PeerRestarted], None] | None = None

    def fill(self, arrivals: list[Arrival]) -> None:
        """Begin a turn with these messages."""
        self._arrived += arrivals
        self._is_taken = False

    @property
    def num_waiting(self) -> int:
        """Messages that were released and not taken."""
        return len(self._arrived)

    def wait(self, timeout_s: float) -> bool:
        if not self._arrived:
            raise TurnOver
        return True

    def receive(self) -> Any:
        while self._arrived:
            arrival = self._arrived.popleft()
            sender, incarnation, body = arrival
            if incarnation != (known := self._incarnations.setdefault(sender, incarnation)):
                if incarnation > known:
                    self._late.append(arrival)
                continue
            self.last_sender = f"{sender}#{incarnation}"
            message = self._decoder.decode(body)
            if isinstance(message, m.PeerRestarted) and self.on_peer_restarted is not None:
                self.on_peer_restarted(message)
            return message
        return None

    def wait_all(self, timeout_s: float) -> list[Any]:
        """All messages of the turn, the first time."""
        if self._is_taken:
            raise TurnOver
        self._is_taken = True
        messages = []
        while (message := self.receive()) is not None:
            messages.append(message)
        return messages

    def replaced(self, sender: str, incarnation: int, edge: object = None) -> None:
        self._incarnations[sender] = incarnation
        early, self._late = self._late, []
        self._arrived.extendleft(reversed([one for one in early if one.sender == sender]))
        self._late = [one for one in early if one.sender != sender]

    def close(self) -> None:
        pass


class ModelOutbox(Outbox[Any]):
    """Sends to the process of a peer that it knows of, as one process."""

    def __init__(self, network: Network, sender: str, own_incarnation: int, peer: str) -> None:
        self._network = network
        self._from = sender, own_incarnation
        self.peer = peer
        self.was_refused = False
        """Since the last wake began."""
        self.incarnation = network.incarnations.get(peer, 0)
        self.is_detached = False

    def detach(self) -> None:
        self.is_detached = True

    def send(self, message: Any) -> bool:
        if self.is_detached:
            return True
        is_sent = self._network.send((*self._from, self.peer, self.incarnation), message)
        self.was_refused |= not is_sent
        return is_sent

    def send_all(self, messages: Sequence[Any], *, wakes: bool = True) -> bool:
        if self.is_detached or not messages:
            return True
        is_sent = self._network.send((*self._from, self.peer, self.incarnation), *messages)
        self.was_refused |= not is_sent
        return is_sent

    def wake(self) -> None:
        pass

    def notify(self) -> None:
        pass


class ModelContext(ReplayContext):
    """A clock that moves on with each look at it, and random numbers that the seed determines."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._now_s = 1.0
        self.monotonic = self.time = self._next_s

    def _next_s(self) -> float:
        self._now_s += CLOCK_STEP_S
        return self._now_s

    def randbits(self, num_bits: int) -> int:
        return self._rng.getrandbits(num_bits)


class ModelStage(Stage[Any]):
    """What the code of a stage sees, with the newest channels at its start."""

    def __init__(
        self,
        network: Network,
        name: str,
        union: Any,
        settings: Settings,
        model_dir: Path,
        context: ModelContext,
        names: list[str],
        crash_counts: dict[int, int],
    ) -> None:
        """`names` are those of all processes; `crash_counts` are as in `Launch`."""
        stage, _, replica = name.partition(".")
        row = topology.row(stage)
        incarnation = network.incarnations[name]
        # As SharedResources._incarnations_for.
        gone = {peer: number + 1 for peer, number in network.last_of_removed.items()}
        incarnations = gone | network.incarnations
        self.launch = m.Launch(
            stage,
            int(replica),
            0,
            incarnation,
            row.entry,
            settings,
            str(model_dir),
            "",
            [],
            [],
            -1,
            incarnations=incarnations,
            crash_counts=crash_counts,
        )
        self.name, self.replica, self.settings, self.model_dir = name, int(replica), settings, model_dir
        self.log = logging.getLogger("pipeline.model")
        self.log.setLevel(logging.CRITICAL)
        self.trace = Tracer()
        self.black_box = memoryview(bytearray(NUM_BYTES))
        self.breadcrumb = Breadcrumb(self.black_box)
        self.suspects = SuspectList(self.black_box)
        self.control_requests = ControlRequests(self)
        self.replay_context = context
        self._network = network
        self.inbox = self._model_inbox = ModelInbox(union, incarnations)
        self.inbox.on_peer_restarted = self._renew
        self._row = row
        peers = [SUPERVISOR, *(peer for each in row.sends_to for peer in topology.among(names, each))]
        self._outboxes = {
            peer: ModelOutbox(network, name, incarnation, peer) for peer in dict.fromkeys(peers) if peer != name
        }
        self.supervisor = self._outboxes[SUPERVISOR]
        self.memories = Memories()
        for owner in [owner for each in row.reads for owner in topology.among(names, each)] + [name] * row.has_arena:
            self.memories.add(owner, network.segments[owner], network.incarnations[owner])
        if stage == "schedule":
            for index, memory in network.indices.items():
                self.memories.add(index, memory)
        self.arrays = Arrays(self.memories, name, incarnation)

    def _renew(self, message: m.PeerRestarted) -> None:
        name, stage = message.peer.name, topology.stage_of(message.peer.name)
        outbox = self._outboxes.get(name)
        assert outbox is None or isinstance(outbox, ModelOutbox)
        self.arrays.lost(name)
        if message.is_removed:
            if outbox is not None:
                outbox.detach()
            self.inbox.removed(name, message.incarnation)
            return
        segment = self._network.segment(name, message.incarnation)
        if stage in self._row.reads and segment is not None:
            self.memories.add(name, segment, message.incarnation)
        if outbox is not None:
            outbox.incarnation, outbox.is_detached = message.incarnation, False
        elif stage in self._row.sends_to:
            self._outboxes[name] = new = ModelOutbox(self._network, self.name, self.launch.incarnation, name)
            new.incarnation = message.incarnation
        self.inbox.replaced(name, message.incarnation)

    def _forget(self, name: str) -> None:
        self.arrays.lost(name)
        self.memories.remove(name)

    def fill(self, arrivals: list[Arrival]) -> None:
        """Begin a turn with these messages."""
        self._model_inbox.fill(arrivals)
        for outbox in self._outboxes.values():
            assert isinstance(outbox, ModelOutbox)
            outbox.was_refused = False

    @property
    def was_refused(self) -> bool:
        """Whether something waits to be sent, because an edge was full."""
        return any(isinstance(outbox, ModelOutbox) and outbox.was_refused for outbox in self._outboxes.values())
