"""Ingest: checks a request, applies the chat template, tokenizes, and hands the ids on.

    gateway ──Submit──► waiting ──short──────────────────► Accepted to the gateway, Admit to schedule
                           │                     ▲                or Rejected to the gateway
                           └─long──► a thread ───┘

Requests wait in a queue that is fair to the API keys (pipeline/runtime/queues/fair_queue.py). The loop works on them
for `SLICE_S`, then reads the inbox again, so that an Abort finds its request still waiting. Threads encode long texts
(encoder_threads.py), one of each key at a time: short requests overtake them, and the executor keeps its cores. A
separate process checks grammars (grammar_checker.py) while their requests wait.
"""

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import assert_never

import msgspec
import uvloop
from tokenizers import Tokenizer

from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Failure, Launch, Submit
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import read_file
from pipeline.runtime.process import heap
from pipeline.runtime.queues.work_pool import share_interpreter
from pipeline.runtime.stage import Stage
from pipeline.runtime.transport.async_inbox import AsyncInbox
from pipeline.stages.ingest import grammar_checker, loop_texts, reply_grammar
from pipeline.stages.ingest.encoder_threads import EncoderThreads
from pipeline.stages.ingest.grammar_checker import GrammarChecker
from pipeline.stages.ingest.media.image_cache import DecodedImage
from pipeline.stages.ingest.media.request_images import RequestImages
from pipeline.stages.ingest.metrics import IngestMetrics
from pipeline.stages.ingest.outcomes import Outcomes
from pipeline.stages.ingest.prompts import prompt_preparer, prompt_processor
from pipeline.stages.ingest.prompts.ids import Ids, given_ids
from pipeline.stages.ingest.prompts.prompt_cost import cost_bytes
from pipeline.stages.ingest.prompts.prompt_preparer import PromptPreparer
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.stages.ingest.retry_queue import RetryQueue
from pipeline.stages.ingest.submit_queue import MIN_BYTES, Key, SubmitQueue
from pipeline.stages.ingest.templates.chat_templates import NeedsTime, require_valid
from pipeline.text.formats.chat_formats import ChatFormats, either

LONG_BYTES = loop_texts.LONG_BYTES
"""Prompts of this length or more, as UTF-8, are encoded in a thread; with slow tokenizers, shorter ones too."""

VERY_LONG_BYTES = 100_000
"""Prompts of this length or more have threads of their own: those of shorter ones are free again after 50 ms or so."""

MANY_IDS = 10_000
"""This many ids or more are decoded in a thread."""

NUM_THREADS = 2
"""Threads for long prompts, and as many for very long ones. Each works for another key, so without keys one of each
kind works."""

ID_BYTES = 2
"""What an id costs that is decoded, in bytes of a text that is encoded."""

SLICE_S = 0.01

MAX_TOGETHER = 32
"""Prompts whose ids are sent together at most: they wait for each other for about a millisecond."""


def run(launch: Launch) -> None:
    """Run the stage until `Stop`."""
    share_interpreter()
    heap.unmap_large_blocks()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(launch))


async def _run(launch: Launch) -> None:
    stage: Stage[m.IngestInbox]
    with open_stage(launch, m.IngestInbox) as stage:
        if stage.settings.chat_template:
            require_valid(stage.model_dir, stage.settings.chat_template)
        tokenizer = Tokenizer.from_buffer(read_file(stage.model_dir / "tokenizer.json"))
        prompt_processor.pairs_of(stage.model_dir, tokenizer, stage.settings.limits)  # raises UserError at once
        crumbs = stage.thread_breadcrumbs
        long = EncoderThreads("encode", crumbs[:NUM_THREADS])
        very_long = EncoderThreads("encode-long", crumbs[NUM_THREADS : 2 * NUM_THREADS])
        try:
            async with asyncio.TaskGroup() as tasks:
                ingest = IngestStage(stage, tokenizer, long, very_long, tasks)
                stage.ready()
                await ingest.loop()
        except BaseExceptionGroup as group:
            # The stage ends with the first error, not with the group around it.
            raise group.exceptions[0] from group
        finally:
            long.join()
            very_long.join()


class IngestStage:
    """The loop and its state: waiting requests, texts being encoded, and messages that a full edge refused."""

    def __init__(
        self,
        stage: Stage[m.IngestInbox],
        tokenizer: Tokenizer,
        long: EncoderThreads,
        very_long: EncoderThreads,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._stage = stage
        self._inbox = AsyncInbox(stage.inbox)
        self._tokenizer = tokenizer
        self._long, self._very_long = long, very_long
        self._loop_texts = loop_texts.LoopTexts(stage)
        self._tasks = tasks
        self._preparer: PromptPreparer | None = None
        """From `Start` on."""
        self._waiting = SubmitQueue(stage.launch.crash_counts)
        self._encoding: dict[Key, tuple[Submit, asyncio.Task[None]]] = {}
        title = f"pipeline: {stage.launch.name} grammars"
        self._formats = ChatFormats.load(stage.model_dir, stage.settings.chat)
        self._max_new_tokens = generation_config.load(stage.settings, stage.model_dir).max_new_tokens
        model = ModelConfig.load(stage.model_dir)
        self._has_states = model.has_states
        self._excluded = generation_config.excluded(stage.settings, stage.model_dir).runs(model.eos_ids)
        self._grammar_checker = GrammarChecker(stage.model_dir, stage.launch.settings.limits, title)
        self._images = RequestImages(stage.model_dir, f"pipeline: {stage.launch.name} media")
        self._retry_queue = RetryQueue(lambda: stage.replay_context)
        self._metrics = IngestMetrics(self._images.counts)
        self._outcomes = Outcomes(stage, self._retry_queue, self._metrics)
        stage.control_requests.own_counts = lambda: self._metrics.counts(len(self._waiting), len(self._encoding))
        self._stopping = False
        self._is_turn_due = False
        """`_turn` is scheduled."""
        stage.replay_context.perform("work", lambda *_: self._work())
        stage.replay_context.perform("work alone", lambda *_: self._work_alone())
        for threads in (long, very_long):
            threads.on_done = self._hold_others

    async def loop(self) -> None:
        await self._inbox.handle_all(self._handle_all)
        self._close()

    def _handle_all(self, messages: list[m.IngestInbox]) -> bool:
        """One wake: handle all messages, then work on what waits. Returns whether the loop goes on."""
        begin_s = time.monotonic()
        self._retry_queue.retry()
        for message in messages:
            self._handle(message)
        self._work()
        self._hold_others()
        self._stage.release()
        if self._stage.trace.on:
            self._stage.trace.span("wake", begin_s, time.monotonic(), {"messages": len(messages)})
        return not self._stopping

    @property
    def _has_work(self) -> bool:
        """Whether prompts can be prepared now. Requests that overtake `Start` wait for it."""
        return self._preparer is not None and self._waiting.may_pop

    @property
    def _may_work_alone(self) -> bool:
        """Whether a suspect can be prepared now. In a replay, it is when it was."""
        is_idle = not (self._long.num_running or self._very_long.num_running)
        return self._preparer is not None and self._waiting.may_pop_suspect and is_idle

    def _hold_others(self) -> None:
        """While there are suspects, threads begin nothing else. Call it when that may have changed, and after a turn:
        what still waits has one, then. In a replay they may still be behind what had begun, which is waited for."""
        holds = self._waiting.holds and not self._stage.replay_context.is_replaying
        for threads in (self._long, self._very_long):
            threads.hold(holds)
        if self._has_work or self._may_work_alone:
            self._work_soon()

    def _handle(self, message: m.IngestInbox) -> None:
        match message:
            case m.Submit():
                self._wait((message.request_id, message.attempt), message)
            case m.Abort():
                self._abort(message)
            case m.Release():
                self._stage.arrays.released(message)
            case m.Start(facts):
                self._preparer = prompt_preparer.load(
                    self._stage.model_dir,
                    facts,
                    self._tokenizer,
                    self._stage.settings,
                    self._formats,
                    self._max_new_tokens,
                    excluded=self._excluded,
                    has_states=self._has_states,
                )
                self._images.max_rows = facts.num_encoder_rows
                self._tasks.create_task(self._loop_texts.measure(self._very_long, self._tokenizer))
                heap.freeze()
            case m.PeerRestarted():
                self._peer_restarted(message)
            case m.Ping(nonce):
                self._stage.supervisor.send(m.Pong(nonce, m.PlainLoad(self._num_open())))
            case m.Stop():
                self._stopping = True
            case never:
                assert_never(never)

    def _peer_restarted(self, message: m.PeerRestarted) -> None:
        """Drop the requests of a dead gateway, and what was not sent to the dead process: slabs that it alone had still
        to release are free. The gateways submit the requests of a dead schedule again."""
        stage, _, replica = message.peer.name.partition(".")
        if stage == "gateway":
            lost = int(replica)
            for key in [key for key in self._waiting if self._waiting[key].gateway == lost]:
                self._waiting.remove(key)
            for key in [key for key, (submit, _) in self._encoding.items() if submit.gateway == lost]:
                self._encoding.pop(key)[1].cancel()
                self._waiting.done(key)
        self._outcomes.expects_grammars &= stage != "schedule"
        self._retry_queue.drop(self._stage.outbox(stage, int(replica)))
        self._stage.reconnected(message)

    def _wait(self, key: Key, submit: Submit) -> None:
        """Wait for a turn."""
        if key not in self._waiting:  # else it was submitted twice, as after a restart
            self._waiting.push(key, submit)
            if self._waiting.is_suspect(submit):
                self._hold_others()

    def _work_soon(self) -> None:
        """Work on what waits although no message comes, after other tasks."""
        if not self._is_turn_due and not self._stage.replay_context.is_replaying:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._inbox.run, self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        if self._stopping:
            return
        if self._has_work:
            self._stage.replay_context.event("work")
            self._work()
        elif self._may_work_alone:
            self._stage.replay_context.event("work alone")
            self._work_alone()
        self._hold_others()

    def _work(self) -> None:
        """Prepare prompts for a slice of time, at least one."""
        end = self._stage.replay_context.monotonic() + SLICE_S
        while self._has_work and not self._stopping:
            with self._retry_queue.together():
                for _ in range(MAX_TOGETHER):
                    key, submit = self._waiting.pop()
                    with self._stage.breadcrumb.at(*key):
                        self._begin(key, submit)
                    if self._stage.replay_context.monotonic() > end:
                        return
                    if not self._has_work or self._stopping:
                        break

    def _work_alone(self) -> None:
        """Prepare a suspect."""
        key, submit = self._waiting.pop_suspect()
        with self._stage.breadcrumb.at(*key):
            self._begin(key, submit)
        if key not in self._encoding or submit.options.grammar is not None:
            self._waiting.done(key)  # it is done, or waits for the check of its grammar

    def _begin(self, key: Key, submit: Submit) -> None:
        assert self._preparer is not None
        began_s = self._stage.replay_context.monotonic()
        if (grammar := submit.options.grammar) is not None:
            self._outcomes.expect_grammars()
            self._encoding[key] = submit, self._tasks.create_task(self._begin_checked(key, submit, grammar))
            return
        if submit.images:
            self._encoding[key] = submit, self._tasks.create_task(self._begin_decoded(key, submit, began_s))
            return
        try:
            ids = given_ids(submit.prompt, self._stage.arrays)
            cost = cost_bytes(submit)
            is_long = not self._loop_texts.may_have(cost)
            if ids is not None and (submit.prompt_options.with_text or submit.prompt_options.with_pieces):
                is_long |= len(ids) >= MANY_IDS
            if not is_long:
                with self._loop_texts.timed(cost):
                    prepared = self._preparer.prepare(submit, ids, is_short=True)
                self._outcomes.admit(self._preparer.processor, submit, began_s, prepared)
                return
        except NeedsTime:
            pass  # a short chat with a slow template
        except RequestRejected as rejection:
            self._outcomes.reject(submit, rejection.failure)
            return
        self._encoding[key] = submit, self._tasks.create_task(self._admit_from_thread(key, submit, began_s, ids))

    async def _begin_checked(self, key: Key, submit: Submit, grammar: m.Grammar) -> None:
        """Check the grammar, then wait for another turn, without it."""
        try:
            outcome: str | RequestRejected
            checked = await self._grammar_checker.check(grammar, submit.scope_id)
            most = self._stage.settings.limits.max_grammar_bytes
            breadcrumb = self._stage.breadcrumb
            outcome, calls = reply_grammar.with_calls(submit, grammar, checked, self._formats, most, breadcrumb)
            if calls is not None:
                others = await self._grammar_checker.check(calls, submit.scope_id)
                with self._stage.breadcrumb.at(*key):
                    outcome = either(outcome, others)
        except RequestRejected as rejection:
            outcome = rejection
        # The time that a check takes varies, and with it the outcome: a replay uses the recorded one.
        recorded = await self._stage.replay_context.await_external(
            "checked", submit.request_id, grammar_checker.encode_outcome(outcome)
        )
        outcome = grammar_checker.decode_outcome(recorded)
        self._encoding.pop(key, None)
        if isinstance(outcome, RequestRejected):
            self._outcomes.reject(submit, outcome.failure)
            return
        options = msgspec.structs.replace(submit.options, grammar=None, compiled_grammar=outcome)
        self._wait(key, msgspec.structs.replace(submit, options=options))
        self._work_soon()

    async def _begin_decoded(self, key: Key, submit: Submit, began_s: float) -> None:
        """Decode the images, then prepare the prompt in a thread."""
        outcome = await self._images.outcome(submit, self._stage.replay_context)
        if isinstance(outcome, RequestRejected):
            self._outcomes.reject(submit, outcome.failure)
            self._left(key)
        else:
            ids = given_ids(submit.prompt, self._stage.arrays)
            await self._admit_from_thread(key, submit, began_s, ids, outcome)

    async def _admit_from_thread(
        self, key: Key, submit: Submit, began_s: float, ids: Ids | None = None, images: Sequence[DecodedImage] = ()
    ) -> None:
        assert self._preparer is not None
        cost = MIN_BYTES + cost_bytes(submit) + (0 if ids is None else len(ids) * ID_BYTES)
        threads = self._very_long if cost >= VERY_LONG_BYTES else self._long
        try:
            placed = self._images.in_prompt(submit.prompt, images) if images else None
            work = functools.partial(self._preparer.prepare_in_thread, submit, ids, placed, cost)
            if self._waiting.is_suspect(submit):
                outcome = await threads.run_alone(work)
            else:
                outcome = await threads.run(submit.scope_id, cost, work)
            await self._stage.replay_context.await_external("encoded", submit.request_id)
            with self._stage.breadcrumb.at(*key):
                try:
                    if isinstance(outcome, RequestRejected):
                        raise outcome
                    self._outcomes.admit(self._preparer.processor, submit, began_s, outcome, images)
                except RequestRejected as rejection:
                    self._outcomes.reject(submit, rejection.failure)
        finally:
            self._left(key)

    def _left(self, key: Key) -> None:
        """A request is encoded, or rejected."""
        self._encoding.pop(key, None)
        if self._waiting.holds:
            self._waiting.done(key)
            self._hold_others()
            self._work_soon()

    def _abort(self, abort: m.Abort) -> None:
        """Reject a request that is still here. Schedule handles requests that have left, and single sequences."""
        if abort.index != -1:
            return
        key = abort.request_id, abort.attempt
        submit = self._waiting.remove(key)
        if submit is None and key in self._encoding:
            submit, task = self._encoding.pop(key)
            task.cancel()
            self._waiting.done(key)
        if submit is not None:
            self._outcomes.reject(submit, Failure(499, "the request was aborted", code="aborted"))

    def _num_open(self) -> int:
        arena = self._stage.arrays.arena
        held = arena.num_live if arena is not None else 0
        return len(self._waiting) + len(self._encoding) + self._retry_queue.num_messages + held

    def _close(self) -> None:
        self._long.close()
        self._very_long.close()
        for _, task in self._encoding.values():
            task.cancel()
        self._grammar_checker.close()
        self._images.close()
        self._retry_queue.close()
        self._inbox.close()
