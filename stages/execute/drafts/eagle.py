"""An EAGLE head (Li et al., "EAGLE: speculative sampling requires rethinking feature uncertainty", 2024): a layer or
two that continue the model's own hidden states. This is what both back ends share: which positions the head has read.

    h[t]        the model's hidden state of position t, after its last norm
    x[t]        fc(embedding of id t + 1, h[t])           the input of the head's layers at position t
    f[t]        layers(x[0] … x[t])                       the model's LM head makes the id at t + 2 of it

After the last known h, the head's own f takes its place, and one id after the other is proposed. Embedding and LM head
are the model's. The first layer has no norm before attention, and there is none after the last one.

    position   0 ………………… computed ………………… pending ………………… known - 2
               head's KV           h is kept here     its h came with the last step

The head's KV cache has as many blocks as the model's, and the block tables of its first KV group. A block that a row
has from the prefix cache holds what another row's hidden states left there. What comes back from swap space is missing.
So the head may propose less well there; texts do not depend on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.rows import BoolArray, RowTable

MAX_PENDING = 16
"""Positions of a row that wait until ids are proposed for it. More are computed at once."""
MAX_SHARED = 2
"""Positions of each row in a step whose hidden states stay in the memory of the whole step."""


class StatesLike(Protocol):
    """Hidden states [positions, width]: an array, or a tensor on a GPU."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


States = TypeVar("States", bound=StatesLike)


@dataclass(slots=True)
class _Pending(Generic[States]):
    """Hidden states of a row's last positions that the head has not read."""

    start: int
    end: int
    parts: list[States]
    """In order, together [end - start, width]."""


class EagleProposer(ABC, Generic[States]):
    """A `Proposer`."""

    reads_hidden_states = True

    def __init__(self, table: RowTable, max_len: int, piece: int) -> None:
        """`max_len` is the longest sequence of the head. It computes up to `piece` positions of a row together."""
        self._table, self._max_len, self._piece = table, max_len, piece
        self._pending: dict[int, _Pending[States]] = {}
        self.draft_s = self.pass_s = 0.0

    @abstractmethod
    def _run(
        self, rows: IntArray, starts: IntArray, counts: IntArray, hidden: States, samples: BoolArray
    ) -> tuple[IntArray, States]:
        """Compute positions of these rows from their hidden states [positions, width]. Returns an id for each row that
        samples, and the head's states at its last position."""

    @abstractmethod
    def _states_of(self, residual: States) -> States:
        """What the head's layers get of the model's hidden states, in new memory."""

    @abstractmethod
    def _join(self, parts: Sequence[States]) -> States:
        """All positions of `parts`, one after the other."""

    @abstractmethod
    def _take(self, states: States, which: BoolArray) -> States:
        """Some of the positions."""

    @abstractmethod
    def close(self) -> None:
        """Free threads and memory."""

    def drop(self, rows: IntArray) -> None:
        for row in rows.tolist():
            self._pending.pop(row, None)

    def observe(self, rows: IntArray, starts: IntArray, counts: IntArray, offsets: IntArray, residual: Any) -> None:
        """Take the model's hidden states of the positions `starts` … `starts` + `counts` of these rows, which begin at
        `offsets`."""
        states = self._states_of(residual)
        for row, start, count, offset in zip(
            rows.tolist(), starts.tolist(), counts.tolist(), offsets.tolist(), strict=True
        ):
            count = min(count, self._max_len - start)
            if count <= 0:
                self._pending.pop(row, None)
                continue
            pending = self._pending.get(row)
            if pending is None or pending.end != start:
                pending = self._pending[row] = _Pending(start, start, [])
            pending.end = start + count
            part = states[offset : offset + count]
            if count <= MAX_PENDING and len(states) > MAX_SHARED * len(rows):
                part = self._take(part, np.ones(count, np.bool_))  # else it would keep the memory of whole prompts
            pending.parts.append(part)
            if pending.end - pending.start > MAX_PENDING:
                self._catch_up(row, pending)

    def _catch_up(self, row: int, pending: _Pending[States]) -> None:
        """Compute pending positions until few are left. The id after the last one may not be known yet."""
        hidden, one, nothing = self._join(pending.parts), np.array([row], np.int32), np.zeros(1, np.bool_)
        while len(hidden) > MAX_PENDING:
            num = min(self._piece, len(hidden) - 1)
            self._run(one, np.array([pending.start], np.int32), np.array([num], np.int32), hidden[:num], nothing)
            pending.start, hidden = pending.start + num, hidden[num:]
        # In memory of its own: that of all positions is freed.
        pending.parts = [self._take(hidden, np.ones(len(hidden), np.bool_))]

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        began_s = clock()
        table, known = self._table, self._table.num_ids[rows]
        most = np.minimum(most, self._max_len - known).clip(0)
        pending = [self._pending.get(row) for row in rows.tolist()]
        is_ready = [one is not None and one.end == end for one, end in zip(pending, (known - 1).tolist(), strict=True)]
        proposed = np.zeros((len(rows), int(most.max(initial=0))), np.int32)
        num = np.zeros(len(rows), np.int64)
        some = np.flatnonzero(np.array(is_ready, np.bool_) & (most > 0))
        ready = [one for i in some.tolist() if (one := pending[i]) is not None]
        starts = np.array([one.start for one in ready], np.int32)
        counts = np.array([one.end - one.start for one in ready], np.int32)
        hidden = self._join([part for one in ready for part in one.parts]) if ready else None
        for row in rows[some].tolist():
            del self._pending[row]
        index, times = 0, []
        while len(some) and hidden is not None:
            pass_began_s = clock()
            ids, states = self._run(rows[some], starts, counts, hidden, np.ones(len(some), np.bool_))
            if index:
                times.append(clock() - pass_began_s)
            is_usable = ids >= 0
            some, ids = some[is_usable], ids[is_usable]
            proposed[some, index], num[some] = ids, index + 1
            table.ids[rows[some], known[some] + index] = ids  # the next pass reads them
            index += 1
            goes_on = most[some] > index
            is_usable[is_usable] = goes_on
            some, hidden = some[goes_on], states if is_usable.all() else self._take(states, is_usable)
            starts = (known[some] - 2 + index).astype(np.int32)
            counts = np.ones(len(some), np.int32)
        self.pass_s = sum(times) / len(times) if times else 0.0
        self.draft_s = clock() - began_s
        return [proposed[i, : num[i]] for i in range(len(rows))]
