"""The base of all stages: inbox, outboxes, shared memory and settings."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.control_requests import ControlRequests, StageRecordings
from pipeline.runtime.messages import ExecuteFacts, Launch
from pipeline.runtime.process import black_box
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.tracing import Tracer
from pipeline.runtime.transport.arrays import Arrays
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.memories import Memories
from pipeline.runtime.transport.outbox import GoneOutbox, Outbox

T = TypeVar("T")


class Channels(Protocol):
    """The inbox, the outboxes and the memory of a process. When a peer's process has been replaced, these objects stay
    the same, so their users keep them."""

    inbox: Inbox[Any]
    outboxes: dict[str, Outbox[Any]]
    memories: Memories
    arrays: Arrays
    on_added: Callable[[str], None]
    """Called with the name of a new peer when it has an outbox."""

    @property
    def replay_context(self) -> ReplayContext:
        """The one at the start."""

    def forget(self, name: str) -> None:
        """Everything that a process has sent, which is gone, was handled: free its segment."""

    def close(self, linger_s: float) -> None: ...


Connect = Callable[[Callable[[m.ControlRequest], None]], Channels]
"""Makes the channels, which pass control requests to this function."""


class Stage(Generic[T]):
    """One process of the pipeline, as its own code sees it. `T` is the union of messages that it receives. As a context
    manager, it closes at the end. `pipeline.replay.open_stage` makes one.

    A segment has the name of the stage that writes it, so its releases go to the peer of that name.
    """

    def __init__(
        self, launch: Launch, connect: Connect, recordings_of: "Callable[[Stage[Any]], StageRecordings]"
    ) -> None:
        self.launch = launch
        """As this process was started; settings, peers and segments are the current ones."""
        self.name = launch.name
        self.replica = launch.replica
        self.settings: Settings = launch.settings
        self.model_dir = Path(launch.model_dir)
        self.log = logging.getLogger("pipeline")
        self.trace = Tracer()
        memory = black_box.attach(launch.black_box)
        self.breadcrumb = black_box.Breadcrumb(memory)
        """Of the loop."""
        self.thread_breadcrumbs = [black_box.Breadcrumb(memory, 1 + i) for i in range(black_box.MAX_THREADS)]
        """Of the threads beside the loop, in stages that have some which work on requests."""
        self.suspects = black_box.SuspectList(memory)
        self.control_requests = ControlRequests(self)
        """Answers control requests. A stage with counts of its own sets `control_requests.own_counts`."""
        self._channels = connect(self.control_requests)
        self._channels.on_added = self._added
        self.inbox: Inbox[T] = self._channels.inbox
        self._outboxes = self._channels.outboxes
        self.memories, self.arrays = self._channels.memories, self._channels.arrays
        self.replay_context: ReplayContext = self._channels.replay_context
        """The clock and random numbers; see pipeline.replay."""
        self.supervisor: Outbox[m.SupervisorInbox] = self._outboxes[SUPERVISOR]
        self.recordings = recordings_of(self)

    def memory(self, name: str) -> memoryview | None:
        """The segment of this name; None if this stage does not have it."""
        return self.memories.get(name)

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
            if message.is_removed:
                self._forget(message.peer.name)
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
        if self.replay_context.is_recording:
            outbox.replay_context = self.replay_context

    def _forget(self, name: str) -> None:
        """Everything that a process has sent, which is gone, was handled."""
        self._channels.forget(name)

    def release(self) -> None:
        """Send releases of the slabs that were read. Call it once per turn; the next call repeats what a full socket
        refused."""
        self.memories.trim()
        for owner, release in self.arrays.releases():
            if not self._outboxes[owner].send(release):
                self.arrays.not_released(owner, release)

    def use_context(self, replay_context: ReplayContext) -> None:
        """Set the context, and if it records, connect it to all channels except the supervisor's."""
        self.replay_context = replay_context
        recording = replay_context if replay_context.is_recording else None
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
        self.recordings.close()
        self._channels.close(linger_s)
