"""What the executor and the process that computes its masks have in common: shared memory, and what they say.

    word, uint32    the ticket of the last order that is done
    states, uint8   one a place: what has become of its mask
    words, uint32   [places, ceil(V / 32)], the masks: bit v % 32 of word v / 32 says whether id v is allowed

    waiting ──► working ──► done │ failed       the process moves them, the executor reads: who was worked on when it
                                                had to be killed is to blame

A place is one of a step's sampled tokens. The process writes masks, then states, then the word, by which they are
published; nobody else writes while an order is not done.
"""

import mmap
import os
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

HEADER_BYTES = 64
ALIGNMENT = 64

WordArray = np.ndarray[Any, np.dtype[np.uint32]]


class State(IntEnum):
    WAITING = 0
    WORKING = 1
    DONE = 2
    FAILED = 3


class Begin(msgspec.Struct, array_like=True, frozen=True):
    """How a row's masks are made."""

    grammar: str
    """In llguidance's own form."""
    stop_ids: list[int]
    """Besides the model's own, ids that end the output: allowed where it may end, and nowhere else."""
    ignores_eos: bool
    """It ends only where nothing else can follow."""


class Fill(msgspec.Struct, array_like=True, frozen=True):
    """The next mask of a row."""

    row: int
    place: int
    ids: bytes
    """int32; those of the output that were not told before"""
    begin: Begin | None
    """For a row that is new."""


class Order(msgspec.Struct, array_like=True, frozen=True):
    """To the process: what is to be done at once, in this order."""

    drops: list[int]
    """Rows that are no more."""
    prepare: list[str]
    """Grammars that will be wanted soon."""
    ticket: int
    fills: list[Fill]


class MaskReport(msgspec.Struct, array_like=True, frozen=True):
    """From the process: it has begun (ticket 0), or what failed of an order, before the order is done."""

    ticket: int
    places: list[int] = []
    errors: list[str] = []
    """Why; parallel."""


class MaskMemory:
    """Maps it, for `num_places` masks of `vocab_size` bits. Without `fd` it is made."""

    def __init__(self, num_places: int, vocab_size: int, fd: int = -1) -> None:
        num_words = -(-vocab_size // 32)
        states_end = HEADER_BYTES + -(-num_places // ALIGNMENT) * ALIGNMENT
        num_bytes = states_end + 4 * num_places * num_words
        self.fd = fd
        if fd < 0:
            # Pages that no mask was written to take no memory, so nothing is reserved.
            self.fd = os.memfd_create("pipeline-masks", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, num_bytes)
        self._map = mmap.mmap(self.fd, num_bytes)
        self.word: WordArray = np.frombuffer(self._map, np.uint32, 1)
        self.states: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._map, np.uint8, num_places, HEADER_BYTES)
        words = np.frombuffer(self._map, np.uint32, num_places * num_words, states_end)
        self.words: WordArray = words.reshape(num_places, num_words)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last array that looks at it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
