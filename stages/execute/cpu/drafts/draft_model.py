"""A draft model on a CPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.config.settings import Settings
from pipeline.kernels.sampling.logprob_inputs import ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, StepInputs
from pipeline.runtime.model import model_folder
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.backend import Library, library_of_draft, make_program
from pipeline.stages.execute.cpu.drafts.eagle import EagleHead, Target
from pipeline.stages.execute.cpu.drafts.eagle3 import Eagle3Head
from pipeline.stages.execute.cpu.native.panel_file import PanelLocation
from pipeline.stages.execute.cpu.program import ProgramPlan
from pipeline.stages.execute.drafts.draft_model import MAX_CATCH_UP, DraftModel, prepared_draft, require_all_positions
from pipeline.stages.execute.drafts.speculation import Proposer
from pipeline.stages.execute.kv import KVPlan, layout_of_all
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.rows import BoolArray, RowTable
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights


class CpuDraftModel(DraftModel):
    """`kv` is the plan of the model's KV cache."""

    def __init__(
        self, settings: Settings, table: RowTable, kv: KVPlan, num_threads: int, folder: Path, of_model: Library | None
    ) -> None:
        """`of_model` is the model's library. Raises UserError if the draft model can't run here."""
        self._hold = model_folder.hold(folder)
        config = ModelConfig.load(folder)
        super().__init__(table, min(kv.max_model_len, config.max_position), min(config.vocab_size, table.vocab_size))
        self._has_other_vocab = config.vocab_size != table.vocab_size
        max_num_seqs = settings.schedule.max_num_seqs
        library = library_of_draft(settings, config, of_model)
        weights = Weights(folder, config, FLOAT_FORMATS[settings.execute.dtype], keeps_floats=library is not None)
        panels = PanelLocation.of(folder, weights.files) if library and settings.execute.keep_packed_weights else None
        self._inputs = StepInputs(MAX_CATCH_UP + max_num_seqs, max_num_seqs, -(-kv.max_model_len // BLOCK_SIZE))
        self._sampling_inputs = SamplingInputs(max_num_seqs, config.vocab_size)
        own = replace(kv, max_model_len=self._max_len, layout=layout_of_all(settings.execute, config))
        plan = ProgramPlan(
            settings=settings,
            config=config,
            inputs=self._inputs,
            sampling_inputs=self._sampling_inputs,
            scores=ScoreInputs(max_num_seqs),
            kv=own,
            num_threads=num_threads,
            panels=panels,
        )
        self._program = make_program(library, plan)
        build_program(config, weights, self._program)
        self._program.finish_loading()

    def close(self) -> None:
        """Free threads and memory."""
        self._program.close()
        if self._hold is not None:
            self._hold.close()

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
    require_all_positions(settings, kv)
    folder = prepared_draft(settings)
    if settings.speculative.method == "eagle":
        kind = EagleHead if ModelConfig.load(folder).eagle3 is None else Eagle3Head
        return kind(settings, table, kv, num_threads, folder, target)
    return CpuDraftModel(settings, table, kv, num_threads, folder, target.library)
