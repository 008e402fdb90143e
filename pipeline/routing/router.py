"""Routes requests to replicas, and keeps their load.

    lease = router.route(prompt, now_s)      the replica, with what is predicted
    router.first_token(lease, now_s)         its prompt is computed: its tokens no longer wait
    router.end(lease)                        it is over; also if it had no first token

What a router knows comes from its own requests alone. So it can be tested and simulated, and it needs no messages from
replicas. Several routers in front of the same replicas each see a part of the load.
"""

import contextlib
from collections.abc import Collection, Iterator

import msgspec

from pipeline.routing.key_caches import KeyCaches
from pipeline.routing.policies import Loads, Policy, PredictedTTFT, Prompt

MIN_TOKENS = 64
"""Requests with fewer tokens in front of their first token teach nothing about the speed of prefill."""
MEMORY = 0.95
"""How much of the earlier observations remains after another one."""
MIN_SHARE = 0.1
"""The least part of a measured time that counts as prefill, however many sequences were open."""


class ReplicaSpec(msgspec.Struct, frozen=True):
    """What a router must know of a replica."""

    kv_tokens: int
    """Tokens that its KV cache holds."""
    tokens_per_s: float
    """Speed of prefill; a first guess if the router learns."""
    open_s: float
    """Seconds that an open sequence adds to the time to first token of a new one."""


class Lease(msgspec.Struct, eq=False):
    """A request that was routed and is open."""

    replica: str
    index: int
    num_sequences: int
    num_cached: int
    """Tokens of the prompt that were expected in the replica's cache."""
    num_uncached: int
    num_ahead: float
    """Tokens to compute before its first one, with its own."""
    num_open: int
    """Sequences that were open at the replica before."""
    routed_s: float
    predicted_s: float
    has_first_token: bool = False
    has_ended: bool = False


class RouterCounts(msgspec.Struct):
    """Since start."""

    num_requests: int = 0
    num_hits: int = 0
    """Requests with a prefix that the chosen replica was expected to have."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of these prefixes."""
    predicted_s: float = 0.0
    """Sum of the predicted times to first token."""
    measured_s: float = 0.0
    """Sum of those that came, of requests with a first token."""


class Router:
    """Owns the load and the expected cache of each replica."""

    def __init__(self, policy: Policy | None = None, key_tokens: int = 256, *, learns: bool = False) -> None:
        """`key_tokens` is the number of tokens that a key stands for. If it `learns`, the speed of each replica's
        prefill is estimated from the times to first token. That is for replicas on unequal machines: among equal ones
        it adds noise, and with it longer tails (docs/log.md)."""
        self.policy = policy or PredictedTTFT()
        self.loads = Loads()
        self.counts = RouterCounts()
        self.caches = KeyCaches()
        self._key_tokens = key_tokens
        self._learns = learns
        self._names: list[str] = []
        self._indices: dict[str, int] = {}
        self._free: list[int] = []
        self._observed: list[tuple[float, float]] = []
        """Tokens and seconds, by place, with older ones weighing less."""

    def __len__(self) -> int:
        return len(self._indices)

    def add(self, name: str, spec: ReplicaSpec) -> None:
        """A replica begins. Raises ValueError if its name is in use."""
        if name in self._indices:
            raise ValueError(f"replica {name!r} is there already")
        index = self._free.pop() if self._free else len(self._names)
        if index == len(self._names):
            self._names.append(name)
            self._observed.append((0.0, 0.0))
            self.loads.grow(index + 1)
        self._names[index] = name
        self._indices[name] = index
        self._observed[index] = spec.tokens_per_s, 1.0
        loads = self.loads
        loads.queued[index] = loads.num_open[index] = 0
        loads.tokens_per_s[index], loads.open_s[index] = spec.tokens_per_s, spec.open_s
        loads.set_open(index, True)
        if self.policy.uses_keys:
            self.caches.add(index, max(1, spec.kv_tokens // self._key_tokens))

    def remove(self, name: str) -> None:
        """A replica is gone. Its leases may still end. Raises KeyError if it is not there."""
        index = self._indices.pop(name)
        self.loads.set_open(index, False)
        if self.policy.uses_keys:
            self.caches.remove(index)
        self._names[index] = ""
        if not self.loads.num_open[index]:
            self._free.append(index)

    def drain(self, name: str) -> None:
        """A replica gets no more requests."""
        self.loads.set_open(self._indices[name], False)

    @contextlib.contextmanager
    def without(self, names: Collection[str]) -> Iterator[None]:
        """Within it, these replicas get no requests: they have just refused one, or lost it."""
        indices = [index for name in names if (index := self._indices.get(name)) is not None]
        indices = [index for index in indices if self.loads.is_open[index]]
        for index in indices:
            self.loads.set_open(index, False)
        try:
            yield
        finally:
            for index in indices:
                self.loads.set_open(index, True)

    def set_speed(self, tokens_per_s: float, open_tokens: float) -> None:
        """The speed of all replicas, if they are equal. An open sequence counts as `open_tokens`."""
        self.loads.tokens_per_s[:] = tokens_per_s
        self.loads.open_s[:] = open_tokens / tokens_per_s

    def route(self, prompt: Prompt, now_s: float) -> Lease:
        """Choose a replica. Raises LookupError if there is none."""
        loads, policy = self.loads, self.policy
        if not len(loads.open_indices):
            raise LookupError("there is no replica to route to")
        cached: dict[int, int] = {}
        if policy.uses_keys:
            most = max(0, prompt.num_tokens - 1)  # at least one token is computed
            matches = self.caches.matches(prompt.keys)
            cached = {index: min(most, num * self._key_tokens) for index, num in matches}
        index = policy.choose(prompt, loads, cached)
        num_cached = cached.get(index, 0)
        num_uncached = prompt.num_tokens - num_cached
        num_ahead, num_open = float(loads.queued[index]) + num_uncached, int(loads.num_open[index])
        predicted_s = num_ahead / float(loads.tokens_per_s[index]) + num_open * float(loads.open_s[index])
        loads.queued[index] += num_uncached
        loads.num_open[index] += prompt.num_sequences
        if policy.uses_keys:
            self.caches.use(index, prompt.keys)
        counts = self.counts
        counts.num_requests += 1
        counts.num_hits += num_cached > 0
        counts.num_prompt_tokens += prompt.num_tokens
        counts.num_cached_tokens += num_cached
        counts.predicted_s += predicted_s
        return Lease(
            self._names[index], index, prompt.num_sequences, num_cached, num_uncached, num_ahead, num_open, now_s,
            predicted_s,
        )  # fmt: skip

    def first_token(self, lease: Lease, now_s: float) -> None:
        """The first token of a request came. Later calls change nothing."""
        if lease.has_first_token or lease.has_ended:
            return
        lease.has_first_token = True
        self.loads.queued[lease.index] -= lease.num_uncached
        seconds = now_s - lease.routed_s
        self.counts.measured_s += seconds
        if self._learns and self._is_current(lease) and lease.num_ahead >= MIN_TOKENS and seconds > 0:
            self._learn(lease, seconds)

    def end(self, lease: Lease) -> None:
        """A request is over. Later calls change nothing."""
        if lease.has_ended:
            return
        lease.has_ended = True
        loads, index = self.loads, lease.index
        if not lease.has_first_token:
            loads.queued[index] -= lease.num_uncached
        loads.num_open[index] -= lease.num_sequences
        if not loads.num_open[index]:
            loads.queued[index] = 0.0  # without what rounding left
            if not self._names[index] and index not in self._free:
                self._free.append(index)

    def _is_current(self, lease: Lease) -> bool:
        return self._names[lease.index] == lease.replica

    def _learn(self, lease: Lease, seconds: float) -> None:
        index = lease.index
        prefill_s = max(seconds - lease.num_open * float(self.loads.open_s[index]), MIN_SHARE * seconds)
        tokens, total_s = self._observed[index]
        tokens, total_s = MEMORY * tokens + lease.num_ahead, MEMORY * total_s + prefill_s
        self._observed[index] = tokens, total_s
        self.loads.tokens_per_s[index] = tokens / total_s

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert (self.loads.queued > -1e-6).all() and (self.loads.num_open >= 0).all()
        assert {self._names[index] for index in self._indices.values()} == set(self._indices)
        assert not any(self._names[index] for index in self._free)
        if self.policy.uses_keys:
            self.caches.check()
