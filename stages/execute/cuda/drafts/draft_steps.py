"""The steps of a model that proposes ids on a GPU: a draft model, or an EAGLE head.

They read the rows of the model, and have KV memory, graphs and slots of their own."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton.step import STAMP_WORDS
from pipeline.runtime.model.kv_groups import undivided
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.graphs.step_graphs import CapturedStep, CapturedStepKind, SamplerKind, StepGraphs
from pipeline.stages.execute.cuda.graphs.step_shapes import StepShapes
from pipeline.stages.execute.cuda.model.device_model import DeviceModel, HiddenStates, allocate_kv
from pipeline.stages.execute.cuda.rows.batches import Batch, batch_of
from pipeline.stages.execute.cuda.rows.device_rows import DeviceRows
from pipeline.stages.execute.cuda.rows.staging import Slot, Staging
from pipeline.stages.execute.drafts.draft_model import require_all_positions
from pipeline.stages.execute.kv import KVPlan, kv_dtype
from pipeline.stages.execute.rows import BoolArray, RowTable


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A step that was launched."""

    batch: Batch
    captured: CapturedStep
    slot: Slot


class DraftSteps:
    """`kv` is the plan of the model's KV cache. With `id_shift`, a token has an id of a later position; see
    `pipeline.kernels.triton.step.prepare`."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        config: ModelConfig,
        model: DeviceModel,
        table: RowTable,
        rows: DeviceRows,
        kv: KVPlan,
        max_num_tokens: int,
        id_shift: int = 0,
    ) -> None:
        """Raises UserError if the model keeps no block table of all positions."""
        require_all_positions(settings, kv)
        self.max_len = min(kv.max_model_len, config.max_position)
        """The longest sequence."""
        self._table, self._rows, self._id_shift = table, rows, id_shift
        kv_type = getattr(torch, kv_dtype(settings.execute))
        model.use(allocate_kv(config, kv.num_blocks, kv_type, device.where), self.max_len, undivided(config.num_layers))
        sizes = settings.schedule.max_num_seqs, max_num_tokens, settings.schedule.max_num_seqs
        self._staging, self._shapes = Staging(device, *sizes), StepShapes(*sizes)
        words, results = self._staging.words, self._staging.results
        self._graphs = StepGraphs(device, model, rows.on_device, words, results, *sizes, id_shift=id_shift)
        self._busy: deque[Slot] = deque()
        """Slots of steps that no one waits for, oldest first."""

    def launch(
        self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray, *, is_forward_only: bool = False
    ) -> DraftStep:
        """Launch a step. The row changes that have not been sent, with the ids that were proposed before, must fit into
        its words. End it by `ids_of` or `release`."""
        batch = batch_of(rows, starts, counts, samples, None)
        if len(rows) == batch.num_tokens == len(batch.sampled):
            shape = self._shapes.decode(len(rows))
        else:
            shape = self._shapes.mix(batch.num_tokens, len(rows), len(batch.sampled))
        # The rows don't get the sampled ids: they are only proposed.
        shape = replace(shape, verifies=True)
        if is_forward_only:
            captured = self._graphs.get(shape, CapturedStepKind.FORWARD_ONLY)
        else:
            captured = self._graphs.with_sampling(shape, filtered=bool(self._rows.filtered))
        num_drafts = (starts + counts + self._id_shift - self._table.num_ids[rows]).clip(0).astype(np.int64)
        # A row that samples nothing reads known ids. On the GPU it may have more of them than in the table.
        self._rows.propose(rows, num_drafts * samples)
        slot = self._take()
        self._staging.fill(slot, batch, self._rows.take_runs(), one_each=shape.one_each)
        captured.launch()
        return DraftStep(batch, captured, slot)

    def compile(self) -> None:
        """Make the launches of steps of all kinds. For `Device.compiling`."""
        for shape in self._shapes.compiled():
            for kind in CapturedStepKind:
                self._graphs.compile(replace(shape, verifies=True), kind)
        self._graphs.compile_sampler(SamplerKind(1, filtered=True, verifies=True))

    def capture_first(self) -> None:
        """Capture the graphs that first requests need."""
        for shape in (*self._shapes.first(), *self._shapes.first_mixes()):
            self._graphs.get(replace(shape, verifies=True), CapturedStepKind.SAMPLE)

    def hidden_states(self, step: DraftStep) -> HiddenStates:
        """Those of the last launched step."""
        return self._graphs.hidden_states(step.captured.shape)

    def ids_of(self, step: DraftStep) -> IntArray:
        """Wait for a step. Returns the sampled ids."""
        slot = step.slot
        slot.done.record()
        slot.done.synchronize()
        ids: IntArray = slot.result_array[STAMP_WORDS : STAMP_WORDS + len(step.batch.sampled)].copy()
        self._staging.give(slot)
        return ids

    def release(self, step: DraftStep) -> None:
        """Let a step end without waiting for it."""
        step.slot.done.record()
        self._busy.append(step.slot)

    def _take(self) -> Slot:
        """A free slot. All but one may be busy."""
        while self._busy and (not self._staging.has_free or self._busy[0].done.query()):
            self._busy[0].done.synchronize()
            self._staging.give(self._busy.popleft())
        return self._staging.take()
