"""The request router of the replicas' deployment: it sends a call to the replica that the ingress has chosen, and tells
the ingress which replicas there are. Ray Serve runs it in the ingress's process."""

import threading
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

REPLICA = "replica"
"""The keyword argument of a call that names its replica; any one is right if it is empty."""


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


class LeaseRouter(RequestRouter):
    """Chooses the replica that a call names."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        MEMBERS.set(frozenset(one.replica_id.unique_id for one in replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named replica. If it is gone, any other one, so that the call ends: it says where it was."""
        wanted: Any = None if pending_request is None else pending_request.kwargs.get(REPLICA)
        found = [one for one in candidate_replicas if one.replica_id.unique_id == wanted]
        return [found or candidate_replicas]
