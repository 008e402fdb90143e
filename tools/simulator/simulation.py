"""Discrete events: requests arrive, a router chooses a replica, the replica's admission takes or refuses them, and its
steps end. The time of an arrival or of a step's end is the next event.

Routing (pipeline/routing) and admission (stages/gateway/admission/admission.py) are the code of the server.
"""

import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol

import msgspec
import numpy as np

from pipeline.errors import UserError
from pipeline.replay.traffic import ReplicaProfile
from pipeline.routing.policies import POLICIES, WEIGHT, Policy, PredictedTTFT, Prompt
from pipeline.routing.router import Lease, ReplicaSpec, Router
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.errors import ApiError
from tools.simulator.costs import KnownCosts
from tools.simulator.replica import NEVER, FastReplica, ReplicaListener
from tools.simulator.requests import SimRequest, Trace
from tools.simulator.scheduled_replica import MIN_BLOCK_TOKENS, ScheduledReplica

Float64s = np.ndarray[Any, np.dtype[np.float64]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Replica(Protocol):
    next_s: float
    busy_s: float

    @property
    def num_preemptions(self) -> int: ...

    def submit(self, request: SimRequest, now_s: float) -> None: ...

    def advance(self) -> None: ...


class Setup(msgspec.Struct, frozen=True):
    """What is simulated, besides the trace."""

    num_replicas: int
    profile: ReplicaProfile
    policy: str = "predicted-ttft"
    is_real: bool = False
    """Whether the real scheduler plans the steps."""
    num_routers: int = 1
    """Routers that each see an equal part of the requests, and know only those."""
    num_cells: int = 1
    """Cells: parts of the replicas with a router of their own. A first tier hashes a session, or a prompt's first key,
    to a cell, with bounded loads."""
    weight: float = WEIGHT
    """Of tokens to compute; see `PredictedTTFT`."""
    learns: bool = False
    """Whether routers learn the speed of prefill."""
    overhead_s: float = 0.0
    """Added to each time to first token: network, tokenization, detokenization."""
    seed: int = 0


class Outcome(msgspec.Struct):
    """What became of each request: arrays by index, in seconds from the trace's begin; nan if it never was."""

    setup: Setup
    first_s: Float64s
    end_s: Float64s
    num_cached: Int64s
    replica_index: Int64s
    """The replica; -1 if it was refused."""
    busy_s: Float64s
    """By replica."""
    num_preemptions: int
    predicted_s: float
    """Mean predicted time to first token."""
    took_s: float
    """CPU time of the simulation."""
    route_s: float = 0.0
    """The part of it that routing took."""


class Simulation:
    """One run."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        """Raises UserError if a request can't fit into a replica, or a cell would have no replica."""
        if setup.num_cells > setup.num_replicas:
            raise UserError(f"--cells {setup.num_cells}: needs at most as many as replicas, {setup.num_replicas}")
        check_fits(trace, setup.profile, is_real=setup.is_real)
        self._trace = trace
        self._setup = setup
        self._routers = [
            Router(_policy(setup, setup.seed + number), trace.block_tokens, learns=setup.learns)
            for number in range(setup.num_routers * setup.num_cells)
        ]
        """The routers of the first cell, of the second …"""
        self._tiers = [
            Router(POLICIES["bounded-hash"](number), trace.block_tokens) for number in range(setup.num_routers)
        ]
        """The first tier, if there are cells."""
        spec = spec_of(setup.profile, trace)
        for tier in self._tiers:
            for cell in range(setup.num_cells):
                tier.add(str(cell), spec)
        self._replicas: list[Replica] = []
        kind: Callable[[ReplicaProfile, int, ReplicaListener], Replica] = (
            ScheduledReplica if setup.is_real else FastReplica
        )
        for replica_index in range(setup.num_replicas):
            self._replicas.append(kind(setup.profile, trace.block_tokens, self))
            first = replica_index % setup.num_cells * setup.num_routers
            for router in self._routers[first : first + setup.num_routers]:
                router.add(str(replica_index), spec)
        self._admissions = [
            Admission(setup.profile.max_open_sequences, setup.profile.max_open_tokens) for _ in self._replicas
        ]
        num = len(trace.requests)
        self._leases: list[tuple[tuple[Router, Lease], ...]] = [()] * num
        """Of each request: at the router that chose the replica, and at the first tier."""
        self._first_s, self._end_s = np.full(num, np.nan), np.full(num, np.nan)
        self._num_cached, self._replica_indices = np.full(num, -1, np.int64), np.full(num, -1, np.int64)
        self._events: list[tuple[float, int]] = []
        self._route_ns = 0

    def run(self) -> Outcome:
        """Simulate until the last request has ended."""
        begun_s = time.process_time()
        replicas, events = self._replicas, self._events
        pushed = [NEVER] * len(replicas)
        requests = self._trace.requests
        next_request = 0
        while next_request < len(requests) or events:
            arrival_s = requests[next_request].arrival_s if next_request < len(requests) else NEVER
            if events and events[0][0] <= arrival_s:
                at_s, replica_index = heappop(events)
                if pushed[replica_index] != at_s:
                    continue  # it was moved
                replicas[replica_index].advance()
            else:
                replica_index = self._arrive(requests[next_request])
                next_request += 1
                if replica_index < 0:
                    continue
            if (due_s := replicas[replica_index].next_s) != pushed[replica_index] or due_s == NEVER:
                pushed[replica_index] = due_s
                if due_s < NEVER:
                    heappush(events, (due_s, replica_index))
        assert all(lease.has_ended for leases in self._leases for _, lease in leases)
        counts = [router.counts for router in self._routers]
        num_routed = sum(one.num_requests for one in counts)
        return Outcome(
            self._setup,
            self._first_s,
            self._end_s,
            self._num_cached,
            self._replica_indices,
            np.array([replica.busy_s for replica in replicas]),
            sum(replica.num_preemptions for replica in replicas),
            sum(one.predicted_s for one in counts) / max(1, num_routed),
            time.process_time() - begun_s,
            self._route_ns / 1e9,
        )

    def _arrive(self, request: SimRequest) -> int:
        """Route a request. Returns the place of its replica; -1 if it was refused."""
        now_s = request.arrival_s
        begun_ns = time.perf_counter_ns()
        prompt = Prompt(request.num_prompt, request.keys, request.session, len(request.outputs))
        leases = self._route(request.index % self._setup.num_routers, prompt, now_s)
        self._route_ns += time.perf_counter_ns() - begun_ns
        replica_index = int(leases[0][1].replica)
        admission = self._admissions[replica_index]
        try:
            admission.admit(len(request.outputs), request.num_prompt, now_s)
        except ApiError:
            for router, lease in leases:
                router.end(lease)
            return -1
        admission.take(len(request.outputs), request.num_prompt, now_s)
        self._leases[request.index] = leases
        self._replica_indices[request.index] = replica_index
        self._replicas[replica_index].submit(request, now_s)
        return replica_index

    def _route(self, number: int, prompt: Prompt, now_s: float) -> tuple[tuple[Router, Lease], ...]:
        """Route a request that came to one of the `num_routers` ways in."""
        if self._setup.num_cells == 1:
            router = self._routers[number]
            return ((router, router.route(prompt, now_s)),)
        tier = self._tiers[number]
        cell = tier.route(prompt, now_s)
        router = self._routers[int(cell.replica) * self._setup.num_routers + number]
        return (router, router.route(prompt, now_s)), (tier, cell)

    # ---------------------------------------------------------------------------------------- events of the replicas

    def started(self, request: SimRequest, num_cached: int) -> None:
        if self._num_cached[request.index] < 0:
            self._num_cached[request.index] = num_cached

    def first_token(self, request: SimRequest, now_s: float) -> None:
        if np.isnan(self._first_s[request.index]):
            self._first_s[request.index] = now_s + self._setup.overhead_s
            for router, lease in self._leases[request.index]:
                router.first_token(lease, now_s)

    def ended(self, request: SimRequest, now_s: float) -> None:
        self._end_s[request.index] = now_s + self._setup.overhead_s
        for router, lease in self._leases[request.index]:
            router.end(lease)
        replica_index = int(self._replica_indices[request.index])
        self._admissions[replica_index].give(len(request.outputs), request.num_prompt, now_s)


def _policy(setup: Setup, seed: int) -> Policy:
    return PredictedTTFT(seed, setup.weight) if setup.policy == "predicted-ttft" else POLICIES[setup.policy](seed)


def spec_of(profile: ReplicaProfile, trace: Trace) -> ReplicaSpec:
    """What a router knows of a replica: its speed with full steps, and what an open sequence adds to a step."""
    costs = KnownCosts(profile)
    num = profile.max_num_batched_tokens
    tokens_per_s = num / costs.predict(0, 0, num, num * num / 2)
    context = sum(one.num_prompt for one in trace.requests) / len(trace.requests)
    return ReplicaSpec(profile.kv_tokens, tokens_per_s, profile.row_s + profile.context_s * context)


def check_fits(trace: Trace, profile: ReplicaProfile, *, is_real: bool) -> None:
    """Raise UserError if a request can't fit into a replica."""
    if profile.max_num_seqs > profile.max_num_batched_tokens:
        raise UserError(
            f"max_num_seqs: {profile.max_num_seqs} sequences can't all decode in a step of "
            f"{profile.max_num_batched_tokens} tokens (max_num_batched_tokens); lower one or raise the other"
        )
    if is_real and trace.block_tokens < MIN_BLOCK_TOKENS:
        raise UserError(f"block_size: the real scheduler needs blocks of at least {MIN_BLOCK_TOKENS} tokens")
    if trace.block_tokens % profile.block_size:
        raise UserError(
            f"block_size: the trace's blocks of {trace.block_tokens} tokens are no multiple of the replica's "
            f"KV blocks of {profile.block_size}"
        )
    most = min(profile.kv_tokens // profile.block_size * profile.block_size, profile.max_model_len)
    name, limit = ("kv_tokens", profile.kv_tokens) if most < profile.max_model_len else ("max_model_len", most)
    for one in trace.requests:
        if one.num_prompt + max(one.outputs) > most:
            raise UserError(
                f"request {one.index + 1} of {trace.name} has {one.num_prompt} + {max(one.outputs)} tokens, but {name} "
                f"is {limit}: raise it, or leave such requests out with --max-request-tokens {most}"
            )
