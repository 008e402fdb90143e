"""A loaded model with its KV memory and its rows, on one device.

What a runner keeps beside its model is the same on any device: rows, grammar masks, adapters, and what proposes ids. A
back end loads its model between these parts, because each needs some of the others:

    CPU    rows ──► program, adapters ──► row changes
    GPU    model, adapters ──► rows ──► graphs ──► row changes
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.config.sections.speculative import max_num_drafts, num_speculative_tokens
from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray
from pipeline.runtime.messages import ExecuteFacts, KVSaved, SaveKV
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import AdapterMemory, AdapterSlots, LoraPlan
from pipeline.stages.execute.drafts.speculation import Proposer, Speculator
from pipeline.stages.execute.grammar_masks.masks import Masks, NoMasks
from pipeline.stages.execute.kv import KVPlan, kv_block_bytes, kv_dtype
from pipeline.stages.execute.pooling.head import PoolerHead
from pipeline.stages.execute.pooling.pool import Pool
from pipeline.stages.execute.program import Norm
from pipeline.stages.execute.row_changes import RowChanges, RowMirror
from pipeline.stages.execute.rows import RowTable, Take


class SavedKV(Protocol):
    """Memory that outlives the executor, for its KV cache."""

    def save(self, message: SaveKV, take: Take) -> KVSaved:
        """Write what the message names. If there is no room, the answer says so, and nothing has changed."""


class Runner(ABC):
    """What the loop needs of a back end, beside its steps; and the parts that all back ends have."""

    facts: ExecuteFacts
    rows: RowTable
    masks: Masks
    failed: dict[int, str]
    """Rows whose sequence can't continue, and why."""
    weight_formats: str
    """Formats of the matrices, such as `q8_0+q4_1`."""
    kernels: str
    """As in `Backend`; so are `code` and `activations`."""
    code: str
    activations: str
    answers: bool
    """Whether it samples, and sends the results: of several ranks, one does."""
    rank_name = ""
    """Its place among ranks, for `pipeline ps`; empty if it has none to show."""
    saved_kv: SavedKV | None = None
    """What it leaves to the next executor when the server goes to sleep; None if it can't."""
    layers: str
    """The first and the last layer that it computes, for logs."""

    def __init__(self, settings: Settings, model_dir: Path) -> None:
        """The back end sets `answers` before it makes the rows."""
        self._settings, self._model_dir = settings, model_dir
        self.activations = settings.execute.activations
        self.adapters: AdapterSlots | None = None
        """None if LoRA adapters are off."""
        self.speculator: Speculator | None = None
        self._max_num_seqs = settings.schedule.max_num_seqs
        self._max_num_samples = self._max_num_seqs + max_num_drafts(settings.speculative, self._max_num_seqs)

    @property
    @abstractmethod
    def name(self) -> str:
        """The back end, for logs."""

    def save_kv(self, message: SaveKV, take: Take) -> KVSaved:
        """Leave KV blocks and states to the next executor, since the server goes to sleep."""
        if self.saved_kv is None:
            return KVSaved(message.number, 0, 0.0, f"{self.name} can't save its KV cache")
        return self.saved_kv.save(message, take)

    @abstractmethod
    def drop_all(self, incarnation: int = 0) -> None:
        """Drop all rows. No step may be in flight. `incarnation` is that of the scheduler's successor."""

    def _make_adapters(self, plan: LoraPlan | None, memory: AdapterMemory) -> None:
        """Make the slots of LoRA adapters, which are computed at this place."""
        if plan is not None:
            self.adapters = AdapterSlots(self._model_dir, plan.num_slots, memory)

    def _make_rows(self, config: ModelConfig, kv: KVPlan, num_swap_blocks: int, num_swap_slots: int = 0) -> None:
        """Make the facts, the row table and the masks. The back end replaces facts that differ. `config` has the KV
        heads of the rank with the most."""
        settings, max_num_seqs = self._settings, self._max_num_seqs
        self.facts = ExecuteFacts(
            kv.num_blocks,
            BLOCK_SIZE,
            kv.max_model_len,
            config.vocab_size,
            num_swap_blocks,
            config.hidden_size if config.pooler is None else config.pooler.width,
            kv_dtype=kv_dtype(settings.execute),
            kv_groups=list(kv.layout.groups),
            num_speculative_tokens=num_speculative_tokens(settings.speculative),
            max_num_drafts=max_num_drafts(settings.speculative, max_num_seqs),
            eos_ids=sorted(config.eos_ids),
            num_state_slots=kv.num_state_slots,
            num_swap_state_slots=num_swap_slots,
            state_tokens=kv.state_tokens,
            block_bytes=kv_block_bytes(settings.execute, config, kv.layout),
            slot_bytes=kv.slot_bytes,
            generates=config.generates,
            is_encoder=not config.causal,
        )
        num_groups = len(kv.layout.groups)
        # A text may have max_model_len ids, and its row gets one more, which has no meaning.
        longest = kv.max_model_len + (not config.generates)
        self.rows = RowTable(max_num_seqs, longest, kv.num_blocks, config.vocab_size, num_groups)
        masks = Masks if self.answers else NoMasks
        limit_s = settings.limits.grammar_timeout_s
        self.masks = masks(self._model_dir, self._max_num_samples, config.vocab_size, limit_s)

    def _make_changes(
        self,
        config: ModelConfig,
        last_norm: Norm | None,
        make_proposer: Callable[[], Proposer | None],
        mirror: RowMirror | None = None,
    ) -> None:
        """Make what proposes ids, and what applies the row changes of steps. `last_norm` is None if this rank does not
        have it or there is none; `make_proposer` returns None for n-grams."""
        if self.facts.max_num_drafts:
            self.masks.forces = True
            self.speculator = Speculator(self.rows, self._settings.speculative, make_proposer(), self.masks)
        self.pool = Pool(config, last_norm, PoolerHead.of(self._model_dir, config.pooler))
        self._changes = RowChanges(
            *(self.rows, self.masks, self.pool, config.eos_ids, mirror),
            drop_drafts=self._drop_drafts,
            adapters=self.adapters,
        )
        self.failed = self._changes.failed

    @property
    def _proposer(self) -> Proposer | None:
        return None if self.speculator is None else self.speculator.proposer

    def _drop_drafts(self, rows: IntArray) -> None:
        if self._proposer is not None:
            self._proposer.drop(rows)

    def barrier_wait_s(self) -> float:
        """How long this rank has waited for others of its stage of the pipeline; 0 if there are none."""
        return 0.0

    def pipeline_wait_s(self) -> float:
        """How long this rank has waited for other stages of the pipeline; 0 if there are none."""
        return 0.0

    def start(self) -> None:  # noqa: B027 - that of a CPU does something
        """All stages are ready."""

    def expect_grammars(self) -> None:
        """Start the process that computes masks, so that the first row that needs one does not wait for it."""
        if self.facts.generates:
            self.masks.start()

    def preload_adapters(self, adapter_ids: list[str]) -> None:
        """Read these LoRA adapters beside the steps, as far as there is room."""
        if self.adapters is not None:
            self.adapters.preload(adapter_ids)

    def close(self) -> None:
        """Free threads and memory, and end the processes beside this one. Raises the device's error, if there was
        one."""
        try:
            if self.adapters is not None:
                self.adapters.close()
            self._close_device()
        finally:
            self.masks.close()
            if self._proposer is not None:
                self._proposer.close()

    @abstractmethod
    def _close_device(self) -> None:
        """Free what the back end has."""
