"""Ray Serve's deployment of servers, and the replica set that the ingress makes of it.

A request is a *lease*: a streaming call to the replica that stays open until the response is over. No byte of the
response passes through Ray. The calls keep Serve's counts of open requests true, which autoscaling and draining use.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pipeline.client.embedded.server import EmbeddedServer
from pipeline.config.settings import Settings
from pipeline.deploy.ray.members import MEMBERS
from pipeline.deploy.replicas import (
    DEFAULT_KV_TOKENS,
    UNKNOWN,
    NoReplica,
    Numbers,
    ReplicaLease,
    ReplicaSet,
)
from pipeline.errors import UserError
from pipeline.routing import router
from pipeline.routing.policies import Prompt
from pipeline.supervisor.admin.admin_client import Admin, find_servers

DESCRIBE_S = 30.0
"""Time for a replica to say where its server is."""
LEASE_S = 10.0
"""Time for a replica to begin a lease."""
LOOK_S = 0.1

log = logging.getLogger("pipeline.deploy")


class ReplicaAddress(msgspec.Struct, array_like=True):
    """Where a replica's server is."""

    replica: str
    host: str
    port: int
    kv_tokens: int
    numbers: Numbers = UNKNOWN


class ServerReplica:
    """A replica of the deployment: it owns a server, which is started by exec and dies with this process."""

    def __init__(self, settings: bytes, start_timeout_s: float, keys: bytes) -> None:
        """Start the server, and wait until it is ready. `settings` are msgpack; `keys` are as of `Keys.packed`, or
        empty."""
        import ray
        from ray import serve

        self._id = serve.get_replica_context().replica_id.unique_id
        self._server = EmbeddedServer(msgspec.msgpack.decode(settings, type=Settings), keys=keys)
        self._address = self._until_ready(ray.util.get_node_ip_address(), start_timeout_s)

    def _until_ready(self, own_host: str, timeout_s: float) -> ReplicaAddress:
        """`own_host` is the address of this machine, for a server that listens on all."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if not self._server.is_alive:
                raise RuntimeError(f"the server of replica {self._id} could not start: {self._server.reason()}")
            names = [name for name in find_servers() if name.startswith(f"{self._server.pid}-")]
            with contextlib.suppress(UserError):
                for name in names:
                    with Admin(name) as admin:
                        stats = admin.stats()
                    if stats.state == "serving":
                        parts = urlsplit(stats.address)
                        host = parts.hostname or "127.0.0.1"
                        host = own_host if host in ("0.0.0.0", "::") else host
                        kv_tokens = stats.num_blocks * stats.block_size or DEFAULT_KV_TOKENS
                        numbers = Numbers(stats.backend, stats.is_batch_invariant)
                        return ReplicaAddress(self._id, host, parts.port or 80, kv_tokens, numbers)
            time.sleep(LOOK_S)
        self._server.close()
        raise RuntimeError(f"the server of replica {self._id} was not ready after {timeout_s:g} s")

    async def describe(self, replica: str = "") -> bytes:
        """Where the server is, as msgpack of `ReplicaAddress`."""
        return msgspec.msgpack.encode(self._address)

    async def lease(self, replica: str = "") -> AsyncIterator[bytes]:
        """Yields where the server is, then waits until the caller cancels."""
        yield msgspec.msgpack.encode(self._address)
        await asyncio.Event().wait()

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces this replica if it raises."""
        if not self._server.is_alive:
            raise RuntimeError(f"the server of replica {self._id} ended: {self._server.reason()}")

    def __del__(self) -> None:
        """Called by Ray Serve when the replica stops; its leases are over."""
        if hasattr(self, "_server"):
            self._server.close()


class RayReplicas(ReplicaSet):
    """The replicas of a deployment, as a replica set. Create it in the event loop."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self._handle = handle
        self._members: frozenset[str] = frozenset()
        loop = asyncio.get_running_loop()

        def changed(ids: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._set_members, ids)

        MEMBERS.watch(changed)

    async def start(self, timeout_s: float) -> None:
        """Wait until a replica takes requests. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._handle.describe.remote()  # makes the router
            await self.routed.changed.wait()

    def _set_members(self, ids: frozenset[str]) -> None:
        self._members = ids
        for name in ids:
            if not self.routed.has(name):
                task = asyncio.create_task(self._admit(name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for name in self.routed.names:
            if name not in ids:
                self.routed.drain(name)
                self._forget_if_idle(name)

    async def _admit(self, name: str) -> None:
        """A replica has begun: ask it where its server is."""
        while name in self._members and not self.routed.has(name):
            try:
                async with asyncio.timeout(DESCRIBE_S):
                    address = msgspec.msgpack.decode(
                        await self._handle.describe.remote(replica=name), type=ReplicaAddress
                    )
            except Exception as error:  # noqa: BLE001 - Ray raises many kinds; the replica may be gone
                log.warning("replica not reached", extra={"fields": {"replica": name, "why": str(error)[:200]}})
                await asyncio.sleep(LOOK_S)
                continue
            if address.replica != name:  # it was gone, and another one answered
                await asyncio.sleep(LOOK_S)
            elif name in self._members and not self.routed.has(name):
                self.routed.add(name, address.host, address.port, address.kv_tokens, address.numbers)

    def _forget_if_idle(self, name: str) -> None:
        if not any(one.name == name and one.open_requests for one in self.routed.infos()):
            self.routed.remove(name)

    async def lease(self, prompt: Prompt, avoid: Collection[str] = (), before: Numbers | None = None) -> "RayLease":
        lease = RayLease(self, self.routed.route(prompt, avoid, before), self._handle)
        try:
            await lease.begin()
        except BaseException as error:
            lease.end()
            if not isinstance(error, Exception):
                raise
            self.lost(lease.name)
            raise NoReplica(f"replica {lease.name} did not begin a lease: {str(error)[:200]}") from error
        return lease

    def lost(self, name: str) -> None:
        """The replica is asked again as long as Serve has it."""
        super().lost(name)
        asyncio.get_running_loop().call_later(LOOK_S, lambda: self._set_members(self._members))

    def doubted(self, name: str) -> None:
        """Nothing: Ray Serve asks it, and replaces it if it is dead."""

    def ended(self, name: str) -> None:
        if name not in self._members:
            self._forget_if_idle(name)

    async def close(self) -> None:
        MEMBERS.watch(lambda _: None)
        await super().close()


class RayLease(ReplicaLease):
    """Has a call to the replica that stays open."""

    def __init__(self, replicas: RayReplicas, lease: router.Lease, handle: Any) -> None:
        super().__init__(replicas, lease)
        self._all = replicas
        self._call = handle.lease.options(stream=True).remote(replica=self.name)

    async def begin(self) -> None:
        """Wait until the replica has answered the call. Raises TimeoutError, LookupError, and what Ray raises."""
        async with asyncio.timeout(LEASE_S):
            address = msgspec.msgpack.decode(await anext(self._call), type=ReplicaAddress)
        if address.replica != self.name:  # Serve will say so in a moment
            raise LookupError("it is gone, and another one answered")

    def end(self) -> None:
        super().end()
        self._call.cancel()
        self._all.ended(self.name)
