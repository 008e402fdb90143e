"""The process that computes grammar masks: a matcher for each row with a grammar, which consumes the sampled ids.

It computes while the forward pass runs, and the program waits for it before sampling (memory.py). Threads prepare
grammars, so that other rows need not wait. Its state follows from (grammar, ids), so it may be killed at any time and
replaced by a new process.
"""

import os
import platform
import socket
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher

from pipeline.grammars.engine import Engine, GrammarsUnsupported, limit_memory, short_message
from pipeline.grammars.worker import receive, send
from pipeline.runtime import heap
from pipeline.runtime.messages import GRAMMAR_FAILED, NOTHING_LEFT
from pipeline.runtime.rust_panics import RustPanic, panics_as_errors
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

MAX_GRAMMARS = 64
"""Prepared grammars in the cache; each takes a few hundred kilobytes, seldom more."""

STACK_BYTES = 64 * 1024**2
"""Stack of the threads that prepare grammars; as large as a process's, so that they can do what the checker did."""

MAX_BYTES = 4 * 1024**3
"""Limit of the matchers' memory. A row that exceeds it crashes this process, and fails."""

MAX_THREADS = 8
CPUS_PER_THREAD = 4
"""CPUs per thread that computes masks; these threads take time from the forward pass."""


class MaskError(Exception):
    """A row has no mask. The message is for the client."""


@dataclass(slots=True)
class MatcherRow:
    matcher: LLMatcher
    stop_ids: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    ignores_eos: bool


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
        self._rows: dict[int, MatcherRow] = {}
        self._threads = ThreadPoolExecutor(num_threads, "masks") if num_threads > 1 else None
        self._fence = Fence()
        self._eos_ids = np.array(engine.eos_ids, np.int64)
        # The library writes masks for all of the tokenizer's ids; those beyond the model's are cut off.
        num_words = -(-engine.tokenizer.vocab_size // 32)
        self._wide = num_words if engine.tokenizer.vocab_size != engine.vocab_size else 0
        self._last_bits = np.uint32(2 ** ((engine.vocab_size - 1) % 32 + 1) - 1)
        self._texts = texts(engine)

    def loop(self) -> None:
        """Handle orders. Raises Gone when the executor ends."""
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
        # Rows that may wait for their grammar come last.
        fills = sorted(order.fills, key=lambda fill: fill.begin is not None)
        for fill in fills:
            if fill.begin is not None:
                self._grammars.prepare(fill.begin.grammar)
        run = map if self._threads is None else self._threads.map
        failed = [(fill.place, error) for fill, error in zip(fills, run(self._fill, fills), strict=True) if error]
        if failed:
            report = MaskReport(order.ticket, [place for place, _ in failed], [error for _, error in failed])
            send(self._socket, msgspec.msgpack.encode(report))
        self._fence()
        self._memory.word[0] = order.ticket

    def _fill(self, fill: Fill) -> str:
        """Write a mask. Returns the error, or an empty string."""
        states = self._memory.states
        states[fill.place] = State.WORKING
        try:
            with panics_as_errors():
                self._write(fill)
        except (MaskError, RustPanic) as error:
            self._rows.pop(fill.row, None)
            states[fill.place] = State.FAILED
            why = str(error) if isinstance(error, MaskError) else f"it can't be used: {short_message(str(error))}"
            return why if why.startswith(NOTHING_LEFT) else f"{GRAMMAR_FAILED}: {why}"
        states[fill.place] = State.DONE
        return ""

    def _write(self, fill: Fill) -> None:
        """Write the mask after a row's ids, and those after ids that were proposed."""
        if fill.begin is not None:
            self._rows[fill.row] = self._row(fill.begin)
        row = self._rows[fill.row]
        ids = np.frombuffer(fill.ids, np.int32).tolist()
        if ids and not row.matcher.consume_tokens(ids):
            raise MaskError(_why(row.matcher, "the output does not match the grammar"))
        self._write_mask(row, self._memory.words[fill.place])
        num_consumed = 0
        drafts = np.frombuffer(fill.drafts, np.int32).tolist()
        for place, token in enumerate(drafts, fill.place):
            # What is sampled behind an id that the mask excludes, or behind the end, is not kept.
            before = self._memory.words[place]
            if not has(before, token) or token in self._eos_ids or token in row.stop_ids:
                self._memory.words[place + 1 : fill.place + len(drafts) + 1] = 0xFFFF_FFFF
                break
            if not row.matcher.consume_tokens([token]):
                raise MaskError(_why(row.matcher, "the output does not match the grammar"))
            num_consumed += 1
            self._write_mask(row, self._memory.words[place + 1])
        if fill.forces:
            forced = row.matcher.compute_ff_tokens()[:MAX_FORCED]
            self._memory.forced[fill.place, :2] = len(forced), num_consumed
            self._memory.forced[fill.place, 2 : 2 + len(forced)] = forced
        if num_consumed and not row.matcher.rollback(num_consumed):
            raise MaskError(_why(row.matcher, "its state could not be restored"))

    def _write_mask(self, row: MatcherRow, words: WordArray) -> None:
        if self._wide:
            wide = np.frombuffer(row.matcher.compute_bitmask(), np.uint32)
            words[:] = wide[: len(words)]
            words[-1] &= self._last_bits
        else:
            row.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if row.matcher.is_error():
            raise MaskError(_why(row.matcher, "its next ids could not be computed"))
        if not (words & self._texts).any():
            self._spell(row.matcher, words)
        if row.ignores_eos or len(row.stop_ids):
            self._end_by(row, words)
        if not words.any():
            raise MaskError(f"{NOTHING_LEFT}: the grammar allows none of the model's tokens")

    def _spell(self, matcher: LLMatcher, words: WordArray) -> None:
        """Replace a mask that allows only special tokens by one with text.

        If only one text can follow, the library allows the ids that its tokenizer makes of it. The tokenizer takes text
        such as <|im_end|> for the special token, which the grammar does not accept. This allows the text's first
        ordinary token instead. Special tokens that the grammar itself requires are forced as byte 0xFF and their id.
        """
        text = matcher.compute_ff_bytes().partition(b"\xff")[0].decode(errors="ignore")
        if parts := self._engine.tokenizer.greedy_tokenize(text):
            words[:] = 0
            if parts[0] < self._engine.vocab_size:
                words[parts[0] // 32] = np.uint32(1) << np.uint32(parts[0] % 32)

    def _row(self, begin: Begin) -> MatcherRow:
        stop_ids = np.setdiff1d(np.array(begin.stop_ids, np.int64), self._eos_ids)
        return MatcherRow(self._grammars.matcher(begin.grammar), stop_ids, begin.ignores_eos)

    def _end_by(self, row: MatcherRow, words: WordArray) -> None:
        """Allow or forbid the ids that end the output. The library allows EOS ids exactly where the output may end."""
        may_end = has(words, int(self._eos_ids[0]))
        if may_end and row.ignores_eos:
            without(words, self._eos_ids)
        if len(row.stop_ids):
            if may_end:
                np.bitwise_or.at(words, row.stop_ids // 32, _bits(row.stop_ids))
            else:
                without(words, row.stop_ids)


def texts(engine: Engine) -> WordArray:
    """A mask of all ids except special tokens."""
    words = np.full(-(-engine.vocab_size // 32), 0xFFFF_FFFF, np.uint32)
    num_ids = min(engine.vocab_size, engine.tokenizer.vocab_size)
    special = np.array([token for token in range(num_ids) if engine.tokenizer.is_special_token(token)], np.int64)
    np.bitwise_and.at(words, special // 32, ~_bits(special))
    return words


def has(words: WordArray, token: int) -> bool:
    """Whether a mask allows an id."""
    return bool(words[token // 32] >> np.uint32(token % 32) & 1)


def without(words: WordArray, ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    """Forbid ids, unless no other id is allowed."""
    before = words.copy()
    np.bitwise_and.at(words, ids // 32, ~_bits(ids))
    if not words.any():
        words[:] = before


def _bits(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> WordArray:
    return np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))


def _why(matcher: LLMatcher, what: str) -> str:
    return f"{what}: {short_message(matcher.get_error())}" if matcher.get_error() else what


def main(of: socket.socket, model_dir: str, fd: str, num_places: str, vocab_size: str) -> None:
    """Compute masks until the executor ends."""
    if not fence.is_known():
        known = " and ".join(fence.MACHINES)
        why = f"masks need the memory order of {known}, and this machine is {platform.machine()}"
        send(of, msgspec.msgpack.encode(MaskReport(0, errors=[why])))
        return
    memory = MaskMemory(int(num_places), int(vocab_size), int(fd))
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
