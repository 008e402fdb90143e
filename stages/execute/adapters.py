"""LoRA adapters in the executor: which of them are loaded, and in which slot.

A row's options name its adapter by id. The first row of an adapter loads it into a free slot, or into the slot that has
been unused for longest: so slots are also the cache of adapters in memory. Nothing else tells the executor of an
adapter, so one that has been started again knows those that it needs.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import IntArray
from pipeline.lora.adapter_file import AdapterFile, Target, path_of
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.layers.attention import places_of_heads
from pipeline.stages.execute.rope import head_order

NO_ADAPTER = -1

QKV: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj")
OUT: tuple[Target, ...] = ("o_proj",)
DOWN: tuple[Target, ...] = ("down_proj",)


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """What a program reserves for adapters."""

    num_slots: int
    max_rank: int
    """Of one projection."""

    @classmethod
    def of(cls, settings: Settings) -> "LoraPlan | None":
        """None if adapters are off."""
        lora = settings.lora
        return cls(lora.num_slots, lora.max_lora_rank) if lora.is_on else None


def gate_up(config: ModelConfig) -> tuple[Target, ...]:
    return ("gate_proj", "up_proj") if config.gated else ("up_proj",)


def num_outputs(config: ModelConfig, target: Target) -> int:
    match target:
        case "q_proj":
            return config.num_heads * config.head_dim
        case "k_proj" | "v_proj":
            return config.num_kv_heads * config.head_dim
        case "gate_proj" | "up_proj":
            return config.intermediate_size
        case "o_proj" | "down_proj":
            return config.hidden_size


def row_order(config: ModelConfig, target: Target) -> "IntArray | None":
    """The row of B for each output of a projection, where loading moves the rows of its weight; None if it doesn't."""
    order = head_order(config) if target in ("q_proj", "k_proj") else None
    return None if order is None else places_of_heads(order, num_outputs(config, target)).astype("int32")


class AdapterSlots:
    """Owns the slots of a program. `load` puts an adapter into one of them."""

    def __init__(self, model_dir: Path, num_slots: int, load: Callable[[int, AdapterFile], None]) -> None:
        self._model_dir, self._load = model_dir, load
        self._free = list(range(num_slots))
        self._slots: OrderedDict[str, int] = OrderedDict()
        """By adapter, the one that was used longest ago first."""
        self._num_rows: dict[str, int] = {}
        self._of_row: dict[int, str] = {}
        self.num_loads = 0

    @property
    def loaded(self) -> list[str]:
        return list(self._slots)

    def take(self, row: int, adapter_id: str) -> int:
        """The slot of a row's adapter, which is loaded if it isn't. Raises OSError or ValueError if it can't be."""
        slot = self._slots.get(adapter_id)
        if slot is None:
            file = AdapterFile(path_of(self._model_dir, adapter_id))
            slot = self._free.pop() if self._free else self._evict()
            try:
                self._load(slot, file)
            except BaseException:
                self._free.append(slot)
                raise
            self._slots[adapter_id] = slot
            self.num_loads += 1
        self._slots.move_to_end(adapter_id)
        self._of_row[row] = adapter_id
        self._num_rows[adapter_id] = self._num_rows.get(adapter_id, 0) + 1
        return slot

    def drop(self, row: int) -> None:
        """A row has ended."""
        if (adapter_id := self._of_row.pop(row, None)) is not None:
            self._num_rows[adapter_id] -= 1
            if not self._num_rows[adapter_id]:
                del self._num_rows[adapter_id]

    def _evict(self) -> int:
        unused = next((adapter_id for adapter_id in self._slots if adapter_id not in self._num_rows), None)
        assert unused is not None, "more adapters at once than there are slots"
        return self._slots.pop(unused)
