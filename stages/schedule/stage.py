"""The schedule stage's process: receive, settle, keep `depth` steps in flight, report.

    wait ──► handle all messages ──► plan until `depth` steps are in flight ──► report to detokenize ──► wait

A result that ends no sequence is settled after the next step was sent (`ScheduleStage._settle`). Steps go to the
executor before output goes to detokenize, because the executor is the bottleneck.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import msgspec

from pipeline.config.by_device import max_steps_in_flight
from pipeline.metrics.stats import ScheduleCounts
from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.log.event_log import EventLog
from pipeline.runtime.process import heap
from pipeline.runtime.stage import Stage
from pipeline.runtime.tracing import Args
from pipeline.runtime.transport.outbox import Outbox, RankOutboxes
from pipeline.stages.schedule.kv_cache.block_index import IndexMemory
from pipeline.stages.schedule.kv_cache.manager import ExecutorLoss
from pipeline.stages.schedule.output.detokenize_reports import DetokenizeReports
from pipeline.stages.schedule.policies.depth_tuner import DEPTHS, GPU_DEPTHS, DepthTuner
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from pipeline.stages.schedule.state import SchedulerContext
from pipeline.stages.schedule.stats.traffic import TrafficRecorder, profile_of
from pipeline.stages.schedule.steps.sleep import Sleep
from pipeline.stages.schedule.steps.step_entries import SettledStep

IDLE_WAIT_S = 60.0
"""Longest wait for a message while the server is idle."""
RETRY_S = 0.01
"""How soon a message that a full socket refused is sent again."""


def run(launch: m.Launch) -> None:
    """Run the stage until `Stop`."""
    stage: Stage[m.ScheduleInbox]
    with open_stage(launch, m.ScheduleInbox) as stage:
        stage.ready()
        early: list[m.ScheduleInbox] = []
        facts = _wait_for_start(stage, early)
        if facts is not None:
            heap.freeze()
            _let_the_executor_run()
            ScheduleStage(stage, facts).loop(early)


def _let_the_executor_run() -> None:
    """Let this thread not preempt others when it wakes: the executor wakes it, often on its own core, and goes on."""
    with contextlib.suppress(OSError):  # forbidden here
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _wait_for_start(stage: "Stage[m.ScheduleInbox]", early: list[m.ScheduleInbox]) -> m.ExecuteFacts | None:
    """Returns the executor's facts, or None if `Stop` comes first. The supervisor has the deadline.

    Messages of other stages may overtake ours. They go into `early`, and are bounded by the gateways' credits."""
    while True:
        stage.inbox.wait(IDLE_WAIT_S)
        match stage.inbox.receive():
            case m.Start(facts):
                return facts
            case m.Stop():
                return None
            case m.Ping(nonce):
                stage.supervisor.send(m.Pong(nonce, m.PlainLoad()))
            case None:
                continue
            case m.StepResult() as result:
                stage.arrays.done_all(result)  # of the incarnation before: this one has planned no step yet
            case message:
                early.append(message)


class ScheduleStage:
    """The loop around the scheduler, and the messages that wait to be sent."""

    def __init__(self, stage: "Stage[m.ScheduleInbox]", facts: m.ExecuteFacts) -> None:
        self._stage = stage
        settings = stage.settings.schedule
        depth = max_steps_in_flight(stage.settings)
        depths = DEPTHS if stage.settings.execute.device == "cpu" else GPU_DEPTHS
        self._depth_tuner = DepthTuner(depths) if depth == "auto" else None
        self._depth: int = depths[0] if depth == "auto" else depth
        self._has_settled = False
        """Whether a result came in this turn."""
        self._is_single = False
        """Whether this turn has one message."""
        self._settled: list[SettledStep] = []
        """Results of this turn."""
        self._were_due: deque[bool] = deque()
        """For each step in flight: whether it was planned as soon as the executor could take it."""
        ranks = topology.among(stage.outboxes, "execute")
        to_ranks = [stage.outboxes[name] for name in ranks]
        self._execute: Outbox[Any] | RankOutboxes[Any] = to_ranks[0] if len(ranks) == 1 else RankOutboxes(to_ranks)
        self._has_lost_ranks = False
        """Some ranks of the executor are being replaced, and the first one, which comes last, is not yet."""
        max_loras = stage.settings.lora.max_loras if stage.settings.lora.is_on else 0
        self._scheduler = Scheduler(
            SchedulerConfig.of(
                *(settings, facts, stage.settings.speculative, max_loras),
                *(stage.settings.execute.pipeline_parallel, stage.settings.execute.sleep_cache_bytes),
            ),
            SchedulerContext(
                incarnation=stage.launch.incarnation,
                executor=stage.launch.incarnations.get(topology.EXECUTE, 1),
                num_detokenize=topology.num_replicas(stage.settings, "detokenize"),
                max_detokenize=len(topology.among(stage.outboxes, "detokenize")),
                put_for=lambda reader: partial(
                    stage.arrays.put, readers=ranks if reader == topology.EXECUTE else (reader,)
                ),
                take=stage.arrays.take,
                view=stage.arrays.view,
                done=stage.arrays.done,
                kv_index=self._index(topology.KV_INDEX, "cached"),
                swap_index=self._index(topology.OFFLOAD_INDEX, "offloaded"),
                state_index=self._index(topology.STATE_INDEX, "snapshots"),
                swap_state_index=self._index(topology.OFFLOAD_STATE_INDEX, "offloaded_snapshots"),
                crash_counts=stage.launch.crash_counts,
                breadcrumb=stage.breadcrumb,
                suspects=stage.suspects,
            ),
        )
        self._incarnations = dict(stage.launch.incarnations)
        """Of the gateways' processes, by name; 1 if a name is missing."""
        stage.control_requests.own_counts = self._counts
        self._traffic = TrafficRecorder(self._scheduler, lambda: profile_of(self._scheduler, stage.settings.gateway))
        stage.control_requests.traffic = self._traffic
        self._reports = DetokenizeReports(stage, self._scheduler)
        self._stopped = False
        self._expects_grammars = False
        self._is_handing_over = False
        """A successor takes over when no step is in flight."""
        self._has_ended_work = False
        self._has_released = False
        """Whether sequences may run since the end of the last wake that were held back."""
        self._sleep = Sleep(stage, self._scheduler, self._execute)
        self._preemption_log = EventLog(stage.log, "preempted sequences")

    def _index(self, segment: str, name: str) -> IndexMemory:
        """`name` is that of its entries in a recording."""
        return IndexMemory(self._stage.memory(segment), partial(self._stage.replay_context.observe, name, 0))

    def loop(self, early: list[m.ScheduleInbox]) -> None:
        """Handle the messages that came before `Start`, then new ones, until `Stop`."""
        messages, report_is_due = early, False
        while not self._stopped:
            messages = messages or self._stage.inbox.wait_all(self._wait_s(report_is_due))
            begin_s = time.monotonic()
            self._scheduler.now_s = self._stage.replay_context.monotonic()
            self._has_settled = False
            self._is_single = len(messages) == 1
            for message in messages:
                self._handle(message)
            self._use_adapters()
            self._feed()
            self._sleep.turn()
            self._account()
            self._log_preemptions()
            report_is_due = not self._reports.send()
            if self._is_handing_over and not (report_is_due or self._scheduler.in_flight or self._has_ended_work):
                self._has_ended_work = True
                self._scheduler.publish_partial_blocks()
                self._stage.supervisor.send(m.Drained())
            if not report_is_due:
                self._scheduler.lifecycle.list_suspects()
                if cleared := self._scheduler.lifecycle.quarantine.take_cleared():
                    self._stage.supervisor.send(m.Cleared(cleared))
                self._has_released = self._scheduler.lifecycle.release_held()
            self._stage.release()
            if (trace := self._stage.trace).on:
                trace.span("wake", begin_s, time.monotonic(), {"messages": len(messages)})
            messages = []

    def _wait_s(self, report_is_due: bool) -> float:
        """How long to wait for messages."""
        return RETRY_S if report_is_due else 0.0 if self._has_released else IDLE_WAIT_S

    def _handle(self, message: m.ScheduleInbox) -> None:
        scheduler = self._scheduler
        match message:
            case m.StepResult() | m.AdaptersLoaded():
                self._answered(message)
            case m.Admit(request_id, attempt):
                with self._stage.breadcrumb.at(request_id, attempt):
                    self._admit(message)
            case m.Abort(request_id, attempt):
                with self._stage.breadcrumb.at(request_id, attempt):
                    scheduler.abort(message)
            case m.Closed(request_id, attempt):
                with self._stage.breadcrumb.at(request_id, attempt):
                    if self._traffic.is_on:
                        self._traffic.closed(message)
                    scheduler.close(message)
            case m.ResetPrefixCache(gateway, nonce):
                num_blocks = scheduler.reset_prefix_cache()
                self._stage.log.info("prefix cache reset", extra={"fields": {"blocks": num_blocks}})
                self._reports.add_reset(m.PrefixCacheReset(gateway, nonce, num_blocks))
            case m.Release():
                self._stage.arrays.released(message)
            case m.PeerRestarted() | m.Rescaled():
                self._peers_changed(message)
            case m.FailRequests(errors):
                scheduler.fail(errors)
            case m.HandOver() | m.FallAsleep() | m.WakeUp():
                self._pause(message)
            case m.ExpectGrammars():
                self._expects_grammars = self._execute.send(message)
            case m.Ping(nonce):
                self._stage.supervisor.send(m.Pong(nonce, self._load()))
            case m.Stop():
                self._stopped = True
            case m.Start():
                raise AssertionError("started twice")
            case _:
                assert_never(message)

    def _pause(self, message: m.HandOver | m.FallAsleep | m.WakeUp) -> None:
        """Plan no more steps, or plan them again."""
        if isinstance(message, m.HandOver):
            self._is_handing_over = True
        else:
            self._sleep.handle(message)

    def _answered(self, message: m.StepResult | m.AdaptersLoaded) -> None:
        """Handle an answer of the executor, if it is for this process."""
        is_own = message.incarnation == self._stage.launch.incarnation
        if isinstance(message, m.AdaptersLoaded):
            if is_own:
                self._scheduler.adapters_loaded(message)
        elif is_own:
            self._settle(message)
        else:
            self._stage.arrays.done_all(message)

    def _peers_changed(self, message: m.PeerRestarted | m.Rescaled) -> None:
        """Send the successor of a stage again what this one owns, or forget what the dead process owned."""
        if isinstance(message, m.Rescaled):
            self._stage.rescaled(message)
            if message.stage == "detokenize":
                self._scheduler.use_detokenize(message.num_replicas)
            self._stage.reconnected(message)
            return
        stage, _, replica = message.peer.name.partition(".")
        match stage:
            case "execute" if int(replica):
                self._has_lost_ranks = True
            case "execute" if message.has_saved_kv:
                self._has_lost_ranks = False
                self._scheduler.executor_slept(message.incarnation)
            case "execute":
                self._has_lost_ranks = False
                self._sleep.executor_lost()
                keeps_swap = not message.has_other_settings
                loss = ExecutorLoss(message.incarnation, keeps_swap=keeps_swap, crash_counts=message.crash_counts)
                self._scheduler.executor_lost(loss)
                self._were_due.clear()
                if self._expects_grammars:
                    self._execute.send(m.ExpectGrammars())
            case "detokenize":
                self._reports.restarted(int(replica), message)
            case "ingest":
                self._scheduler.ingest_lost(message.peer.name)
            case "gateway":
                # Of one that is gone, nothing counts from now on (Inbox.removed).
                self._incarnations[message.peer.name] = message.incarnation + message.is_removed
                self._scheduler.gateway_lost(int(replica))
        self._stage.reconnected(message)

    def _use_adapters(self) -> None:
        """Tell the executor which LoRA adapters it needs, before steps name them."""
        is_away = self._is_handing_over or self._sleep.is_on
        if not is_away and (message := self._scheduler.use_adapters()) is not None:
            sent = self._execute.send(message)
            assert sent, "the edge to the executor is full, though one of these messages is unanswered at most"

    @property
    def _is_paused(self) -> bool:
        """Whether no steps are planned."""
        return self._is_handing_over or self._has_lost_ranks or self._sleep.is_on

    def _feed(self) -> None:
        """Plan until `depth` steps are in flight. The edge to the executor never holds more."""
        while not self._is_paused and len(self._scheduler.in_flight) < self._depth:
            if not self._send_step(self._scheduler.plan):
                return

    def _send_step(self, plan: Callable[[], m.Step | None]) -> bool:
        """Plan a step and send it. Returns False if there is nothing to compute now."""
        in_flight = self._scheduler.in_flight
        begin_s = time.monotonic()
        step = plan()
        end_s = time.monotonic()
        self._scheduler.metrics.plan_s += end_s - begin_s
        if step is None:
            return False
        self._were_due.append(self._has_settled or len(in_flight) > 1)
        sent = self._execute.send(step)
        assert sent, "the edge to the executor is full, though few steps are in flight"
        # The kernel often wakes the executor on this core: on busy cores it does not look for an idle one. Without
        # this, the executor would wait there until the report is done.
        os.sched_yield()
        if (trace := self._stage.trace).on:
            args: Args = {"step": step.step_id, "tokens": in_flight[-1].num_tokens, "starts": len(step.adds)}
            trace.span("plan", begin_s, end_s, args, [add.request_id for add in step.adds])
        return True

    # ------------------------------------------------------------------- the scheduler's methods, timed and traced

    def _admit(self, message: m.Admit) -> None:
        if message.gateway_incarnation < self._incarnations.get(f"gateway.{message.gateway}", 1):
            self._stage.arrays.done_all(message)  # its gateway had died before this process started: no one closes it
            return
        begin_s = time.monotonic()
        known = self._scheduler.requests.get(message.request_id)
        openings = self._scheduler.admit(message)
        if not openings and self._scheduler.requests.get(message.request_id) is known:
            return  # it is here already
        for opening in openings:
            self._reports.add(opening)
        self._sleep.admitted()
        what = "refused" if openings and isinstance(openings[0], m.Reject) else "queued"
        self._stage.log.debug(what, extra={"fields": {"request": f"{message.request_id:x}", "n": len(openings)}})
        if (trace := self._stage.trace).on:
            trace.span("admit", begin_s, time.monotonic(), {"n": len(openings)}, (message.request_id,))

    def _settle(self, result: m.StepResult) -> None:
        """Settle a result, after the next step was sent if that needs nothing of it: the executor waits. Other messages
        of this turn are handled before the next step, as they may change it."""
        scheduler = self._scheduler
        if len(scheduler.in_flight) == 1 and scheduler.expects_step:
            self._execute.wake()  # it sleeps, and a step follows in most cases
        may_plan = self._is_single and not self._is_paused
        if may_plan and len(scheduler.in_flight) == self._depth and scheduler.can_plan_before_settling(result):
            self._send_step(scheduler.plan_before_settling)
        begin_s = time.monotonic()
        step, was_due = scheduler.in_flight[0], self._were_due.popleft()
        scheduler.settle(result)
        self._has_settled = True
        request_ids = scheduler.traced_request_ids
        self._settled.append(SettledStep(step, result, was_due, begin_s, time.monotonic(), request_ids))

    def _account(self) -> None:
        """Count and trace the results of this turn. The next step goes to the executor first, because it waits."""
        for settled in self._settled:
            step, result = settled.step, settled.result
            metrics = self._scheduler.metrics
            metrics.settle_s += settled.end_s - settled.begin_s
            if settled.was_due:
                metrics.observe_step(step.num_samples, step.num_tokens, result.wait_s, result.compute_s)
                if step.num_tokens == step.num_samples and step.has_drafts is None:  # all rows decode
                    # Since the end of the previous step. A replay gets the same times and plans the same.
                    seconds = result.wait_s + result.compute_s - result.copy_s - result.encode_s
                    self._choose_depth(step.num_tokens, seconds)
            if self._stage.trace.on:
                self._trace(settled)
        self._settled.clear()

    def _trace(self, settled: SettledStep) -> None:
        scheduler, trace, end_s = self._scheduler, self._stage.trace, settled.end_s
        args: Args = {"step": settled.result.step_id, "compute_ms": round(settled.result.compute_s * 1000, 3)}
        if settled.was_due:
            args["plan_wait_ms"] = round(settled.result.wait_s * 1000, 3)
        trace.span("settle", settled.begin_s, end_s, args, settled.request_ids)
        trace.counters("sequences", end_s, {"running": scheduler.num_running, "waiting": scheduler.num_waiting})
        pool = scheduler.kv_cache_manager.pool
        trace.counters("KV blocks", end_s, {"held": pool.num_held, "cached": pool.num_cached})

    def _choose_depth(self, num_rows: int, seconds: float) -> None:
        """Tune the depth, if it is "auto", with the time of a step that decoded `num_rows` rows."""
        if self._depth_tuner is None:
            return
        decision = self._depth_tuner.observe(num_rows, seconds)
        self._depth = self._depth_tuner.depth
        if decision is not None:
            self._stage.log.info("depth", extra={"fields": decision.fields(self._depth_tuner.depths)})

    def _log_preemptions(self) -> None:
        scheduler, total = self._scheduler, self._scheduler.lifecycle.num_preemptions
        if total != self._preemption_log.num_logged:
            self._preemption_log.update(total, running=scheduler.num_running, waiting=scheduler.num_waiting)

    # --------------------------------------------------------------------------------------------------- counts

    def _load(self) -> m.ScheduleLoad:
        return msgspec.structs.replace(self._scheduler.load(), depth=self._depth)

    def _counts(self) -> ScheduleCounts:
        return msgspec.structs.replace(self._scheduler.counts(), depth=self._depth)
