"""What detokenize is told: settled ids of running sequences, and partings of those that have left their row.

Nothing is forgotten until it was sent: a report that a full socket refused is due again, with what came since.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeline.messages import Finish, FirstTimes, Settled
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.arrays import Float32s, Ids, Int64s
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import Rows
from pipeline.topology import shard

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
    """Where `ids` has the first that was sampled for it"""
    logprobs: Float32s
    """Of `ids`; empty where its request does not ask"""


class Outgoing:
    """Owns how far each row has been reported (`Rows.sent`), and the partings that have not. A sequence is reported to
    one replica of detokenize, which its number says."""

    def __init__(self, rows: Rows, put: Put, num_replicas: int = 1) -> None:
        self._rows = rows
        self._put = put
        self._num_replicas = num_replicas
        self._partings: list[list[Parting]] = [[] for _ in range(num_replicas)]
        self._reported: list[Int64s] = [np.zeros(0, np.int64)] * num_replicas

    def part(self, sequence: Sequence, num_sent: int, finish: Finish) -> None:
        """Note what a sequence without a row has still to say: its ids from `num_sent` on, and its closing."""
        fresh = sequence.ids[num_sent:]
        if len(fresh) or finish != Finish.NONE:
            start = num_sent - len(sequence.request.prompt)
            first = sequence.first_times if num_sent == sequence.num_given and len(fresh) else None
            parting = Parting(sequence.seq, start, fresh, finish, first, sequence.logprobs[num_sent:])
            self._partings[shard(sequence.seq, self._num_replicas)].append(parting)

    def report(self, replica: int = 0, now_s: float = 0.0) -> Settled | None:
        """What is due to a replica, or None. It stays due until `reported`. `now_s` is by time.monotonic()."""
        rows, put = self._rows, self._put
        order = rows.order
        fresh = order[rows.known[order] > rows.sent[order]]
        if self._num_replicas > 1:
            fresh = fresh[rows.seq[fresh] % np.uint64(self._num_replicas) == replica]
        self._reported[replica] = fresh
        parted = self._partings[replica]
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
            firsts=self._firsts(parted, fresh, starts),
            settled_s=now_s,
            logprobs=self._logprobs(parted, fresh, starts, counts),
        )

    def _logprobs(self, parted: list[Parting], fresh: Int64s, starts: Int64s, counts: Int64s) -> Array:
        """Those of a report's ids, or nothing where nobody asks."""
        rows = self._rows
        if not (rows.num_scored or any(len(parting.logprobs) for parting in parted)):
            return b""
        if (counts == 1).all():
            logprobs = np.where(rows.is_scored[fresh], rows.logprobs[fresh, starts], 0)
        else:
            ends = zip(fresh.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)
            each = [np.where(rows.is_scored[row], rows.logprobs[row, start:end], 0) for row, start, end in ends]
            logprobs = np.concatenate(each)
        before = [p.logprobs if len(p.logprobs) else np.zeros(len(p.ids), np.float32) for p in parted]
        return self._put(np.concatenate((*before, logprobs)).astype(np.float32))

    def _firsts(self, parted: list[Parting], fresh: Int64s, starts: Int64s) -> list[FirstTimes]:
        found = [(place, parting.first) for place, parting in enumerate(parted) if parting.first is not None]
        for place in np.flatnonzero(starts == self._rows.num_given[fresh]).tolist():
            sequence = self._rows.sequences[int(fresh[place])]
            assert sequence is not None
            found.append((len(parted) + place, sequence.first_times))
        return [msgspec.structs.replace(first, place=place) for place, first in found]

    def reported(self, replica: int = 0) -> None:
        """The last report to a replica was sent."""
        self._rows.sent[self._reported[replica]] = self._rows.known[self._reported[replica]]
        self._partings[replica] = []


def _int32s(first: list[int], then: Int64s) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.concatenate((np.array(first, np.int64), then)).astype(np.int32)
