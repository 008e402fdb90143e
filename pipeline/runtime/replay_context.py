"""What a stage asks for whatever it does not get from a message: the time, random numbers, and its turn."""

import secrets
import time
from collections.abc import Callable
from typing import Any


class ReplayContext:
    """The tape of a stage that is neither recorded nor replayed: everything is as it is.

    Stages go through `stage.tape` each time, for a recording may begin and end while they run.
    """

    is_recording = False
    is_replaying = False
    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, as `time.monotonic`."""
    time: Callable[[], float] = staticmethod(time.time)
    """Unix time in seconds."""

    def randbits(self, num_bits: int) -> int:
        """A random number of at most 64 bits."""
        return secrets.randbits(num_bits)

    def event(self, name: str, key: int = 0, data: bytes = b"") -> None:
        """Note that the stage does something now that no message asked for: a client's call, a timer. A replay does it
        when it comes to this place, by what was given to `perform`."""

    def perform(self, name: str, act: Callable[[int, bytes], None]) -> None:
        """What a replay does for events of this name."""

    async def await_external(self, name: str, key: int, data: bytes = b"") -> bytes:
        """To be awaited when something that ran beside the loop is done, before anything is made of it. A replay goes
        on here when it comes to this place. Never suspends in a stage that is not replayed. Returns `data`, what came
        of it; in a replay what came of it then, where that depends on more than messages."""
        return data

    def observe(self, name: str, key: int, data: bytes) -> bytes:
        """To be called where a blocking stage takes note of something that was done beside it, before anything is made
        of it. Returns `data`, what is known of it; in a replay what was known then. What makes a replay come to this
        place is what was given to `perform`, or the stage itself."""
        return data

    def catch_up(self) -> None:
        """To be called where a blocking stage looks whether something has `observe`: a replay comes to what had, at
        this place."""

    # What the channels say.

    def received(self, sender: str, incarnation: int, body: bytes, message: Any) -> None:
        """A message was taken from the inbox."""

    def took(self) -> None:
        """That was all that the stage is given for now, perhaps nothing."""

    def sent(self, peer: str, body: bytes, message: Any) -> None:
        """A message was sent."""

    def log_output(self, client: int, data: bytes) -> None:
        """A client outside is sent this."""

    def refused(self, peer: str) -> None:
        """A full socket refused a message."""

    def close(self) -> int:
        """The stage ends. Returns how many bytes have been written."""
        return 0
