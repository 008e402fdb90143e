"""A replica without a scheduler: the same rules by counts, so that hundreds of them are simulated in seconds.

- Chunks of prompts are granted by the scheduler's own `StepBudget`, with the same two queues of short and long prompts.
- Steps that only decode are computed in one go until a sequence ends: their times have a closed form.
- KV memory counts tokens. The prefix cache is an LRU of the trace's blocks; those of running sequences are held.

What it leaves out: priorities (first come, first served), swap space (preempted sequences are recomputed, the latest
first), steps in flight, speculation. `python -m tools.simulator check` compares it with the real scheduler.
"""

import math
from collections import OrderedDict
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from pipeline.replay.traffic import ReplicaProfile
from pipeline.stages.schedule.policies.budget import BudgetLimits, StepBudget, grant_chunks
from pipeline.stages.schedule.policies.policy import MAX_SKIPPED
from pipeline.stages.schedule.scheduler_config import MAX_TOKENS, UNLIMITED
from tools.simulator.costs import KnownCosts
from tools.simulator.requests import SimRequest

NEVER = math.inf


class ReplicaListener(Protocol):
    """Hears what happens in a replica."""

    def started(self, request: SimRequest, num_cached: int) -> None:
        """The first sequence of a request starts, with so many tokens of its prompt from the prefix cache."""
        ...

    def first_token(self, request: SimRequest, now_s: float) -> None: ...

    def ended(self, request: SimRequest, now_s: float) -> None: ...


class BlockCache:
    """Blocks by key: held by running sequences, or cached without a holder, least recently used first."""

    def __init__(self) -> None:
        self.refs: dict[int, int] = {}
        self.lru: OrderedDict[int, None] = OrderedDict()

    def num_hits(self, keys: tuple[int, ...]) -> int:
        """How many blocks, from the first on, are there."""
        refs, lru = self.refs, self.lru
        for index, key in enumerate(keys):
            if key not in refs and key not in lru:
                return index
        return len(keys)

    def hold(self, keys: tuple[int, ...]) -> None:
        """Add a reference to blocks that are there."""
        for key in keys:
            if (num := self.refs.get(key, 0)) == 0:
                del self.lru[key]
            self.refs[key] = num + 1

    def add(self, key: int) -> bool:
        """Let a new block be found by this key, held once. Returns False if there is one already."""
        if key in self.refs or key in self.lru:
            return False
        self.refs[key] = 1
        return True

    def release(self, keys: list[int]) -> None:
        """Drop a reference of each; the last ones are evicted first."""
        refs = self.refs
        for key in reversed(keys):
            if refs[key] == 1:
                del refs[key]
                self.lru[key] = None
            else:
                refs[key] -= 1


class Row:
    """A sequence."""

    __slots__ = ("end_count", "held", "is_long", "known", "num_skipped", "order", "planned", "private", "registered",
                 "remaining", "request", "sample", "start_count")  # fmt: skip

    def __init__(self, request: SimRequest, sample: int) -> None:
        self.request = request
        self.sample = sample
        """Its index among the request's sequences."""
        self.order = (request.arrival_s, request.index, sample)
        self.known = request.num_prompt
        """Ids when it started: the prompt, and output that is computed again."""
        self.remaining = request.outputs[sample]
        """Ids to sample."""
        self.planned = 0
        self.registered = 0
        """Blocks from the first on that are in the cache, or that another sequence had there first."""
        self.held: list[int] = []
        self.private = 0
        """Tokens of KV memory besides the held blocks, without those of decoding."""
        self.is_long = False
        self.num_skipped = 0
        self.start_count = self.end_count = 0
        """Decode steps of the replica when it began to decode, and when it ends."""


class FastReplica:
    """Simulates one replica. The driver calls `submit` for each request and `advance` at `next_s`."""

    def __init__(self, profile: ReplicaProfile, block_tokens: int, events: ReplicaListener) -> None:
        self.next_s = NEVER
        """When `advance` is due."""
        self.busy_s = 0.0
        self.num_preemptions = 0
        self._profile = profile
        self._block_tokens = block_tokens
        self._events = events
        self._costs = KnownCosts(profile)
        self._long_tokens = profile.long_prompt_tokens or MAX_TOKENS
        self._limits = BudgetLimits(
            profile.max_num_batched_tokens,
            profile.max_step_ms / 1000 or UNLIMITED,
            profile.prompt_max_slowdown or UNLIMITED,
            profile.long_prompt_max_slowdown,
            max(profile.max_num_batched_tokens, profile.max_num_prefill_tokens),
        )
        self.cache = BlockCache()
        self._private = 0
        """Tokens of KV memory besides the blocks of `cache`."""
        self._waiting: tuple[list[tuple[tuple[float, int, int], Row]], ...] = ([], [])
        """Heaps of short and of long prompts."""
        self._prefilling: list[Row] = []
        """By order."""
        self._decoding: dict[Row, None] = {}
        self._ends: list[tuple[int, tuple[float, int, int], Row]] = []
        """Decoding rows by `end_count`, and rows that were preempted."""
        self._count = 0
        """Decode steps so far."""
        self._context = 0
        """Positions that the decoding rows attend to in the next step."""
        self._left: dict[int, int] = {}
        """Sequences of each request that have not ended."""
        self._begun_s = 0.0
        """When the step in progress, or the first of several, began."""
        self._num_steps = 0
        """Decode steps in progress that are computed in one go; 0: one step with chunks, or idle."""
        self._sampling: list[Row] = []
        """Rows whose prompt is complete with the step in progress."""

    def submit(self, request: SimRequest, now_s: float) -> None:
        """A request arrives. It must fit into the KV cache alone."""
        self._left[request.index] = len(request.outputs)
        self._wait(Row(request, 0))
        if self.next_s == NEVER:
            self._plan(now_s)
        elif self._num_steps > 1:  # it may start after the step in progress
            done = self._steps_until(now_s - self._begun_s)
            if done < self._num_steps:
                self._num_steps = done
                self.next_s = self._begun_s + self._run_s(done)

    def advance(self) -> None:
        """The step in progress ends, and the next one begins."""
        now_s = self.next_s
        self.busy_s += now_s - self._begun_s
        self._decode(self._num_steps or 1, now_s)
        for row in self._sampling:
            self._sampled_first(row, now_s)
        self._sampling = []
        self._plan(now_s)

    # ------------------------------------------------------------------------------------------------ the next step

    def _plan(self, now_s: float) -> None:
        self._begun_s = now_s
        while self._num_available() < len(self._decoding):
            self._preempt_last()
        num = len(self._decoding)
        if self._prefilling or self._waiting[0] or self._waiting[1]:
            num_prompts = len(self._prefilling) + sum(map(len, self._waiting))
            budget = StepBudget(self._limits, self._costs, num, self._context, num_prompts)
            self._grant(budget)
            if (shape := budget.shape).num_chunk_tokens:
                self._num_steps = 0
                self.next_s = now_s + self._costs.predict(num, self._context, shape.num_chunk_tokens, shape.pairs)
                return
        if not num:
            assert not (self._prefilling or any(self._waiting)), "a sequence can't start in an idle replica"
            self.next_s = NEVER
            return
        self._num_steps = max(1, min(self._ends[0][0] - self._count, self._num_available() // num))
        self.next_s = now_s + self._run_s(self._num_steps)

    def _grant(self, budget: StepBudget) -> None:
        """Divide a step's budget among prompts, as the planner does: short ones, new ones, long ones."""
        longs = [row for row in self._prefilling if row.is_long]
        if longs:
            budget.hold_for_long(0)
        for row in [row for row in self._prefilling if not row.is_long]:
            self._advance_prompt(row, budget.chunk(row.planned, row.known - row.planned, False))
        while budget.has_room(False) and len(self._prefilling) + len(self._decoding) + len(self._sampling) < (
            self._profile.max_num_seqs
        ):
            first = self._next_waiting(budget)
            if first is None or not self._start(first):
                break
            need, is_sure = first.known - first.planned, first.num_skipped >= MAX_SKIPPED
            self._advance_prompt(first, budget.chunk(first.planned, need, first.is_long, is_sure=is_sure))
        if longs:
            budget.release_held()
            needs = np.array([row.known - row.planned for row in longs])
            starts = np.array([row.planned for row in longs])
            counts = grant_chunks(budget, needs, starts, np.ones(len(longs), np.bool_))
            for row, count in zip(longs, counts.tolist(), strict=True):
                self._advance_prompt(row, count)

    def _next_waiting(self, budget: StepBudget) -> Row | None:
        short, long = (queue[0][1] if queue else None for queue in self._waiting)
        if long is not None and not (
            budget.has_room_for_long(0)
            or long.num_skipped >= MAX_SKIPPED
            or long.known - self._num_cached(long) <= self._long_tokens
        ):
            if short is not None and short.order > long.order:
                long.num_skipped += 1
            return short
        if long is None or (short is not None and short.order < long.order):
            return short
        return long

    def _start(self, row: Row) -> bool:
        """Take a waiting row's memory. Returns whether there is enough."""
        block, keys, size = self._block_tokens, self._keys(row), self._profile.block_size
        num_hits = self.cache.num_hits(keys)
        hits = keys[:num_hits]
        private = -(-row.known // size) * size - num_hits * block
        needed = max(0, private) + block * sum(key in self.cache.lru for key in hits)
        num_running = len(self._prefilling) + len(self._decoding) + len(self._sampling)
        if self._num_available() - needed < num_running * size:
            return False
        is_long = row.known > self._long_tokens
        heappop(self._waiting[is_long])
        self.cache.hold(hits)
        row.held, row.private, row.registered = list(hits), max(0, private), num_hits
        row.planned = min(num_hits * block, (row.known - 1) // size * size)
        row.is_long = row.known - row.planned > self._long_tokens
        self._private += row.private
        self._evict()
        self._prefilling.append(row)
        if row.sample == 0 and row.remaining == row.request.outputs[0]:
            self._events.started(row.request, row.planned)
        return True

    def _advance_prompt(self, row: Row, count: int) -> None:
        """A step computes `count` more positions of a prompt. Its blocks can be found from now on."""
        if not count:
            return
        row.planned += count
        self._register(row, row.planned)
        if row.planned == row.known:
            self._prefilling.remove(row)
            self._sampling.append(row)

    # ------------------------------------------------------------------------------------------------------- decode

    def _run_s(self, num_steps: int) -> float:
        """The time of so many decode steps from now on."""
        num = len(self._decoding)
        a, b, c, _, _ = self._costs.coefficients
        return num_steps * (a + b * num + c * self._context) + c * num * num_steps * (num_steps - 1) / 2

    def _steps_until(self, seconds: float) -> int:
        """The least number of decode steps, at least 1, that take so long."""
        num = len(self._decoding)
        a, b, c, _, _ = self._costs.coefficients
        half, first = c * num / 2, a + b * num + c * self._context
        linear = first - half
        steps = seconds / linear if half == 0 else (math.sqrt(linear**2 + 4 * half * seconds) - linear) / (2 * half)
        return max(1, math.ceil(steps - 1e-9))

    def _decode(self, num_steps: int, now_s: float) -> None:
        """The decoding rows sampled `num_steps` ids each."""
        num = len(self._decoding)
        if not num:
            return
        self._count += num_steps
        self._context += num * num_steps
        self._private += num * num_steps
        self._evict()
        while self._ends and self._ends[0][0] <= self._count:
            end_count, _, row = heappop(self._ends)
            if row in self._decoding and row.end_count == end_count:
                self._stop_decoding(row)
                self._end(row, now_s)

    def _sampled_first(self, row: Row, now_s: float) -> None:
        """A row's prompt is computed, and an id was sampled."""
        request = row.request
        if row.sample == 0 and row.remaining == request.outputs[0]:
            self._events.first_token(request, now_s)
            for sample in range(1, len(request.outputs)):
                self._wait(Row(request, sample))
        row.remaining -= 1
        if not row.remaining:
            self._end(row, now_s)
            return
        row.known += 1
        row.start_count, row.end_count = self._count, self._count + row.remaining
        self._decoding[row] = None
        self._context += row.known
        heappush(self._ends, (row.end_count, row.order, row))

    def _stop_decoding(self, row: Row) -> None:
        """A row decodes no longer: count what it has, and release the memory of its decode steps."""
        del self._decoding[row]
        num_sampled = self._count - row.start_count
        self._context -= row.known + num_sampled
        self._private -= num_sampled
        row.known += num_sampled
        row.remaining -= num_sampled

    def _end(self, row: Row, now_s: float) -> None:
        if row.sample == 0 and row.request.output_keys:
            row.private += row.known - row.request.num_prompt  # of its decode steps
            self._private += row.known - row.request.num_prompt
            self._register(row, row.known - 1)  # the last id is not computed
        self._release(row)
        request = row.request
        self._left[request.index] -= 1
        if not self._left[request.index]:
            del self._left[request.index]
            self._events.ended(request, now_s)

    # ------------------------------------------------------------------------------------------------------- memory

    def _num_available(self) -> int:
        """Tokens of KV memory that are free or hold blocks without a holder."""
        return self._profile.kv_tokens - len(self.cache.refs) * self._block_tokens - self._private

    def _evict(self) -> None:
        cache, block = self.cache, self._block_tokens
        over = (len(cache.refs) + len(cache.lru)) * block + self._private - self._profile.kv_tokens
        while over > 0 and cache.lru:
            cache.lru.popitem(last=False)
            over -= block

    def _keys(self, row: Row) -> tuple[int, ...]:
        request = row.request
        has_output = row.sample == 0 and request.output_keys and row.known > request.num_prompt
        keys = request.keys + request.output_keys if has_output else request.keys
        return keys[: row.known // self._block_tokens]

    def _num_cached(self, row: Row) -> int:
        return self.cache.num_hits(self._keys(row)) * self._block_tokens

    def _register(self, row: Row, num_computed: int) -> None:
        """Let the blocks of a row's first positions be found. One that another sequence has there stays private."""
        keys, block = self._keys(row), self._block_tokens
        for index in range(row.registered, min(len(keys), num_computed // block)):
            if row.private >= block and self.cache.add(keys[index]):
                row.held.append(keys[index])
                row.private -= block
                self._private -= block
            row.registered = index + 1

    def _release(self, row: Row) -> None:
        self._private -= row.private
        row.private = 0
        self.cache.release(row.held)
        row.held = []

    def _preempt_last(self) -> None:
        """Recompute the latest sequence later."""
        row = max([*self._decoding, *self._prefilling], key=lambda row: row.order)
        if row in self._decoding:
            self._stop_decoding(row)
        else:
            self._prefilling.remove(row)
        self._release(row)
        self.num_preemptions += 1
        row.planned = 0
        self._wait(row)

    def _wait(self, row: Row) -> None:
        heappush(self._waiting[row.known > self._long_tokens], (row.order, row))
