"""What detokenize is told: settled ids of running sequences, and partings of those that have left their row.

Nothing is forgotten until it was sent: a report that a full socket refused is due again, with what came since.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeline.messages import Finish, FirstTimes, Settled
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.request import Ids, Sequence
from pipeline.stages.schedule.rows import Int64s, Rows

Put = Callable[["np.ndarray[Any, Any]"], Array]


class Parting(msgspec.Struct, frozen=True):
    """The last of a sequence's time in a row, or in the queue: it has ended, or it was preempted and waits again."""

    seq: int
    start: int
    """Output ids before these."""
    ids: Ids
    finish: int
    """`Finish`; NONE where it was preempted"""
    first: FirstTimes | None
    """Where `ids` has its first output id"""


class Outgoing:
    """Owns how far each row has been reported (`Rows.sent`), and the partings that have not."""

    def __init__(self, rows: Rows, put: Put) -> None:
        self._rows = rows
        self._put = put
        self._partings: list[Parting] = []
        self._reported: Int64s = np.zeros(0, np.int64)

    def part(self, sequence: Sequence, num_sent: int, finish: Finish) -> None:
        """Note what a sequence without a row has still to say: its ids from `num_sent` on, and its closing."""
        fresh = sequence.ids[num_sent:]
        if len(fresh) or finish != Finish.NONE:
            start = num_sent - len(sequence.request.prompt)
            first = sequence.first_times if start == 0 and len(fresh) else None
            self._partings.append(Parting(sequence.seq, start, fresh, finish, first))

    def report(self) -> Settled | None:
        """What is due, or None. It stays due until `reported`."""
        rows, put = self._rows, self._put
        order = rows.order
        fresh = order[rows.known[order] > rows.sent[order]]
        self._reported = fresh
        parted = self._partings
        firsts = [p.first for p in parted if p.first is not None]
        if len(fresh) == 0 and not parted:
            return None
        starts, counts = rows.sent[fresh], rows.known[fresh] - rows.sent[fresh]
        if (counts == 1).all():
            ids = rows.ids[fresh, starts]
        else:
            ids = np.concatenate([rows.ids[row, rows.sent[row] : rows.known[row]] for row in fresh.tolist()])
        # Partings come first: a sequence that was preempted may run again and have more to say.
        return Settled(
            seqs=put(np.concatenate((np.array([p.seq for p in parted], np.uint64), rows.seq[fresh]))),
            starts=put(_int32s([p.start for p in parted], starts - rows.num_prompt[fresh])),
            counts=put(_int32s([len(p.ids) for p in parted], counts)),
            ids=put(np.concatenate((*(p.ids for p in parted), ids)).astype(np.int32)),
            finishes=put(np.array([p.finish for p in parted] + [Finish.NONE] * len(fresh), np.uint8)),
            firsts=firsts + [self._first_times(row) for row in fresh[starts == rows.num_prompt[fresh]].tolist()],
            settled_s=time.monotonic(),
        )

    def _first_times(self, row: int) -> FirstTimes:
        sequence = self._rows.sequences[row]
        assert sequence is not None
        return sequence.first_times

    def reported(self) -> None:
        """The last report was sent."""
        self._rows.sent[self._reported] = self._rows.known[self._reported]
        self._partings = []


def _int32s(first: list[int], then: Int64s) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.concatenate((np.array(first, np.int64), then)).astype(np.int32)
