"""Slots: the state of all recurrent layers of one sequence at one position. A model without such layers has none.

A running sequence has one slot, with its state behind the positions planned so far. Each entry of a step names the slot
that it reads and the one that it writes. They are the same if no other sequence may read it:

    slot of one row, without a key      read it, write it
    shared, or found by its key         read it, write another one, which is the row's from then on (copy on write)
    no slot: position 0                 write a new one

So prefix hits, forks and snapshots copy nothing. A snapshot is made where a step ends at a cut (cuts.py):

    step ends at the cut ──► the slot is held ──► next plan that knows all its ids: the slot gets the key of the block
                                                  that ends there, and its hold is dropped: it may be evicted

A slot gets no key in the plan that writes it: no entry of a step reads what another one of it writes.

Rows are one fewer than slots (`SchedulerConfig.max_num_rows`), and each holds one slot when all steps are settled and
all snapshots have keys. So there is always one to write to, at the latest then, and no row is preempted for slots: one
that finds none is left out of a step.
"""

from typing import NamedTuple

import numpy as np

from pipeline.metrics.stats import StateSlotCounts
from pipeline.stages.schedule.arrays import Bools, Int64s
from pipeline.stages.schedule.kv_cache.computed_prefix import ComputedPrefix
from pipeline.stages.schedule.kv_cache.states.cuts import StateCut, cuts_of, next_in_output
from pipeline.stages.schedule.kv_cache.states.pools import StatePools
from pipeline.stages.schedule.kv_cache.swap import BlockCopies, Swapped
from pipeline.stages.schedule.rows import NEVER_REGISTERED, RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

NO_SLOT = -1
NO_CUT = np.iinfo(np.int64).max


class Snapshot(NamedTuple):
    """A slot that is held until it gets a key."""

    position: int
    slot: int
    is_spare: bool
    is_output: bool


class StateSlots:
    """Owns the slots, those of swap space, and the copies of the next step between them."""

    def __init__(self, config: SchedulerConfig, rows: RowTracker, pools: StatePools) -> None:
        self._config = config.states
        self.is_on = pools.is_on
        self._keeps = config.prefix_caching
        self._offloads = pools.offloads
        self._block_size = config.block_size
        self.num_slot_blocks = config.states.interval / config.block_size
        """About how many KV blocks have the size of a slot."""
        self.pool, self.swap = pools.slots, pools.swap
        self.copies = BlockCopies(config.states.num_slots)
        self._rows = rows
        self.slots: Int64s = np.full(config.max_num_seqs, NO_SLOT, np.int64)
        """By row: the slot of its state behind the planned positions."""
        self.next_cuts: Int64s = np.full(config.max_num_seqs, NO_CUT, np.int64)
        """By row: the position at which its next step ends at the latest."""
        self._cuts: list[list[StateCut]] = [[] for _ in range(config.max_num_seqs)]
        """By row: the cuts of its prompt from `next_cuts` on, the last one first."""
        self._snapshots: dict[int, list[Snapshot]] = {}
        """By row: those without a key, by position."""
        self._newest: dict[int, bytes] = {}
        """By row: the key of the newest snapshot of its output."""
        self._last: Int64s = np.zeros(config.max_num_seqs, np.int64)
        """By row: the position of the newest snapshot, or where it started."""
        self.num_hits = self.num_snapshots = self.num_restored = self.num_lost_tokens = 0
        self.num_swapped_out = self.num_offloaded = 0
        """Since start."""

    # ------------------------------------------------------------------------------------------------------ start

    def may_claim(self, found: ComputedPrefix) -> bool:
        """Whether `claim` finds a slot, if it needs one."""
        return found.state is None or found.state >= 0 or self.pool.num_available > 0

    def claim(self, found: ComputedPrefix, swapped: Swapped | None, step_id: int) -> None:
        """Hold the slot of a sequence that starts, and set `found.state` to it. The state of swap space is copied by
        `step_id`."""
        state = found.state
        if state is None:
            found.state = NO_SLOT
        elif state >= 0:
            self.num_hits += 1
            self.pool.set_spare(state, is_spare=False)
            (self.pool.claim if found.tails else self.pool.hold)(state)
        else:
            found.state = self.pool.take()
            self.copies.back([~state], [found.state])
            self.num_restored += 1
            if swapped is None or swapped.state != ~state:  # it was found by its key
                found.is_restored = True
                self.num_hits += 1
                self.swap.set_spare(~state, is_spare=False)
                self.swap.hold(~state)
                self.swap.retire([~state], step_id)
        if swapped is not None:
            self.swap.retire([swapped.state], step_id)
        self.num_lost_tokens += max(0, found.branch - found.num_computed)

    def start(self, row: int, found: ComputedPrefix) -> None:
        """A sequence has got this row."""
        assert found.state is not None
        rows, sequence = self._rows, self._rows.sequences[row]
        assert sequence is not None
        self.slots[row] = found.state
        position = int(rows.num_computed_tokens[row])
        self._last[row] = position
        if found.is_restored:  # it gets its key again
            self.pool.hold(found.state)
            self._snapshots[row] = [Snapshot(position, found.state, is_spare=False, is_output=False)]
        self._cuts[row] = []
        if self._keeps:
            request = sequence.request
            prompt_end, marks = len(request.prompt) - 1, request.cut_positions
            if marks and prompt_end - marks[0] < self._config.min_interval:  # the next turn drops what is behind it
                prompt_end = min(marks[0], prompt_end)
            num_tokens = int(rows.num_tokens[row])
            ends = prompt_end if num_tokens == len(request.prompt) else num_tokens - 1, prompt_end, found.branch
            self._cuts[row] = cuts_of(position, ends, marks, self._config, self._block_size)[::-1]
        self._set_next_cut(row, position)
        assert (self.slots[row] < 0) == (position == 0), f"row {row} starts at {position} with slot {self.slots[row]}"

    def _set_next_cut(self, row: int, position: int) -> None:
        if not self._keeps:
            self.next_cuts[row] = NO_CUT
            return
        if not self._cuts[row]:
            after = max(position, int(self._rows.num_tokens[row]) - 1)
            self._cuts[row] = [next_in_output(after, self._config)]
        self.next_cuts[row] = self._cuts[row][-1].position

    # ------------------------------------------------------------------------------------------------------- plan

    def writable(self, order: Int64s, counts: Int64s) -> Int64s:
        """What these rows compute, by order: `counts` positions, or none if there is no slot to write to."""
        num_left, is_shared = self.pool.num_available, self.pool.is_shared
        lacking: list[int] = []
        for index, (slot, count) in enumerate(zip(self.slots[order].tolist(), counts.tolist(), strict=True)):
            if count and (slot < 0 or is_shared(slot)):
                num_left -= 1
                if num_left < 0:
                    lacking.append(index)
        if lacking:
            counts = counts.copy()
            counts[lacking] = 0
        return counts

    def advance(self, order: Int64s, ends: Int64s, step_id: int) -> tuple[Int64s, Int64s]:
        """Rows for which there are slots compute positions up to `ends` in this step. Returns the slots that their
        entries read and write."""
        pool, reads = self.pool, self.slots[order]
        for row, slot in zip(order.tolist(), reads.tolist(), strict=True):
            if slot < 0:
                self.slots[row] = pool.take()
            elif pool.is_shared(slot):
                self.slots[row] = pool.take()
                pool.retire([slot], step_id)
        for index in np.flatnonzero(ends == self.next_cuts[order]).tolist():
            self._cut(int(order[index]), int(ends[index]))
        return reads, self.slots[order]

    def _cut(self, row: int, position: int) -> None:
        """The planned step of a row ends at a cut: hold its slot."""
        cut, slot = self._cuts[row].pop(), int(self.slots[row])
        assert cut.position == position
        self.pool.hold(slot)
        is_output = position >= self._rows.num_tokens[row]
        self._snapshots.setdefault(row, []).append(Snapshot(position, slot, cut.is_spare, is_output))
        self._set_next_cut(row, position)

    def register(self, step_id: int) -> None:
        """Give held slots keys, as far as their ids are settled. The plan of `step_id` has changed nothing yet."""
        for row in list(self._snapshots):
            self._register_row(row, int(self._rows.num_tokens[row]), step_id)

    def _register_row(self, row: int, num_tokens: int, step_id: int) -> None:
        """Give a row's held slots keys, at positions up to `num_tokens`."""
        snapshots = self._snapshots[row]
        while snapshots and snapshots[0].position <= num_tokens:
            self._add_key(row, snapshots[0], step_id)
            self.pool.release([snapshots.pop(0).slot])
        if not snapshots:
            del self._snapshots[row]

    def _add_key(self, row: int, snapshot: Snapshot, step_id: int) -> None:
        pool, slot, key = self.pool, snapshot.slot, self._key_at(row, snapshot.position)
        pool.register(slot, key, step_id)
        self._last[row] = snapshot.position
        if pool.find(key) == slot:
            self.num_snapshots += 1
            pool.set_spare(slot, is_spare=snapshot.is_spare)
        if self._offloads:
            self._offload(slot, key, snapshot, step_id)
        if snapshot.is_output:
            if (before := self._newest.get(row)) is not None and before != key:
                pool.forget_spare(before)
                self.swap.forget_spare(before)
            self._newest[row] = key

    def _key_at(self, row: int, position: int) -> bytes:
        """The key of a row's block that ends at a position."""
        sequence, num_blocks = self._rows.sequences[row], position // self._block_size
        assert sequence is not None
        sequence.extend_keys(self._rows.ids[row], num_blocks, self._block_size)
        return sequence.keys[num_blocks - 1]

    def _offload(self, slot: int, key: bytes, snapshot: Snapshot, step_id: int) -> None:
        """Have `step_id` copy a slot to swap space, if that lacks it and has room."""
        if self.swap.find(key) is not None or not self.swap.num_available:
            return
        taken = self.swap.take()
        self.copies.out([slot], [taken])
        self.num_offloaded += 1
        self.swap.register(taken, key, step_id)
        self.swap.set_spare(taken, is_spare=snapshot.is_spare)
        self.swap.release([taken])

    # ------------------------------------------------------------------------------------------------ fork, leave

    def fork_row(self, row: int, source: int, step_id: int | None) -> None:
        """Give a running row the state of another one, at the same position. Its own slot is released once `step_id` is
        settled."""
        self._drop(row, step_id)
        slot = int(self.slots[source])
        self.pool.hold(slot)
        self.slots[row], self._last[row] = slot, self._last[source]
        self.next_cuts[row], self._cuts[row] = self.next_cuts[source], list(self._cuts[source])

    def leave(self, row: int, step_id: int, last_in_flight: int | None) -> None:
        """A sequence is about to leave its row. What it can be found by stays, as far as its ids are settled; `step_id`
        is the next step."""
        num_settled = int(self._rows.num_tokens[row]) - 1  # the sequence may have stopped with its last id
        position, slot = int(self._rows.num_computed_tokens[row]), int(self.slots[row])
        if self._keeps and self._rows.num_registered[row] < NEVER_REGISTERED:
            is_aligned = position % self._block_size == 0 and slot >= 0
            if is_aligned and position <= num_settled and not self.pool.is_shared(slot):
                self.pool.hold(slot)
                self._snapshots.setdefault(row, []).append(Snapshot(position, slot, is_spare=True, is_output=False))
            if row in self._snapshots:
                self._register_row(row, num_settled, step_id)
        self._drop(row, last_in_flight)

    def _drop(self, row: int, last_in_flight: int | None) -> None:
        """Release a row's slots once `last_in_flight` is settled."""
        slots = [snapshot.slot for snapshot in self._snapshots.pop(row, ())]
        if (slot := int(self.slots[row])) >= 0:
            slots.append(slot)
        if slots:
            self.pool.release_after(slots, last_in_flight)
        self._newest.pop(row, None)
        self.slots[row], self.next_cuts[row] = NO_SLOT, NO_CUT

    # ------------------------------------------------------------------------------------------------------- swap

    def swap_out(self, row: int) -> int:
        """List the copy of a row's state to swap space. Returns its slot there; the caller has checked for room."""
        if not self.is_on:
            return NO_SLOT
        taken = self.swap.take()
        self.copies.out([int(self.slots[row])], [taken])
        self.num_swapped_out += 1
        return taken

    def may_swap(self, rows: Int64s, num_kept: Int64s) -> Bools:
        """Whether these rows can be swapped out to go on behind `num_kept` positions: that is where their state is. A
        row that decodes can't while a step of it is in flight, for its last id is not known."""
        can: Bools = (self._rows.num_computed_tokens[rows] == num_kept) & (self.swap.num_available > 0)
        return can

    def num_lacking(self, rows: Int64s, num_kept: Int64s, num_held: Int64s) -> Int64s:
        """Positions that these rows compute again if they are not swapped out, of `num_kept`. KV is there for
        `num_held` of them: they go on at the newest snapshot before its end."""
        if self.is_on:
            num_held = np.where(self._last[rows] <= num_held, self._last[rows], 0)
        return (num_kept - num_held).clip(0)

    def release_swapped(self, swapped: Swapped, step_id: int | None) -> None:
        """Release the slot of a sequence that ended in swap space."""
        if swapped.state >= 0:
            self.swap.release_after([swapped.state], step_id)

    # ------------------------------------------------------------------------------------------ settle, lose, reset

    def settle(self, step_id: int) -> None:
        """Release what was retired until this step."""
        self.pool.settle(step_id)
        self.swap.settle(step_id)

    def executor_lost(self, successor: int, *, keeps_swap: bool) -> None:
        """The executor has died with all slots but those of swap space. No row holds any."""
        self.copies.take()
        self.swap.forget_unwritten()
        if not keeps_swap:
            self.swap.forget_all()
        self.pool.settle_all()
        self.swap.settle_all()
        self.pool.forget_all(successor)

    def reset(self) -> None:
        """Forget all snapshots. Running rows make no more: their blocks can't be found."""
        for row, snapshots in self._snapshots.items():
            self.pool.release([snapshot.slot for snapshot in snapshots])
            assert self._rows.active[row]
        self._snapshots.clear()
        self._newest.clear()
        for row in self._rows.order.tolist():
            self.next_cuts[row], self._cuts[row] = NO_CUT, []
        self.pool.forget_all()
        self.swap.forget_all()

    def publish(self, tail_keys: dict[int, bytes], step_id: int) -> None:
        """Give the slots of running rows keys: those of their tails, by row, or of their last full block. `step_id`,
        the last step, is settled."""
        self.register(step_id)
        rows = self._rows
        for row in rows.order[rows.num_registered[rows.order] < NEVER_REGISTERED].tolist():
            position, sequence = int(rows.num_computed_tokens[row]), rows.sequences[row]
            assert sequence is not None
            key = tail_keys.get(row)
            if position and position % self._block_size == 0:
                key = self._key_at(row, position)
            if key is not None:
                self.pool.register(int(self.slots[row]), key, step_id)
        self.pool.settle(step_id)

    def counts(self) -> StateSlotCounts:
        pool, swap = self.pool, self.swap
        return StateSlotCounts(
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_held=pool.num_held,
            num_total=pool.num_total,
            num_swap_free=swap.num_available,
            num_swap_total=swap.num_total,
            num_hits=self.num_hits,
            num_snapshots=self.num_snapshots,
            num_evictions=pool.num_evictions,
            num_restored=self.num_restored,
            num_swapped_out=self.num_swapped_out,
            num_offloaded=self.num_offloaded,
            num_lost_tokens=self.num_lost_tokens,
        )

    def check(self, swapped: list[Swapped]) -> None:
        """Assert every invariant; for tests. `swapped` are all sequences in swap space."""
        pool, rows = self.pool, self._rows
        pool.check()
        self.swap.check()
        num_held = sum(map(len, self._snapshots.values()))
        for row in range(len(self.slots)):
            slot, position = int(self.slots[row]), int(rows.num_computed_tokens[row])
            if not rows.active[row]:
                assert slot < 0 and row not in self._snapshots, f"row {row} has a slot and no sequence"
                continue
            assert (slot < 0) == (position == 0), f"row {row} has a slot and no state, or the reverse"
            assert self.next_cuts[row] > position, f"row {row} was not cut at {self.next_cuts[row]}"
            num_held += slot >= 0
        assert num_held + pool.num_retired == sum(map(pool.num_refs, range(pool.num_total))), (
            "a reference to a slot has no holder"
        )
        num_swapped = sum(one.state >= 0 for one in swapped)
        assert num_swapped == len(swapped), "a swapped sequence lacks its state"
        assert num_swapped + self.swap.num_retired == sum(map(self.swap.num_refs, range(self.swap.num_total)))
