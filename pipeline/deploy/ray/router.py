"""The request router of the replicas' deployment: it sends a call to the replica that the ingress has chosen, and tells
the ingress which replicas there are. Ray Serve runs it in the ingress's process."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

REPLICA = "replica"
"""The keyword argument of a call that names its replica; any one is right if it is empty."""


class LeaseRouter(RequestRouter):  # type: ignore[misc] # ray is an extra, so it has no types here
    """Chooses the replica that a call names."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        # Ray pickles this class with the globals that it uses; the ingress must see the same object.
        from pipeline.deploy.ray.members import MEMBERS

        super().update_replicas(replicas)
        MEMBERS.set(frozenset(one.replica_id.unique_id for one in replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named replica. If it is gone, any other one, so that the call ends: it says where it was."""
        wanted: Any = None if pending_request is None else pending_request.kwargs.get(REPLICA)
        found = [one for one in candidate_replicas if one.replica_id.unique_id == wanted]
        return [found or candidate_replicas]
