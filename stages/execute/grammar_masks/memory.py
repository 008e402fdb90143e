"""The interface between the executor and the process that computes grammar masks: shared memory and messages.

    word, uint32    the ticket of the last completed order
    states, uint8   [places], the state of each mask
    words, uint32   [places, ceil(V / 32)], the masks: bit v % 32 of word v / 32 is set if id v is allowed
    times, float32  [places], the CPU time of a row's masks, in seconds
    forced, int32   [places, 2 + MAX_FORCED], how many ids the grammar forces, behind how many of the proposed ids, and
                    these ids

    waiting ──► working ──► done │ failed

A place is one of a step's sampled tokens. If ids were proposed for a row, it has a place for each of them after its
first one, and the state of the first is that of all. Forced ids are only proposed: the mask may allow other ids for the
same text. The process writes masks, then states, then the word, which publishes them.
The executor only reads while an order is in progress. If it must kill the process, the places in state `working` fail.
"""

import mmap
import os
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime.messages import ReasoningBudget

HEADER_BYTES = 64
ALIGNMENT = 64
MAX_FORCED = 24
"""Ids in one array of forced ids."""
ID_BYTES = 4
SLOW_STEP_S, SLOW_ROW_S = 0.05, 0.01
"""CPU times of all masks of a step, and of each, from which both are slow: the step waits for them. A mask takes 10 to
100 µs, that of a large schema some milliseconds."""
NUM_PREPARING = 2
"""Grammars that the process prepares at once."""

WordArray = np.ndarray[Any, np.dtype[np.uint32]]
TimeArray = np.ndarray[Any, np.dtype[np.float32]]


class State(IntEnum):
    WAITING = 0
    WORKING = 1
    DONE = 2
    FAILED = 3
    FREE = 4
    """Done, and the row needs no mask any more: all ids are allowed from here on."""


class Begin(msgspec.Struct, array_like=True, frozen=True):
    """Parameters of a row's masks."""

    grammar: str
    """In llguidance's format; empty allows anything."""
    stop_ids: list[int]
    """Stop ids besides the model's EOS ids; allowed only where the output may end."""
    ignores_eos: bool
    """The output ends only where no other id is allowed."""
    reasoning: ReasoningBudget | None = None


class Fill(msgspec.Struct, array_like=True, frozen=True):
    """The next mask of a row."""

    row: int
    slot: int
    ids: bytes
    """int32; ids of the output since the last order"""
    begin: Begin | None
    """For a new row."""
    drafts: bytes = b""
    """int32; ids that were proposed after these: the masks behind them go into the places that follow"""
    forces: bool = False
    """Write the ids that are forced behind these, or behind the first of them that the grammar allows."""

    @property
    def is_next(self) -> bool:
        """Whether this is only the mask behind one more id, of a row that the process has."""
        return self.begin is None and len(self.ids) == ID_BYTES and not self.drafts and not self.forces


class Order(msgspec.Struct, array_like=True, frozen=True):
    """To the process: what to do, in this order."""

    drops: list[int]
    """Dropped rows."""
    prepare: list[str]
    """Grammars that will be needed soon."""
    ticket: int
    fills: list[Fill]


class MaskReport(msgspec.Struct, array_like=True, frozen=True):
    """From the process: it is ready (ticket 0), or the failures of an order, before the order is done."""

    ticket: int
    slots: list[int] = []
    errors: list[str] = []
    """The reasons; parallel."""


class MaskMemory:
    """Maps the shared memory for `num_slots` masks of `vocab_size` bits. Creates it if `fd` is not given."""

    def __init__(self, num_slots: int, vocab_size: int, fd: int = -1) -> None:
        num_words = -(-vocab_size // 32)
        states_end = HEADER_BYTES + -(-num_slots // ALIGNMENT) * ALIGNMENT
        words_end = states_end + 4 * num_slots * num_words
        forced_end = words_end + 4 * num_slots * (2 + MAX_FORCED)
        num_bytes = forced_end + 4 * num_slots
        self.fd = fd
        if fd < 0:
            # Untouched pages take no memory, so nothing is reserved.
            self.fd = os.memfd_create("pipeline-masks", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, num_bytes)
        self._map = mmap.mmap(self.fd, num_bytes)
        self.word: WordArray = np.frombuffer(self._map, np.uint32, 1)
        self.states: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._map, np.uint8, num_slots, HEADER_BYTES)
        words = np.frombuffer(self._map, np.uint32, num_slots * num_words, states_end)
        self.words: WordArray = words.reshape(num_slots, num_words)
        forced = np.frombuffer(self._map, np.int32, num_slots * (2 + MAX_FORCED), words_end)
        self.forced: np.ndarray[Any, np.dtype[np.int32]] = forced.reshape(num_slots, 2 + MAX_FORCED)
        self.times: TimeArray = np.frombuffer(self._map, np.float32, num_slots, forced_end)

    def close(self) -> None:
        """Close the descriptor. The mapping lives as long as the last array that views it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
