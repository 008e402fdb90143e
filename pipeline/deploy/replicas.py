"""Replica sets: which replicas there are, and which of them gets a request.

    lease = await replicas.lease(prompt, avoid)      a replica, with its load counted from now on
    lease.first_token(now_s)                         its prompt is computed
    lease.end()                                      the response is over

One ingress owns this state, and knows it from its own requests alone: several ingresses in front of the same replicas
would each see a part of it, which costs hits (docs/scale.md). So the state lives beside the relay, not in messages.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec

from pipeline.deploy.prompts import KEY_TOKENS
from pipeline.deploy.proxy.upstream import Upstream
from pipeline.errors import UserError
from pipeline.routing import router
from pipeline.routing.policies import PredictedTTFT, Prompt
from pipeline.routing.router import ReplicaSpec, Router

OPEN_TOKENS = 0.73
"""What an open sequence adds to the time to first token of a new one, as prompt tokens: of the simulator's default
replica. The choice depends on this ratio and not on the speed."""
FIRST_SPEED = 1000.0
"""Prompt tokens per second, until requests have shown the speed."""
MIN_SPEED_TOKENS = 64
MEMORY = 0.95
DEFAULT_KV_TOKENS = 100_000
"""Of a replica that has not said how many tokens its KV cache holds."""


log = logging.getLogger("pipeline.deploy")


class NoReplica(Exception):
    """No replica takes requests."""


class Numbers(msgspec.Struct, frozen=True):
    """What decides a replica's ids and logprobs, besides the model and the settings, as its /health says."""

    backend: str = ""
    """Empty if it has not said it."""
    is_batch_invariant: bool = True

    def continues(self, before: "Numbers") -> bool:
        """Whether a stream of a replica with the numbers `before` goes on here exactly."""
        return self == before and self.is_batch_invariant


UNKNOWN = Numbers()


class ReplicaInfo(msgspec.Struct):
    """A replica, for /health."""

    name: str
    url: str
    status: str
    """ok, down or draining"""
    open_requests: int
    backend: str = ""
    """What it computes with, from its /health"""
    batch_invariant: bool | None = None


class Speed:
    """The speed of prefill, from the requests of all replicas together. One that is learned for each replica adds noise
    among equal ones, and longer tails (docs/log.md)."""

    def __init__(self) -> None:
        self._tokens, self._seconds = FIRST_SPEED, 1.0
        self._is_first = True

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds

    def observe(self, lease: router.Lease, seconds: float) -> None:
        """A request got its first token after so long."""
        if lease.num_ahead < MIN_SPEED_TOKENS or seconds <= 0:
            return
        memory = 0.0 if self._is_first else MEMORY
        self._is_first = False
        self._tokens = memory * self._tokens + lease.num_ahead
        self._seconds = memory * self._seconds + seconds


class RoutedReplicas:
    """The router over the replicas of a set, with their connections. Replicas are added and removed by the set."""

    def __init__(self) -> None:
        self.router = Router(PredictedTTFT(), KEY_TOKENS)
        self.speed = Speed()
        self._upstreams: dict[str, Upstream] = {}
        self._status: dict[str, str] = {}
        self._numbers: dict[str, Numbers] = {}
        self._num_open: dict[str, int] = {}
        self.num_failures: dict[str, int] = {}
        """How often a replica was found dead, by name."""
        self.changed = asyncio.Event()
        """Set when a replica begins to take requests."""

    def add(self, name: str, host: str, port: int, kv_tokens: int, numbers: Numbers = UNKNOWN) -> None:
        """A replica begins to take requests, perhaps again: then its open ones go on."""
        assert not self.has(name), f"replica {name} takes requests already"
        speed = self.speed.tokens_per_s
        self.router.add(name, ReplicaSpec(kv_tokens, speed, OPEN_TOKENS / speed))
        upstream = self._upstreams.get(name)
        if upstream is None or (upstream.host, upstream.port) != (host, port):
            if upstream is not None:
                upstream.close()
            self._upstreams[name] = Upstream(host, port)
        self._status[name] = "ok"
        self._num_open.setdefault(name, 0)
        self.learn(name, numbers)
        self.changed.set()

    def learn(self, name: str, numbers: Numbers) -> None:
        """What a replica that takes requests says of its numbers. Logs if it differs from the others."""
        if self._numbers.get(name) == numbers:
            return
        self._numbers[name] = numbers
        for other in self.upstreams():
            if other != name and self._numbers[other].backend != numbers.backend:
                fields = {
                    "replica": name,
                    "backend": numbers.backend,
                    "other": other,
                    "its_backend": self._numbers[other].backend,
                }
                log.warning(
                    "replicas compute with different back ends: a stream that continues at another one may get other "
                    "ids from there on; give them the same version and settings, and the same execute.kernels",
                    extra={"fields": fields},
                )
                return

    @property
    def have_same_backend(self) -> bool:
        """Whether the replicas that take requests compute with the same back end."""
        return len({self._numbers[name].backend for name in self.upstreams()}) <= 1

    def remove(self, name: str, *, status: str = "") -> None:
        """A replica is gone, and so are its connections; it stays listed if there is a `status`."""
        if self._status.get(name) == "ok":
            self.router.remove(name)
        if (upstream := self._upstreams.pop(name, None)) is not None:
            upstream.close()
        if status:
            self._status[name] = status
        else:
            self._status.pop(name, None)
            self._numbers.pop(name, None)

    def drain(self, name: str) -> None:
        """A replica gets no more requests. Its open ones go on."""
        if self._status.get(name) == "ok":
            self.router.remove(name)
            self._status[name] = "draining"

    def has(self, name: str) -> bool:
        return self._status.get(name) == "ok"

    @property
    def names(self) -> list[str]:
        return list(self._status)

    def upstream(self, name: str) -> Upstream:
        return self._upstreams[name]

    def numbers(self, name: str) -> Numbers:
        return self._numbers[name]

    def upstreams(self) -> dict[str, Upstream]:
        return {name: upstream for name, upstream in self._upstreams.items() if self.has(name)}

    def infos(self) -> list[ReplicaInfo]:
        found = []
        for name, status in self._status.items():
            upstream = self._upstreams.get(name)
            url = "" if upstream is None else f"http://{upstream.host}:{upstream.port}"
            numbers = self._numbers.get(name)
            facts = ("", None) if numbers is None else (numbers.backend, numbers.is_batch_invariant)
            found.append(ReplicaInfo(name, url, status, self._num_open.get(name, 0), *facts))
        return found

    def route(self, prompt: Prompt, avoid: Collection[str] = (), before: Numbers | None = None) -> router.Lease:
        """Choose a replica, as `ReplicaSet.lease`, and count the request. Raises NoReplica."""
        known = self.upstreams()
        allowed = [name for name in known if name not in avoid] or list(known)
        if before is not None:
            allowed = [name for name in allowed if self._numbers[name] == before] or allowed
        try:
            with self.router.without(known.keys() - allowed):
                lease = self.router.route(prompt, time.monotonic())
        except LookupError as error:
            raise NoReplica("no replica takes requests") from error
        self._num_open[lease.replica] += 1
        return lease

    def ended(self, lease: router.Lease) -> None:
        self.router.end(lease)
        if lease.replica in self._num_open:
            self._num_open[lease.replica] -= 1
            if not self._num_open[lease.replica] and lease.replica not in self._status:
                del self._num_open[lease.replica]

    def close(self) -> None:
        for name in self.names:
            self.remove(name)


class ReplicaSet(ABC):
    """The replicas of an ingress."""

    def __init__(self) -> None:
        self.routed = RoutedReplicas()
        """The router, and what it knows."""
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def lease(self, prompt: Prompt, avoid: Collection[str] = (), before: Numbers | None = None) -> "ReplicaLease":
        """A replica for a request; one of `avoid` only if there is no other. For a stream that has begun, one with the
        numbers `before` if there is such a replica. Raises NoReplica."""

    def lost(self, name: str) -> None:
        """A request found a replica dead: it gets no more for now."""
        self.routed.num_failures[name] = self.routed.num_failures.get(name, 0) + 1
        if self.routed.has(name):
            self.routed.drain(name)

    @abstractmethod
    def doubted(self, name: str) -> None:
        """A request lost its connection, but perhaps not because of the replica: ask it."""

    def infos(self) -> list[ReplicaInfo]:
        return self.routed.infos()

    def upstreams(self) -> dict[str, Upstream]:
        """Those of all replicas that take requests, by name."""
        return self.routed.upstreams()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.routed.close()


class ReplicaLease:
    """A request that is open at a replica, and that the router has counted."""

    def __init__(self, replicas: ReplicaSet, lease: router.Lease) -> None:
        self.name = lease.replica
        self.numbers = replicas.routed.numbers(lease.replica)
        self.upstream = replicas.routed.upstream(lease.replica)
        self._replicas, self._routed = replicas, replicas.routed
        self._lease = lease
        self._has_ended = False

    def first_token(self, now_s: float) -> None:
        if not self._lease.has_first_token:
            seconds = now_s - self._lease.routed_s
            self._routed.router.first_token(self._lease, now_s)
            self._routed.speed.observe(self._lease, seconds)
            self._routed.router.set_speed(self._routed.speed.tokens_per_s, OPEN_TOKENS)

    def failed(self) -> None:
        """The replica did not answer."""
        self._replicas.lost(self.name)

    def doubted(self) -> None:
        """The replica may be dead."""
        self._replicas.doubted(self.name)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._routed.ended(self._lease)


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a server's URL. Raises UserError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError(f"--servers: {url!r} is not a URL: {error}") from error
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise UserError(f"--servers: {url!r} must be http://HOST:PORT")
    return parts.hostname, port or 80
