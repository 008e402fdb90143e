"""The scheduler as a whole: requests in, steps out, results in, output out.

    requests      `RequestStates`        admit, abort, close
    sequences     `SequenceLifecycle`   waiting, running, swapped, finished
    plan          `Planner`             the next step; `TokenGrants` divides the budget, `StepBuilder` makes the message
    settle        `Settlement`          results of steps
    output        `OutputBuffer`        ids on their way to detokenize

It neither sends nor receives; stage.py does. It holds no tensor and imports no torch.
"""

from collections import deque

import msgspec

from pipeline.metrics.stats import ScheduleCounts
from pipeline.runtime import messages as m
from pipeline.stages.schedule.encoder_planner import EncoderPlanner
from pipeline.stages.schedule.kv_cache.manager import ExecutorLoss
from pipeline.stages.schedule.kv_cache.saved import SavedCache
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.planner import Planner
from pipeline.stages.schedule.request import RequestState
from pipeline.stages.schedule.request_table import Opening, RequestStates
from pipeline.stages.schedule.row_flags import may_plan_ahead
from pipeline.stages.schedule.samples.beams import Beams
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from pipeline.stages.schedule.settlement import Settlement
from pipeline.stages.schedule.state import SchedulerContext, SchedulerState
from pipeline.stages.schedule.steps.step_entries import InFlightStep


class Scheduler:
    """Connects the parts."""

    def __init__(self, config: SchedulerConfig, context: SchedulerContext | None = None) -> None:
        """Without a `context`, arrays are in the messages, and no memory outlives this object."""
        self.config = config
        self._state = state = SchedulerState(config, context or SchedulerContext())
        self.metrics = state.metrics
        self.cost_model = state.cost_model
        self.rows = state.rows
        self.kv_cache_manager = state.kv_cache_manager
        self.output_buffer = state.output_buffer
        self.speculation = state.speculation
        self.media = state.media
        self.lifecycle = lifecycle = SequenceLifecycle(state)
        self._in_flight = state.in_flight
        self._request_table = RequestStates(state, lifecycle)
        self._planner = (EncoderPlanner if config.is_encoder else Planner)(state, lifecycle)
        self._settlement = Settlement(state, lifecycle, Beams(state, lifecycle))
        sizes = config.block_bytes, config.slot_bytes, config.sleep_cache_bytes
        self._saved = SavedCache(self.kv_cache_manager, *sizes)

    # ------------------------------------------------------------------------------------------------- requests

    def admit(self, message: m.Admit) -> list[m.Open | m.Reject]:
        """Add a request. Returns the messages for detokenize: an `Open` for each sequence, or a `Reject`. There are
        none for a pooled prompt, and if the request is here already."""
        return self._request_table.admit(message)

    def abort(self, message: m.Abort) -> None:
        """End a request, or one sequence of it. A request that is not known yet is refused when it comes."""
        self._request_table.abort(message)

    def close(self, message: m.Closed) -> None:
        """Drop a request that the gateway has closed, and end its open sequences."""
        self._request_table.close(message)

    def fail(self, errors: dict[int, str]) -> None:
        """Fail and forget these requests, as far as they are here."""
        self._request_table.fail(errors)

    def executor_lost(self, loss: ExecutorLoss) -> None:
        """The executor has died: plan again what it had computed. What was settled stays."""
        self._request_table.executor_lost(loss)

    def choose_saved(self) -> tuple[list[int], list[int]]:
        """The KV blocks and state slots that the executor must save before the server sleeps. No step may be in flight,
        and none may be planned before `executor_slept` or `executor_lost`, unless the server does not sleep."""
        return self._saved.choose()

    def executor_slept(self, successor: int) -> None:
        """The executor has ended. What it has saved is in its successor's memory, as it was: the next step gives it all
        rows, and they go on."""
        self._saved.taken_over(successor)
        self._in_flight.renew_all(self.rows.order.tolist())
        self.rows.num_changes += 1
        self.lifecycle.adapters.executor_lost()
        self.media.executor_lost()

    def use_adapters(self) -> m.UseAdapters | None:
        """What to tell the executor of the LoRA adapters that sequences use, if it does not know it and has answered
        the last of these messages."""
        message = self.lifecycle.adapters.next_message()
        return None if message is None else m.UseAdapters(self._state.context.incarnation, *message)

    def adapters_loaded(self, message: m.AdaptersLoaded) -> None:
        """The executor has loaded adapters: their sequences may start."""
        self.lifecycle.adapters_loaded(message.number, message.adapter_ids)

    def gateway_lost(self, gateway: int) -> None:
        """A gateway has died: drop its requests."""
        self._request_table.gateway_lost(gateway)

    def ingest_lost(self, segment: str) -> None:
        """A process of ingest is gone: keep what requests need of its segment."""
        self._request_table.ingest_lost(segment)

    def resend(self, replica: int, *, is_removed: bool = False) -> list[Opening]:
        """A process of detokenize has died. Returns the first messages for its successor, or for other replicas if it
        `is_removed`; all output of its sequences is pending again."""
        return self._request_table.resend(replica, is_removed=is_removed)

    def replica_of(self, opening: m.Open | m.Reject) -> int:
        """The replica of detokenize for a message of `admit`."""
        return self._request_table.replica_of(opening)

    def add_detokenize(self) -> None:
        """Detokenize has one process more. It gets no sequences before `use_detokenize`."""
        self._state.append_output_put()
        self.output_buffer.add_replica()

    def remove_detokenize(self) -> None:
        """The last process of detokenize is gone, and others have its sequences."""
        self._state.output_puts.pop()
        self.output_buffer.remove_replica()

    def use_detokenize(self, num_replicas: int) -> None:
        """New sequences go to this many replicas of detokenize."""
        self._request_table.num_detokenize = num_replicas

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache. Returns how many blocks it held."""
        return self._request_table.reset_prefix_cache()

    @property
    def requests(self) -> dict[int, RequestState]:
        """By request id."""
        return self._request_table.by_id

    # ---------------------------------------------------------------------------------------------------- steps

    @property
    def now_s(self) -> float:
        """By time.monotonic(); the caller sets it once per turn."""
        return self._state.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self._state.now_s = now_s

    def plan(self) -> m.Step | None:
        """Return the next step, or None if there is nothing to compute now."""
        return self._planner.plan()

    def plan_before_settling(self) -> m.Step | None:
        """Like `plan`, before the oldest result is settled, if `can_plan_before_settling`. Full blocks are added to the
        prefix cache by `settle`, when the step has been sent."""
        step = self._planner.repeat() or self._planner.plan(registers=False)
        self._settlement.is_behind = True
        return step

    def can_plan_before_settling(self, result: m.StepResult) -> bool:
        """Whether the next step would compute the same after `settle`: the rows of the oldest step are those that run,
        the next steps of these need nothing of its result, and it ends none of them."""
        step = self.in_flight[0]
        return (
            not self.config.is_encoder
            and self.lifecycle.is_steady
            and self.rows.num_changes == step.num_changes
            and may_plan_ahead(step.flags)
            and not (result.errors or result.slow_rows)
            and isinstance(result.finishes, bytes)
            and not any(result.finishes)
        )

    def settle(self, result: m.StepResult) -> None:
        """Store what the oldest step in flight sampled, and finish sequences."""
        self._settlement.settle(result)
        if any(error.startswith(m.ADAPTER_FAILED) for error in result.errors):
            self.reset_prefix_cache()  # no prompt may reuse blocks that were computed without the adapter

    def publish_partial_blocks(self) -> None:
        """Let the successor of this process continue behind the last position of each running sequence. No step may be
        in flight, and none may follow."""
        assert not self.in_flight
        self.kv_cache_manager.publish_partial_blocks()

    @property
    def in_flight(self) -> deque[InFlightStep]:
        """The steps without a result, the oldest first."""
        return self._in_flight.steps

    @property
    def traced_request_ids(self) -> list[int]:
        """Requests with a sequence that began or finished in the last result; for traces."""
        return self._settlement.traced_request_ids

    # --------------------------------------------------------------------------------------------------- counts

    @property
    def expects_step(self) -> bool:
        """Whether a step is likely to follow the result of the one in flight at once. A text of an encoder ends with
        it, and to plan a step of other texts takes longer than the executor waits awake."""
        return not self.config.is_encoder and len(self.rows) > 0

    @property
    def num_running(self) -> int:
        return len(self.rows)

    @property
    def num_waiting(self) -> int:
        return self.lifecycle.num_waiting

    def load(self) -> m.ScheduleLoad:
        """The current counts, and those since start."""
        lifecycle, manager = self.lifecycle, self.kv_cache_manager
        pool = manager.pool
        return m.ScheduleLoad(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks_free=pool.num_free,
            num_blocks_cached=pool.num_cached,
            num_blocks_held=pool.num_held,
            num_blocks_total=pool.num_total,
            num_prompt_tokens=lifecycle.num_prompt_tokens,
            num_cached_tokens=lifecycle.num_cached_tokens,
            num_output_tokens=self._settlement.num_output_tokens,
            num_preemptions=lifecycle.num_preemptions,
            num_steps=self._in_flight.last_step_id,
            num_swapped=len(lifecycle.swapped),
            num_swap_blocks_free=manager.swap.num_available,
            num_swap_blocks_total=manager.swap.num_total,
            num_blocks_swapped_out=manager.num_blocks_swapped_out,
            num_blocks_swapped_in=manager.num_blocks_swapped_in,
            num_blocks_offloaded=manager.offload.num_blocks_offloaded,
            num_blocks_restored=manager.num_blocks_restored,
            num_forks=manager.num_forks,
            num_recomputed_tokens=lifecycle.num_recomputed_tokens,
        )

    def counts(self) -> ScheduleCounts:
        """`load` and the histograms."""
        metrics, windows = self.metrics, self.kv_cache_manager.windows
        return ScheduleCounts(
            **msgspec.structs.asdict(self.load()),
            queue_s=metrics.queue_s.counts(),
            prefill_s=metrics.prefill_s.counts(),
            decode_s=metrics.decode_s.counts(),
            inference_s=metrics.inference_s.counts(),
            step_tokens=metrics.step_tokens.counts(),
            plan_s=metrics.plan_s,
            settle_s=metrics.settle_s,
            plan_wait_s=metrics.plan_wait_s(),
            gaps=metrics.gaps(),
            kv_groups=[] if windows.is_plain else windows.counts(),
            speculation=self.speculation.counts(),
            adapters=self.lifecycle.adapters.counts() if self.config.max_loras else None,
            states=self.kv_cache_manager.states.counts() if self.config.states.num_slots else None,
            encoder=self.media.counts() if self.media.is_on else None,
        )

    def check(self) -> None:
        """Assert every invariant; for tests."""
        rows = self.rows
        for row in rows.order.tolist():
            assert (
                rows.num_computed_tokens[row]
                <= rows.num_tokens[row] + rows.num_output_placeholders[row]
                <= rows.max_num_tokens[row]
            )
        self.lifecycle.check(list(self.requests.values()))
        self.media.check()
