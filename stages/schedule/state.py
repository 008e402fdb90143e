"""What the parts of a scheduler share: one object that each of them gets."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime.process.black_box import CRUMB_BYTES, NUM_BYTES, Breadcrumb, SuspectList
from pipeline.runtime.topology import EXECUTE
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.arrays import Put, PutFor, Take
from pipeline.stages.schedule.kv_cache.block_index import NO_MEMORY, IndexMemory
from pipeline.stages.schedule.kv_cache.manager import KVCacheManager
from pipeline.stages.schedule.kv_cache.states.pools import StatePools
from pipeline.stages.schedule.media.spans import MediaSpans
from pipeline.stages.schedule.output.output_buffer import OutputBuffer
from pipeline.stages.schedule.policies.mask_turns import MaskTurns
from pipeline.stages.schedule.policies.policy import POLICIES
from pipeline.stages.schedule.policies.preemption import PreemptionCosts
from pipeline.stages.schedule.policies.speculation import Speculation
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from pipeline.stages.schedule.stats.metrics import ScheduleMetrics
from pipeline.stages.schedule.steps.step_entries import InFlightSteps


def inline(_: str) -> Put:
    return lambda array: array.tobytes()


def from_inline(array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
    assert isinstance(array, bytes)
    return np.frombuffer(array, dtype)


class SchedulerContext(msgspec.Struct, frozen=True):
    """What the process gives to its scheduler. By default: arrays within messages, and no memory that outlives it."""

    incarnation: int = 1
    executor: int = 1
    """The incarnation of the executor's process, which owns the KV cache."""
    num_detokenize: int = 1
    """Replicas of detokenize that get new sequences."""
    max_detokenize: int = 1
    """Replicas that there are."""
    put_for: PutFor = inline
    """Moves arrays into messages."""
    take: Take = from_inline
    """Moves arrays out of messages."""
    view: Take = from_inline
    """Reads arrays that stay in messages."""
    done: Callable[[Array], object] = lambda _: None
    """Frees an array that `view` reads."""
    kv_index: IndexMemory = NO_MEMORY
    """The keys of what is in the KV cache."""
    swap_index: IndexMemory = NO_MEMORY
    """The keys of what is in swap space."""
    state_index: IndexMemory = NO_MEMORY
    """The keys of snapshots of recurrent states."""
    swap_state_index: IndexMemory = NO_MEMORY
    """The keys of those in swap space."""
    crash_counts: dict[int, int] = {}
    """As in `Launch`."""
    breadcrumb: Breadcrumb = msgspec.field(default_factory=lambda: Breadcrumb(memoryview(bytearray(CRUMB_BYTES))))
    """Names the request of a sequence while it starts."""
    suspects: SuspectList = msgspec.field(default_factory=lambda: SuspectList(memoryview(bytearray(NUM_BYTES))))
    """The requests that may be the reason if this process or the executor dies."""


class SchedulerState:
    """The objects that several parts read. Each says who changes it."""

    def __init__(self, config: SchedulerConfig, context: SchedulerContext) -> None:
        self.config = config
        self.context = context
        self.policy = POLICIES[config.policy]()
        self.now_s = 0.0
        """By time.monotonic(), set once per turn."""
        self.put_step = context.put_for(EXECUTE)
        self.output_puts: list[Put] = []
        """By replica of detokenize."""
        for _ in range(max(context.num_detokenize, context.max_detokenize)):
            self.append_output_put()
        self.metrics = ScheduleMetrics()
        self.cost_model = StepCostModel()
        self.in_flight = InFlightSteps()
        self.rows = RowTracker(config)
        state_pools = StatePools(config, context.state_index, context.swap_state_index, context.executor)
        self.kv_cache_manager = KVCacheManager(
            config, self.rows, context.kv_index, context.swap_index, context.executor, state_pools
        )
        self.output_buffer = OutputBuffer(self.rows, self.output_puts, is_encoder=config.is_encoder)
        self.media = MediaSpans(config, self.rows, self.put_step, context.view)
        self.preemption_costs = PreemptionCosts(
            config.preemption, self.rows, self.cost_model, self.kv_cache_manager, config.block_size, self.media
        )
        self.speculation = Speculation(config, self.rows, self.cost_model)
        self.mask_turns = MaskTurns(self.rows, config)

    def append_output_put(self) -> None:
        """Detokenize has one more replica."""
        self.output_puts.append(self.context.put_for(f"detokenize.{len(self.output_puts)}"))
