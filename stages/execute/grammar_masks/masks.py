"""Masks of the rows that have a grammar: what each may draw next, computed by a process beside the forward pass.

    ask ──order──► the process consumes ids, writes masks, says so      (mask_memory.py, mask_worker.py)
    run            forward pass; waits for the word; draws
    take_failed    rows that have no mask, and why

A process and not a thread, because a hostile grammar can keep the library busy for minutes or bring its process down.
When it is late, it is asked what it was at: that row fails, another process is started, and told the rest again; no
more is needed than each row's grammar and ids.
"""

import select
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pipeline.grammars.worker import Gone, Worker, receive, send
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.messages import GenerationOptions
from pipeline.stages.execute.grammar_masks.memory import Begin, Fill, MaskMemory, MaskReport, Order, State
from pipeline.supervisor.process_usage import usage_of

START_S = 30.0
"""Longest that the process may take to be ready."""

LATE_MS = 100
"""How long the program waits before it looks whether the process still lives."""

PATIENCE = 20
"""How many times as long as the limit an order may take on a machine that is busy with other things."""

LOOK_S = 0.001


@dataclass(slots=True)
class _Row:
    begin: Begin
    num_prompt: int
    num_told: int
    """Ids that the process knows; 0 where it does not know the row."""


class Masks:
    """Owned by the runner. `words` [num_places, ceil(V / 32)] are the masks."""

    def __init__(self, model_dir: Path, num_places: int, vocab_size: int, limit_s: float) -> None:
        self._model_dir, self._limit_s = model_dir, limit_s
        self._memory = MaskMemory(num_places, vocab_size)
        self.words = self._memory.words
        self.word_address = int(self._memory.word.ctypes.data)
        self._args = [str(model_dir), str(self._memory.fd), str(num_places), str(vocab_size)]
        self._rows: dict[int, _Row] = {}
        self._drops: list[int] = []
        self._worker: Worker | None = None
        self._is_ready = False
        self._ticket = 0
        self._asked: list[tuple[int, int]] = []
        """Rows and places of the order in flight."""
        self._ids: IntArray = np.zeros((0, 0), np.int32)
        self._num_ids: IntArray = np.zeros(0, np.int32)
        self._failed: dict[int, str] = {}
        """By place."""

    def start(self) -> None:
        """Start the process now, beside other work, rather than with the first row that needs it."""
        if self._worker is None:
            self._worker = Worker(
                "pipeline.stages.execute.grammar_masks.worker", "pipeline: execute masks", self._args, [self._memory.fd]
            )
            self._is_ready = False

    def add(self, row: int, options: GenerationOptions, num_prompt: int) -> None:
        """A row with a grammar."""
        begin = Begin(options.compiled_grammar, options.stop_token_ids, options.ignore_eos)
        self._rows[row] = _Row(begin, num_prompt, 0)
        self.start()
        try:
            if self._look_ready():
                self._send(Order([], [options.compiled_grammar], 0, []))
        except Gone:
            self._stop()

    def drop(self, rows: IntArray) -> None:
        """Rows end; those without a grammar are none of this one's."""
        if self._rows:
            self._drops += [row for row in rows.tolist() if self._rows.pop(row, None) is not None]

    def ask(self, rows: IntArray, ids: IntArray, num_ids: IntArray) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Ask for the masks of a step that samples for `rows`; `ids` [rows of the table, L] and `num_ids` are all that
        is known of each. Returns the places that will have one: those whose row has a grammar."""
        self._failed = {}
        self._asked = []
        if self._rows:
            self._asked = [(row, place) for place, row in enumerate(rows.tolist()) if row in self._rows]
        if self._asked:
            self._ids, self._num_ids = ids, num_ids
            self._order()
        return np.array([place for _, place in self._asked], np.int64)

    @property
    def ticket(self) -> int:
        """What `word_address` holds when the masks that were asked for are there; 0 where there is nothing to wait
        for."""
        return self._ticket if self._asked else 0

    def is_done(self) -> bool:
        return not self._asked or int(self._memory.word[0]) == self._ticket

    def wait(self) -> None:
        """The program has waited in vain: return when its next run need not. Rows that are to blame fail."""
        began_s, began_cpu_s, is_first = time.monotonic(), self._cpu_s(), True
        while not self.is_done():
            now_s = time.monotonic()
            alive = self._worker is not None and self._worker.is_alive
            used_s = self._cpu_s() - began_cpu_s
            if not alive or used_s > self._limit_s or now_s - began_s > PATIENCE * self._limit_s:
                how = "brought the library down" if not alive else f"took longer than {self._limit_s:g} s"
                self._blame(how, is_first=is_first)
                began_s, began_cpu_s, is_first = time.monotonic(), self._cpu_s(), False
            else:
                time.sleep(LOOK_S)

    def take_failed(self) -> dict[int, str]:
        """The places of the step, which has been computed, that have no mask, and why."""
        if self._asked and (self._memory.states[[place for _, place in self._asked]] == State.FAILED).any():
            report = self._receive()
            assert report.ticket == self._ticket
            self._failed.update(zip(report.places, report.errors, strict=True))
        failed, self._failed = self._failed, {}
        return failed

    def close(self) -> None:
        self._stop()
        self._memory.close()

    def _order(self) -> None:
        """Say what is to be done for `_asked`, to a process that is ready for it."""
        for is_last in (False, True):
            try:
                self._until_ready()
                self._say()
                return
            except Gone as gone:
                self._stop()
                if is_last:
                    self._fail([place for _, place in self._asked], f"there can be no grammars: {gone}")

    def _say(self) -> None:
        self._ticket = self._ticket % 0xFFFF_FFFF + 1
        fills = []
        for number, place in self._asked:
            row, num_ids = self._rows[number], int(self._num_ids[number])
            new = self._ids[number, row.num_told or row.num_prompt : num_ids]
            fills.append(Fill(number, place, new.tobytes(), None if row.num_told else row.begin))
            row.num_told = num_ids
            self._memory.states[place] = State.WAITING
        drops, self._drops = self._drops, []
        self._send(Order(drops, [], self._ticket, fills))

    def _blame(self, how: str, *, is_first: bool) -> None:
        """The process is stuck or gone: whoever it worked on fails, and another begins with the rest. Where it had not
        begun with any, it died of what it did before, and all are tried once more."""
        states = self._memory.states
        working = [place for _, place in self._asked if states[place] == State.WORKING]
        self._stop()
        if working or not is_first:
            self._fail(working or [place for _, place in self._asked], f"the grammar {how}")
        if self._asked:
            self._order()

    def _fail(self, places: list[int], why: str) -> None:
        """What such a row draws is not looked at, and anything will do."""
        for place in places:
            self._failed[place] = why
            self.words[place] = 0xFFFF_FFFF
        self._asked = [(row, place) for row, place in self._asked if place not in places]

    def _until_ready(self) -> None:
        """Raises Gone, with the reason, where there can be none."""
        self.start()
        if self._is_ready:
            return
        assert self._worker is not None
        self._worker.socket.settimeout(START_S)
        try:
            report = self._receive()
        except Gone:
            self._stop()
            raise Gone("the process for them does not start") from None
        if report.errors:
            self._stop()
            raise Gone(report.errors[0])
        self._is_ready = True
        self._worker.socket.settimeout(self._limit_s)

    def _look_ready(self) -> bool:
        """Whether it is ready by now. Raises Gone where there can be none."""
        assert self._worker is not None
        if not self._is_ready and select.select([self._worker.socket], [], [], 0)[0]:
            self._until_ready()
        return self._is_ready

    def _send(self, order: Order) -> None:
        """Raises Gone."""
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
            row.num_told = 0
