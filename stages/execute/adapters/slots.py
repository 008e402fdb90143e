"""LoRA adapters in the executor: which of them are loaded, and in which slot.

A row's options name its adapter by id. The first row of an adapter puts it into a free slot, or into the slot that has
been unused for longest: so slots are also the cache of adapters in memory. A thread reads and packs adapters before
their first row, so that a step only puts them into a slot:

- those of schedule's sequences (`UseAdapters`). It plans no row of an adapter before `AdaptersLoaded` names it;
- those that clients may use (the supervisor's `Adapters`), as long as there are free slots.

One that neither names is read within the step.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import IntArray
from pipeline.lora.adapter_file import AdapterFile, Target, path_of
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.attention import head_indices
from pipeline.stages.execute.layers.rope import head_order

NO_ADAPTER = -1
LOAD_TIMEOUT_S = 60.0
"""How long a row waits for its adapter."""

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
    order = head_order(config, None) if target in ("q_proj", "k_proj") else None
    return None if order is None else head_indices(order, num_outputs(config, target)).astype("int32")


class AdapterMemory(Protocol):
    """Where adapters are computed: a program or a model on a device."""

    def pack_adapter(self, file: AdapterFile) -> Any:
        """An adapter as `put_adapter` takes it. Any thread may call this."""

    def put_adapter(self, slot: int, packed: Any) -> None:
        """Put it into a slot, between two steps."""


class AdapterLoader:
    """Reads and packs adapters on a thread of its own, so that no step waits for it. The thread has the usual priority:
    with a lower one it could lose its core while it holds the GIL, and steps would wait for it."""

    def __init__(self, model_dir: Path, pack: Callable[[AdapterFile], Any]) -> None:
        self._model_dir, self._pack = model_dir, pack
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when an adapter was loaded since `clear`."""
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: OrderedDict[str, Future[Any]] = OrderedDict()
        """Adapters that no row has used yet, by id."""

    def start(self, adapter_ids: Iterable[str]) -> None:
        """Begin to load these adapters, in this order; forget others."""
        wanted = list(dict.fromkeys(adapter_ids))
        for adapter_id, future in list(self._waiting.items()):
            # Those whose turn has not come are put in the new order.
            if future.cancel() or adapter_id not in wanted:
                del self._waiting[adapter_id]
        if self._thread is None and wanted:
            self._thread = ThreadPoolExecutor(1, "adapters")
        for adapter_id in wanted:
            if adapter_id not in self._waiting:
                assert self._thread is not None
                self._waiting[adapter_id] = future = self._thread.submit(self._load, adapter_id)
                future.add_done_callback(lambda _: self.wake())

    def is_over(self, adapter_id: str) -> bool:
        """Whether `take` returns without waiting."""
        future = self._waiting.get(adapter_id)
        return future is not None and future.done()

    def wake(self) -> None:
        """Make `fd` readable."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def take(self, adapter_id: str) -> Any:
        """A packed adapter; loads it now if that has not begun. Raises OSError or ValueError if it can't be loaded."""
        future = self._waiting.pop(adapter_id, None)
        if future is None or future.cancel():
            return self._load(adapter_id)
        try:
            return future.result(LOAD_TIMEOUT_S)
        except TimeoutError as error:
            raise OSError(f"reading the file took longer than {LOAD_TIMEOUT_S:.0f} s") from error

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        os.close(self.fd)

    def _load(self, adapter_id: str) -> Any:
        return self._pack(AdapterFile(path_of(self._model_dir, adapter_id)))


class AdapterSlots:
    """Owns the slots of a program, and puts adapters into them."""

    def __init__(self, model_dir: Path, num_slots: int, memory: AdapterMemory) -> None:
        self._memory = memory
        self.loader = AdapterLoader(model_dir, memory.pack_adapter)
        self._free = list(range(num_slots))
        self._slots: OrderedDict[str, int] = OrderedDict()
        """By adapter, the one that was used longest ago first."""
        self._num_rows: dict[str, int] = {}
        self._of_row: dict[int, str] = {}
        self._used: list[str] = []
        self._preloaded: list[str] = []
        self.num_loads = 0

    @property
    def loaded(self) -> list[str]:
        return list(self._slots)

    def preload(self, adapter_ids: Iterable[str]) -> None:
        """Load adapters that clients may use, beside the steps. As many as there are free slots."""
        self._preloaded = list(adapter_ids)
        self._load()

    def use(self, adapter_ids: Iterable[str]) -> None:
        """Load adapters that rows will use soon, beside the steps and before others, and keep them."""
        self._used = list(adapter_ids)
        self._load()

    def used_and_loaded(self) -> list[str]:
        """Those of the last `use` whose rows need not wait any more."""
        return [one for one in self._used if one in self._slots or self.loader.is_over(one)]

    def _load(self) -> None:
        used = [one for one in self._used if one not in self._slots]
        others = [one for one in self._preloaded if one not in self._slots and one not in used]
        self.loader.start([*used, *others[: max(0, len(self._free) - len(used))]])

    def close(self) -> None:
        """End the thread that loads adapters."""
        self.loader.close()

    def take(self, row: int, adapter_id: str) -> int:
        """The slot of a row's adapter, which is loaded if it isn't. Raises OSError or ValueError if it can't be."""
        slot = self._slots.get(adapter_id)
        if slot is None:
            packed = self.loader.take(adapter_id)
            slot = self._free.pop() if self._free else self._evict()
            try:
                self._memory.put_adapter(slot, packed)
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
        without_rows = [adapter_id for adapter_id in self._slots if adapter_id not in self._num_rows]
        assert without_rows, "more adapters at once than there are slots"
        unused = next((adapter_id for adapter_id in without_rows if adapter_id not in self._used), without_rows[0])
        return self._slots.pop(unused)
