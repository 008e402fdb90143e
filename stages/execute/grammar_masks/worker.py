"""The process that computes grammar masks: a matcher for each row with a grammar, which consumes the sampled ids.

It computes while the forward pass runs, and the program waits for it before sampling (memory.py). Threads prepare
grammars, so that other rows need not wait. Its state follows from (grammar, ids), so it may be killed at any time and
replaced by a new process.
"""

import os
import platform
import socket
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher

from pipeline.grammars.engine import Engine, GrammarsUnsupported, short_message
from pipeline.runtime.messages import GRAMMAR_FAILED, NOTHING_LEFT
from pipeline.runtime.process import heap
from pipeline.runtime.process.rust_panics import RustPanic, panics_as_errors
from pipeline.runtime.workers.forked_jobs import limit_memory
from pipeline.runtime.workers.worker import receive, send
from pipeline.shm import fence
from pipeline.shm.fence import Fence
from pipeline.stages.execute.grammar_masks.memory import (
    MAX_FORCED,
    NUM_PREPARING,
    Begin,
    Fill,
    MaskMemory,
    MaskReport,
    Order,
    State,
    WordArray,
)
from pipeline.stages.execute.grammar_masks.next_masks import NextMasks
from pipeline.stages.execute.grammar_masks.reasoning_budget import BudgetState, Pieces
from pipeline.stages.execute.grammar_masks.rows import (
    NO_TOKEN_LEFT,
    BudgetedRow,
    MaskError,
    MatcherRow,
    allow_text_form,
    consume,
    end_by,
    has,
    not_computed,
    texts,
    why,
)

MAX_GRAMMARS = 64
"""Prepared grammars in the cache; each takes a few hundred kilobytes, seldom more."""

STACK_BYTES = 64 * 1024**2
"""Stack of the threads that prepare grammars; as large as a process's, so that they can do what the checker did."""

MAX_BYTES = 4 * 1024**3
"""Limit of the matchers' memory. A row that exceeds it crashes this process, and fails."""

MAX_THREADS = 8
CPUS_PER_THREAD = 4
"""CPUs per thread that computes masks; these threads take time from the forward pass."""


class Grammars:
    """Prepared matchers that have consumed no ids yet, by grammar."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        threading.stack_size(STACK_BYTES)
        self._threads = ThreadPoolExecutor(max_workers=NUM_PREPARING, thread_name_prefix="prepare")

    def prepare(self, grammar: str) -> "Future[LLMatcher]":
        if grammar in self._ready:
            self._ready.move_to_end(grammar)
        else:
            self._ready[grammar] = self._threads.submit(self._make, grammar)
            if len(self._ready) > MAX_GRAMMARS:
                self._ready.popitem(last=False)
        return self._ready[grammar]

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher for a row. Raises MaskError."""
        matcher = self.prepare(grammar).result()
        if matcher.is_error():
            raise MaskError(f"it can't be used: {short_message(matcher.get_error())}")
        return matcher.deep_copy()

    def _make(self, grammar: str) -> LLMatcher:
        matcher = self._engine.matcher(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies share what the first mask caches
        return matcher


class MaskWorker:
    """Computes masks. Owns the matchers of the rows."""

    def __init__(self, of: socket.socket, engine: Engine, memory: MaskMemory, num_threads: int) -> None:
        self._socket, self._engine, self._memory = of, engine, memory
        self._grammars = Grammars(engine)
        self._rows: dict[int, MatcherRow | BudgetedRow] = {}
        self._pieces = Pieces(engine.tokenizer)
        self._threads = ThreadPoolExecutor(num_threads, "masks") if num_threads > 1 else None
        self._fence = Fence()
        self._eos_ids = np.array(engine.eos_ids, np.int64)
        self._next_masks = NextMasks(engine, memory.words, memory.times, num_threads)
        self._is_wide = engine.tokenizer.vocab_size != engine.vocab_size
        self._last_bits = np.uint32(2 ** ((engine.vocab_size - 1) % 32 + 1) - 1)
        self._texts = texts(engine)

    def loop(self) -> None:
        """Handle orders. Raises WorkerLostError when the executor ends."""
        decoder = msgspec.msgpack.Decoder(Order)
        while True:
            self._do(decoder.decode(receive(self._socket)))

    def _do(self, order: Order) -> None:
        for row in order.drops:
            self._rows.pop(row, None)
        for grammar in order.prepare:
            self._grammars.prepare(grammar)
        if not order.fills:
            return
        together, alone = list[Fill](), list[Fill]()
        for fill in order.fills:
            is_next = fill.is_next and isinstance(self._rows[fill.row], MatcherRow)
            (together if is_next else alone).append(fill)
        # Rows that may wait for their grammar come last.
        alone.sort(key=lambda fill: fill.begin is not None)
        for fill in alone:
            if fill.begin is not None and fill.begin.grammar:
                self._grammars.prepare(fill.begin.grammar)
        failed = self._fill_together(together) if together else []
        run = map if self._threads is None else self._threads.map
        failed += [(fill.slot, error) for fill, error in zip(alone, run(self._fill, alone), strict=True) if error]
        if failed:
            report = MaskReport(order.ticket, [slot for slot, _ in failed], [error for _, error in failed])
            send(self._socket, msgspec.msgpack.encode(report))
        self._fence()
        self._memory.word[0] = order.ticket

    def _fill_together(self, fills: list[Fill]) -> list[tuple[int, str]]:
        """Write masks at once. Returns the places without a mask, and the errors.

        The rows stay in state `waiting` until all are done. If the library hangs or crashes, the executor gives all of
        them to a new process with all their ids, and that one computes them row by row.
        """
        rows = [row for fill in fills if isinstance(row := self._rows[fill.row], MatcherRow)]
        slots = np.array([fill.slot for fill in fills])
        ids = np.frombuffer(b"".join([fill.ids for fill in fills]), np.int32).tolist()
        failed = self._next_masks.fill(rows, slots, ids)
        self._memory.states[slots] = State.DONE
        for i in failed:
            self._memory.states[slots[i]] = State.FAILED
            del self._rows[fills[i].row]
        return [(fills[i].slot, _described(error)) for i, error in failed.items()]

    def _fill(self, fill: Fill) -> str:
        """Write a mask. Returns the error, or an empty string."""
        states = self._memory.states
        states[fill.slot] = State.WORKING
        began_s = time.thread_time()
        try:
            with panics_as_errors():
                state = self._write(fill)
        except (MaskError, RustPanic) as error:
            self._rows.pop(fill.row, None)
            states[fill.slot] = State.FAILED
            is_panic = isinstance(error, RustPanic)
            return _described(f"it can't be used: {short_message(str(error))}" if is_panic else str(error))
        self._memory.times[fill.slot] = time.thread_time() - began_s
        states[fill.slot] = state
        return ""

    def _write(self, fill: Fill) -> State:
        """Write the mask after a row's ids, and those after ids that were proposed. Returns the state of its place."""
        if fill.begin is not None:
            self._rows[fill.row] = self._row(fill.begin)
        row = self._rows[fill.row]
        ids = np.frombuffer(fill.ids, np.int32).tolist()
        if isinstance(row, BudgetedRow):
            return self._write_budgeted(row, fill, ids)
        consume(row.matcher, ids)
        self._write_mask(row, self._memory.words[fill.slot])
        num_consumed = 0
        drafts = np.frombuffer(fill.drafts, np.int32).tolist()
        for slot, token in enumerate(drafts, fill.slot):
            # What is sampled behind an id that the mask excludes, or behind the end, is not kept.
            before = self._memory.words[slot]
            if not has(before, token) or token in self._eos_ids or token in row.stop_ids:
                self._memory.words[slot + 1 : fill.slot + len(drafts) + 1] = 0xFFFF_FFFF
                break
            consume(row.matcher, [token])
            num_consumed += 1
            self._write_mask(row, self._memory.words[slot + 1])
        if fill.forces:
            forced = row.matcher.compute_ff_tokens()[:MAX_FORCED]
            self._memory.forced[fill.slot, :2] = len(forced), num_consumed
            self._memory.forced[fill.slot, 2 : 2 + len(forced)] = forced
        if num_consumed and not row.matcher.rollback(num_consumed):
            raise MaskError(why(row.matcher, "its state could not be restored"))
        return State.DONE

    def _write_budgeted(self, row: BudgetedRow, fill: Fill, ids: list[int]) -> State:
        """The same for a row with a reasoning budget."""
        words, inner = self._memory.words, row.inner
        row.consume(ids)
        if fill.begin is not None and fill.begin.reasoning is not None and fill.begin.reasoning.ends_now:
            row.budget.end_now()
        known = row.budget.copy()
        self._write_budgeted_mask(row, words[fill.slot])
        num_consumed = 0
        drafts = np.frombuffer(fill.drafts, np.int32).tolist()
        for slot, token in enumerate(drafts, fill.slot):
            if not has(words[slot], token) or token in self._eos_ids or (inner and token in inner.stop_ids):
                words[slot + 1 : fill.slot + len(drafts) + 1] = 0xFFFF_FFFF
                break
            row.consume([token])
            num_consumed += 1
            self._write_budgeted_mask(row, words[slot + 1])
        if fill.forces:
            forced = row.budget.forced or ([] if inner is None else inner.matcher.compute_ff_tokens())
            forced = forced[:MAX_FORCED]
            self._memory.forced[fill.slot, :2] = len(forced), num_consumed
            self._memory.forced[fill.slot, 2 : 2 + len(forced)] = forced
        if inner is not None and num_consumed and not inner.matcher.rollback(num_consumed):
            raise MaskError(why(inner.matcher, "its state could not be restored"))
        row.budget = known
        if not known.is_over:
            return State.DONE
        if inner is None:
            return State.FREE
        self._rows[fill.row] = inner
        return State.DONE

    def _write_budgeted_mask(self, row: BudgetedRow, words: WordArray) -> None:
        forced = row.budget.forced
        if forced:
            words[:] = 0
            words[forced[0] // 32] = np.uint32(1) << np.uint32(forced[0] % 32)
        elif row.inner is None:
            words[:] = 0xFFFF_FFFF
        else:
            self._write_mask(row.inner, words)

    def _write_mask(self, row: MatcherRow, words: WordArray) -> None:
        if self._is_wide:
            wide = np.frombuffer(row.matcher.compute_bitmask(), np.uint32)
            words[:] = wide[: len(words)]
            words[-1] &= self._last_bits
        else:
            row.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if row.matcher.is_error():
            raise MaskError(not_computed(row.matcher))
        if not (words & self._texts).any():
            allow_text_form(self._engine, row.matcher, words)
        if row.ignores_eos or len(row.stop_ids):
            end_by(row, self._eos_ids, words)
        if not words.any():
            raise MaskError(NO_TOKEN_LEFT)

    def _row(self, begin: Begin) -> MatcherRow | BudgetedRow:
        inner: MatcherRow | None = None
        if begin.grammar:
            stop_ids = np.setdiff1d(np.array(begin.stop_ids, np.int64), self._eos_ids)
            inner = MatcherRow(self._grammars.matcher(begin.grammar), stop_ids, begin.ignores_eos)
        if begin.reasoning is not None:
            return BudgetedRow(BudgetState(begin.reasoning, self._pieces), inner)
        assert inner is not None, "a row has masks without a reason"
        return inner


def _described(error: str) -> str:
    return error if error.startswith(NOTHING_LEFT) else f"{GRAMMAR_FAILED}: {error}"


def main(of: socket.socket, model_dir: str, fd: str, num_slots: str, vocab_size: str) -> None:
    """Compute masks until the executor ends."""
    if not fence.is_known():
        known = " and ".join(fence.MACHINES)
        why = f"masks need the memory order of {known}, and this machine is {platform.machine()}"
        send(of, msgspec.msgpack.encode(MaskReport(0, errors=[why])))
        return
    memory = MaskMemory(int(num_slots), int(vocab_size), int(fd))
    try:
        engine = Engine(Path(model_dir))
    except GrammarsUnsupported as error:
        send(of, msgspec.msgpack.encode(MaskReport(0, errors=[str(error)])))
        return
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) // CPUS_PER_THREAD)
    worker = MaskWorker(of, engine, memory, num_threads)
    limit_memory(MAX_BYTES)
    heap.freeze()
    send(of, msgspec.msgpack.encode(MaskReport(0)))
    worker.loop()
