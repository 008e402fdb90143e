"""Grammar masks: the ids that each row may sample next, computed by a process during the forward pass.

    request ──order──► the process consumes ids, writes masks, sets the word      (memory.py, worker.py)
    run                forward pass; waits for the word; samples
    take_failed        rows without a mask, and why

It is a process, not a thread, because a hostile grammar can keep the library busy for minutes or crash it. If it is
late, the row that it was working on fails, and a new process gets the other rows: their grammars and ids are all it
needs.
"""

import select
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.runtime.messages import GRAMMAR_FAILED, GenerationOptions
from pipeline.runtime.process import suspension
from pipeline.runtime.process.process_usage import usage_of
from pipeline.runtime.workers.worker import Worker, WorkerLostError, receive, send
from pipeline.shm.fence import Fence
from pipeline.stages.execute.grammar_masks.memory import (
    NUM_PREPARING,
    SLOW_ROW_S,
    SLOW_STEP_S,
    Begin,
    Fill,
    MaskMemory,
    MaskReport,
    Order,
    State,
)

START_S = 30.0
"""Timeout for the process to become ready."""

LATE_MS = 100
"""How long the program waits before it checks that the process is alive."""

PATIENCE = 20
"""Factor by which an order may exceed the limit in wall-clock time, on a busy machine."""

POLL_S = 0.001


@dataclass(slots=True)
class _Row:
    begin: Begin
    num_prompt: int
    num_sent: int
    """Ids that the process has; 0 if it does not have the row."""
    num_free: int = 0
    """Output ids before the first that a mask can exclude."""
    is_free: bool = False
    """No mask excludes an id any more."""
    forced_from: int = 0
    """Position of the first of the ids that the grammar forces."""
    forced: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))


class Masks:
    """Owned by the runner. `words` [num_slots, ceil(V / 32)] are the masks."""

    def __init__(self, model_dir: Path, num_slots: int, vocab_size: int, limit_s: float) -> None:
        self._model_dir, self._limit_s = model_dir, limit_s
        self._memory = MaskMemory(num_slots, vocab_size)
        self.words = self._memory.words
        self.word_address = int(self._memory.word.ctypes.data)
        self._args = [str(model_dir), str(self._memory.fd), str(num_slots), str(vocab_size)]
        self._rows: dict[int, _Row] = {}
        self._drops: list[int] = []
        self._worker: Worker | None = None
        self._is_ready = False
        self._ticket = 0
        self._fence = Fence()
        self._requested: list[tuple[int, int]] = []
        """(row, place) pairs of the order in flight."""
        self._num_preparing = 1
        """Grammars of the order in flight that the process may be preparing at once."""
        self.forces = False
        """Whether forced ids are wanted."""
        self._num_drafts: dict[int, int] = {}
        """Ids that were proposed for rows of the order in flight."""
        self._ids: IntArray = np.zeros((0, 0), np.int32)
        self._num_ids: IntArray = np.zeros(0, np.int32)
        self._failed: dict[int, str] = {}
        """Errors by place."""
        self._slow: dict[int, float] = {}
        """CPU time of slow masks, by row, that `take_slow` has not returned."""

    def start(self) -> None:
        """Start the process in the background, before the first row needs it."""
        if self._worker is None:
            self._worker = Worker(
                "pipeline.stages.execute.grammar_masks.worker", "pipeline: execute masks", self._args, [self._memory.fd]
            )
            self._is_ready = False

    def add(self, row: int, options: GenerationOptions, num_prompt: int) -> None:
        """Add a row with a grammar."""
        grammar, budget = options.compiled_grammar, options.reasoning_budget
        begin = Begin(grammar, options.stop_token_ids, options.ignore_eos, budget)
        num_free = 0 if grammar or budget is None or budget.ends_now else budget.num_tokens
        self._rows[row] = _Row(begin, num_prompt, 0, num_free)
        self.start()
        try:
            if self._check_ready() and grammar:
                self._send(Order([], [options.compiled_grammar], 0, []))
        except WorkerLostError:
            self._stop()

    def drop(self, rows: IntArray) -> None:
        """Drop rows. Those without a grammar are ignored."""
        if self._rows:
            self._drops += [row for row in rows.tolist() if self._rows.pop(row, None) is not None]

    def request(
        self, rows: IntArray, ids: IntArray, num_ids: IntArray, num_drafts: LongArray | None = None
    ) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Request masks for a step that samples `rows`. `ids` [rows of the table, L] and `num_ids` are the known ids.
        With `num_drafts`, so many ids follow the known ones of each row; it has that many more places.

        Returns the first places of rows that will have a mask: those whose row has a grammar.
        """
        self._failed = {}
        self._requested = []
        self._num_drafts = {}
        masked: list[int] = []
        if self._rows:
            slots = np.arange(len(rows)) if num_drafts is None else (1 + num_drafts).cumsum() - (1 + num_drafts)
            pairs = [pair for pair in zip(rows.tolist(), slots.tolist(), strict=True) if pair[0] in self._rows]
            masked = [slot for _, slot in pairs]
            if num_drafts is not None:
                self._num_drafts = dict(zip(rows.tolist(), num_drafts.tolist(), strict=True))
            for row, slot in pairs:
                num_slots = 1 + self._num_drafts.get(row, 0)
                if self._is_free(row, int(num_ids[row]) + num_slots):
                    self.words[slot : slot + num_slots] = 0xFFFF_FFFF
                else:
                    self._requested.append((row, slot))
        if self._requested:
            self._ids, self._num_ids = ids, num_ids
            self._order()
        return np.array(masked, np.int64)

    def _is_free(self, number: int, num_after: int) -> bool:
        """Whether the next ids of a row, after which it has `num_after`, may be any."""
        row = self._rows[number]
        return row.is_free or num_after - row.num_prompt <= row.num_free

    @property
    def ticket(self) -> int:
        """The value at `word_address` once the requested masks are complete; 0 if there is nothing to wait for."""
        return self._ticket if self._requested else 0

    def is_done(self) -> bool:
        """Whether the requested masks are complete. If so, they may be read."""
        if not self._requested:
            return True
        is_done = int(self._memory.word[0]) == self._ticket
        if is_done:
            self._fence()
        return is_done

    def wait(self) -> None:
        """Called after the program timed out: return when the masks are complete. Rows that caused the delay fail.

        The limit is for one grammar, and an order may have many new ones, as after a restart of the executor. So the
        time counts from the last mask that was completed.
        """
        began_s, began_cpu_s, is_first = time.monotonic(), self._cpu_s(), True
        progress = self._progress()
        while not self.is_done():
            now_s = time.monotonic()
            alive = self._worker is not None and self._worker.is_alive
            if (after := self._progress()) != progress:
                progress, began_s, began_cpu_s = after, now_s, self._cpu_s()
            used_s = self._cpu_s() - began_cpu_s
            limit_s = self._limit_s * self._num_preparing
            if not alive or used_s > limit_s or now_s - began_s > PATIENCE * limit_s:
                how = "crashed the library" if not alive else f"took longer than {self._limit_s:g} s"
                was_killed = self._worker is not None and self._worker.was_killed
                why = "the process that computes masks was killed" if was_killed else f"{GRAMMAR_FAILED}: it {how}"
                self._replace_worker(why, is_first=is_first)
                began_s, began_cpu_s, is_first = time.monotonic(), self._cpu_s(), False
                progress = self._progress()
            else:
                time.sleep(POLL_S)
                if suspension.missed(now_s):
                    began_s += time.monotonic() - now_s

    def _progress(self) -> int:
        """Masks of the order that are complete."""
        states = self._memory.states[[slot for _, slot in self._requested]]
        return int(np.count_nonzero(states >= State.DONE))

    def take_failed(self) -> dict[int, str]:
        """Errors of the places without a mask, by place, after the step was computed."""
        if self._requested and (self._memory.states[[slot for _, slot in self._requested]] == State.FAILED).any():
            report = self._receive()
            assert report.ticket == self._ticket
            self._failed.update(zip(report.slots, report.errors, strict=True))
        if self.forces:
            self._take_forced()
        for number, slot in self._requested:
            if self._memory.states[slot] == State.FREE:
                self._rows[number].is_free = True
        if self._requested:
            times = self._memory.times[[slot for _, slot in self._requested]]
            if times.sum() > SLOW_STEP_S:
                slow = np.flatnonzero(times > SLOW_ROW_S).tolist()
                self._slow |= {self._requested[index][0]: float(times[index]) for index in slow}
        failed, self._failed = self._failed, {}
        return failed

    def take_slow(self) -> dict[int, float] | None:
        """CPU time of the slow masks since the last call, by row, in seconds; None if there are no rows."""
        slow, self._slow = self._slow, {}
        return slow if self._rows else None

    def _take_forced(self) -> None:
        for number, slot in self._requested:
            row, forced = self._rows[number], self._memory.forced[slot]
            row.forced_from = row.num_sent + int(forced[1])
            row.forced = forced[2 : 2 + forced[0]].copy()

    def forced(self, number: int, known: IntArray) -> IntArray:
        """The ids that a row's grammar forces after the known ones, as far as they were computed with its last mask:
        none if another id was sampled in between."""
        row = self._rows[number]
        begun = known[row.forced_from :]
        if len(known) < row.forced_from or not np.array_equal(begun, row.forced[: len(begun)]):
            return known[:0]
        return row.forced[len(begun) :]

    def close(self) -> None:
        self._stop()
        self._memory.close()

    def _order(self) -> None:
        """Send the order for the requested masks, once the process is ready."""
        for is_last in (False, True):
            try:
                self._until_ready()
                self._send_order()
                return
            except WorkerLostError as gone:
                self._stop()
                if is_last:
                    self._fail([slot for _, slot in self._requested], f"grammars are not available: {gone}")

    def _send_order(self) -> None:
        self._ticket = self._ticket % 0xFFFF_FFFF + 1
        fills = []
        for number, slot in self._requested:
            row, num_ids = self._rows[number], int(self._num_ids[number])
            new = self._ids[number, row.num_sent or row.num_prompt : num_ids]
            num_drafts = self._num_drafts.get(number, 0)
            drafts = self._ids[number, num_ids : num_ids + num_drafts].tobytes() if num_drafts else b""
            begin = None if row.num_sent else row.begin
            fills.append(Fill(number, slot, new.tobytes(), begin, drafts, self.forces))
            row.num_sent = num_ids
            self._memory.states[slot] = State.WAITING
        drops, self._drops = self._drops, []
        new_grammars = {fill.begin.grammar for fill in fills if fill.begin is not None}
        self._num_preparing = max(1, min(len(new_grammars), NUM_PREPARING))
        self._send(Order(drops, [], self._ticket, fills))

    def _replace_worker(self, why: str, *, is_first: bool) -> None:
        """The process is stuck or dead: fail the rows that it was working on, and give the others to a new process. If
        it had not begun with any row, an earlier order caused it, and all rows are tried again."""
        states = self._memory.states
        working = [slot for _, slot in self._requested if states[slot] == State.WORKING]
        self._stop()
        if working or not is_first:
            self._fail(working or [slot for _, slot in self._requested], why)
        if self._requested:
            self._order()

    def _fail(self, slots: list[int], why: str) -> None:
        """Mark places as failed. Their sampled ids are ignored, so any mask will do."""
        rows = {slot: row for row, slot in self._requested}
        for slot in slots:
            self._failed[slot] = why
            self.words[slot : slot + 1 + self._num_drafts.get(rows.get(slot, -1), 0)] = 0xFFFF_FFFF
        self._requested = [(row, slot) for row, slot in self._requested if slot not in slots]

    def _until_ready(self) -> None:
        """Wait until the process is ready. Raises WorkerLostError, with the reason, if it does not start."""
        self.start()
        if self._is_ready:
            return
        assert self._worker is not None
        self._worker.socket.settimeout(START_S)
        try:
            report = self._receive()
        except WorkerLostError:
            self._stop()
            raise WorkerLostError("the process that computes masks does not start") from None
        if report.errors:
            self._stop()
            raise WorkerLostError(report.errors[0])
        self._is_ready = True
        self._worker.socket.settimeout(self._limit_s)

    def _check_ready(self) -> bool:
        """Whether the process is ready. Raises WorkerLostError if it does not start."""
        assert self._worker is not None
        if not self._is_ready and select.select([self._worker.socket], [], [], 0)[0]:
            self._until_ready()
        return self._is_ready

    def _send(self, order: Order) -> None:
        """Raises WorkerLostError."""
        assert self._worker is not None
        send(self._worker.socket, msgspec.msgpack.encode(order))

    def _receive(self) -> MaskReport:
        assert self._worker is not None
        return msgspec.msgpack.decode(receive(self._worker.socket), type=MaskReport)

    def _cpu_s(self) -> float:
        return 0.0 if self._worker is None else usage_of(self._worker.pid).cpu_s

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._is_ready = False
        self._drops.clear()
        for row in self._rows.values():
            row.num_sent = 0


class NoMasks(Masks):
    """On ranks that don't sample: rows with grammars need nothing here."""

    def start(self) -> None:
        pass

    def add(self, row: int, options: GenerationOptions, num_prompt: int) -> None:
        pass
