"""The source of a stage's inputs that are not messages: the clock, random numbers, and external events."""

import secrets
import time
from collections.abc import Callable
from typing import Any


class ReplayContext:
    """The context of a stage that is neither recorded nor replayed: it passes everything through.

    Stages must use `stage.replay_context` each time, because a recording may begin and end while they run.
    """

    is_recording = False
    is_replaying = False
    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, like `time.monotonic`."""
    time: Callable[[], float] = staticmethod(time.time)
    """Unix time in seconds."""

    def randbits(self, num_bits: int) -> int:
        """A random number of at most 64 bits."""
        return secrets.randbits(num_bits)

    def event(self, name: str, key: int = 0, data: bytes = b"") -> None:
        """Record that the stage now acts without a message, for example on a client's request or a timer. At this point
        a replay calls the function given to `perform`."""

    def perform(self, name: str, act: Callable[[int, bytes], None]) -> None:
        """Set the function that a replay calls for events of this name."""

    async def await_external(self, name: str, key: int, data: bytes = b"") -> bytes:
        """Record the result of work outside the loop; await this before using the result. A replay resumes here at the
        recorded point. Otherwise this never suspends. Returns `data`, the result; a replay returns the recorded one."""
        return data

    def observe(self, name: str, key: int, data: bytes) -> bytes:
        """Record the result of external work in a blocking stage; call this before using the result. Returns `data`,
        the result; a replay returns the recorded one. In a replay the stage, or the function given to `perform`, makes
        this call."""
        return data

    def catch_up(self) -> None:
        """Call this where a blocking stage polls for external results. A replay performs the recorded events here."""

    # Called by the channels.

    def received(self, sender: str, incarnation: int, body: bytes, message: Any) -> None:
        """A message was taken from the inbox."""

    def end_turn(self) -> None:
        """The stage has taken all messages of this turn, perhaps none."""

    def sent(self, peer: str, body: bytes, message: Any) -> None:
        """A message was sent."""

    def log_output(self, client: int, data: bytes) -> None:
        """Data was sent to an external client."""

    def refused(self, peer: str) -> None:
        """A full socket refused a message."""

    def close(self) -> int:
        """End with the stage. Returns the number of bytes written."""
        return 0
