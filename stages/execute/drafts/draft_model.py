"""A draft model: a small model of the same family proposes ids, computed beside the model in the same process.

`DraftModel` is what both back ends share: which positions of a row the draft model has computed.

Its KV cache has as many blocks as the model's, and a row has the same block table in both: that of the model's first KV
group, which must keep all positions. All layers of the draft model are in one group. Which positions of a row it
has computed is known for each row alone: a row that starts behind a cached prefix, or comes back from swap space, is
computed by the draft model from its beginning. Rows that share a block write the same numbers to it.

    position  0 ………………… computed ………………… known
              draft's KV     to catch up, in chunks     proposed one by one

Its ids are sampled with the parameters and the noise key of the row's own next ids. So they agree more often than those
of independent draws.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline.config.sections.speculative import MAX_SPECULATIVE_TOKENS
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.model.draft_link import draft_link
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.kv import KVPlan, kv_block_bytes
from pipeline.stages.execute.rows import BoolArray, RowTable

MAX_CATCH_UP = 128
"""Positions that the draft model catches up in one step, all rows together: other rows wait meanwhile."""


def prepared_draft(settings: Settings) -> Path:
    """The folder of the draft model or EAGLE head that prepare has left. Raises UserError if there is none."""
    link = draft_link(settings)
    if not link.exists():
        raise UserError(f"speculative.draft: the prepared model is missing at {link}: start the server again")
    return link.resolve()


def draft_block_bytes(settings: Settings) -> int:
    """Bytes of a KV block of the draft model or EAGLE head; 0 if there is none. Raises UserError if it is not
    prepared, or has states beside KV blocks."""
    if settings.speculative.method in ("none", "ngram"):
        return 0
    config = ModelConfig.load(prepared_draft(settings))
    if config.has_states:
        raise UserError(
            f"speculative.draft: {config.name} ({config.architecture}) has recurrent layers, which are not supported "
            "in a draft model: choose another one"
        )
    return kv_block_bytes(settings.execute, config)


def captured_layers(settings: Settings) -> tuple[int, ...]:
    """The layers before which an EAGLE-3 head reads the model's hidden states; empty without one."""
    if settings.speculative.method != "eagle":
        return ()
    eagle3 = ModelConfig.load(prepared_draft(settings)).eagle3
    return () if eagle3 is None else tuple(eagle3.layers)


def require_all_positions(settings: Settings, kv: KVPlan) -> None:
    """Raises UserError if the model keeps no block table of all positions that a draft model could use."""
    if window := kv.layout.groups[0].window:
        raise UserError(
            f"speculative.method: {settings.speculative.method!r} reads all positions, and all layers of the model "
            f"keep only the last {window} or fewer: set execute.hybrid_kv_cache_manager = false, or choose 'ngram'"
        )


class DraftModel(ABC):
    """A `Proposer`."""

    reads_hidden_states = False

    def __init__(self, table: RowTable, max_len: int, vocab_size: int) -> None:
        """`max_len` is the longest sequence of the draft model, and `vocab_size` the number of ids of both models."""
        self._table, self._max_len, self._vocab_size = table, max_len, vocab_size
        max_num_seqs = len(table.ids)
        self._num_computed: IntArray = np.zeros(max_num_seqs, np.int32)
        """Positions of each row whose KV the draft model has."""
        self._begins: IntArray = np.zeros(max_num_seqs, np.int32)
        """The position of the first id that was last proposed for each row. The KV before it is that of the row's
        ids."""
        self._proposed: IntArray = np.zeros((max_num_seqs, MAX_SPECULATIVE_TOKENS), np.int32)
        """These ids, as far as their KV is computed."""
        self.draft_s = self.pass_s = 0.0

    @abstractmethod
    def _run(self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> IntArray:
        """Compute positions of these rows. Returns an id for each row that samples."""

    def observe(
        self, rows: IntArray, starts: IntArray, counts: IntArray, offsets: IntArray, residual: FloatArray
    ) -> None:
        assert not self.reads_hidden_states

    def drop(self, rows: IntArray) -> None:
        self._num_computed[rows] = 0

    @abstractmethod
    def close(self) -> None:
        """Free threads and memory."""

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        began_s = clock()
        table = self._table
        known = table.num_ids[rows]
        most = np.minimum(most, self._max_len - known).clip(0)
        starts = self._num_computed[rows] = self._num_right(rows, known)
        self._begins[rows] = known
        counts = self._catch_up(known - starts)
        counts[most == 0] = 0
        is_ready = starts + counts == known
        num_each = np.where(is_ready & (counts > 0), most, 0)
        proposed = np.zeros((len(rows), int(num_each.max(initial=0))), np.int32)
        num = np.zeros(len(rows), np.int64)
        some = np.flatnonzero(counts)
        index, times = 0, []
        while len(some):
            pass_began_s = clock()
            ids = self._run(rows[some], starts[some], counts[some], is_ready[some])
            if counts[some].max() == 1:
                times.append(clock() - pass_began_s)
            self._num_computed[rows[some]] = starts[some] + counts[some]
            is_usable = (ids >= 0) & (ids < self._vocab_size)
            some, ids = some[is_ready[some]][is_usable], ids[is_usable]
            if not len(some):
                break
            proposed[some, index], num[some] = ids, index + 1
            self._proposed[rows[some], index] = ids
            table.ids[rows[some], known[some] + index] = ids  # the next pass reads them
            index += 1
            starts, counts = known + index - 1, np.ones(len(rows), np.int32)
            some = some[num_each[some] > index]
        self.pass_s = sum(times) / len(times) if times else 0.0
        self.draft_s = clock() - began_s
        return [proposed[i, : num[i]] for i in range(len(rows))]

    def _num_right(self, rows: IntArray, known: IntArray) -> IntArray:
        """Positions of each row whose KV is that of its ids. Other ids may have been proposed, many steps ago. The last
        id is always computed: after it, the first id is proposed."""
        computed = np.minimum(self._num_computed[rows], known - 1)
        positions = self._begins[rows, None] + np.arange(MAX_SPECULATIVE_TOKENS, dtype=np.int32)
        ids = self._table.ids[rows[:, None], np.minimum(positions, self._table.max_model_len - 1)]
        wrong = (positions < computed[:, None]) & (ids != self._proposed[rows])
        right: IntArray = np.where(wrong.any(axis=1), self._begins[rows] + wrong.argmax(axis=1), computed)
        return right.astype(np.int32)

    def _catch_up(self, lacking: IntArray) -> IntArray:
        """How many positions each row computes now: the rows that lack least come first."""
        counts = np.zeros(len(lacking), np.int32)
        left = MAX_CATCH_UP + len(lacking)
        for i in np.argsort(lacking, kind="stable").tolist():
            counts[i] = num = min(int(lacking[i]), left)
            left -= num
        return counts
