"""The channels of a stage that is replayed, without sockets."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from pipeline.replay.player import PlaybackContext
from pipeline.runtime import messages as m
from pipeline.runtime.transport.arrays import Arrays
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.outbox import Outbox

T = TypeVar("T")


class ReplayInbox(Inbox[T]):
    """An inbox that delivers recorded messages."""

    is_replayed = True

    def __init__(self, replay_context: PlaybackContext) -> None:
        self._replay = replay_context
        self._left: list[tuple[str, Any]] = []
        self.on_peer_restarted = None
        self.num_received = 0
        self.num_stale = 0
        self.last_sender = ""

    def wait(self, timeout_s: float) -> bool:
        return True

    def is_ready(self) -> bool:
        return True

    def has_message(self) -> bool:
        return True

    def take(self) -> T | None:
        while not self._left:
            self._left = self._replay.next_turn()
        sender, message = self._left.pop(0)
        return self._taken(sender, message)

    def end_turn(self) -> None:
        """Does nothing: the playback context tracks wakes."""

    def receive_all(self) -> list[T]:
        left, self._left = self._left, []
        return [self._taken(*one) for one in left or self._replay.next_turn()]

    def wait_all(self, timeout_s: float) -> list[T]:
        return self.receive_all()

    async def replayed(self) -> list[T]:
        return [self._taken(*one) for one in await self._replay.next_turn_async()]

    def _taken(self, sender: str, message: T) -> T:
        self.num_received += 1
        self.last_sender = sender
        if isinstance(message, m.PeerRestarted) and self.on_peer_restarted is not None:
            self.on_peer_restarted(message)
        return message

    def close(self) -> None:
        pass


class ReplayOutbox(Outbox[T], Generic[T]):
    """An outbox that writes to the capture."""

    def __init__(self, replay_context: PlaybackContext, peer: str) -> None:
        self._replay = replay_context
        self.peer = peer
        self._encoder = msgspec.msgpack.Encoder()
        self.num_sent = 0
        self.num_refused = 0
        self.is_detached = False

    def detach(self) -> None:
        self.is_detached = True

    def send_encoded(self, body: bytes, message: T) -> bool:
        if self.is_detached:
            return True
        if self._replay.is_refused(self.peer):
            self.num_refused += 1
            return False
        self._replay.sent(self.peer, body, message)
        self.num_sent += 1
        return True

    def send_all(self, messages: Sequence[T], *, wakes: bool = True) -> bool:
        if self.is_detached or not messages:
            return True
        if self._replay.is_refused(self.peer):
            self.num_refused += 1
            return False
        for message in messages:
            self._replay.sent(self.peer, self._encoder.encode(message), message)
        self.num_sent += len(messages)
        return True

    def wake(self) -> None:
        pass

    def notify(self) -> None:
        pass

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class ReplayChannels:
    """The `stage.Channels` of a replay. Its memory is that of the playback context."""

    def __init__(self, launch: m.Launch, replay: m.Replay, union: Any) -> None:
        self.replay_context = PlaybackContext(replay, union)
        self.inbox: Inbox[Any] = ReplayInbox(self.replay_context)
        self.inbox.on_peer_restarted = self._renew
        self.outboxes: dict[str, Outbox[Any]] = {
            peer.name: ReplayOutbox(self.replay_context, peer.name) for peer in launch.peers
        }
        self.memories = self.replay_context.memories
        self.arrays = Arrays(self.memories, launch.name, launch.incarnation)
        self.on_added: Callable[[str], None] = lambda _: None
        """Never called: no recording begins in a replay."""

    def _renew(self, message: m.PeerRestarted) -> None:
        """The recorded stage got a new peer, or lost one."""
        name, shared = message.peer.name, message.segment
        if message.is_removed and name in self.outboxes:
            self.outboxes[name].detach()
        if message.peer.address and (name not in self.outboxes or self.outboxes[name].is_detached):
            self.outboxes[name] = ReplayOutbox(self.replay_context, name)
        if shared is not None and name not in self.memories:
            self.replay_context.add_segment(name, shared.num_bytes)

    def forget(self, name: str) -> None:
        """Does nothing: the recording may still name the segment."""

    def close(self, linger_s: float) -> None:
        """Does nothing: there are no sockets."""
