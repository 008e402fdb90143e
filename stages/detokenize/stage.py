"""Turns settled ids into text, and judges stop strings.

    schedule ──Open, Settled, Refuse──►  detokenize  ──Deltas, Rejected──►  gateway
        ▲                                    │
        └──────────Abort (stop string)───────┘

It never blocks in a send: what a full socket refused waits here, merged, and goes with a later wake.
"""

import gc
import logging
import time
from typing import Any, assert_never

from pipeline.metrics.stats import DetokenizeCounts
from pipeline.runtime import messages as m
from pipeline.runtime.channels import Outbox
from pipeline.runtime.messages import Launch
from pipeline.runtime.stage import Stage
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.text.vocabulary import Vocabulary

IDLE_S = 60.0
"""Longest wait where there is nothing to do."""

RETRY_S = 0.01
"""Longest wait while something could not be sent."""


def run(launch: Launch) -> None:
    """The stage. Returns after `Stop`."""
    stage: Stage[m.DetokenizeInbox]
    with Stage(launch, m.DetokenizeInbox) as stage:
        detokenize = DetokenizeStage(stage, Vocabulary.load(stage.model_dir / "tokenizer.json"))
        stage.ready()
        while not detokenize.stopped:
            detokenize.turn()


class DetokenizeStage:
    """The loop's state: the sequences, and single messages that wait for room in a socket."""

    def __init__(self, stage: Stage[m.DetokenizeInbox], vocabulary: Vocabulary) -> None:
        self._stage = stage
        self._sequences = OutputProcessor(vocabulary)
        self._letters: list[tuple[Outbox[Any], m.Rejected | m.Abort | m.PrefixCacheReset]] = []
        self.stopped = False
        self._num_tokens = 0
        self._settle_s = 0.0
        stage.control_requests.own_counts = self._counts

    def _counts(self) -> DetokenizeCounts:
        unsent = self._sequences.num_unsent
        return DetokenizeCounts(len(self._sequences), unsent, self._num_tokens, self._settle_s)

    def turn(self) -> None:
        """One wake: take everything that is there, then tell each receiver once."""
        waiting = self._letters or self._sequences.unsent()
        messages = self._stage.inbox.wait_all(RETRY_S if waiting else IDLE_S)
        begin_s = time.monotonic()
        for message in messages:
            self._take(message)
        self._tell()
        self._stage.release()
        if self._stage.trace.on:
            self._stage.trace.span("wake", begin_s, time.monotonic(), {"messages": len(messages)})

    def _take(self, message: m.DetokenizeInbox) -> None:
        match message:
            case m.Settled():
                self._settle(message)
            case m.Open():
                outputs = self._stage.arrays.take(message.outputs, "<i4").tolist()
                self._end(self._sequences.open(message, outputs))
            case m.Refuse():
                rejected = m.Rejected(message.request_id, message.attempt, message.failure)
                self._letters.append((self._stage.outbox("gateway", message.gateway), rejected))
            case m.PrefixCacheReset():
                self._letters.append((self._stage.outbox("gateway", message.gateway), message))
            case m.Ping():
                self._stage.supervisor.send(m.Pong(message.nonce, m.PlainLoad(len(self._sequences))))
            case m.Start():
                gc.collect()
                gc.freeze()
            case m.Stop():
                self.stopped = True
            case _:
                assert_never(message)

    def _settle(self, message: m.Settled) -> None:
        begin_s = time.monotonic()
        take = self._stage.arrays.take
        seqs = take(message.seqs, "<u8").tolist()
        ids = take(message.ids, "<i4").tolist()
        finishes = take(message.finishes, "u1").tolist()
        is_watched = self._stage.trace.on or self._stage.log.isEnabledFor(logging.DEBUG)
        traced = self._sequences.requests(seqs) if is_watched else []
        for request_id, finish in zip(traced, finishes, strict=False):
            if finish:
                fields = {"request": f"{request_id:x}", "finish": m.Finish(finish).name.lower()}
                self._stage.log.debug("ended", extra={"fields": fields})
        if message.prompt_seqs:
            self._sequences.record_prompts(message)
        aborts = self._sequences.settle(
            seqs,
            take(message.starts, "<i4").tolist(),
            take(message.counts, "<i4").tolist(),
            ids,
            finishes,
            message.firsts,
            message.settled_s,
            take(message.records, "u1").tobytes() if message.records else b"",
            message.errors,
        )
        end_s = time.monotonic()
        self._num_tokens += len(ids)
        self._settle_s += end_s - begin_s
        if (trace := self._stage.trace).on:
            # A request is followed here where its text begins, and where it ends.
            begun = {first.place for first in message.firsts}
            marked = [one for place, one in enumerate(traced) if place in begun or finishes[place]]
            trace.span("text", begin_s, end_s, {"sequences": len(seqs), "tokens": len(ids)}, marked)
        self._end(aborts)

    def _end(self, aborts: list[m.Abort]) -> None:
        """Have schedule end sequences in whose text a stop string was found."""
        schedule = self._stage.outbox("schedule")
        self._letters += [(schedule, abort) for abort in aborts]

    def _tell(self) -> None:
        for gateway in self._sequences.unsent():
            deltas = self._sequences.deltas(gateway, self._stage.replay_context.monotonic())
            if self._stage.outbox("gateway", gateway).send(deltas):
                self._sequences.sent(gateway)
        self._letters = [(outbox, letter) for outbox, letter in self._letters if not outbox.send(letter)]
