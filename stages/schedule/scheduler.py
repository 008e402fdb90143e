"""The scheduler's core: plans steps by counts alone, and settles what they sampled.

A step lets each sequence's computed ids catch up with its known ones, within a budget. Prefill, chunks of it, decode,
prefix hits and resumption after preemption are that one rule with different numbers. With several steps in flight a row
is planned ahead of the ids it will have: its length is known before its ids are.

This module neither sends nor receives; stage.py does. It holds no tensor and imports no torch.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeline import messages as m
from pipeline.messages import Finish
from pipeline.shm.arrays import Array
from pipeline.stages.schedule import policy, prefix
from pipeline.stages.schedule.blocks import BlockPool
from pipeline.stages.schedule.counting import Counting
from pipeline.stages.schedule.outgoing import Outgoing, Put
from pipeline.stages.schedule.request import Ids, Request, Sequence
from pipeline.stages.schedule.rows import Int64s, Rows
from pipeline.stats import ScheduleCounts

MAX_TOMBSTONES = 65536
"""Aborts remembered that came before their request; as many as there can be open requests."""

NEVER_KEYED = 2**31 - 1
"""More blocks than any row has."""

PROMPT_TAIL = 8
"""The prompt's last ids that detokenize is given: more than any character or word boundary takes."""

NO_IDS: Ids = np.zeros(0, np.int32)

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Take = Callable[[Array, Any], "np.ndarray[Any, Any]"]


class Limits(msgspec.Struct, frozen=True):
    """What the scheduler may hand out."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    prefix_caching: bool = True


class Flight(msgspec.Struct, frozen=True):
    """A step that the executor has been sent and has not answered."""

    step_id: int
    num_samples: int
    num_tokens: int


def inline(array: "np.ndarray[Any, Any]") -> Array:
    return array.tobytes()


def from_inline(array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
    assert isinstance(array, bytes)
    return np.frombuffer(array, dtype)


class Scheduler:
    """Owns requests, the waiting and the running, the block pool and the settled ids.

    The verbs: `admit`, `abort` and `close` for requests, `plan` and `settle` for steps; `outgoing` has what detokenize
    is to be told. `put` and `take` carry arrays out of and into messages.
    """

    def __init__(
        self,
        limits: Limits,
        incarnation: int = 1,
        put: Put = inline,
        take: Take = from_inline,
        num_detokenize: int = 1,
    ) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.rows = Rows(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self.outgoing = Outgoing(self.rows, put, num_detokenize)
        self.requests: dict[int, Request] = {}
        self.in_flight: deque[Flight] = deque()
        self._incarnation = incarnation
        self._put = put
        self._take = take
        self._waiting: list[tuple[tuple[float, int], Sequence]] = []
        self._tombstones: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._drops: list[int] = []
        self._next_seq = 1
        self._last_step = 0
        self.now_s = 0.0
        """By time.monotonic(), set by whoever drives this, once per wake."""
        self.counting = Counting()
        self.marked: list[int] = []
        """Requests that began or ended with the last result, for traces."""
        self._totals = {"prompt": 0, "cached": 0, "output": 0, "preemptions": 0}

    # ------------------------------------------------------------------------------------------------- requests

    def admit(self, message: m.Admit) -> list[m.Open | m.Refuse]:
        """Take a request in. Returns what detokenize is to be told: its openings, or why it is refused."""
        prompt = self._take(message.prompt_ids, np.int32).astype(np.int32, copy=False)
        outputs = [self._take(ids, np.int32) for ids in message.outputs]
        limit = min(len(prompt) + message.max_tokens, self.limits.max_model_len)
        failure = None
        if self._tombstones.pop((message.request_id, message.attempt), self) is None:
            failure = m.Failure(499, "the request was aborted", code="aborted")
        elif (num_blocks := self._blocks_for(limit - 1)) > self.limits.num_blocks:
            failure = m.Failure(
                400,
                f"prompt and output need {num_blocks} KV blocks, but this server has {self.limits.num_blocks}: "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        elif not 0 < len(prompt) < limit:
            failure = m.Failure(400, f"the prompt has {len(prompt)} tokens, which leaves no room for output")
        if failure is not None:
            return [m.Refuse(message.request_id, message.attempt, message.gateway, failure)]
        assert message.request_id not in self.requests, f"request {message.request_id:x} came twice"
        request = Request(
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
        )
        self.requests[request.request_id] = request
        return [
            self._open(request, index, limit, outputs[index], Finish(message.finishes[index]))
            if outputs
            else self._open(request, index, limit, NO_IDS, Finish.NONE)
            for index in range(request.n)
        ]

    def _open(self, request: Request, index: int, limit: int, outputs: Ids, finish: Finish) -> m.Open:
        """Begin a sequence behind the outputs that are known, or end it at once where nothing may follow them."""
        ids = np.concatenate((request.prompt, outputs)) if len(outputs) else request.prompt
        assert len(ids) <= limit, f"request {request.request_id:x} comes with more ids than it may have"
        sequence = Sequence(self._next_seq, request, index, ids, limit, num_given=len(ids))
        self._next_seq += 1
        if finish == Finish.NONE and len(ids) == limit:
            finish = Finish.LENGTH
        if finish == Finish.NONE:
            request.open_sequences[index] = sequence
            insort(self._waiting, (sequence.order, sequence))
        else:
            self.outgoing.part(sequence, len(ids), finish)
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
        """Let nothing that was computed up to now be found again, nor what running sequences will compute behind it.
        Returns how many blocks could have been found."""
        self.rows.num_keyed[self.rows.order] = NEVER_KEYED
        return self.pool.forget_all()

    @property
    def num_running(self) -> int:
        return len(self.rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        )

    def counts(self) -> ScheduleCounts:
        """The same, with what is counted for metrics."""
        counting = self.counting
        return ScheduleCounts(
            **msgspec.structs.asdict(self.load()),
            queue_s=counting.queue_s.counts(),
            prefill_s=counting.prefill_s.counts(),
            decode_s=counting.decode_s.counts(),
            inference_s=counting.inference_s.counts(),
            step_tokens=counting.step_tokens.counts(),
            plan_s=counting.plan_s,
            settle_s=counting.settle_s,
        )

    # ---------------------------------------------------------------------------------------------------- plan

    def plan(self) -> m.Step | None:
        """What the next step computes, or None where there is nothing to compute now."""
        rows = self.rows
        order = rows.order
        total = rows.known[order] + rows.promised[order]
        need = np.where(total < rows.limit[order], total - rows.planned[order], 0)
        counts = policy.grant(need, self.limits.max_num_batched_tokens)
        running, counts = order[counts > 0], counts[counts > 0]
        running, counts, appended, preempted = self._cover(running, counts)
        samples = self._advance(running, counts)
        adds: list[m.RowAdd] = []
        if not preempted:
            started = self._start_waiting(self.limits.max_num_batched_tokens - int(counts.sum()), adds)
            running = np.concatenate((running, np.array([row for row, _, _ in started], np.int64)))
            counts = np.concatenate((counts, np.array([count for _, count, _ in started], np.int64)))
            samples = np.concatenate((samples, np.array([sample for _, _, sample in started], np.bool_)))
        if len(running) == 0:
            assert self.in_flight or not (self.num_running or self._waiting), "there is work, but no step to do it"
            return None
        return self._step(running, counts, samples, appended, adds)

    def _cover(self, running: Int64s, counts: Int64s) -> tuple[Int64s, Int64s, list[tuple[int, int]], bool]:
        """Append the blocks that the granted positions fall into, preempting the youngest where there are none.
        Returns who still runs and how much, the (row, block) pairs, and whether anyone was preempted.

        A row starts with blocks for all its ids and gains one id a step, so it lacks one block at most. Rows are
        covered by age, so nobody who has just got a block is preempted for a later one."""
        rows, pool = self.rows, self.pool
        full = rows.planned[running] + counts > rows.num_blocks[running] * self.limits.block_size
        appended: list[tuple[int, int]] = []
        skipped: list[int] = []
        preempted = False
        for place in np.flatnonzero(full).tolist():
            row = int(running[place])
            while rows.active[row] and pool.num_available == 0 and pool.num_retired == 0:
                self._preempt(rows.youngest)
                preempted = True
            if not rows.active[row]:
                continue
            if pool.num_available:
                block = pool.take()
                rows.append_block(row, block)
                appended.append((row, block))
            else:
                skipped.append(place)  # a block comes back when the step in flight is settled
        keep = rows.active[running]
        keep[skipped] = False
        return running[keep], counts[keep], appended, preempted

    def _preempt(self, row: int) -> None:
        """Take a running sequence's blocks. It waits again, in its old place, and is computed again from its ids;
        what steps in flight sample for it is dropped, and sampled again with the same noise."""
        sequence = self._leave(row, Finish.NONE)
        sequence.num_preemptions += 1
        self._totals["preemptions"] += 1
        insort(self._waiting, (sequence.order, sequence))

    def _start_waiting(self, budget: int, adds: list[m.RowAdd]) -> list[tuple[int, int, bool]]:
        """Start waiting sequences, the oldest first and none before it, while budget, rows and blocks last. Returns
        (row, count, whether it samples), and appends to `adds`."""
        started = []
        while budget > 0 and self._waiting and self.rows.num_free:
            add = self._start(self._waiting[0][1])
            if add is None:
                break
            self._waiting.pop(0)
            adds.append(add)
            count = min(budget, int(self.rows.known[add.row] - self.rows.planned[add.row]))
            samples = self._advance(np.array([add.row]), np.array([count]))
            started.append((add.row, count, bool(samples[0])))
            budget -= count
        return started

    def _start(self, sequence: Sequence) -> m.RowAdd | None:
        """Give a sequence a row and the blocks of all its ids, or return None where there are too few."""
        pool = self.pool
        ids = sequence.ids
        hits = self._find_prefix(sequence)
        num_needed = self._blocks_for(len(ids)) - len(hits)
        num_unheld = sum(map(pool.is_cached, hits))
        if not policy.may_start(pool.num_available, num_needed + num_unheld, self.num_running):
            return None
        for block in hits:
            pool.hold(block)
        blocks = hits + [pool.take() for _ in range(num_needed)]
        num_cached = len(hits) * self.limits.block_size
        if sequence.num_preemptions == 0:
            sequence.started_s = self.now_s
            num_prompt = len(sequence.request.prompt)  # ids that a client received before are no prompt
            sequence.num_cached = min(num_cached, num_prompt)
            self._totals["prompt"] += num_prompt
            self._totals["cached"] += sequence.num_cached
        row = self.rows.start(sequence, blocks, num_cached)
        request = sequence.request
        return m.RowAdd(
            row=row,
            generation=int(self.rows.generation[row]),
            index=sequence.index,
            ids=self._put(ids),
            num_prompt=len(request.prompt),
            blocks=self._put(np.array(blocks, np.int32)),
            sampling=request.sampling,
            request_id=request.request_id,
        )

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest run of blocks, from the first, that hold this sequence's ids already. Its last id is computed in
        any case: the next one is drawn from its logits."""
        if not self.limits.prefix_caching:
            return []
        num_blocks = (len(sequence.ids) - 1) // self.limits.block_size
        prefix.extend(sequence.keys, sequence.ids, num_blocks, self.limits.block_size)
        hits: list[int] = []
        for key in sequence.keys[:num_blocks]:
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def _advance(self, running: Int64s, counts: Int64s) -> Bools:
        """Note that a step computes these positions, and offer the blocks they fill to others: a later step, or a later
        row of this one, may read them, since steps run in order and a step writes KV before it reads.
        Returns which rows have caught up with what they have, and so sample an id."""
        rows = self.rows
        rows.planned[running] += counts
        caught_up: Bools = rows.planned[running] == rows.known[running] + rows.promised[running]
        rows.promised[running] += caught_up
        self._register(running)
        return caught_up

    def _step(
        self, running: Int64s, counts: Int64s, samples: Bools, appended: list[tuple[int, int]], adds: list[m.RowAdd]
    ) -> m.Step:
        """Put a plan into a message. Decode rows first."""
        by_kind = np.argsort(counts > 1, kind="stable")
        running, counts, samples = running[by_kind], counts[by_kind], samples[by_kind]
        planned = self.rows.planned[running]
        drops, self._drops = self._drops, []
        num_tokens = int(counts.sum())
        self.counting.step_tokens.observe(num_tokens)
        self._last_step += 1
        self.in_flight.append(Flight(self._last_step, int(samples.sum()), num_tokens))
        put = self._put
        return m.Step(
            incarnation=self._incarnation,
            step_id=self._last_step,
            drops=put(np.array(drops, np.int32)),
            adds=adds,
            block_rows=put(np.array([row for row, _ in appended], np.int32)),
            block_ids=put(np.array([block for _, block in appended], np.int32)),
            rows=put(running.astype(np.int32)),
            starts=put((planned - counts).astype(np.int32)),
            counts=put(counts.astype(np.int32)),
            samples=put(samples.astype(np.uint8)),
        )

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
        sampled, ids, finishes = sampled[current], ids[current], finishes[current]
        assert (ids >= 0).all(), f"step {flight.step_id} has no id for a running row"
        known = rows.known[sampled]
        rows.ids[sampled, known] = ids
        rows.known[sampled] = known + 1
        rows.promised[sampled] -= 1
        self._totals["output"] += len(sampled)
        self.marked = []
        for row in sampled[known == rows.num_given[sampled]].tolist():
            self._has_begun(row)
        stopped = finishes == Finish.STOP
        ended = stopped | (known + 1 >= rows.limit[sampled])
        self._register(sampled[~ended])
        for row, by_stop in zip(sampled[ended].tolist(), stopped[ended].tolist(), strict=True):
            sequence = rows.sequences[row]
            assert sequence is not None
            self.marked.append(sequence.request.request_id)
            self._finish(sequence, Finish.STOP if by_stop else Finish.LENGTH)
        self.pool.settle(flight.step_id)

    def _has_begun(self, row: int) -> None:
        """A row's first output id is settled."""
        sequence = self.rows.sequences[row]
        assert sequence is not None
        sequence.first_s = self.now_s
        self.marked.append(sequence.request.request_id)

    def _register(self, running: Int64s) -> None:
        """Offer full blocks to the prefix cache: those whose ids are settled and whose KV is planned."""
        if not self.limits.prefix_caching:
            return
        rows = self.rows
        num_full = np.minimum(rows.known[running], rows.planned[running]) // self.limits.block_size
        for place in np.flatnonzero(num_full > rows.num_keyed[running]).tolist():
            self._register_row(int(running[place]), int(num_full[place]))

    def _register_row(self, row: int, num_full: int) -> None:
        rows = self.rows
        sequence = rows.sequences[row]
        assert sequence is not None
        prefix.extend(sequence.keys, rows.ids[row], num_full, self.limits.block_size)
        for place in range(int(rows.num_keyed[row]), num_full):
            self.pool.register(int(rows.table[row, place]), sequence.keys[place])
        rows.num_keyed[row] = num_full

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence, wherever it is, with its one closing."""
        if sequence.row >= 0:
            self._leave(sequence.row, finish)
        else:
            self._waiting.remove((sequence.order, sequence))
            self.outgoing.part(sequence, len(sequence.ids), finish)
        del sequence.request.open_sequences[sequence.index]
        self.counting.ended(sequence, finish, self.now_s)

    def _leave(self, row: int, finish: Finish) -> Sequence:
        """Take a sequence out of its row. Its blocks return when no step in flight names them."""
        num_sent = int(self.rows.sent[row])
        sequence, blocks = self.rows.end(row)
        self.outgoing.part(sequence, num_sent, finish)
        self._drops.append(row)
        if self.in_flight:
            self.pool.retire(blocks, self._last_step)
        else:
            self.pool.release(blocks)
        return sequence

    def _blocks_for(self, num_ids: int) -> int:
        return -(-num_ids // self.limits.block_size)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        pool, rows = self.pool, self.rows
        pool.check()
        held: dict[int, int] = {}
        for row in rows.order.tolist():
            assert rows.num_blocks[row] * self.limits.block_size >= rows.planned[row]
            assert rows.planned[row] <= rows.known[row] + rows.promised[row] <= rows.limit[row]
            for block in rows.table[row, : rows.num_blocks[row]].tolist():
                held[block] = held.get(block, 0) + 1
        assert sum(held.values()) + pool.num_retired == sum(map(pool.num_refs, range(pool.num_total))), (
            "a reference belongs to nobody"
        )
        for request in self.requests.values():
            for sequence in request.open_sequences.values():
                waits = any(other is sequence for _, other in self._waiting)
                assert waits != (sequence.row >= 0), "a sequence is in two queues, or in none"
