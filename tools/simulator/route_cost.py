"""What a router costs: CPU time of a request, and memory, by the number of replicas."""

import gc
import random
import time
from statistics import median

import msgspec
import psutil

from pipeline.replay.traffic import ReplicaProfile
from pipeline.routing.policies import POLICIES, Prompt
from pipeline.routing.router import Router
from tools.simulator.requests import Trace
from tools.simulator.simulation import spec_of

NUM_OPEN = 16
"""Open requests of a replica, on average."""
MAX_FILLED_KEYS = 1_000_000
"""Keys in all caches for which the memory is measured; more are taken to need as much each."""
ROUND = 200


class RouteCost(msgspec.Struct, frozen=True):
    num_replicas: int
    route_us: float
    """CPU time to route a request, to note its first token and its end: median of rounds."""
    num_keys: int
    """Of all caches when they are full."""
    key_bytes: float
    """Memory of a key."""

    @property
    def state_bytes(self) -> float:
        return self.num_keys * self.key_bytes


def measure(trace: Trace, profile: ReplicaProfile, num_replicas: int, policy: str, seed: int) -> RouteCost:
    """Route the requests of a trace, each replica with about `NUM_OPEN` open ones."""
    router = Router(POLICIES[policy](seed), trace.block_tokens)
    spec = spec_of(profile, trace)
    for number in range(num_replicas):
        router.add(str(number), spec)
    requests = trace.requests
    leases = [router.route(Prompt(one.num_prompt, one.keys, one.session), 0.0) for one in requests]
    rng, spent_us = random.Random(seed), []
    open_leases = rng.sample(leases, min(len(leases), NUM_OPEN * num_replicas))
    keep = set(map(id, open_leases))
    for lease in leases:
        if id(lease) not in keep:
            router.end(lease)
    for begin in range(0, len(requests) - ROUND + 1, ROUND):
        begun_ns = time.process_time_ns()
        for one in requests[begin : begin + ROUND]:
            lease = router.route(Prompt(one.num_prompt, one.keys, one.session), 0.0)
            router.first_token(lease, 0.1)
            router.end(lease)
        spent_us.append((time.process_time_ns() - begun_ns) / 1000 / ROUND)
    capacity = max(1, spec.kv_tokens // trace.block_tokens)
    key_bytes = _key_bytes(num_replicas, capacity, seed) if router.policy.uses_keys else 0.0
    return RouteCost(num_replicas, median(spent_us), capacity * num_replicas, key_bytes)


def _key_bytes(num_replicas: int, capacity: int, seed: int) -> float:
    """Fill caches with keys that no other replica has: the worst case."""
    from pipeline.routing.key_caches import KeyCaches

    gc.collect()
    process, rng = psutil.Process(), random.Random(seed)
    num = max(1, min(capacity, MAX_FILLED_KEYS // num_replicas))
    before: int = process.memory_info().rss
    caches = KeyCaches()
    for replica in range(num_replicas):
        caches.add(replica, num)
        caches.use(replica, [rng.getrandbits(63) for _ in range(num)])
    after: int = process.memory_info().rss
    return max(0, after - before) / (num * num_replicas)


def table(costs: list[RouteCost]) -> str:
    """A line for each, within 80 columns."""
    lines = ["replicas  µs/request  requests/s of a core  keys when full  bytes/key     state"]
    lines += [
        f"{one.num_replicas:8,}  {one.route_us:10.1f}  {1e6 / one.route_us:20,.0f}  {one.num_keys:14,}"
        f"  {one.key_bytes:9.0f}  {one.state_bytes / 2**20:4,.0f} MiB"
        for one in costs
    ]
    return "\n".join(lines)
