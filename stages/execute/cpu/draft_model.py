"""A draft model: a small model of the same family proposes ids, computed beside the model in the same process.

Its KV cache has as many blocks as the model's, and a row has the same block table in both: that of the model's first KV
group, which must keep all positions. All layers of the draft model are in one group. Which positions of a row it
has computed is known for each row alone: a row that starts behind a cached prefix, or comes back from swap space, is
computed by the draft model from its beginning. Rows that share a block write the same numbers to it.

    position  0 ………………… computed ………………… known
              draft's KV     to catch up, in chunks     proposed one by one

Its ids are sampled with the parameters and the noise key of the row's own next ids. So they agree more often than those
of independent draws.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.config.sections.speculative import MAX_SPECULATIVE_TOKENS
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.logprob_inputs import FloatArray, ScoreInputs
from pipeline.kernels.sampling_inputs import NO_ID, SamplingInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, StepInputs
from pipeline.runtime import model_folder
from pipeline.runtime.draft_link import draft_link
from pipeline.runtime.kv_groups import undivided
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.backend import choose_library, make_program
from pipeline.stages.execute.cpu.eagle import EagleHead, Target
from pipeline.stages.execute.cpu.panel_file import PanelPlace
from pipeline.stages.execute.kv import KVPlan, kv_block_bytes
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.rows import BoolArray, RowTable
from pipeline.stages.execute.speculation import Proposer
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights

MAX_CATCH_UP = 128
"""Positions that the draft model catches up in one step, all rows together: other rows wait meanwhile."""


class DraftModel:
    """A `Proposer`. `kv` is the plan of the model's KV cache."""

    reads_hidden_states = False

    def __init__(self, settings: Settings, table: RowTable, kv: KVPlan, num_threads: int, folder: Path) -> None:
        """Raises UserError if the draft model can't run here."""
        self._hold = model_folder.hold(folder)
        config = ModelConfig.load(folder)
        self._table = table
        self._max_len = min(kv.max_model_len, config.max_position)
        self._has_other_vocab = config.vocab_size != table.vocab_size
        self._vocab_size = min(config.vocab_size, table.vocab_size)
        max_num_seqs = settings.schedule.max_num_seqs
        library = choose_library(settings, config)
        weights = Weights(folder, config, FLOAT_FORMATS[settings.execute.dtype], keeps_floats=library is not None)
        panels = PanelPlace.of(folder, weights.files) if library and settings.execute.keep_packed_weights else None
        self._inputs = StepInputs(MAX_CATCH_UP + max_num_seqs, max_num_seqs, -(-kv.max_model_len // BLOCK_SIZE))
        self._sampling_inputs = SamplingInputs(max_num_seqs, config.vocab_size)
        own = replace(kv, max_model_len=self._max_len, layout=undivided(config.num_layers))
        scores = ScoreInputs(max_num_seqs)
        self._program = make_program(
            library, settings, config, self._inputs, self._sampling_inputs, scores, own, num_threads, None, panels
        )
        build_program(config, weights, self._program)
        self._program.finish_loading()
        self._num_computed: IntArray = np.zeros(max_num_seqs, np.int32)
        """Positions of each row whose KV the draft model has."""
        self._begins: IntArray = np.zeros(max_num_seqs, np.int32)
        """The position of the first id that was last proposed for each row. The KV before it is that of the row's
        ids."""
        self._proposed: IntArray = np.zeros((max_num_seqs, MAX_SPECULATIVE_TOKENS), np.int32)
        """These ids, as far as their KV is computed."""
        self.draft_s = self.pass_s = 0.0

    def observe(
        self, rows: IntArray, starts: IntArray, counts: IntArray, offsets: IntArray, residual: FloatArray
    ) -> None:
        pass

    def drop(self, rows: IntArray) -> None:
        self._num_computed[rows] = 0

    def close(self) -> None:
        """Free threads and memory."""
        self._program.close()
        if self._hold is not None:
            self._hold.close()

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
        place, times = 0, []
        while len(some):
            pass_began_s = clock()
            ids = self._run(rows[some], starts[some], counts[some], is_ready[some])
            if counts[some].max() == 1:
                times.append(clock() - pass_began_s)
            self._num_computed[rows[some]] = starts[some] + counts[some]
            is_usable = (ids != NO_ID) & (ids < self._vocab_size)
            some, ids = some[is_ready[some]][is_usable], ids[is_usable]
            if not len(some):
                break
            proposed[some, place], num[some] = ids, place + 1
            self._proposed[rows[some], place] = ids
            table.ids[rows[some], known[some] + place] = ids  # the next pass reads them
            place += 1
            starts, counts = known + place - 1, np.ones(len(rows), np.int32)
            some = some[num_each[some] > place]
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

    def _run(self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> IntArray:
        """Compute positions of these rows. Returns an id for each row that samples."""
        table, inputs, sampling = self._table, self._inputs, self._sampling_inputs
        repeated = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(repeated)) - (np.cumsum(counts) - counts)[repeated] + starts[repeated]
        ids = np.minimum(table.ids[rows[repeated], positions], self._vocab_size - 1)
        num_blocks = int(table.num_blocks[rows].max())
        inputs.fill(ids, starts, counts, table.blocks[rows, :num_blocks], samples)
        sampled = rows[samples]
        table.fill_sampling_inputs(sampling, sampled, (starts + counts)[samples])
        sampling.unmask(len(sampled))
        sampling.logprobs.clear(len(sampled))
        if self._has_other_vocab:  # they have arrays over the model's vocabulary
            sampling.logits_processors[: len(sampled)] = 0
            np.minimum(sampling.top_k, self._vocab_size, out=sampling.top_k)
        return self._program.run()


def load_proposer(settings: Settings, table: RowTable, kv: KVPlan, num_threads: int, target: Target) -> Proposer:
    """The draft model or EAGLE head that prepare has left. Raises UserError if there is none, or if the model keeps no
    block table of all positions that it could use."""
    method = settings.speculative.method
    if window := kv.layout.groups[0].window:
        raise UserError(
            f"speculative.method: {method!r} reads all positions, and all layers of the model keep only the last "
            f"{window} or fewer: set execute.kv_groups = false, or choose 'ngram'"
        )
    folder = _prepared(settings)
    if method == "eagle":
        return EagleHead(settings, table, kv, num_threads, folder, target)
    return DraftModel(settings, table, kv, num_threads, folder)


def draft_block_bytes(settings: Settings) -> int:
    """Bytes of a KV block of the draft model or EAGLE head. Raises UserError if it is not prepared."""
    return kv_block_bytes(settings.execute, ModelConfig.load(_prepared(settings)))


def _prepared(settings: Settings) -> Path:
    """The folder that prepare has left."""
    link = draft_link(settings)
    if not link.exists():
        raise UserError(f"speculative.draft: the prepared model is missing at {link}: start the server again")
    return link.resolve()
