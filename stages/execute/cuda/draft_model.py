"""A draft model on a GPU, over the rows of the model: its steps read their ids, blocks and sampling parameters.

    propose   row changes ──► catch up, sample ──ids──► host ──► sample ──ids──► host …

Each proposed id comes to the host before the next pass, and goes to the GPU's rows with it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton.step import STAMP_WORDS
from pipeline.runtime import model_folder
from pipeline.runtime.kv_groups import undivided
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cuda.available import require_features
from pipeline.stages.execute.cuda.batches import batch_of
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.graphs import CapturedStepKind, StepGraphs
from pipeline.stages.execute.cuda.model import DeviceModel, allocate_kv
from pipeline.stages.execute.cuda.rows import DeviceRows
from pipeline.stages.execute.cuda.staging import Staging
from pipeline.stages.execute.cuda.step_shapes import StepShapes
from pipeline.stages.execute.draft_model import MAX_CATCH_UP, DraftModel, prepared_draft, require_all_positions
from pipeline.stages.execute.kv import KVPlan, kv_dtype
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.rows import BoolArray, RowTable
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights


class DraftWeights:
    """The weights of the draft model on the device, and the memory of its steps. They are there before the KV memory
    is planned."""

    @classmethod
    def of(cls, settings: Settings, device: Device, vocab_size: int) -> "DraftWeights | None":
        """The weights of the draft model that prepare has left; None without one."""
        if settings.speculative.method != "draft_model":
            return None
        return cls(settings, prepared_draft(settings), device, vocab_size)

    def __init__(self, settings: Settings, folder: Path, device: Device, vocab_size: int) -> None:
        """Raises UserError if the draft model can't run with a model of this vocabulary."""
        self.hold = model_folder.hold(folder)
        self.config = config = ModelConfig.load(folder)
        require_features(config)
        if config.vocab_size < vocab_size:
            raise UserError(
                f"speculative.draft: its embedding has {config.vocab_size} tokens, and the model's {vocab_size}: on a "
                "GPU it needs as many"
            )
        dtype: torch.dtype = getattr(torch, settings.execute.dtype)
        max_num_seqs = settings.schedule.max_num_seqs
        self.model = DeviceModel(device, config, dtype, MAX_CATCH_UP + max_num_seqs, max_num_seqs)
        build_program(config, Weights(folder, config, FLOAT_FORMATS[settings.execute.dtype]), self.model)


class DeviceDraftModel(DraftModel):
    """`kv` is the plan of the model's KV cache, and `flush` applies the row changes that have not been sent."""

    def __init__(
        self,
        settings: Settings,
        weights: DraftWeights,
        device: Device,
        table: RowTable,
        rows: DeviceRows,
        kv: KVPlan,
        flush: Callable[[], None],
    ) -> None:
        require_all_positions(settings, kv)
        config, model = weights.config, weights.model
        super().__init__(table, min(kv.max_model_len, config.max_position), table.vocab_size)
        self._hold, self._rows, self._flush = weights.hold, rows, flush
        max_num_seqs = settings.schedule.max_num_seqs
        max_num_tokens = MAX_CATCH_UP + max_num_seqs
        kv_type = getattr(torch, kv_dtype(settings.execute))
        model.use(
            allocate_kv(config, kv.num_blocks, kv_type, device.where), self._max_len, undivided(config.num_layers)
        )
        self._staging = Staging(device, max_num_seqs, max_num_tokens, max_num_seqs)
        self._shapes = StepShapes(max_num_seqs, max_num_tokens, max_num_seqs)
        sizes = max_num_seqs, max_num_tokens, max_num_seqs
        self._graphs = StepGraphs(device, model, rows.on_device, self._staging.words, *sizes)

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        self._flush()
        return super().propose(rows, most, clock)

    def close(self) -> None:
        """Free the folder; the device's memory goes with the process."""
        if self._hold is not None:
            self._hold.close()

    def _run(self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> IntArray:
        table = self._table
        batch = batch_of(rows, starts, counts, samples, None)
        if len(rows) == batch.num_tokens == len(batch.sampled):
            shape = self._shapes.decode(len(rows))
        else:
            shape = self._shapes.mix(batch.num_tokens, len(rows), len(batch.sampled))
        kind = CapturedStepKind.SAMPLE_FILTERED if self._rows.filtered else CapturedStepKind.SAMPLE
        # The rows don't get the sampled ids: they are only proposed.
        captured = self._graphs.get(replace(shape, verifies=True), kind)
        num_drafts = (starts + counts - table.num_ids[rows]).clip(0).astype(np.int64)
        self._rows.propose(rows, num_drafts)
        slot = self._staging.take()
        self._staging.fill(slot, batch, self._rows.take_runs(), one_each=shape.one_each)
        captured.launch()
        slot.result_of(captured.step.num_samples).copy_(captured.result, non_blocking=True)
        slot.done.record()
        slot.done.synchronize()
        ids = slot.result_array[STAMP_WORDS : STAMP_WORDS + len(batch.sampled)].copy()
        self._staging.give(slot)
        return ids
