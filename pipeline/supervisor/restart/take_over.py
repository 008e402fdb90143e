"""What a server that is restarted gives to its successor: `pipeline restart --new-version`.

    server ──environment: TakeOver, descriptors──► successor, a process of the code that is installed now
           ◄──────────── "ready", or why not ─────

The successor may be of another version, so this has its own format: JSON, to which fields may be added.
"""

import os
import signal
import socket
from collections.abc import Sequence

import msgspec

from pipeline.config.source import SettingsSource
from pipeline.supervisor.restart import waiter

VARIABLE = "PIPELINE_TAKE_OVER"
READY = b"ready"


class TakeOver(msgspec.Struct, frozen=True, kw_only=True):
    """Of the server before."""

    listeners: list[int]
    """Descriptors of its HTTP sockets."""
    admins: list[int]
    """Those of its admin listener."""
    ready_fd: int = -1
    """A pipe to it; -1: it has ended."""
    options: list[tuple[str, str]] = []
    """Settings that the operator changed, as texts `key=value`, each with its origin."""
    source: SettingsSource | None = None
    """Where its other settings come from, if `pipeline reload` has changed that."""
    memory_bytes: int = 0
    """What its models may use together, which this server can't measure while both run."""

    def sockets(self, fds: Sequence[int], num: int, keys: str) -> list[socket.socket]:
        """Its sockets, for `num` gateways. `keys` is the prefix of their settings. Raises OSError, in words for the
        user."""
        if len(fds) != num:
            raise OSError(f"{keys}: the number of listening sockets can't change from {len(fds)} to {num} in a restart")
        return [socket.socket(fileno=fd) for fd in fds]

    def with_options(self, source: SettingsSource) -> SettingsSource:
        """Where this server's settings come from; `source` is its command line."""
        source = self.source or source
        of_models = [text for _, text in self.options if text.startswith("models.")]
        others = [(origin, text) for origin, text in self.options if not text.startswith("models.")]
        return msgspec.structs.replace(source, sets=[*source.sets, *of_models], options=[*source.options, *others])

    def tell(self, text: str = "") -> None:
        """Tell the server before that this one serves, or why it does not."""
        if self.ready_fd >= 0:
            try:
                os.write(self.ready_fd, text.encode() or READY)
            except BrokenPipeError:
                return  # it has ended meanwhile
            finally:
                os.close(self.ready_fd)

    def environ(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}


def taken_over() -> TakeOver | None:
    """What this process was started with; None if it replaces no server. Only the first call finds it."""
    if (text := os.environ.pop(VARIABLE, None)) is None:
        return None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waiter.FORWARDED)  # if this process was that server
    found = msgspec.json.decode(text, type=TakeOver)
    for fd in (*found.listeners, *found.admins, found.ready_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    return found
