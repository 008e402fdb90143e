"""The base of all stages: inbox, outboxes, shared memory and settings."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.replay.crash_recording import recording_of
from pipeline.replay.recorder import RecordingContext, RecordState, header_of
from pipeline.runtime import black_box, topology
from pipeline.runtime import messages as m
from pipeline.runtime.arrays import Arrays
from pipeline.runtime.channels import Inbox
from pipeline.runtime.control_requests import ControlRequests
from pipeline.runtime.messages import ExecuteFacts, Launch
from pipeline.runtime.outbox import GoneOutbox, Outbox
from pipeline.runtime.peer_channels import PeerChannels
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.tracing import Tracer

T = TypeVar("T")


class Stage(Generic[T]):
    """One process of the pipeline, as its own code sees it. `T` is the union of messages that it receives. As a context
    manager, it closes at the end.

    A segment has the name of the stage that writes it, so its releases go to the peer of that name.
    """

    def __init__(self, launch: Launch, union: Any) -> None:
        self.launch = launch
        """As this process was started; settings, peers and segments are the current ones."""
        self.name = launch.name
        self.replica = launch.replica
        self.settings: Settings = launch.settings
        self.model_dir = Path(launch.model_dir)
        self.log = logging.getLogger("pipeline")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.trace = Tracer()
        memory = black_box.attach(launch.black_box)
        self.breadcrumb = black_box.Breadcrumb(memory)
        """Of the loop."""
        self.thread_breadcrumbs = [black_box.Breadcrumb(memory, 1 + i) for i in range(black_box.MAX_THREADS)]
        """Of the threads beside the loop, in stages that have some which work on requests."""
        self.suspects = black_box.SuspectList(memory)
        self.control_requests = ControlRequests(self)
        """Answers control requests. A stage with counts of its own sets `control_requests.own_counts`."""
        self.replay_context = ReplayContext()
        """The clock and random numbers; see pipeline.replay."""
        self._recording: RecordingContext | None = None
        """The last recording, until it has been ended and written."""
        self._channels: PeerChannels | None = None
        """None in a replay."""
        self.inbox: Inbox[T]
        self._outboxes: dict[str, Outbox[Any]]
        if launch.replay is not None:
            # Imported here: a stage that is not a replay needs neither this nor asyncio.
            from pipeline.replay.player import PlaybackContext, ReplayInbox, ReplayOutbox

            self.replay_context = replay = PlaybackContext(launch.replay, union)
            self.inbox = ReplayInbox(replay)
            self._outboxes = {peer.name: ReplayOutbox(replay, peer.name) for peer in launch.peers}
            self._memories = replay.memories
            self.arrays = Arrays(self._memories, launch.name, launch.incarnation)
            self.inbox.on_peer_restarted = self._replay_peer
        else:
            self._channels = PeerChannels(launch, union, self.control_requests, self._context)
            self.inbox, self._outboxes = self._channels.inbox, self._channels.outboxes
            self._memories, self.arrays = self._channels.memories, self._channels.arrays
            self._channels.on_added = self._added
        self.supervisor: Outbox[m.SupervisorInbox] = self._outboxes[SUPERVISOR]
        if launch.record is not None:
            self.record(launch.record, from_start=True)
        elif (recording := recording_of(lambda: self.launch, self._memories, self.log)) is not None:
            self._use(recording)

    def memory(self, name: str) -> memoryview | None:
        """The segment of this name; None if this stage does not have it."""
        return self._memories.get(name)

    def outbox(self, stage: str, replica: int = 0) -> Outbox[Any]:
        """The outbox to a peer. Raises KeyError if the topology has no such edge. Messages to a process that is gone
        for good are dropped: others may not know yet that it is."""
        if (found := self._outboxes.get(f"{stage}.{replica}")) is None:
            if stage not in topology.row(self.launch.stage).sends_to:
                raise KeyError(f"{self.name} does not send to {stage}")
            return GoneOutbox()
        return found

    def outboxes_of(self, stage: str) -> list[Outbox[Any]]:
        """The outboxes to all replicas of a stage, in order. Raises KeyError if the topology has no such edge."""
        return [self.outbox(stage, replica) for replica in range(topology.num_replicas(self.settings, stage))]

    @property
    def outboxes(self) -> Mapping[str, Outbox[Any]]:
        """Outboxes by the peer's name, such as `ingest.0`."""
        return self._outboxes

    def ready(self, facts: ExecuteFacts | None = None) -> None:
        """Report that everything is loaded. Call it once, before the first receive."""
        self.supervisor.send(m.Ready(facts))

    def reconnected(self, message: m.PeerRestarted | m.Rescaled) -> None:
        """Answer it: this stage has done what it must do then."""
        if isinstance(message, m.PeerRestarted):
            self._keep_launch(message)
            if message.is_removed and self._channels is not None:
                self._channels.forget(message.peer.name)
        self.supervisor.send(m.Reconnected(message.epoch))

    def rescaled(self, message: m.Rescaled) -> None:
        """Use this number of processes of a stage from now on: `settings` has it."""
        self.settings = topology.with_replicas(self.settings, message.stage, message.num_replicas)
        self.launch = msgspec.structs.replace(self.launch, settings=self.settings)

    def _keep_launch(self, message: m.PeerRestarted) -> None:
        """Keep peers and segments of the launch current, for recordings that begin later."""
        name, shared = message.peer.name, message.segment
        peers = [one for one in self.launch.peers if one.name != name]
        segments = [one for one in self.launch.segments if one.name != name]
        if message.peer.address:
            peers.append(message.peer)
        if shared is not None:
            segments.append(shared)
        self.launch = msgspec.structs.replace(self.launch, peers=peers, segments=segments)

    def _added(self, name: str) -> None:
        """There is a new peer."""
        outbox = self._outboxes[name]
        outbox.peer = name
        if isinstance(self.replay_context, RecordingContext):
            outbox.replay_context = self.replay_context

    def _replay_peer(self, message: m.PeerRestarted) -> None:
        """A recorded stage has got a new peer."""
        from pipeline.replay.player import PlaybackContext, ReplayOutbox

        assert isinstance(self.replay_context, PlaybackContext)
        name, shared = message.peer.name, message.segment
        if message.is_removed and name in self._outboxes:
            self._outboxes[name].detach()
        if message.peer.address and (name not in self._outboxes or self._outboxes[name].is_detached):
            self._outboxes[name] = ReplayOutbox(self.replay_context, name)
        if shared is not None and name not in self._memories:
            self.replay_context.add_segment(name, shared.num_bytes)

    def release(self) -> None:
        """Send releases of the slabs that were read. Call it once per wake; the next call repeats what a full socket
        refused."""
        self._memories.trim()
        for owner, release in self.arrays.releases():
            if not self._outboxes[owner].send(release):
                self.arrays.not_released(owner, release)

    def record(self, order: m.Record, *, from_start: bool = False) -> None:
        """Start recording. Raises UserError if the stage is already recorded or is a replay, OSError if the file can't
        be written."""
        if self.launch.address.startswith("tcp://"):
            raise UserError(f"{self.name} can't be recorded, because it runs on another host (execute.launcher)")
        before = self._recording
        if before is not None and not before.ends_alone():
            raise UserError(f"{self.name} is already being recorded into {before.path}")
        if before is not None and not before.state.is_closed:
            raise UserError(f"{self.name} is still writing its last recording into {before.path}")
        if self.replay_context.is_replaying:
            raise UserError(f"{self.name} is a replay and can't be recorded")
        header = header_of(self.launch, order, from_start=from_start)
        self._recording = RecordingContext(order, header, self._memories, self.log)
        self._use(self._recording)

    def keep_record(self, path: str) -> RecordState:
        """Keep a recording running, for the client that started it. Returns its state."""
        if self._recording is None or self._recording.path != path:
            return RecordState(0, 0, ended=f"{self.name} no longer records into that file", is_closed=True)
        self._recording.keep()
        return self._recording.state

    def end_record(self, path: str = "") -> RecordState:
        """End the recording; a thread writes the rest of it. Raises UserError if there is none."""
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
        """Set the context, and if it records, connect it to all channels except the supervisor's."""
        if isinstance(self.replay_context, RecordingContext):
            self.replay_context.finish("another recording began")
        self.replay_context = replay_context
        recording = replay_context if isinstance(replay_context, RecordingContext) else None
        self.inbox.replay_context = recording
        for peer, outbox in self._outboxes.items():
            outbox.peer = peer
            if peer != SUPERVISOR:
                outbox.replay_context = recording

    def __enter__(self) -> "Stage[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, linger_s: float = 1.0) -> None:
        """Close all sockets. Queued messages have `linger_s` to be sent."""
        (self._recording or self.replay_context).close()
        self.inbox.close()
        if self._channels is not None:
            self._channels.close()
        for outbox in self._outboxes.values():
            outbox.flush(linger_s)
        self._context.term()
