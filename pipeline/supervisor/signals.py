"""The signals that end a server as a readable descriptor, so that one poll waits for everything."""

import os
import signal
import time
from typing import Protocol

SAME_SIGNAL_S = 0.5


class StopSignals(Protocol):
    """What ends a server's loop."""

    def fileno(self) -> int: ...

    def take(self) -> int:
        """The number of a signal that came since the last call, or 0."""

    def close(self) -> None: ...


def _ignore(number: int, frame: object) -> None:
    """The descriptor has the number."""


class TerminationSignals:
    """Catches them until it is closed. SIGHUP says that the terminal is gone; `nohup` has made it ignored."""

    CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._taken = -SAME_SIGNAL_S
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, _ignore)
            for number in self.CAUGHT
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

    def fileno(self) -> int:
        return self._read

    def take(self) -> int:
        """The number of a signal that came since the last call, or 0. A second one within `SAME_SIGNAL_S` counts as the
        same: a process group and our parent may both forward the signal that they received."""
        try:
            numbers = os.read(self._read, 64)
        except BlockingIOError:
            return 0
        number = next((number for number in numbers if number in self.CAUGHT), 0)
        now = time.monotonic()
        if number and now - self._taken < SAME_SIGNAL_S:
            return 0
        self._taken = now if number else self._taken
        return number

    def close(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is _ignore:  # another one may pass it on (restart/server_restart.py)
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)


class AskedToStop:
    """The same for a server that is a thread, which another one asks to stop."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._is_closed = False

    def ask(self) -> None:
        """Ask it to stop; a second time, to do it at once."""
        if not self._is_closed:
            os.write(self._write, bytes([signal.SIGTERM]))

    def wake(self) -> None:
        """Have the loop turn once."""
        if not self._is_closed:
            os.write(self._write, b"\0")

    def fileno(self) -> int:
        return self._read

    def take(self) -> int:
        try:
            return os.read(self._read, 1)[0]
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self._is_closed = True
        os.close(self._read)
        os.close(self._write)
