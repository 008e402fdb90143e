"""An ingress's replicas that were started elsewhere: each is probed, and takes requests while it answers."""

import asyncio
import contextlib
import logging
from collections.abc import Collection

import msgspec

from pipeline.deploy.proxy.upstream import Upstream, UpstreamLost, fetch
from pipeline.deploy.replicas import DEFAULT_KV_TOKENS, Numbers, ReplicaLease, ReplicaSet
from pipeline.routing.policies import Prompt

PROBE_S = 1.0
"""Time between two probes of a replica."""
PROBE_TIMEOUT_S = 5.0
NUM_MISSED = 2
"""Probes in a row without an answer, after which the connections of a replica are closed: it hangs."""
BLOCK_TOKENS = 16

log = logging.getLogger("pipeline.deploy")


class _Health(msgspec.Struct):
    status: str = ""
    kv_blocks: dict[str, int] | None = None
    backend: str | None = None
    batch_invariant: bool | None = None

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.backend or "", self.batch_invariant is not False)


class FixedReplicas(ReplicaSet):
    """A set of servers at fixed addresses. Call `start`, in the event loop."""

    def __init__(self, addresses: list[tuple[str, int]], probe_s: float = PROBE_S) -> None:
        super().__init__()
        self._addresses = {f"{host}:{port}": (host, port) for host, port in addresses}
        self._probe_s = probe_s
        self._wakes: dict[str, asyncio.Event] = {}

    async def start(self, wait_s: float) -> None:
        """Begin to probe. Waits until each server has answered once, at most for `wait_s`."""
        firsts = []
        for name, (host, port) in self._addresses.items():
            first = asyncio.Event()
            firsts.append(first.wait())
            self._wakes[name] = asyncio.Event()
            self._tasks.add(asyncio.create_task(self._watch(name, host, port, first)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.gather(*firsts)

    async def _watch(self, name: str, host: str, port: int, first: asyncio.Event) -> None:
        probe = Upstream(host, port)
        num_missed = 0
        routed = self.routed
        while True:
            problem = ""
            try:
                status, body = await fetch(probe, "/health", PROBE_TIMEOUT_S)
                health = _health_of(body)
                num_missed = 0
            except UpstreamLost as error:
                problem, num_missed = str(error), num_missed + (not error.is_own_fault)
            if not problem and status == 200:
                if not routed.has(name):
                    blocks = (health.kv_blocks or {}).get("total", 0)
                    routed.add(name, host, port, blocks * BLOCK_TOKENS or DEFAULT_KV_TOKENS, health.numbers)
                    log.info("replica takes requests", extra={"fields": {"replica": name}})
                routed.learn(name, health.numbers)  # another server may have its address now
                first.set()
            elif not problem and health.status in ("draining", "recovering", "late"):
                if routed.has(name):  # its streams go on
                    routed.drain(name)
                    log.info("replica not ready", extra={"fields": {"replica": name, "why": health.status}})
            elif (problem and num_missed >= NUM_MISSED) or (not problem and health.status in ("dead", "failed")):
                if routed.has(name) or name not in routed.names:
                    log.warning("replica is down", extra={"fields": {"replica": name, "why": problem or health.status}})
                self._down(name)
            wake = self._wakes[name]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._probe_s):
                    await wake.wait()
            wake.clear()

    def _down(self, name: str) -> None:
        self.routed.remove(name, status="down")
        self.routed.num_failures.setdefault(name, 0)

    async def lease(self, prompt: Prompt, avoid: Collection[str] = (), before: Numbers | None = None) -> ReplicaLease:
        return ReplicaLease(self, self.routed.route(prompt, avoid, before))

    def lost(self, name: str) -> None:
        """The replica gets no more requests until it answers a probe, which comes at once."""
        super().lost(name)
        self._wakes[name].set()

    def doubted(self, name: str) -> None:
        """Probe the replica at once."""
        self._wakes[name].set()


def _health_of(body: bytes) -> _Health:
    try:
        return msgspec.json.decode(body, type=_Health)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Health()
