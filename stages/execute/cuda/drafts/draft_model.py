"""A draft model on a GPU, over the rows of the model: its steps read their ids, blocks and sampling parameters.

    propose   row changes ──► catch up, sample ──ids──► host ──► sample ──ids──► host …

Each proposed id comes to the host before the next pass, and goes to the GPU's rows with it.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.model import model_folder
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.available import require_features
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.drafts.draft_steps import DraftSteps
from pipeline.stages.execute.cuda.model.device_model import DeviceModel
from pipeline.stages.execute.cuda.rows.device_rows import DeviceRows
from pipeline.stages.execute.drafts.draft_model import MAX_CATCH_UP, DraftModel, prepared_draft
from pipeline.stages.execute.kv import KVPlan
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
        max_num_tokens = MAX_CATCH_UP + settings.schedule.max_num_seqs
        self.steps = DraftSteps(settings, device, weights.config, weights.model, table, rows, kv, max_num_tokens)
        super().__init__(table, self.steps.max_len, table.vocab_size)
        self._hold, self._flush = weights.hold, flush

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        self._flush()
        return super().propose(rows, most, clock)

    def close(self) -> None:
        """Free the folder; the device's memory goes with the process."""
        if self._hold is not None:
            self._hold.close()

    def _run(self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> IntArray:
        return self.steps.ids_of(self.steps.launch(rows, starts, counts, samples))
