"""The scheduler's core: plans steps by counts alone, and settles what they sampled.

A step lets each sequence's computed ids catch up with its known ones, within a budget. Prefill, chunks of it, decode,
prefix hits, forks and resumption after preemption are that one rule with different numbers. With several steps in
flight a row is planned ahead of the ids it will have: its length is known before its ids are.

            admit                start                     finish
      ────────────────► waiting ───────► running ──────────────────────►
                           ▲     preempt │  ▲ │
                           └─────────────┘  │ │ preempt, keys and values kept
                                     resume │ ▼
                                          swapped

This module neither sends nor receives; stage.py does. It holds no tensor and imports no torch.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeline.metrics.stats import ScheduleCounts
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.arrays import Bools, Ids, Int64s
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.manager import KVCacheManager
from pipeline.stages.schedule.kv_cache.swap import Swapped
from pipeline.stages.schedule.logprob_records import awaited, take_prompt_records, take_records
from pipeline.stages.schedule.metrics import ScheduleMetrics
from pipeline.stages.schedule.output_buffer import OutputBuffer, Put
from pipeline.stages.schedule.parallel_samples import ParallelSamples
from pipeline.stages.schedule.policies.budget import BudgetLimits, StepBudget, StepShape, grant_chunks, grant_decodes
from pipeline.stages.schedule.policies.policy import MAX_SKIPPED, POLICIES
from pipeline.stages.schedule.policies.preemption import PreemptionCosts, Victims
from pipeline.stages.schedule.policies.priority_preemptor import PriorityPreemptor
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel
from pipeline.stages.schedule.queues import SequenceQueue, WaitingQueue
from pipeline.stages.schedule.request import PromptRequest, Sequence
from pipeline.stages.schedule.rows import Rows
from pipeline.stages.schedule.scheduler_config import UNLIMITED, SchedulerConfig
from pipeline.stages.schedule.step_entries import InFlightStep, StepEntries, joined

MAX_TOMBSTONES = 65536
"""Aborts remembered that came before their request; as many as there can be open requests."""

PROMPT_TAIL = 8
"""The prompt's last ids that detokenize is given: more than any character or word boundary takes."""

LEARN_EVERY = 8
"""Of the steps in which all rows decode, one in so many is learnt from: they are all alike."""

NO_IDS: Ids = np.zeros(0, np.int32)
NO_PLACES: Int64s = np.zeros(0, np.int64)

Take = Callable[[Array, Any], "np.ndarray[Any, Any]"]


def inline(array: "np.ndarray[Any, Any]") -> Array:
    return array.tobytes()


def from_inline(array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
    assert isinstance(array, bytes)
    return np.frombuffer(array, dtype)


class Scheduler:
    """Owns requests, the waiting, the running and the swapped, the block pool, swap space and the settled ids.

    The verbs: `admit`, `abort` and `close` for requests, `plan` and `settle` for steps; `output_buffer` has what
    detokenize is to be told. `put` and `take` carry arrays out of and into messages.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        incarnation: int = 1,
        put: Put = inline,
        take: Take = from_inline,
        num_detokenize: int = 1,
    ) -> None:
        self.config = config
        self.rows = Rows(config.max_num_seqs, config.max_model_len, config.block_size)
        self.kv_cache_manager = KVCacheManager(config, self.rows)
        self.pool = self.kv_cache_manager.pool
        self.output_buffer = OutputBuffer(self.rows, put, num_detokenize)
        self.requests: dict[int, PromptRequest] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self._incarnation = incarnation
        self._put = put
        self._take = take
        self._policy = POLICIES[config.policy]()
        self._bounds = BudgetLimits(config.max_num_batched_tokens, config.max_step_s, config.long_prompt_max_slowdown)
        self.cost_model = StepCostModel()
        self._preemption = PreemptionCosts(
            config.preemption, self.rows, self.cost_model, self.kv_cache_manager, config.block_size
        )
        self._waiting = WaitingQueue(self._policy, config.long_prompt_tokens)
        self._parallel_samples = ParallelSamples()
        self._swapped = SequenceQueue()
        self._preemptor = PriorityPreemptor(self.rows, self.kv_cache_manager, self._preemption)
        self._num_decode_steps = 0
        self._tombstones: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._drops: list[int] = []
        self._next_seq = 1
        self._last_step = 0
        self.now_s = 0.0
        """By time.monotonic(), set by whoever drives this, once per wake."""
        self.metrics = ScheduleMetrics()
        self.traced_request_ids: list[int] = []
        """Requests that began or ended with the last result, for traces."""
        self._totals = {"prompt": 0, "cached": 0, "output": 0, "preemptions": 0}

    # ------------------------------------------------------------------------------------------------- requests

    def admit(self, message: m.Admit) -> list[m.Open | m.Refuse]:
        """Take a request in. Returns what detokenize is to be told: its openings, or why it is refused."""
        prompt = self._take(message.prompt_ids, np.int32).astype(np.int32, copy=False)
        outputs = [self._take(ids, np.int32) for ids in message.outputs]
        limit = min(len(prompt) + message.max_tokens, self.config.max_model_len)
        failure = None
        if self._tombstones.pop((message.request_id, message.attempt), self) is None:
            failure = m.Failure(499, "the request was aborted", code="aborted")
        elif (num_blocks := self.kv_cache_manager.blocks_for(limit - 1)) > self.config.num_blocks:
            failure = m.Failure(
                400,
                f"prompt and output need {num_blocks} KV blocks, but this server has {self.config.num_blocks}: "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        elif not 0 < len(prompt) < limit:
            failure = m.Failure(400, f"the prompt has {len(prompt)} tokens, which leaves no room for output")
        if failure is not None:
            return [m.Refuse(message.request_id, message.attempt, message.gateway, failure)]
        assert message.request_id not in self.requests, f"request {message.request_id:x} came twice"
        request = PromptRequest(
            message.request_id,
            message.attempt,
            message.gateway,
            message.arrival_s,
            prompt,
            message.n,
            message.max_tokens,
            message.sampling,
            message.text,
            queued_s=self.now_s,
            priority=message.priority,
            root=prefix.root(message.cache_salt) if message.cache_salt else prefix.ROOT,
            record_bytes=message.record_bytes,
            prompt_record_bytes=message.prompt_record_bytes,
            needs_full_prefill=message.needs_full_prefill,
        )
        self.requests[request.request_id] = request
        return [
            self._open(request, index, limit, outputs[index], Finish(message.finishes[index]))
            if outputs
            else self._open(request, index, limit, NO_IDS, Finish.NONE)
            for index in range(request.n)
        ]

    def _open(self, request: PromptRequest, index: int, limit: int, outputs: Ids, finish: Finish) -> m.Open:
        """Begin a sequence behind the outputs that are known, or end it at once where nothing may follow them."""
        ids = np.concatenate((request.prompt, outputs)) if len(outputs) else request.prompt
        assert len(ids) <= limit, f"request {request.request_id:x} comes with more ids than it may have"
        order = (self._policy.rank(request), request.arrival_s, self._next_seq)
        sequence = Sequence(self._next_seq, request, index, ids, limit, order, num_given=len(ids))
        self._next_seq += 1
        if finish == Finish.NONE and len(ids) == limit:
            finish = Finish.LENGTH
        if finish == Finish.NONE:
            if request.open_sequences:
                self._parallel_samples.park(sequence)
            else:
                self._waiting.add(sequence)
            request.open_sequences[index] = sequence
        else:
            self.output_buffer.part(sequence, len(ids), finish)
        return m.Open(
            sequence.seq,
            request.request_id,
            request.attempt,
            index,
            request.gateway,
            request.prompt[-PROMPT_TAIL:].tobytes(),
            request.text,
            self._put(outputs),
            int(finish),
        )

    def abort(self, message: m.Abort) -> None:
        """End a request, or one sequence of it. One that is not known yet is refused when it comes."""
        request = self.requests.get(message.request_id)
        if request is None or request.attempt < message.attempt:
            if message.index < 0:
                self._tombstones[message.request_id, message.attempt] = None
                if len(self._tombstones) > MAX_TOMBSTONES:
                    self._tombstones.popitem(last=False)
            return
        if request.attempt > message.attempt:
            return
        for sequence in list(request.open_sequences.values()):
            if message.index in (-1, sequence.index):
                self._finish(sequence, Finish(message.finish))

    def close(self, message: m.Closed) -> None:
        """The gateway needs this request no more. Whatever of it is still open ends."""
        self._tombstones.pop((message.request_id, message.attempt), None)
        request = self.requests.get(message.request_id)
        if request is not None and request.attempt <= message.attempt:
            for sequence in list(request.open_sequences.values()):
                self._finish(sequence, Finish.ABORT)
            del self.requests[message.request_id]

    def reset_prefix_cache(self) -> int:
        """Let nothing that was computed up to now be found again, nor what begun sequences will compute behind it: at
        most by their own siblings. Returns how many blocks could have been found."""
        for request in self.requests.values():
            sequences = request.open_sequences.values()
            if any(sequence.row >= 0 or sequence.swapped is not None for sequence in sequences):
                request.root = prefix.apart(request.root, request.request_id)
                request.keys.clear()
                for sequence in sequences:
                    sequence.keys.clear()
        return self.kv_cache_manager.forget()

    @property
    def num_running(self) -> int:
        return len(self.rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._parallel_samples)

    def load(self) -> m.ScheduleLoad:
        """The counts of now and since start."""
        pool = self.pool
        return m.ScheduleLoad(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks_free=pool.num_free,
            num_blocks_cached=pool.num_cached,
            num_blocks_held=pool.num_held,
            num_blocks_total=pool.num_total,
            num_prompt_tokens=self._totals["prompt"],
            num_cached_tokens=self._totals["cached"],
            num_output_tokens=self._totals["output"],
            num_preemptions=self._totals["preemptions"],
            num_steps=self._last_step,
            num_swapped=len(self._swapped),
            num_swap_blocks_free=self.kv_cache_manager.swap.num_free,
            num_swap_blocks_total=self.kv_cache_manager.swap.num_total,
            num_blocks_swapped_out=self.kv_cache_manager.num_swapped_out,
            num_blocks_swapped_in=self.kv_cache_manager.num_swapped_in,
            num_forks=self.kv_cache_manager.num_forks,
        )

    def counts(self) -> ScheduleCounts:
        """The same, with what is counted for metrics."""
        metrics = self.metrics
        return ScheduleCounts(
            **msgspec.structs.asdict(self.load()),
            queue_s=metrics.queue_s.counts(),
            prefill_s=metrics.prefill_s.counts(),
            decode_s=metrics.decode_s.counts(),
            inference_s=metrics.inference_s.counts(),
            step_tokens=metrics.step_tokens.counts(),
            plan_s=metrics.plan_s,
            settle_s=metrics.settle_s,
            plan_wait_s=metrics.plan_wait_s(),
            gaps=metrics.gaps(),
        )

    # ---------------------------------------------------------------------------------------------------- plan

    def plan(self) -> m.Step | None:
        """What the next step computes, or None where there is nothing to compute now."""
        rows = self.rows
        if self._waiting or self._swapped or self._parallel_samples.any_led:
            np.copyto(rows.ahead, rows.planned)
            for sequence in self._parallel_samples.take_ready(rows):
                self._waiting.add(sequence)
        order, planned = rows.order, rows.planned[rows.order]
        total = rows.known[order] + rows.promised[order]
        need = (total - planned) * (total < rows.limit[order])
        budget, counts, later = self._grant(order, planned, need, total)
        has_made_way = self._make_way(budget, order[total >= rows.limit[order]])
        running, appended, preempted = self._cover(order, planned, counts, total)
        if running is not order:
            kept = np.flatnonzero(np.isin(order, running))
            planned, total, counts = planned[kept], total[kept], counts[kept]
        entries = [self._advance(running, planned, counts, total)]
        later = later[rows.active[later]]  # a row that was put back may be another's below
        adds: list[m.RowAdd] = []
        if not preempted and (self._waiting or self._swapped):
            entries += self._start_others(budget, adds, has_made_way)
        if len(later):
            entries += self._go_on(budget, later)
        if not any(len(part.rows) for part in entries) and not adds:
            assert self.in_flight or not (self.num_running or self.num_waiting or self._swapped), (
                "there is work, but no step to do it"
            )
            return None
        return self._step(entries, appended, adds, budget.shape)

    def _grant(self, order: Int64s, planned: Int64s, need: Int64s, total: Int64s) -> tuple[StepBudget, Int64s, Int64s]:
        """Divide a step's budget among rows that lack `need` of `total` ids. Returns what is left of it, how many
        tokens each row computes, and the rows of prompts that are to get what others leave.

        Decoding rows come first, then prompts by order. Long prompts come after whoever starts, and the first of them
        is left something; so do, where the policy preempts, prompts of a higher rank than somebody who waits."""
        prompts = later = NO_PLACES
        if len(need) <= self.config.max_num_batched_tokens and (need == 1).all():
            counts, num_decodes = need, len(need)  # nearly every step
        else:
            counts = grant_decodes(need, self.config.max_num_batched_tokens)
            num_decodes = int(counts.sum())
            prompts = (need > 1).nonzero()[0]
            yields = self._yields(order[prompts])
            prompts, later = prompts[~yields], order[prompts[yields]]
        matters = len(prompts) > 0 or len(later) > 0 or self._waiting or self._swapped or self._learns(False)
        context = int((total * counts).sum()) if matters else 0
        budget = StepBudget(self._bounds, self.cost_model, num_decodes, context)
        if len(longs := later[self.rows.is_long[later]]):
            budget.hold_for_long(int(self.rows.rank[longs[0]]))
        if len(prompts):
            counts[prompts] = self._chunks(budget, order[prompts], need[prompts], planned[prompts])
        return budget, counts, later

    def _yields(self, prompts: Int64s) -> Bools:
        """Which of these rows' prompts get what is left when others have started."""
        is_long: Bools = self.rows.is_long[prompts]
        if not self._policy.preempts:
            return is_long
        ranks = self.rows.rank[prompts]
        first = min((queue.first_rank for queue in (self._waiting, self._swapped) if queue), default=UNLIMITED)
        yields: Bools = (ranks > first) | (is_long & (ranks == first))
        return yields

    def _chunks(self, budget: StepBudget, prompts: Int64s, need: Int64s, starts: Int64s) -> Int64s:
        """Divide a budget among these rows' prompts, by order: rank by rank."""
        rows = self.rows
        ranks, is_long = rows.rank[prompts], rows.is_long[prompts]
        if len(ranks) == 0 or ranks[0] == ranks[-1]:
            return grant_chunks(budget, need, starts, is_long)
        counts = np.zeros(len(prompts), np.int64)
        for rank in np.unique(ranks):
            of_rank = ranks == rank
            counts[of_rank] = grant_chunks(budget, need[of_rank], starts[of_rank], is_long[of_rank])
        return counts

    def _go_on(self, budget: StepBudget, prompts: Int64s) -> list[StepEntries]:
        """Divide what is left of a budget among these rows' prompts."""
        rows = self.rows
        budget.release_held()
        planned, known = rows.planned[prompts], rows.known[prompts]
        counts = self._chunks(budget, prompts, known - planned, planned)
        some = counts > 0
        return [self._advance(prompts[some], planned[some], counts[some], known[some])]

    def _cover(
        self, order: Int64s, planned: Int64s, counts: Int64s, total: Int64s
    ) -> tuple[Int64s, list[tuple[int, int]], bool]:
        """Append the blocks that the granted positions fall into, preempting others where there are none: those that
        come later, and of them who costs least to bring back; itself where it is the last. So the first of all always
        goes on, and everybody becomes the first. Returns the rows that run (`order` itself where all do), the (row,
        block) pairs, and whether anyone was preempted.

        A row starts with blocks for all its ids and gains one id a step, so it lacks one block at most. Rows are
        covered by order, so nobody who has just got a block is preempted for a later one."""
        rows, pool = self.rows, self.pool
        full = planned + counts > rows.num_blocks[order] * self.config.block_size
        appended: list[tuple[int, int]] = []
        preempted = False
        victims: Victims | None = None
        ending = NO_PLACES
        runs: Bools = (counts > 0) & rows.active[order]
        for place in full.nonzero()[0].tolist():
            row = int(order[place])
            if pool.num_available == 0 and victims is None:
                # Rows that have all their ids leave when the step in flight is settled, and give their blocks back.
                ending = (total >= rows.limit[order]).nonzero()[0]
                victims = Victims(self._preemption, rows, order)
                victims.drop(np.concatenate((ending, (~rows.active[order]).nonzero()[0])))
            while rows.active[row] and not (pool.num_available or pool.num_retired or len(ending)):
                assert victims is not None
                victim = victims.take(behind=place)
                self._preempt(row if victim is None else victim)
                preempted = True
            if not rows.active[row]:
                continue
            if pool.num_available:
                block = pool.take()
                rows.append_block(row, block)
                appended.append((row, block))
            else:
                runs[place] = False  # a block comes back when the step in flight is settled
        if preempted:
            runs &= rows.active[order]
        return order if runs.all() else order[runs], appended, preempted

    # ------------------------------------------------------------------------------------------------ preemption

    def _preempt(self, row: int) -> None:
        """Take a running sequence's blocks. It is swapped out, or waits again in its old place and is computed again
        from its ids; what steps in flight sample for it is dropped, and sampled again with the same noise."""
        swapped: Swapped | None = None
        if self._preemption.swaps(row):
            swapped = self.kv_cache_manager.swap_out(row, int(self._preemption.num_kept(np.array([row]))[0]))
        sequence = self._leave(row, Finish.NONE)
        sequence.num_preemptions += 1
        sequence.swapped = swapped
        self._totals["preemptions"] += 1
        (self._waiting if swapped is None else self._swapped).add(sequence)

    def _make_way(self, budget: StepBudget, ending: Int64s) -> bool:
        """Where the policy preempts, put rows back for who would start next. What was granted to them is nobody's in
        this step. Returns whether anyone was put back: then only those that it was for may start now."""
        if not (
            self._policy.preempts and self.num_running and self._preemptor.may_preempt() and budget.has_room(False)
        ):
            return False
        first = self._next(budget)
        if first is None:
            return False
        behind = self._waiting.behind(first, int(self.rows.rank[self.rows.order[-1]]))
        put_back = self._preemptor.choose_victims(first, behind, ending, budget.tokens, self._last_step)
        for row in put_back:
            self._preempt(row)
        return bool(put_back)

    # ----------------------------------------------------------------------------------------------------- start

    def _start_others(self, budget: StepBudget, adds: list[m.RowAdd], has_made_way: bool) -> list[StepEntries]:
        """Bring swapped sequences back and start waiting ones, while budget, rows and blocks last; where this plan has
        put others back, those alone that it was for. Returns what of them is computed, and appends to `adds`."""
        started: list[StepEntries] = []
        while budget.has_room(False) and self.rows.num_free and (sequence := self._next(budget)) is not None:
            queue = self._waiting if sequence.swapped is None else self._swapped
            way_was_made = self._preemptor.is_next(sequence)
            if has_made_way and not way_was_made:
                break
            is_sure = way_was_made or sequence.num_skipped >= MAX_SKIPPED
            add = self._start(sequence, way_was_made)
            if add is None:
                break
            self._preemptor.forget(sequence)
            queue.remove(sequence)
            self._waiting.started()
            self._parallel_samples.started(sequence)
            adds.append(add)
            row = add.row
            planned, known = int(self.rows.planned[row]), int(self.rows.known[row])
            count = budget.chunk(planned, known - planned, bool(self.rows.is_long[row]), is_sure=is_sure)
            if count:  # else it has its row, and its turn in a later step
                started.append(self._advance(*(np.array([value]) for value in (row, planned, count, known))))
        return started

    def _next(self, budget: StepBudget) -> Sequence | None:
        """Who starts next, if there were blocks: for whom others were put back; then those that were put back
        themselves, by order, whether they are swapped or are computed again; then new ones."""
        waiting = self._waiting.choose(
            budget.has_room_for_long, self.kv_cache_manager.num_cached, self.config.block_size
        )
        if self._preemptor.preempted_for:
            first = self._preemptor.preempted_for[0]
            ranks = [queue.first_rank for queue in (self._waiting, self._swapped) if queue]
            if first.order[0] <= min(ranks):
                self._waiting.choose_none()
                return first
        if self._swapped:
            swapped = self._swapped.first
            is_older = waiting is not None and waiting.num_preemptions > 0 and waiting.order < swapped.order
            if waiting is None or (swapped.order[0] <= waiting.order[0] and not is_older):
                self._waiting.choose_none()
                return swapped
        return waiting

    def _start(self, sequence: Sequence, way_was_made: bool) -> m.RowAdd | None:
        """Give a sequence a row and the blocks of all its ids, or return None where there are too few. Where way was
        made for it, none is left for others."""
        given = self.kv_cache_manager.start(sequence, 0 if way_was_made else self.num_running, self._last_step + 1)
        if given is None:
            return None
        start, blocks = given
        request, ids = sequence.request, sequence.ids
        num_prompt = len(request.prompt)
        if sequence.num_preemptions == 0:
            sequence.started_s = self.now_s
            sequence.num_cached = min(start.num_computed, num_prompt)  # ids that a client received before are no prompt
            self._totals["prompt"] += num_prompt
            self._totals["cached"] += sequence.num_cached
        num_keyed = len(start.blocks)  # what is shared, others have offered
        row = self.rows.start(sequence, blocks, start.num_computed, num_keyed, self.config.long_prompt_tokens)
        return m.RowAdd(
            row=row,
            generation=int(self.rows.generation[row]),
            index=sequence.index,
            ids=self._put(ids[num_prompt:] if start.leader >= 0 else ids),
            num_prompt=num_prompt,
            blocks=self._put(np.array(blocks, np.int32)),
            sampling=request.sampling,
            request_id=request.request_id,
            fork_of=start.leader,
        )

    def _advance(self, running: Int64s, planned: Int64s, counts: Int64s, total: Int64s) -> StepEntries:
        """Note that a step computes `counts` positions of these rows behind those planned, and offer the blocks that
        they fill to others. Rows that have caught up with what they have, `total` ids, sample one."""
        rows = self.rows
        ends = planned + counts
        samples: Bools = ends == total
        rows.planned[running] = ends
        rows.promised[running] += samples
        self.kv_cache_manager.register(running)
        return StepEntries(running, planned, counts, samples)

    def _step(
        self, entries: list[StepEntries], appended: list[tuple[int, int]], adds: list[m.RowAdd], shape: StepShape
    ) -> m.Step:
        """Put a plan into a message. Decode rows first."""
        computed = joined(entries)
        if shape.num_chunk_tokens:
            by_kind = np.argsort(computed.counts > 1, kind="stable")
            computed = computed.taken(by_kind)
        drops, self._drops = self._drops, []
        num_tokens = int(computed.counts.sum())
        self.metrics.step_tokens.observe(num_tokens)
        self._last_step += 1
        # Where rows were put back, it is not what was granted that is computed.
        learns = self._learns(shape.num_chunk_tokens > 0) and num_tokens == shape.num_decodes + shape.num_chunk_tokens
        self._num_decode_steps += shape.num_chunk_tokens == 0
        num_samples = int(np.count_nonzero(computed.samples))
        has_forks = self.kv_cache_manager.copies.has_forks
        sources, targets = self.kv_cache_manager.copies.take()
        num_copies = 0 if has_forks else len(sources)
        told = awaited(self.rows, computed)
        learns &= told is None or not told.prompts  # to tell of a prompt takes longer than to compute it
        flight = InFlightStep(self._last_step, num_samples, num_tokens, num_copies, shape if learns else None, told)
        self.in_flight.append(flight)
        put = self._put
        return m.Step(
            incarnation=self._incarnation,
            step_id=self._last_step,
            drops=self._put_list(drops),
            adds=adds,
            block_rows=self._put_list([row for row, _ in appended]),
            block_ids=self._put_list([block for _, block in appended]),
            rows=put(computed.rows.astype(np.int32)),
            starts=put(computed.starts.astype(np.int32)),
            counts=put(computed.counts.astype(np.int32)),
            samples=put(computed.samples.astype(np.uint8)),
            copy_sources=self._put_list(sources),
            copy_targets=self._put_list(targets),
        )

    def _put_list(self, values: list[int]) -> Array:
        """int32; nearly always there are none."""
        return self._put(np.array(values, np.int32)) if values else b""

    def _learns(self, has_chunks: bool) -> bool:
        """Whether the time of a step is learnt from."""
        return has_chunks or self._num_decode_steps % LEARN_EVERY == 0

    # -------------------------------------------------------------------------------------------------- settle

    def settle(self, result: m.StepResult) -> None:
        """Take in what the oldest step in flight sampled: from now on these ids can't change."""
        flight = self.in_flight.popleft()
        assert result.step_id == flight.step_id, f"step {result.step_id} answered, {flight.step_id} is due"
        rows, take = self.rows, self._take
        sampled = take(result.rows, np.int32).astype(np.int64)
        generations = take(result.generations, np.uint32)
        ids = take(result.ids, np.int32)
        finishes = take(result.finishes, np.uint8)
        assert len(sampled) == flight.num_samples, f"step {flight.step_id} sampled {len(sampled)} rows"
        current = rows.active[sampled] & (rows.generation[sampled] == generations)
        if (told := flight.awaited) is not None:
            take_records(rows, told, sampled, ids, current, take(result.records, np.uint8).tobytes())
            take_prompt_records(rows, told, take(result.prompt_records, np.uint8).tobytes(), self.output_buffer)
        self.traced_request_ids = []
        if result.errors:
            self._fail(sampled[current & (finishes == Finish.ERROR)], sampled[finishes == Finish.ERROR], result.errors)
            current &= finishes != Finish.ERROR
        if not current.all():
            sampled, ids, finishes = sampled[current], ids[current], finishes[current]
        assert (ids >= 0).all(), f"step {flight.step_id} has no id for a running row"
        known = rows.known[sampled]
        rows.ids[sampled, known] = ids
        following = known + 1
        rows.known[sampled] = following
        rows.promised[sampled] -= 1
        self._totals["output"] += len(sampled)
        begun = known == rows.num_given[sampled]
        if begun.any():
            for row in sampled[begun].tolist():
                self._has_begun(row)
        stopped = finishes == Finish.STOP
        ended = stopped | (following >= rows.limit[sampled])
        if ended.any():
            for row, by_stop in zip(sampled[ended].tolist(), stopped[ended].tolist(), strict=True):
                sequence = rows.sequences[row]
                assert sequence is not None
                self.traced_request_ids.append(sequence.request.request_id)
                self._finish(sequence, Finish.STOP if by_stop else Finish.LENGTH)
        self.kv_cache_manager.settle(flight.step_id)
        self._learn(flight, result)

    def _fail(self, running: Int64s, failed: Int64s, errors: list[str]) -> None:
        """End sequences for which the executor had no id. It gives a reason for each row that failed; those of
        `running` are still whose they were."""
        reasons = dict(zip(failed.tolist(), errors, strict=True))
        for row in running.tolist():
            sequence = self.rows.sequences[row]
            assert sequence is not None
            sequence.error = reasons[row]
            self.traced_request_ids.append(sequence.request.request_id)
            self._finish(sequence, Finish.ERROR)

    def _learn(self, flight: InFlightStep, result: m.StepResult) -> None:
        """Take in how long a step took, for the budgets of later ones, and for what preemption costs."""
        if flight.num_copies:
            self.kv_cache_manager.copies.observe(flight.num_copies, result.copy_s)
        if (shape := flight.shape) is not None:
            seconds = result.compute_s - result.copy_s
            self.cost_model.observe(shape.num_decodes, shape.context, shape.num_chunk_tokens, shape.pairs, seconds)

    def _has_begun(self, row: int) -> None:
        """A row's first output id is settled."""
        sequence = self.rows.sequences[row]
        assert sequence is not None
        sequence.first_s = self.now_s
        self.traced_request_ids.append(sequence.request.request_id)

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence, wherever it is, with its one closing."""
        if sequence.row >= 0:
            self._leave(sequence.row, finish)
        else:
            if self._parallel_samples.holds(sequence):
                self._parallel_samples.remove(sequence)
            elif sequence.swapped is None:
                self._waiting.remove(sequence)
            else:
                self._swapped.remove(sequence)
                self.kv_cache_manager.give_up(sequence.swapped, self._last_in_flight)
                sequence.swapped = None
            self.output_buffer.part(sequence, len(sequence.ids), finish)
        self._preemptor.forget(sequence)
        del sequence.request.open_sequences[sequence.index]
        for sibling in self._parallel_samples.take_next(
            sequence.request, has_computed=len(sequence.ids) > sequence.num_given
        ):
            self._waiting.add(sibling)
        self.metrics.ended(sequence, finish, self.now_s)

    def _leave(self, row: int, finish: Finish) -> Sequence:
        """Take a sequence out of its row. Its blocks return when no step in flight names them."""
        self.kv_cache_manager.register_last(row)
        num_sent = int(self.rows.sent[row])
        sequence, blocks = self.rows.end(row)
        self.output_buffer.part(sequence, num_sent, finish)
        self._drops.append(row)
        self.kv_cache_manager.release(blocks, self._last_in_flight)
        return sequence

    @property
    def _last_in_flight(self) -> int | None:
        return self._last_step if self.in_flight else None

    def _blocks_for(self, num_ids: int) -> int:
        return -(-num_ids // self.config.block_size)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        rows = self.rows
        self.kv_cache_manager.check()
        for row in rows.order.tolist():
            assert rows.planned[row] <= rows.known[row] + rows.promised[row] <= rows.limit[row]
        for request in self.requests.values():
            for sequence in request.open_sequences.values():
                places = (
                    sequence.row >= 0,
                    sequence in self._swapped,
                    sequence in self._waiting,
                    sequence in self._parallel_samples,
                )
                assert sum(places) == 1, "a sequence is in two places, or in none"
                assert (sequence.swapped is not None) == places[1], "what was swapped out belongs to nobody"
                assert self._parallel_samples.holds(sequence) == places[3]
        kept = [sequence.swapped for sequence in self._swapped]
        self.kv_cache_manager.swap.check([block for swapped in kept if swapped is not None for block in swapped.blocks])
