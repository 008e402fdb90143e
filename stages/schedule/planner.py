"""Plans steps by counts alone: a row's length is known before its ids are.

A step lets each sequence's computed positions catch up with its ids, within a budget. Prefill, chunks, decode, prefix
hits, forks and resumption after preemption are that one rule with different numbers.
"""

import numpy as np

from pipeline.runtime import messages as m
from pipeline.stages.schedule.arrays import NO_ROWS, Bools, Int64s
from pipeline.stages.schedule.kv_cache.windows import AppendedBlocks
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.policies.budget import StepBudget
from pipeline.stages.schedule.policies.policy import MAX_SKIPPED
from pipeline.stages.schedule.policies.preemption import Victims
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.row_flags import RowFlag, may_repeat
from pipeline.stages.schedule.state import SchedulerState
from pipeline.stages.schedule.steps.decode_run import MAX_ROWS, DecodeRun
from pipeline.stages.schedule.steps.step_builder import StepBuilder
from pipeline.stages.schedule.steps.step_entries import StepEntries
from pipeline.stages.schedule.steps.token_grants import TokenGrants


class Planner:
    """Makes plans. The state that they change belongs to `RowTracker`, `KVCacheManager` and `SequenceLifecycle`."""

    def __init__(self, state: SchedulerState, lifecycle: SequenceLifecycle) -> None:
        self._block_size = state.config.block_size
        self._preempts = state.policy.preempts
        self._rows = state.rows
        self._kv_cache_manager = state.kv_cache_manager
        self._lifecycle = lifecycle
        self._costs = state.preemption_costs
        self._grants = TokenGrants(state, lifecycle)
        self._builder = StepBuilder(state)
        self._speculation = state.speculation
        self._in_flight = state.in_flight
        self._put = state.put_step
        self._breadcrumb = state.context.breadcrumb
        self._registers = True
        self._has_windows = bool(state.kv_cache_manager.windows.by_window)
        self._run: DecodeRun | None = None
        """Of the last plan, if it can be repeated."""
        self._num_stages = state.config.num_stages
        self._states = state.kv_cache_manager.states
        self._was_short_of_room = False
        """Whether the last plan left sequences waiting that are not paced."""
        self._media = state.media
        self._state = state

    def repeat(self) -> m.Step | None:
        """Return the next step if it differs from the last one by a position of each row only, and by new blocks, else
        None. No sequence may wait. Full blocks are not added to the prefix cache."""
        run = self._run
        if run is None or not run.num_left > 0 or not run.is_valid:
            return None
        self._kv_cache_manager.begin_plan(self._in_flight.last_step_id + 1)
        full = run.full_rows()
        appended = self._kv_cache_manager.windows.append_all(full, self._rows.num_computed_tokens[full] + 1)
        return None if appended is None else self._builder.repeat(run, appended)

    def plan(self, *, registers: bool = True, paces: bool = True) -> m.Step | None:
        """Return the next step, or None if there is nothing to compute now. Without `registers`, full blocks are not
        added to the prefix cache yet: the caller does that later, and no sequence waits. Without `paces`, rows with
        slow masks need not wait for their turn."""
        rows, lifecycle = self._rows, self._lifecycle
        self._registers, self._run = registers, None
        self._kv_cache_manager.begin_plan(self._in_flight.last_step_id + 1)
        self._kv_cache_manager.release_passed(self._in_flight.last_in_flight)
        if lifecycle.waiting or lifecycle.swapped or lifecycle.parallel_samples.any_running:
            np.copyto(rows.num_computed_before, rows.num_computed_tokens)
            lifecycle.add_ready_samples()
            lifecycle.free_adapters()
        order, flags = rows.order, rows.all_flags
        num_computed = rows.num_computed_tokens[order]
        total = rows.num_tokens[order] + rows.num_output_placeholders[order]
        need = self._need(order, num_computed, total)
        if flags & RowFlag.PACED and paces:
            need = self._state.mask_turns.limit(order, need, self._state.now_s)
        max_decodes = self._divide_among_stages(order, need) if self._num_stages > 1 else len(order)
        renewed = [(row, rows.block_ends[:, row].tolist()) for row in self._in_flight.renewed_rows]
        learns = self._builder.learns(has_chunks=False) or self._speculation.is_on
        budget, counts, deferred = self._grants.grant(order, num_computed, need, total, max_decodes, learns=learns)
        if flags & RowFlag.STATE:  # a row without a slot waits for the steps in flight
            counts = self._states.writable(order, counts)
            deferred = deferred[self._states.writable(deferred, np.ones_like(deferred)) > 0]
        has_preempted = self._preempt_for_priority(budget, order, total)
        if flags & RowFlag.PACED and self._was_short_of_room and not has_preempted:
            for row in self._state.mask_turns.beyond():
                lifecycle.preempt(row)
        wanted = num_computed + counts
        if len(deferred) and self._has_windows:  # they are granted tokens below, and must find some blocks
            is_deferred = np.isin(order, deferred)
            least = self._media.least_chunks(order[is_deferred], num_computed[is_deferred])
            wanted[is_deferred] += np.minimum(need[is_deferred], least)
        running, appended, lacked_blocks = self._allocate_blocks(order, num_computed, counts, total, wanted)
        if running is not order:
            kept = np.flatnonzero(np.isin(order, running))
            num_computed, total, counts = num_computed[kept], total[kept], counts[kept]
        entries = [self._advance(running, num_computed, counts, total)]
        if len(deferred):  # the row of a preempted prompt may get another sequence below
            deferred = deferred[rows.active[deferred]]
        adds = [self._added_again(row, ends) for row, ends in renewed if row in self._in_flight.renewed_rows]
        if not lacked_blocks and (lifecycle.waiting or lifecycle.swapped):
            entries += self._start_sequences(budget, adds, only_preempted_for=has_preempted)
        self._was_short_of_room = lifecycle.is_short_of_room
        if len(deferred):
            entries.append(self._grant_deferred(budget, deferred, appended))
        if not any(len(part.rows) for part in entries) and not adds:
            waits = lifecycle.adapters.is_loading or lifecycle.quarantine.is_cleared
            if self._in_flight.steps or lifecycle.is_idle or waits:
                return None
            # The others wait for blocks of paced ones, or images for rows that can't decode.
            if (flags & RowFlag.PACED and paces) or self._media.forgive():
                return self.plan(registers=registers, paces=False)
            assert lifecycle.preempt_stalled_beams(), "there is work, but no step to do it"
            return self.plan(registers=registers)
        drafts = self._grant_drafts(budget, entries[0], appended) if self._speculation.is_on else None
        if running is order and len(entries) == 1 and may_repeat(flags):
            self._run = self._new_run(entries[0])
        return self._builder.build(entries, appended, adds, budget.shape, drafts)

    def _need(self, order: Int64s, num_computed: Int64s, total: Int64s) -> Int64s:
        """How many positions each row lacks that it may compute now."""
        rows, flags = self._rows, self._rows.all_flags
        need: Int64s = (total - num_computed) * (total < rows.max_num_tokens[order])
        if flags & RowFlag.STATE:
            need = np.minimum(need, self._states.next_cuts[order] - num_computed)
        if flags & RowFlag.DRAFTS:
            need *= rows.num_drafts[order] == 0
        if flags & RowFlag.BEAM:
            need *= ~(rows.have(RowFlag.BEAM, order) & (rows.num_output_placeholders[order] > 0))
        if self._media.is_on:
            need = self._media.begin_plan(order, num_computed, need)
        return need

    def _divide_among_stages(self, order: Int64s, need: Int64s) -> int:
        """Leave out rows whose last id the first stage of the executor's pipeline will not have: it learns the ids of a
        step when it begins the one that is as many later as there are stages. Returns how many rows may decode, so that
        each of these steps has about as many. Prompts need no ids, so each step may have a chunk of them."""
        rows = self._rows
        num_decoding = int(np.count_nonzero(need == 1))
        last_known = self._in_flight.last_step_id + 1 - self._num_stages
        need *= (rows.num_output_placeholders[order] == 0) | (rows.sampled_by[order] <= last_known)
        return -(-num_decoding // self._num_stages)

    def _new_run(self, entries: StepEntries) -> DecodeRun | None:
        """The run that a step of all running rows begins, if all of them decode."""
        num = len(entries.rows)
        if not 0 < num <= MAX_ROWS or np.count_nonzero(entries.samples & (entries.counts == 1)) < num:
            return None
        return DecodeRun(self._rows, entries.rows, entries.starts + 1, self._block_size)

    def _grant_drafts(self, budget: StepBudget, running: StepEntries, appended: AppendedBlocks) -> Int64s | None:
        """Let the executor propose ids for running rows that decode, with what is left of the budget, and give the rows
        the blocks for them: at most one in each KV group. Proposals never preempt: without blocks, they end where the
        row's blocks do. Returns the number for each row, or None if there are none."""
        rows, manager = self._rows, self._kv_cache_manager
        decoding = (running.samples & (running.counts == 1) & rows.have(RowFlag.DRAFTS, running.rows)).nonzero()[0]
        order, ends = running.rows[decoding], running.starts[decoding] + 1
        granted = self._speculation.grant(order, ends, budget)
        if not granted.any():
            return None
        for index in np.flatnonzero(ends + granted > rows.num_blocks[order] * self._block_size).tolist():
            row, end = int(order[index]), int(ends[index] + granted[index])
            # As for sequences that start, each row is left its next blocks.
            if manager.may_start(manager.pool.num_available, manager.windows.num_lacking(row, end), len(rows)):
                manager.windows.append(row, end, appended)
        granted = np.minimum(granted, rows.num_blocks[order] * self._block_size - ends)
        rows.num_drafts[order] = granted
        drafts: Int64s = np.zeros(len(running.rows), np.int64)
        drafts[decoding] = granted
        return drafts if granted.any() else None

    def _advance(self, running: Int64s, num_computed: Int64s, counts: Int64s, total: Int64s) -> StepEntries:
        """Add `counts` positions of these rows to the step, after those planned, and the blocks that they fill to the
        prefix cache. A row that catches up with its `total` ids samples one."""
        rows = self._rows
        ends = num_computed + counts
        samples: Bools = ends == total
        if rows.all_flags & RowFlag.MEDIA:
            self._media.advance(running, num_computed, counts)
        rows.num_computed_tokens[running] = ends
        rows.num_output_placeholders[running] += samples
        if self._num_stages > 1:
            rows.sampled_by[running[samples]] = self._in_flight.last_step_id + 1
        if self._registers:
            self._kv_cache_manager.register(running)
        if not self._states.is_on:
            return StepEntries(running, num_computed, counts, samples)
        slots = self._states.advance(running, ends, self._in_flight.last_step_id + 1)
        return StepEntries(running, num_computed, counts, samples, *slots)

    def _grant_deferred(self, budget: StepBudget, prompts: Int64s, appended: AppendedBlocks) -> StepEntries:
        """Divide what is left of a budget among the deferred prompts."""
        budget.release_held()
        num_computed, num_tokens = self._rows.num_computed_tokens[prompts], self._rows.num_tokens[prompts]
        need = np.minimum(num_tokens, self._states.next_cuts[prompts]) - num_computed
        need -= self._rows.have(RowFlag.PACED, prompts)
        if self._media.is_on:
            need = self._media.limit_all(prompts, num_computed, need)
        counts = self._grants.chunks(budget, prompts, need, num_computed)
        if self._states.is_on:
            counts = self._states.writable(prompts, counts)
        if self._has_windows:
            windows = self._kv_cache_manager.windows
            for index, (row, start, count) in enumerate(
                zip(*(each.tolist() for each in (prompts, num_computed, counts)), strict=True)
            ):
                end = self._media.uncut(row, start, windows.fitting(row, start + count))
                windows.append(row, end, appended)
                counts[index] = end - start
        some = counts > 0
        return self._advance(prompts[some], num_computed[some], counts[some], num_tokens[some])

    # ---------------------------------------------------------------------------------------------- running rows

    def _allocate_blocks(
        self, order: Int64s, num_computed: Int64s, counts: Int64s, total: Int64s, wanted: Int64s
    ) -> tuple[Int64s, AppendedBlocks, bool]:
        """Append the blocks that the `wanted` positions need. If too few are available, preempt the later row that
        costs least to bring back, or the row itself if it is the last. So the first sequence always proceeds, and every
        sequence becomes the first. Returns the rows that run (`order` itself if all do), the blocks, and whether any
        row was preempted. Lowers `counts` of chunks that fewer blocks are available for.

        With full attention, a row starts with blocks for all its ids and gains one id a step, so it needs at most one
        block. Rows are handled by order, so no row that has just got a block is preempted for a later one, and later
        rows leave blocks to one that waits for more."""
        rows, pool = self._rows, self._kv_cache_manager.pool
        full = wanted > rows.num_blocks[order] * self._block_size
        runs: Bools = (counts > 0) & rows.active[order]
        if not np.count_nonzero(full):  # in most steps
            return order if np.count_nonzero(runs) == len(runs) else order[runs], AppendedBlocks(), False
        windows = self._kv_cache_manager.windows
        full &= rows.active[order]
        at_once = windows.append_all(order[full], wanted[full])
        if at_once is not None:
            return order if np.count_nonzero(runs) == len(runs) else order[runs], at_once, False
        appended = AppendedBlocks()
        preempted = waits = False
        victims: Victims | None = None
        ending = NO_ROWS
        for index in full.nonzero()[0].tolist():
            row, end = int(order[index]), int(wanted[index])
            if counts[index] > 1:
                fitting = self._media.uncut(row, start := int(num_computed[index]), windows.fitting(row, end))
                if fitting > start:
                    end, counts[index] = fitting, fitting - start
            num_lacking = windows.num_lacking(row, end)
            if pool.num_available < num_lacking and victims is None:
                # Rows with all their ids finish when the step in flight is settled, and release their blocks.
                ending = (total >= rows.max_num_tokens[order]).nonzero()[0]
                victims = Victims(self._costs, rows, order)
                victims.drop(np.concatenate((ending, (~rows.active[order]).nonzero()[0])))
            while rows.active[row] and not (pool.num_available + pool.num_retired >= num_lacking or len(ending)):
                assert victims is not None
                victim = victims.take(after=index)
                self._lifecycle.preempt(row if victim is None else victim)
                preempted = True
            if not rows.active[row]:
                continue
            if pool.num_available >= num_lacking and not waits:
                windows.append(row, end, appended)
            else:
                runs[index], waits = False, True  # blocks are released when the step in flight is settled
        if preempted:
            runs &= rows.active[order]
        return order if runs.all() else order[runs], appended, preempted

    def _preempt_for_priority(self, budget: StepBudget, order: Int64s, total: Int64s) -> bool:
        """If the policy preempts, preempt rows for the sequences that would start next. Their grants in this step are
        lost. Returns whether any row was preempted: then only the sequences that triggered it may start now."""
        preemptor, rows = self._lifecycle.preemptor, self._rows
        if not (self._preempts and len(rows) and preemptor.may_preempt() and budget.has_room(False)):
            return False
        first = self._next_sequence(budget)
        if first is None:
            return False
        following = self._lifecycle.waiting.short_after(first, int(rows.priority_key[order[-1]]))
        ending = order[total >= rows.max_num_tokens[order]]
        victims = preemptor.choose_victims(first, following, ending, budget.tokens, self._in_flight.last_step_id)
        for row in victims:
            self._lifecycle.preempt(row)
        return bool(victims)

    # ----------------------------------------------------------------------------------------------------- start

    def _start_sequences(
        self, budget: StepBudget, adds: list[m.RowAdd], *, only_preempted_for: bool
    ) -> list[StepEntries]:
        """Start waiting and swapped sequences while budget, rows and blocks last; with `only_preempted_for`, only those
        that triggered a preemption. Appends to `adds`, and returns what the step computes of them."""
        rows = self._rows
        started: list[StepEntries] = []
        while budget.has_room(False) and rows.num_free and (sequence := self._next_sequence(budget)) is not None:
            is_preempted_for = self._lifecycle.preemptor.is_next(sequence)
            if only_preempted_for and not is_preempted_for:
                break
            is_sure = is_preempted_for or sequence.num_skipped >= MAX_SKIPPED
            with self._breadcrumb.at(sequence.request.request_id, sequence.request.attempt):
                add = self._start(sequence, is_preempted_for)
            if add is None:
                break
            adds.append(add)
            row = add.row
            num_computed, num_tokens = int(rows.num_computed_tokens[row]), int(rows.num_tokens[row])
            need = min(num_tokens, int(self._states.next_cuts[row])) - num_computed
            need -= bool(rows.flags[row] & RowFlag.PACED)
            if rows.flags[row] & RowFlag.MEDIA:
                need = self._media.limit(row, num_computed, need)
            runs = self._media.runs_of(row, num_computed, need)
            count = budget.chunk(num_computed, need, bool(rows.is_long[row]), is_sure=is_sure, runs=runs)
            if self._states.is_on:
                count = int(self._states.writable(np.array([row]), np.array([count]))[0])
            if count:  # otherwise it has its row now and computes in a later step
                started.append(self._advance(*(np.array([value]) for value in (row, num_computed, count, num_tokens))))
        return started

    def _next_sequence(self, budget: StepBudget) -> Sequence | None:
        """The sequence to start next, if there are blocks for it: one that triggered a preemption, then preempted ones
        by order, swapped or not, then new ones."""
        lifecycle = self._lifecycle
        waiting = self._first_waiting(budget)
        if lifecycle.preemptor.preempted_for:
            first = lifecycle.preemptor.preempted_for[0]
            if first.order[0] <= lifecycle.first_rank():
                lifecycle.waiting.clear_skipped()
                return first
        if lifecycle.swapped and (swapped := lifecycle.first_swapped()) is not None:
            is_older = waiting is not None and waiting.num_preemptions > 0 and waiting.order < swapped.order
            if waiting is None or (swapped.order[0] <= waiting.order[0] and not is_older):
                lifecycle.waiting.clear_skipped()
                return swapped
        return waiting

    def _first_waiting(self, budget: StepBudget) -> Sequence | None:
        """The waiting sequence that starts next: by the policy, or a paced one that comes before it and has a place."""
        turns, waiting = self._state.mask_turns, self._lifecycle.waiting
        num_cached_blocks = self._kv_cache_manager.prefixes.num_cached_blocks
        while (first := waiting.choose(budget.has_room_for_long, num_cached_blocks, self._block_size)) is not None:
            if not turns.begins_paced(first, self._state.now_s):
                break
            waiting.pace(first)
        paced = turns.next_of(waiting.paced) if waiting.paced else None
        if paced is None or (first is not None and first.order < paced.order):
            return first
        waiting.clear_skipped()
        return paced

    def _added_again(self, row: int, ends: list[int]) -> m.RowAdd:
        """The message that gives the executor a row with its present ids and blocks, of each KV group those before
        `ends`."""
        rows = self._rows
        sequence = rows.sequences[row]
        assert sequence is not None
        firsts = rows.block_firsts[:, row].tolist()
        tables = [
            self._put(rows.tables[group, row, first:end])
            for group, (first, end) in enumerate(zip(firsts, ends, strict=True))
        ]
        return m.RowAdd(
            row=row,
            generation=int(rows.generation[row]),
            index=sequence.row_index,
            ids=self._put(rows.ids[row, : rows.num_tokens[row]]),
            num_prompt=len(sequence.request.prompt),
            blocks=tables[0],
            options=sequence.request.row_options,
            request_id=sequence.request.request_id,
            group_blocks=tables[1:],
            first_blocks=firsts if any(firsts) else [],
            grids=sequence.request.grids,
        )

    def _start(self, sequence: Sequence, is_preempted_for: bool) -> m.RowAdd | None:
        """Start a sequence, or return None if there are too few blocks. One block is left for each running row, unless
        the sequence triggered a preemption."""
        request, ids = sequence.request, sequence.ids  # the ids move into the row
        num_prompt = len(request.prompt)
        started = self._lifecycle.start(sequence, 0 if is_preempted_for else len(self._rows))
        if started is None:
            return None
        row, found, (table, *others) = started
        has_firsts = table.first > 0 or any(other.first for other in others)
        return m.RowAdd(
            row=row,
            generation=int(self._rows.generation[row]),
            index=sequence.row_index,
            ids=self._put(ids[num_prompt:] if found.fork_of >= 0 else ids),
            num_prompt=num_prompt,
            blocks=self._put(np.array(table.blocks, np.int32)),
            options=request.row_options,
            request_id=request.request_id,
            fork_of=found.fork_of,
            group_blocks=[self._put(np.array(other.blocks, np.int32)) for other in others],
            first_blocks=[table.first, *(other.first for other in others)] if has_firsts else [],
            grids=request.grids,
        )
