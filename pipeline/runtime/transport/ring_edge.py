"""The receiving end of an edge through shared memory."""

from collections import deque
from dataclasses import dataclass, field

from pipeline.runtime.messages import Envelope
from pipeline.shm.ring import RingReader


@dataclass(slots=True)
class RingEdge:
    """A sender whose messages come through a ring. What is too large for the ring comes through the socket, in its
    turn: the ring announces it."""

    envelope: Envelope
    reader: RingReader
    awaits_socket: bool = False
    """The next message was announced and has not come through the socket yet."""
    early: deque[bytes] = field(default_factory=deque)
    """Messages that came through the socket before their turn in the ring."""

    def take(self) -> bytes | None:
        """The next message of those that were noticed, or None."""
        if not self.awaits_socket:
            if not self.reader.num_waiting:
                return None
            message = self.reader.take()
            assert message is not None
            if not message.is_elsewhere:
                return message.data
            self.awaits_socket = True
        if not self.early:
            return None
        self.awaits_socket = False
        return self.early.popleft()
