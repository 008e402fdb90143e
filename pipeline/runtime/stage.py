"""What a stage is given: its inbox, its outboxes, its shared memory and its settings."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.replay.player import PlaybackContext, ReplayInbox, ReplayOutbox
from pipeline.replay.recorder import RecordingContext, RecordState, header_of
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.arrays import Arrays
from pipeline.runtime.channels import Inbox, Outbox
from pipeline.runtime.control_requests import ControlRequests
from pipeline.runtime.messages import Envelope, ExecuteFacts, Launch
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.tracing import Tracer
from pipeline.shm import segment

T = TypeVar("T")

SUPERVISOR = "supervisor.0"


class Stage(Generic[T]):
    """One process of the pipeline, seen from inside. `T` is the union its inbox takes. As a context manager it is
    closed at the end, whatever the end is.

    Segments are called by the name of the stage that writes them, so a release goes to the peer of that name.
    """

    def __init__(self, launch: Launch, union: Any) -> None:
        self.launch = launch
        self.name = launch.name
        self.replica = launch.replica
        self.settings: Settings = launch.settings
        self.model_dir = Path(launch.model_dir)
        self.log = logging.getLogger("pipeline")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.trace = Tracer()
        self.control_requests = ControlRequests(self)
        """Answers control requests; a stage with counts of its own sets `control_requests.own_counts`."""
        self.replay_context = ReplayContext()
        """The clock and random numbers; see pipeline.replay."""
        self._recording: RecordingContext | None = None
        """The last one, until its end was asked for and all of it is written."""
        self.inbox: Inbox[T]
        self._outboxes: dict[str, Outbox[Any]]
        if launch.replay is not None:
            self.replay_context = replay = PlaybackContext(launch.replay, union)
            self.inbox = ReplayInbox(replay)
            self._outboxes = {peer.name: ReplayOutbox(replay, peer.name) for peer in launch.peers}
            self._memories = replay.memories
        else:
            self.inbox = Inbox(self._context, launch.address, union, self.control_requests)
            envelope = Envelope(launch.name, launch.incarnation)
            self._outboxes = {
                peer.name: Outbox(self._context, peer.address, envelope, peer.bound) for peer in launch.peers
            }
            self._memories = {s.name: segment.attach(s.fd, s.num_bytes, writable=s.writable) for s in launch.segments}
        self.arrays = Arrays(self._memories, launch.name)
        self.supervisor: Outbox[m.SupervisorInbox] = self._outboxes[SUPERVISOR]
        if launch.record is not None:
            self.record(launch.record, from_start=True)

    def memory(self, name: str) -> memoryview | None:
        """A segment by its name, or None where this stage was not given it."""
        return self._memories.get(name)

    def outbox(self, stage: str, replica: int = 0) -> Outbox[Any]:
        """The way to a peer. Raises KeyError where the topology has no such edge."""
        return self._outboxes[f"{stage}.{replica}"]

    def outboxes_of(self, stage: str) -> list[Outbox[Any]]:
        """The ways to all replicas of a peer, in order. Raises KeyError where the topology has no such edge."""
        return [self.outbox(stage, replica) for replica in range(topology.num_replicas(self.settings, stage))]

    @property
    def outboxes(self) -> Mapping[str, Outbox[Any]]:
        """By the peer's name, as `ingest.0`."""
        return self._outboxes

    def ready(self, facts: ExecuteFacts | None = None) -> None:
        """Say that everything is loaded. To be called once, before the first receive."""
        self.supervisor.send(m.Ready(facts))

    def release(self) -> None:
        """Tell the owners which slabs were read; to be called once per wake. What a full socket refuses goes with the
        next call."""
        for owner, release in self.arrays.releases():
            if not self._outboxes[owner].send(release):
                self.arrays.not_released(owner, release)

    def record(self, order: m.Record, *, from_start: bool = False) -> None:
        """Begin to record. Raises UserError where a recording goes on or this is a replay, OSError where the file can't
        be written."""
        before = self._recording
        if before is not None and not before.ends_alone():
            raise UserError(f"{self.name} is being recorded already, into {before.path}")
        if before is not None and not before.state.is_closed:
            raise UserError(f"{self.name} was recorded, and is still writing that into {before.path}")
        if self.replay_context.is_replaying:
            raise UserError(f"{self.name} is replayed: there is nothing to record")
        header = header_of(self.launch, order, from_start=from_start)
        self._recording = RecordingContext(order, header, self._memories, self.log)
        self._use(self._recording)

    def keep_record(self, path: str) -> RecordState:
        """Who began a recording is still there. Returns how far it is."""
        if self._recording is None or self._recording.path != path:
            return RecordState(0, 0, ended=f"{self.name} records into that file no more", is_closed=True)
        self._recording.keep()
        return self._recording.state

    def end_record(self, path: str = "") -> RecordState:
        """End the recording, if one goes on; a thread writes what is left. Raises UserError where there is none."""
        replay_context = self._recording
        if replay_context is None or (path and replay_context.path != path):
            raise UserError(f"{self.name} is not being recorded{f' into {path}' if path else ''}")
        replay_context.finish("who began it ended it")
        if self.replay_context is replay_context:
            self._use(ReplayContext())
        state = replay_context.state
        if state.is_closed:
            self._recording = None
        return state

    def _use(self, replay_context: ReplayContext) -> None:
        """Have the channels tell a tape what they carry; what goes to the supervisor is not of the stage's work."""
        self.replay_context = replay_context
        told = replay_context if isinstance(replay_context, RecordingContext) else None
        self.inbox.replay_context = told
        for peer, outbox in self._outboxes.items():
            outbox.peer = peer
            if peer != SUPERVISOR:
                outbox.replay_context = told

    def __enter__(self) -> "Stage[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, linger_s: float = 1.0) -> None:
        """Close all sockets; what is queued to peers has `linger_s` to leave."""
        (self._recording or self.replay_context).close()
        self.inbox.close()
        for outbox in self._outboxes.values():
            outbox.flush(linger_s)
        self._context.term()
