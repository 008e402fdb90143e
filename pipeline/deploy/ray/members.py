"""Which replicas Ray Serve has: what the request router tells the ingress, which runs in the same process."""

import threading
from collections.abc import Callable


class Members:
    """The replicas that take requests, by their ids. Ray Serve changes them in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: frozenset[str] = frozenset()
        self._changed: Callable[[frozenset[str]], None] | None = None

    def set(self, ids: frozenset[str]) -> None:
        with self._lock:
            self._ids = ids
            if self._changed is not None:
                self._changed(ids)

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed` with the ids, now and whenever they change; it must not block."""
        with self._lock:
            self._changed = changed
            changed(self._ids)


MEMBERS = Members()
"""Of the one deployment of servers that an ingress has a handle of."""
