"""Turns settled ids into text, and matches stop strings.

    schedule ──Open, Settled, Reject──►  detokenize  ──Deltas, Rejected──►  gateway
        ▲                                    │
        └──────────Abort (stop string)───────┘

It never blocks in a send: messages that a full socket refused are merged and sent in a later turn.
"""

import logging
import time
from typing import Any, assert_never

import numpy as np

from pipeline.metrics.stats import DetokenizeCounts
from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Launch
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process import heap
from pipeline.runtime.stage import Stage
from pipeline.runtime.transport.outbox import Outbox
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.text.vocabulary import Vocabulary

IDLE_S = 60.0
"""Longest wait for a message while the server is idle."""

RETRY_S = 0.01
"""Longest wait while a message waits to be sent."""

NAMES_S = 60.0
"""How long a process that replaces another one names each request while it decodes its output."""


def run(launch: Launch) -> None:
    """Run the stage until `Stop`."""
    stage: Stage[m.DetokenizeInbox]
    with open_stage(launch, m.DetokenizeInbox) as stage:
        generates = ModelConfig.load(stage.model_dir).generates
        vocabulary = Vocabulary.load(stage.model_dir / "tokenizer.json") if generates else Vocabulary.silent()
        detokenize = DetokenizeStage(stage, vocabulary)
        stage.ready()
        while not detokenize.stopped:
            detokenize.turn()


class DetokenizeStage:
    """The loop's state: the sequences, and messages that wait for room in a socket."""

    def __init__(self, stage: Stage[m.DetokenizeInbox], vocabulary: Vocabulary) -> None:
        self._stage = stage
        # What ended the process before may end this one, at once: it gets all output again.
        names_until_s = time.monotonic() + NAMES_S if stage.launch.incarnation > 1 else 0.0
        self._output_processor = OutputProcessor(vocabulary, stage.breadcrumb, names_until_s=names_until_s)
        self._pending: list[tuple[Outbox[Any], m.Rejected | m.Abort | m.PrefixCacheReset]] = []
        self.stopped = False
        self._num_tokens = 0
        self._settle_s = 0.0
        stage.control_requests.own_counts = self._counts

    def _counts(self) -> DetokenizeCounts:
        unsent = self._output_processor.num_unsent
        return DetokenizeCounts(len(self._output_processor), unsent, self._num_tokens, self._settle_s)

    def turn(self) -> None:
        """One wake: handle all messages, then send each receiver one message."""
        waiting = self._pending or self._output_processor.unsent()
        wait_s = 0.0 if self._output_processor.is_resuming else RETRY_S if waiting else IDLE_S
        messages = self._stage.inbox.wait_all(wait_s)
        begin_s = time.monotonic()
        for message in messages:
            self._handle(message)
        self._abort(self._output_processor.resume())
        self._send()
        self._stage.release()
        if self._stage.trace.on:
            self._stage.trace.span("wake", begin_s, time.monotonic(), {"messages": len(messages)})

    def _handle(self, message: m.DetokenizeInbox) -> None:
        match message:
            case m.Settled():
                self._settle(message)
            case m.Open():
                with self._stage.breadcrumb.at(message.request_id, message.attempt):
                    outputs = self._stage.arrays.take(message.outputs, np.int32).copy()
                    self._abort(self._output_processor.open(message, outputs))
            case m.Reject():
                rejected = m.Rejected(message.request_id, message.attempt, message.failure)
                self._pending.append((self._stage.outbox("gateway", message.gateway), rejected))
            case m.PrefixCacheReset():
                self._pending.append((self._stage.outbox("gateway", message.gateway), message))
            case m.PeerRestarted():
                self._peer_restarted(message)
            case m.Ping():
                self._stage.supervisor.send(m.Pong(message.nonce, m.PlainLoad(len(self._output_processor))))
            case m.Start():
                heap.freeze()
            case m.Stop():
                self.stopped = True
            case _:
                assert_never(message)

    def _peer_restarted(self, message: m.PeerRestarted) -> None:
        """Forget what the dead process owned, and what is left to send to it. The gateways submit the requests of a
        dead schedule again. A new gateway owns nothing."""
        stage, _, replica = message.peer.name.partition(".")
        if stage == "schedule":
            self._output_processor.clear()
        else:
            self._output_processor.mark_sent(int(replica))
        lost = self._stage.outbox(stage, int(replica))
        self._pending = [(outbox, pending) for outbox, pending in self._pending if outbox is not lost]
        self._stage.reconnected(message)

    def _settle(self, message: m.Settled) -> None:
        begin_s = time.monotonic()
        arrays = self._stage.arrays
        seqs = arrays.take_list(message.seqs, "Q")
        ids = arrays.take_list(message.ids, "i")
        finishes = arrays.take_list(message.finishes, "B")
        is_traced = self._stage.trace.on or self._stage.log.isEnabledFor(logging.DEBUG)
        request_ids = self._output_processor.request_ids(seqs) if is_traced else []
        for request_id, finish in zip(request_ids, finishes, strict=False):
            if finish:
                fields = {"request": f"{request_id:x}", "finish": m.Finish(finish).name.lower()}
                self._stage.log.debug("ended", extra={"fields": fields})
        if message.prompt_seqs:
            self._output_processor.add_prompt_logprobs(message)
        aborts = self._output_processor.settle(
            seqs,
            arrays.take_list(message.starts, "i"),
            arrays.take_list(message.counts, "i"),
            ids,
            finishes,
            message.firsts,
            message.settled_s,
            arrays.take(message.token_outputs, "u1").tobytes() if message.token_outputs else b"",
            message.errors,
            message.drafts,
        )
        end_s = time.monotonic()
        self._num_tokens += len(ids)
        self._settle_s += end_s - begin_s
        if (trace := self._stage.trace).on:
            # A trace shows a request where its text begins and where it ends.
            begun = {first.index for first in message.firsts}
            marked = [one for index, one in enumerate(request_ids) if index in begun or finishes[index]]
            trace.span("text", begin_s, end_s, {"sequences": len(seqs), "tokens": len(ids)}, marked)
        if aborts:
            self._abort(aborts)

    def _abort(self, aborts: list[m.Abort]) -> None:
        """Ask schedule to end sequences with a stop string."""
        schedule = self._stage.outbox("schedule")
        self._pending += [(schedule, abort) for abort in aborts]

    def _send(self) -> None:
        for gateway in self._output_processor.unsent():
            deltas = self._output_processor.deltas(gateway, self._stage.replay_context.monotonic())
            if self._stage.outbox("gateway", gateway).send(deltas):
                self._output_processor.mark_sent(gateway)
        if self._pending:
            self._pending = [(outbox, message) for outbox, message in self._pending if not outbox.send(message)]
