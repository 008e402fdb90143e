"""The stages of the model: the code of schedule, detokenize and the gateways' requests is the real one; ingest and
execute are fakes without tokenizer and model. Each has `wake`, one turn of its loop."""

from collections.abc import Container
from functools import partial
from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.process.black_box import MAX_THREADS, Breadcrumb
from pipeline.stages.detokenize.stage import DetokenizeStage
from pipeline.stages.gateway.admin.abort_requests import RequestAborter
from pipeline.stages.gateway.admin.reset_prefix_cache import PrefixCacheResetter
from pipeline.stages.gateway.open_requests.recovery import Recovery
from pipeline.stages.gateway.open_requests.results import ResultHandler
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.ingest.submit_queue import Key, SubmitQueue
from pipeline.stages.schedule.stage import ScheduleStage, _wait_for_start
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.vocabulary import Vocabulary
from tests.fakes import FakeExecutor
from tests.recovery.ledger import Ledger
from tests.recovery.network import ModelStage, TurnOver
from tests.recovery.poison import Poison, Poisoned, poison, poison_detokenize
from tests.rig import raw

SCHEDULE = "schedule.0"


class ScheduleProcess:
    """The real loop of schedule."""

    def __init__(
        self, stage: ModelStage, owners: dict[tuple[int, int], int], poisons: dict[int, Poison] | None = None
    ) -> None:
        """`owners` has the incarnation of the scheduler that runs an attempt, by request id and attempt. `poisons` has
        the requests that kill schedule, by id."""
        self._stage = stage
        self._owners = owners
        self._poisons = {} if poisons is None else poisons
        self._early: list[m.ScheduleInbox] = []
        self.loop: ScheduleStage | None = None
        """None until `Start`."""

    def wake(self) -> None:
        try:
            if self.loop is None:
                facts = _wait_for_start(self._stage, self._early)
                assert facts is not None
                self.loop = ScheduleStage(self._stage, facts)
                poison(self.loop, self._poisons)
                self.loop.loop(self._early)
            else:
                self.loop.loop([])
        except TurnOver:
            pass
        if self.loop is not None:
            incarnation = self._stage.launch.incarnation
            for request in self.loop._scheduler.requests.values():
                owner = self._owners.setdefault((request.request_id, request.attempt), incarnation)
                assert owner == incarnation, "two schedulers run the same attempt"

    @property
    def has_work(self) -> bool:
        return self._stage.was_refused or (self.loop is not None and self.loop._has_released)

    def check(self) -> None:
        """Assert every invariant of the scheduler."""
        if self.loop is not None:
            self.loop._scheduler.check()

    def check_empty(self, num_deaths: dict[str, int]) -> None:
        """`num_deaths` are those of the whole run, by stage."""
        assert self.loop is not None
        scheduler = self.loop._scheduler
        scheduler.check()
        assert not scheduler.in_flight
        assert not any(request.open_sequences for request in scheduler.requests.values())
        assert not scheduler.requests, "a finished request was not forgotten"
        load = scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_swapped, load.num_blocks_held) == (0, 0, 0, 0)
        assert load.num_swap_blocks_free == load.num_swap_blocks_total
        table = scheduler._request_table
        assert not table._rejections, "a refusal was not forgotten"
        # A gateway that has died sends no `Closed` after its `Abort`.
        assert not table._tombstones or "gateway" in num_deaths, "an abort was not forgotten"
        assert not scheduler.lifecycle.quarantine.is_active
        assert not scheduler.output_buffer.pooled.pending
        for replica, openings in enumerate(self.loop._reports.openings):
            assert not openings and scheduler.output_buffer.pending(replica) is None


class DetokenizeProcess:
    """The real loop of detokenize."""

    def __init__(
        self, stage: ModelStage, vocabulary: Vocabulary, poisons: dict[int, Poison], failed: Container[int]
    ) -> None:
        """`poisons` are the requests that kill it, by id; those that have `failed` before it started never come."""
        self._stage = stage
        self._detokenize = DetokenizeStage(stage, vocabulary)
        poison_detokenize(stage, self._detokenize._output_processor, poisons, failed)

    def wake(self) -> None:
        self._detokenize.turn()

    @property
    def has_work(self) -> bool:
        return self._stage.was_refused

    def check_empty(self) -> None:
        processor = self._detokenize._output_processor
        assert (len(processor), processor.num_unsent) == (0, 0)
        assert not self._detokenize._pending


class ExecuteProcess:
    """The loop of execute around the executor that stores ids. Blocks in swap space outlive the process."""

    def __init__(
        self,
        stage: ModelStage,
        facts: m.ExecuteFacts,
        swap: "np.ndarray[Any, Any] | None",
        poisons: dict[int, Poison],
    ) -> None:
        self._stage = stage
        self._poisons = poisons
        self._requests: dict[int, int] = {}
        """By row."""
        self.executor = FakeExecutor(
            facts.num_blocks,
            facts.block_size,
            stage.arrays.take,
            partial(stage.arrays.put, readers=(SCHEDULE,)),
            facts.num_swap_blocks,
        )
        if swap is not None:
            self.executor.kv[facts.num_blocks :] = swap

    @property
    def swap(self) -> "np.ndarray[Any, Any]":
        """The blocks in swap space."""
        return self.executor.kv[self.executor.num_blocks :]

    def wake(self) -> None:
        for message in self._stage.inbox.wait_all(0):
            match message:
                case m.Step():
                    self._die_of(message)
                    assert self._stage.outbox("schedule").send(self.executor.run(message))
                case m.Release():
                    self._stage.arrays.released(message)
                case m.PeerRestarted():
                    self.executor.rows.clear()
                    self._stage.reconnected(message)
        self._stage.release()

    def _die_of(self, step: m.Step) -> None:
        """Raise Poisoned if the step computes a request that kills."""
        self._requests |= {add.row: add.request_id for add in step.adds}
        if not self._poisons:
            return
        rows = self._stage.arrays.take(step.rows, np.int32).tolist()
        deadly = [one for one in {self._requests[row] for row in rows} if one in self._poisons]
        if due := [one for one in deadly if self._poisons[one].point == "execute"]:
            raise Poisoned(due)

    @property
    def has_work(self) -> bool:
        return False

    def check_empty(self) -> None:
        """Rows stay until the next step drops them."""


class IngestProcess:
    """What stages/ingest/stage.py does with messages, for prompts of ids, each of which takes a while in a thread."""

    def __init__(self, stage: ModelStage, poisons: dict[int, Poison]) -> None:
        self._stage = stage
        self._poisons = poisons
        self._waiting = SubmitQueue(stage.launch.crash_counts)
        self._crumbs = [Breadcrumb(stage.black_box, 1 + thread) for thread in range(MAX_THREADS)]
        self._encoding: dict[Key, tuple[m.Submit, Breadcrumb]] = {}
        self._has_started = False

    def wake(self) -> None:
        for message in self._stage.inbox.wait_all(0):
            match message:
                case m.Submit():
                    self._waiting.push((message.request_id, message.attempt), message)
                case m.Abort(request_id, attempt):
                    submit = self._waiting.remove((request_id, attempt)) or self._end((request_id, attempt))
                    if submit is not None:
                        self._reject(submit)
                case m.Release():
                    self._stage.arrays.released(message)
                case m.PeerRestarted():
                    stage, _, replica = message.peer.name.partition(".")
                    if stage == "gateway":
                        for key in [one for one in self._waiting if self._waiting[one].gateway == int(replica)]:
                            self._waiting.remove(key)
                        for key in [key for key, (one, _) in self._encoding.items() if one.gateway == int(replica)]:
                            self._end(key)
                    self._stage.reconnected(message)
                case m.Start():
                    self._has_started = True
        while self._may_begin and self._stage.replay_context.randbits(2):
            key, submit = self._waiting.pop() if self._waiting.may_pop else self._waiting.pop_suspect()
            crumb = self._crumbs.pop()
            crumb.at(*key)
            self._encoding[key] = submit, crumb
        for key in list(self._encoding):
            if self._stage.replay_context.randbits(1):
                poison = self._poisons.get(key[0])
                if poison is not None and poison.point == "ingest":
                    raise Poisoned([key[0]])
                submit = self._end(key)
                assert submit is not None
                self._admit(submit)
        self._stage.release()

    def _end(self, key: Key) -> m.Submit | None:
        """The thread that works on a prompt is free again."""
        if key not in self._encoding:
            return None
        submit, crumb = self._encoding.pop(key)
        self._waiting.done(key)
        crumb.clear()
        self._crumbs.append(crumb)
        return submit

    @property
    def _may_begin(self) -> bool:
        may_pop = self._waiting.may_pop or (self._waiting.may_pop_suspect and not self._encoding)
        return self._has_started and bool(self._crumbs) and may_pop

    @property
    def has_work(self) -> bool:
        return self._may_begin or bool(self._encoding)

    def _reject(self, submit: m.Submit) -> None:
        failure = m.Failure(499, "the request was aborted", code="aborted")
        rejected = m.Rejected(submit.request_id, submit.attempt, failure)
        assert self._stage.outbox("gateway", submit.gateway).send(rejected)

    def _admit(self, submit: m.Submit) -> None:
        put, options = self._stage.arrays.put, submit.options
        assert isinstance(submit.prompt, m.IdsPrompt) and isinstance(submit.prompt.ids, bytes)
        ids = np.frombuffer(submit.prompt.ids, np.int32)
        array = put(ids, readers=(f"gateway.{submit.gateway}", SCHEDULE))
        accepted = m.Accepted(submit.request_id, submit.attempt, array, None, None, 0.0, 0.0)
        assert self._stage.outbox("gateway", submit.gateway).send(accepted)
        finishes = bytearray()
        outputs: list[Any] = []
        for packed in submit.outputs:
            assert isinstance(packed, bytes)
            output = np.frombuffer(packed, np.int32)
            has_stopped = len(output) > 0 and int(output[-1]) in options.stop_token_ids
            finishes.append(m.Finish.STOP if has_stopped else m.Finish.NONE)
            outputs.append(put(output, readers=(SCHEDULE,)))
        admit = m.Admit(
            request_id=submit.request_id,
            attempt=submit.attempt,
            gateway=submit.gateway,
            arrival_s=submit.arrival_s,
            prompt_ids=array,
            options=raw(options),
            outputs=outputs,
            finishes=bytes(finishes),
            gateway_incarnation=submit.gateway_incarnation,
        )
        assert self._stage.outbox("schedule").send(admit)

    def check_empty(self) -> None:
        assert not self._waiting and not self._encoding


class GatewayProcess:
    """The real request table, results and recovery of a gateway, around them a ledger in place of clients."""

    def __init__(self, stage: ModelStage, ledger: Ledger) -> None:
        self._stage = stage
        self.ledger = ledger
        self.table = RequestTable(stage, ChatFormats())
        sender = self.table.sender
        sender._wake_soon = sender._wake_ingests  # type: ignore[method-assign] # there is no loop
        self._results = ResultHandler(stage, self.table)
        self.resetter = PrefixCacheResetter(stage)
        self._recovery = Recovery(stage, self.table, RequestAborter(stage, self.table), self.resetter)
        self.has_started = False
        self.unanswered_resets: set[int] = set()

    def wake(self) -> None:
        inbox = self._stage.inbox
        while (message := inbox.receive()) is not None:
            match message:
                case m.Deltas():
                    self.ledger.check(message, inbox.last_sender)
                    self._results.handle(message)
                case m.Accepted() | m.Rejected():
                    self._results.handle(message)
                case m.PrefixCacheReset():
                    self.resetter.handle_reply(message)
                    self.unanswered_resets.discard(message.nonce)
                case m.PeerRestarted() | m.FailRequests():
                    self._recovery.handle(message)
                case m.Rescaled():
                    self._stage.rescaled(message)
                    self.table.rescaled()
                    self._stage.reconnected(message)
                case m.Start():
                    self.has_started = True
        self.table.sender.flush()
        self._stage.release()
        self._results.publish()
        self.ledger.read(self.table)

    @property
    def has_work(self) -> bool:
        return self._stage.was_refused

    def check_empty(self) -> None:
        table = self.table
        assert not self.unanswered_resets, "a reset of the prefix cache has no answer"
        assert table.num_open == 0 and not table.sender.is_full
        assert (table.admission.num_sequences, table.admission.num_tokens) == (0, 0)


Process = ScheduleProcess | DetokenizeProcess | ExecuteProcess | IngestProcess | GatewayProcess
"""The state of one process, which its death loses."""

UNIONS: dict[str, Any] = {
    "gateway": m.GatewayInbox,
    "ingest": m.IngestInbox,
    "schedule": m.ScheduleInbox,
    "execute": m.ExecuteInbox,
    "detokenize": m.DetokenizeInbox,
}
