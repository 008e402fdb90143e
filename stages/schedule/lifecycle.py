"""The states of a sequence, and the transitions between them.

      add                     start                     finish
────────────────► waiting ───────────► running ──────────────────────►
   │                 ▲ ▲   preempt        │  ▲ │
   │ n > 1           │ └──────────────────┘  │ │ preempt, KV kept
   └────► parked ────┘                start  │ ▼
                                         swapped

When the executor has died, running sequences wait again. Those that must not run beside suspects
(policies/quarantine.py) are held back meanwhile, also when schedule itself has died.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from pipeline.runtime.messages import Finish
from pipeline.runtime.process.black_box import MAX_SUSPECTS
from pipeline.stages.schedule.arrays import Ids
from pipeline.stages.schedule.kv_cache.computed_prefix import ComputedPrefix
from pipeline.stages.schedule.kv_cache.manager import ExecutorLoss
from pipeline.stages.schedule.kv_cache.swap import Swapped
from pipeline.stages.schedule.kv_cache.tables import BlockTable
from pipeline.stages.schedule.policies.adapter_slots import AdapterSlots
from pipeline.stages.schedule.policies.priority_preemptor import PriorityPreemptor
from pipeline.stages.schedule.policies.quarantine import Quarantine
from pipeline.stages.schedule.queues import SequenceQueue, WaitingQueue
from pipeline.stages.schedule.request import RequestState, Sequence
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.samples.parallel_samples import ParallelSamples
from pipeline.stages.schedule.scheduler_config import UNLIMITED
from pipeline.stages.schedule.state import SchedulerState

MAX_STALE_SUSPECTS = 64
"""Ended sequences in the list of suspects before it is written anew."""


class SequenceLifecycle:
    """Owns the queues of sequences without a row. Every sequence that has not finished is in exactly one place."""

    def __init__(self, state: SchedulerState) -> None:
        config = state.config
        self._state = state
        self.waiting = WaitingQueue(state.policy, config.long_prompt_tokens)
        self.swapped = SequenceQueue()
        self.held = SequenceQueue()
        """Sequences that wait until the quarantine lets their request run."""
        self.quarantine = Quarantine(state.context.crash_counts)
        self.adapters = AdapterSlots(config.max_loras, waits=config.waits_for_adapters)
        self.parallel_samples = ParallelSamples()
        self.preemptor = PriorityPreemptor(state.rows, state.kv_cache_manager, state.preemption_costs)
        self.num_prompt_tokens = self.num_cached_tokens = self.num_recomputed_tokens = self.num_preemptions = 0
        """Since start."""
        self._policy = state.policy
        self._long_prompt_tokens = config.long_prompt_tokens
        self._rows = state.rows
        self._kv_cache_manager = state.kv_cache_manager
        self._costs = state.preemption_costs
        self._output_buffer = state.output_buffer
        self._in_flight = state.in_flight
        self._metrics = state.metrics
        self._suspects = state.context.suspects
        self._was_quarantined = False
        """Whether the suspects were not all that were here, when they were listed."""
        self._left: deque[tuple[int, int]] = deque()
        """The last step in flight that may compute sequences that have left their rows, and the ids of their
        requests."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be computed, parked and held ones included."""
        return len(self.waiting) + len(self.parallel_samples) + len(self.held) + len(self.adapters)

    @property
    def is_idle(self) -> bool:
        """Whether there is no sequence at all."""
        return not (len(self._rows) or self.num_waiting or self.swapped)

    @property
    def is_steady(self) -> bool:
        """Whether the rows are all there is to plan: every open sequence runs, none is suspected of having killed a
        process, and any step of them finds its blocks and slots."""
        manager, num_rows = self._kv_cache_manager, len(self._rows)
        return (
            not (self.num_waiting or self.swapped or self.quarantine.is_active)
            and manager.windows.are_enough(num_rows)
            and (not manager.states.is_on or manager.states.pool.num_available >= num_rows)
        )

    def first_swapped(self) -> Sequence | None:
        """The first swapped sequence that may run."""
        excludes, is_loaded = self.quarantine.excludes, self.adapters.is_loaded
        may_run = [one for one in self.swapped if is_loaded(one) and not excludes(one.request.request_id)]
        first = next((one for one in may_run if not one.is_paced), None)
        paced = self._state.mask_turns.next_of([one for one in may_run if one.is_paced])
        return min((one for one in (first, paced) if one is not None), key=lambda one: one.order, default=None)

    @property
    def is_short_of_room(self) -> bool:
        """Whether sequences wait that are not paced."""
        return self.waiting.num_unpaced > 0 or not all(one.is_paced for one in self.swapped)

    def first_rank(self, default: float = UNLIMITED) -> float:
        """The lowest rank of the waiting and the swapped sequences."""
        return min((queue.first_rank for queue in (self.waiting, self.swapped) if queue), default=default)

    def ids_of(self, row: int) -> Ids:
        """The settled ids of a running sequence."""
        return self._rows.ids[row, : self._rows.num_tokens[row]]

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait: for its turn, or for a parallel sample that computes the prompt."""
        request = sequence.request
        if request.open_sequences:
            self.parallel_samples.park(sequence)
        else:
            self._wait(sequence)
        request.open_sequences[sequence.index] = sequence

    def add_ready_samples(self) -> None:
        """Move parked sequences whose prompt is computed to the waiting queue."""
        for sequence in self.parallel_samples.take_ready(self._rows):
            self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        if self.quarantine.excludes(sequence.request.request_id):
            self.held.add(sequence)
            # A suspect may need the slot of its adapter.
            for freed in self.adapters.release(sequence):
                self._wait(freed)
            return
        self._suspects.add(sequence.request.request_id)
        if self.adapters.admit(sequence):
            self.waiting.add(sequence)

    def adapters_loaded(self, number: int, adapters: list[str]) -> None:
        """The executor has loaded LoRA adapters: their sequences need not wait for it."""
        for sequence in self.adapters.loaded(number, adapters):
            self._wait(sequence)

    def suspect(self, request: RequestState) -> None:
        """A process crashed that had a new request in work: it runs beside few. Call it before adding its sequences."""
        was_active, rows = self.quarantine.is_active, self._rows
        new = rows.order[rows.num_tokens[rows.order] == rows.num_resumed_tokens[rows.order]].tolist()
        uncleared = dict.fromkeys(one.request.request_id for row in new if (one := rows.sequences[row]) is not None)
        runs = bool(rows or self.swapped or self._in_flight.steps)
        self.quarantine.add(request.request_id, uncleared, request.n, others_run=runs)
        if not was_active:
            self.preemptor.reset()  # those that rows were preempted for are held, too
            self._wait_again()

    def free_adapters(self) -> None:
        """If sequences wait for the slot of an adapter, let swapped ones that the quarantine holds back give up theirs:
        they go on when the suspects are cleared, and it may be a suspect that waits. They are computed again. Call it
        before each plan."""
        if not (self.quarantine.is_active and self.adapters.waiting):
            return
        for sequence in [one for one in self.swapped if one.request.adapter_id]:
            if self.quarantine.excludes(sequence.request.request_id):
                self._leave_swap(sequence, self._in_flight.last_in_flight)
                self._wait(sequence)

    def _wait_again(self, others: Iterable[Sequence] = ()) -> None:
        """Hold back the waiting sequences that the quarantine excludes now, and these others."""
        waiting, self.waiting = self.waiting, WaitingQueue(self._policy, self._long_prompt_tokens)
        for sequence in (*waiting.sequences, *others):
            self._wait(sequence)

    def list_suspects(self) -> None:
        """Write down which requests may be the reason if this process or the executor dies: those that run, cleared or
        not, those that steps in flight compute, and those that wait, but not those that are held back. So one that is
        listed alone was the only one that anything was done for. Call it at the end of each turn, when its output is
        sent. Until then, those that have ended stay suspects. Without a quarantine, ended ones may stay longer, but not
        if nothing is left."""
        is_quarantined = self.quarantine.is_active
        if not (is_quarantined or self._was_quarantined) and len(self._suspects) <= MAX_STALE_SUSPECTS and self._rows:
            return
        num_open = len(self._rows) + len(self.waiting) + len(self.swapped) + len(self.adapters)
        num_listed = num_open + max(MAX_STALE_SUSPECTS, num_open) if num_open else 0
        if num_open < MAX_SUSPECTS:
            num_listed = min(num_listed, MAX_SUSPECTS - 1)  # else those that come are not listed
        if not (is_quarantined or self._was_quarantined or len(self._suspects) > num_listed):
            return
        here = (*filter(None, self._rows.sequences), *self.waiting.sequences, *self.adapters)
        listed = dict.fromkeys(one.request.request_id for one in here)
        if steps := self._in_flight.steps:
            listed.update((request_id, None) for step_id, request_id in self._left if step_id >= steps[0].step_id)
        swapped = (one.request.request_id for one in self.swapped)
        listed.update(dict.fromkeys(one for one in swapped if not self.quarantine.excludes(one)))
        self._suspects.replace(listed)
        self._was_quarantined = is_quarantined

    def release_held(self) -> bool:
        """If the suspects that ran are cleared, let the next ones run, or all. Call it behind `list_suspects`, when
        the ids that cleared them are sent. Returns whether others may run now."""
        if not self.quarantine.is_cleared:
            return False
        if self.quarantine.is_alone:
            self._hold_others()
            if self._in_flight.steps:
                return False  # they compute the others
            self.list_suspects()
        self.quarantine.next_group()
        held, self.held = self.held, SequenceQueue()
        for sequence in held:
            self._wait(sequence)
        return True

    def _hold_others(self) -> None:
        """Preempt all requests: the next group of suspects runs alone. Their blocks stay in the prefix cache while
        there is room."""
        running = [sequence for row in self._rows.order.tolist() if (sequence := self._rows.sequences[row])]
        for sequence in running:
            if self.quarantine.excludes(sequence.request.request_id):
                self._leave(sequence.row, Finish.NONE)
                sequence.num_preemptions += 1
                self.num_preemptions += 1
                self._wait(sequence)
        swapped = list(self.swapped)
        for sequence in swapped:
            self._leave_swap(sequence, self._in_flight.last_in_flight)
        self._wait_again(swapped)

    def start(self, sequence: Sequence, num_running: int) -> tuple[int, ComputedPrefix, list[BlockTable]] | None:
        """Give a sequence a row and blocks, and leave `num_running` other rows their next ones. Returns the row, the
        computed prefix and the block tables, or None if there are too few blocks."""
        queue = self.waiting if sequence.swapped is None else self.swapped
        allocated = self._kv_cache_manager.allocate(sequence, num_running, self._in_flight.last_step_id + 1)
        if allocated is None:
            return None
        found, tables = allocated
        if sequence.num_preemptions == 0 and not sequence.started_s:
            num_prompt = len(sequence.request.prompt)
            sequence.started_s = self._state.now_s
            sequence.num_cached = min(found.num_computed, num_prompt)  # output that the client has is no prompt
            self.num_prompt_tokens += num_prompt
            self.num_cached_tokens += sequence.num_cached
        queue.remove(sequence)
        self.num_recomputed_tokens += max(0, sequence.num_computed_prompt - found.num_computed)
        self._state.mask_turns.start(sequence, self._state.now_s)
        # The shared blocks are in the prefix cache already.
        row = self._rows.start(sequence, tables, found.num_computed, found.num_shared, self._long_prompt_tokens)
        if self._kv_cache_manager.states.is_on:
            self._kv_cache_manager.states.start(row, found)
        self.preemptor.forget(sequence)
        self.waiting.count_skipped()
        self.parallel_samples.on_start(sequence)
        return row, found, tables

    def preempt(self, row: int) -> None:
        """Take a running sequence's row and blocks. It is swapped out, or waits in its old place to be computed again.
        Samples of steps in flight are dropped, and sampled again with the same noise."""
        swapped: Swapped | None = None
        # The block that a beam gets a copy of may not be there before the next step.
        if not self._rows.flags[row] & RowFlag.BEAM and self._costs.swaps(row):
            swapped = self._kv_cache_manager.swap_out(
                row, int(self._costs.num_kept(np.array([row]))[0]), self._in_flight.last_step_id + 1
            )
        sequence = self._leave(row, Finish.NONE)
        sequence.num_preemptions += 1
        sequence.swapped = swapped
        self.num_preemptions += 1
        (self.waiting if swapped is None else self.swapped).add(sequence)

    def wait_with(self, sequence: Sequence, ids: Ids) -> None:
        """Let a beam wait with other ids, wherever it is. Its row and blocks are released."""
        if sequence.row >= 0:
            self._leave(sequence.row, Finish.NONE)
        else:
            self._remove_queued(sequence)
        sequence.ids = ids
        sequence.keys = []
        self._wait(sequence)

    def preempt_stalled_beams(self) -> bool:
        """Preempt the last beam search that has rows, with all its beams. Returns whether there was one. Call it if no
        step can be planned though there is work: then beams wait for others that find no room."""
        rows = self._rows
        beams = rows.order[rows.have(RowFlag.BEAM, rows.order)]
        if not len(beams):
            return False
        last = rows.sequences[int(beams[-1])]
        assert last is not None
        for sequence in list(last.request.open_sequences.values()):
            if sequence.row >= 0:
                self.preempt(sequence.row)
        return True

    def executor_lost(self, loss: ExecutorLoss) -> None:
        """The executor has died, and with it all KV blocks: running sequences wait to be computed again, in their old
        order. Those whose KV is in swap space stay swapped if its successor keeps that."""
        sequences = [sequence for row in self._rows.order.tolist() if (sequence := self._rows.sequences[row])]
        for sequence in sequences:
            self._leave(sequence.row, Finish.NONE)
            sequence.num_preemptions += 1
        last_settled = self._in_flight.lost()
        self._left.clear()
        lost = [one for one in self.swapped if not loss.keeps_swap or one.swapped_by > last_settled]
        for sequence in lost:
            self._leave_swap(sequence, None)
        self._kv_cache_manager.executor_lost(loss)
        self.adapters.executor_lost()
        self.preemptor.reset()
        sequences += [*self.waiting.sequences, *self.held, *lost]
        self.waiting, self.held = WaitingQueue(self._policy, self._long_prompt_tokens), SequenceQueue()
        requests = {
            sequence.request.request_id: sequence.request.n for sequence in (*sequences, *self.swapped, *self.adapters)
        }
        self.quarantine.executor_lost(loss.crash_counts, requests)
        for sequence in sequences:
            self._wait(sequence)

    def finish(self, sequence: Sequence, finish: Finish, ids: Ids | None = None) -> None:
        """End a sequence in any state. `ids` are the prompt and output of one of a beam search; without, it has only
        the output of its admission."""
        sequence.finish = finish
        is_beam, has_row = sequence.request.beam_search is not None, sequence.row >= 0
        if has_row:
            self._leave(sequence.row, Finish.NONE if is_beam else finish)
        else:
            self._remove_queued(sequence)
        if is_beam:
            if ids is None:
                ids = np.concatenate((sequence.request.prompt, sequence.resumed_outputs))
                sequence.token_outputs.clear()
            sequence.ids = ids
            self._output_buffer.add_closing(sequence, sequence.num_resumed_tokens, finish)
        elif not has_row:
            self._output_buffer.add_closing(sequence, len(sequence.ids), finish)
        self.preemptor.forget(sequence)
        request = sequence.request
        del request.open_sequences[sequence.index]
        for sample in self.parallel_samples.take_next(
            request, has_computed=len(sequence.ids) > sequence.num_resumed_tokens
        ):
            self._wait(sample)
        for freed in self.adapters.release(sequence):
            self._wait(freed)
        if self.quarantine.is_active and not request.open_sequences:
            self.quarantine.ended(request.request_id, is_complete=finish in (Finish.STOP, Finish.LENGTH))
        self._metrics.observe_finished(sequence, finish, self._state.now_s)

    def _remove_queued(self, sequence: Sequence) -> None:
        if self.parallel_samples.is_parked(sequence):
            self.parallel_samples.remove(sequence)
        elif self.held and sequence in self.held:
            self.held.remove(sequence)
        elif sequence.request.adapter_id and self.adapters.is_parked(sequence):
            self.adapters.remove(sequence)
        elif sequence.swapped is None:
            self.waiting.remove(sequence)
        else:
            self._leave_swap(sequence, self._in_flight.last_in_flight)

    def _leave_swap(self, sequence: Sequence, step_id: int | None) -> None:
        """Release a sequence's blocks in swap space once `step_id` is settled."""
        assert sequence.swapped is not None
        self.swapped.remove(sequence)
        self._kv_cache_manager.release_swapped(sequence.swapped, step_id)
        sequence.swapped = None

    def _leave(self, row: int, finish: Finish) -> Sequence:
        """Take a sequence out of its row. Its blocks are released when no step in flight names them."""
        self._kv_cache_manager.register_last(row)
        if self._kv_cache_manager.states.is_on:
            self._kv_cache_manager.states.leave(row, self._in_flight.last_step_id + 1, self._in_flight.last_in_flight)
        num_sent, num_computed = int(self._rows.sent[row]), int(self._rows.num_computed_tokens[row])
        sequence, blocks = self._rows.end(row)
        sequence.num_computed_prompt = min(num_computed, len(sequence.request.prompt))
        self._output_buffer.add_closing(sequence, num_sent, finish)
        if steps := self._in_flight.steps:
            while self._left and self._left[0][0] < steps[0].step_id:
                self._left.popleft()
            self._left.append((steps[-1].step_id, sequence.request.request_id))
        self._in_flight.drop_row(row)
        self._kv_cache_manager.release(blocks, self._in_flight.last_in_flight)
        self._kv_cache_manager.offload.release(sequence)
        return sequence

    def check(self, requests: list[RequestState]) -> None:
        """Assert every invariant; for tests."""
        for request in requests:
            for sequence in request.open_sequences.values():
                containers = (
                    sequence.row >= 0,
                    sequence in self.swapped,
                    sequence in self.waiting,
                    sequence in self.parallel_samples,
                    sequence in self.held,
                    sequence in self.adapters,
                )
                assert sum(containers) == 1, "a sequence is in two places, or in none"
                assert containers[0] or not self.is_steady, "a sequence waits, and steps are planned as if none did"
                assert (sequence.swapped is not None) == containers[1], "swapped blocks have no sequence in swap space"
                assert self.parallel_samples.is_parked(sequence) == containers[3]
        self.adapters.check()
        kept = [sequence.swapped for sequence in self.swapped]
        self._kv_cache_manager.check([swapped for swapped in kept if swapped is not None])
