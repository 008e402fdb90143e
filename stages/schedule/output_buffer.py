"""What detokenize is told: settled ids of running sequences, and partings of those that have left their row.

Nothing is forgotten until it was sent: a report that a full socket refused is due again, with what came since.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime.messages import Finish, FirstTimes, Settled
from pipeline.runtime.topology import shard
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.arrays import Ids, Int64s
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import Rows

Put = Callable[["np.ndarray[Any, Any]"], Array]


class ClosingOutput(msgspec.Struct, frozen=True):
    """The last of a sequence's time in a row, or in the queue: it has ended, or it was preempted and waits again."""

    seq: int
    start: int
    """Output ids before these."""
    ids: Ids
    finish: int
    """`Finish`; NONE where it was preempted"""
    first: FirstTimes | None
    """Where `ids` has the first that was sampled for it"""
    records: bytes
    """Of `ids`; empty where its request does not ask"""
    error: str = ""


class OutputBuffer:
    """Owns how far each row has been reported (`Rows.sent`), and the partings that have not. A sequence is reported to
    one replica of detokenize, which its number says."""

    def __init__(self, rows: Rows, put: Put, num_replicas: int = 1) -> None:
        self._rows = rows
        self._put = put
        self._num_replicas = num_replicas
        self._partings: list[list[ClosingOutput]] = [[] for _ in range(num_replicas)]
        self._prompts: list[list[tuple[int, int, bytes]]] = [[] for _ in range(num_replicas)]
        """`seq`, records before these, and records of prompts"""
        self._reported: list[Int64s] = [np.zeros(0, np.int64)] * num_replicas

    def part(self, sequence: Sequence, num_sent: int, finish: Finish) -> None:
        """Note what a sequence without a row has still to say: its ids from `num_sent` on, and its closing."""
        fresh = sequence.ids[num_sent:]
        if len(fresh) or finish != Finish.NONE:
            start = num_sent - len(sequence.request.prompt)
            first = sequence.first_times if num_sent == sequence.num_given and len(fresh) else None
            records, sequence.records = bytes(sequence.records), bytearray()
            parting = ClosingOutput(sequence.seq, start, fresh, finish, first, records, sequence.error)
            self._partings[shard(sequence.seq, self._num_replicas)].append(parting)

    def tell_prompt(self, seq: int, start: int, records: bytes) -> None:
        """Note records of a sequence's prompt, of which `start` were noted before."""
        self._prompts[shard(seq, self._num_replicas)].append((seq, start, records))

    def pending(self, replica: int = 0, now_s: float = 0.0) -> Settled | None:
        """What is due to a replica, or None. It stays due until `reported`. `now_s` is by time.monotonic()."""
        rows, put = self._rows, self._put
        order = rows.order
        fresh = order[rows.known[order] > rows.sent[order]]
        if self._num_replicas > 1:
            fresh = fresh[rows.seq[fresh] % np.uint64(self._num_replicas) == replica]
        self._reported[replica] = fresh
        parted, prompts = self._partings[replica], self._prompts[replica]
        if len(fresh) == 0 and not parted and not prompts:
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
            records=self._records(parted, fresh),
            prompt_seqs=[seq for seq, _, _ in prompts],
            prompt_starts=[start for _, start, _ in prompts],
            prompt_records=[records for _, _, records in prompts],
            errors=[parting.error for parting in parted if parting.finish == Finish.ERROR],
        )

    def _records(self, parted: list[ClosingOutput], fresh: Int64s) -> Array:
        """Those of a report's ids, or nothing where nobody asks."""
        running = [bytes(one.records) for one in self._recorded(fresh)] if self._rows.num_recorded else []
        records = b"".join([parting.records for parting in parted] + running)
        return self._put(np.frombuffer(records, np.uint8)) if records else b""

    def _recorded(self, rows: Int64s) -> Iterator[Sequence]:
        """Those of these rows whose ids have records."""
        for row in rows[self._rows.record_bytes[rows] > 0].tolist():
            if (sequence := self._rows.sequences[row]) is not None:
                yield sequence

    def _firsts(self, parted: list[ClosingOutput], fresh: Int64s, starts: Int64s) -> list[FirstTimes]:
        found = [(place, parting.first) for place, parting in enumerate(parted) if parting.first is not None]
        for place in np.flatnonzero(starts == self._rows.num_given[fresh]).tolist():
            sequence = self._rows.sequences[int(fresh[place])]
            assert sequence is not None
            found.append((len(parted) + place, sequence.first_times))
        return [msgspec.structs.replace(first, place=place) for place, first in found]

    def mark_sent(self, replica: int = 0) -> None:
        """The last report to a replica was sent."""
        self._rows.sent[self._reported[replica]] = self._rows.known[self._reported[replica]]
        self._partings[replica] = []
        self._prompts[replica] = []
        if self._rows.num_recorded:
            for sequence in self._recorded(self._reported[replica]):
                sequence.records.clear()


def _int32s(first: list[int], then: Int64s) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.concatenate((np.array(first, np.int64), then)).astype(np.int32)
