"""What becomes of a prompt: the gateway learns of it, and schedule gets what is to be computed."""

import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Failure, Submit
from pipeline.runtime.stage import Stage
from pipeline.runtime.topology import SCHEDULE
from pipeline.stages.ingest.media.image_cache import DecodedImage
from pipeline.stages.ingest.media.request_images import media_items
from pipeline.stages.ingest.metrics import IngestMetrics
from pipeline.stages.ingest.prompts.ids import Ids
from pipeline.stages.ingest.prompts.prompt_preparer import PreparedPrompt
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.retry_queue import RetryQueue


class Outcomes:
    """Sends, counts and logs them."""

    def __init__(self, stage: Stage[m.IngestInbox], retry_queue: RetryQueue, metrics: IngestMetrics) -> None:
        self._stage = stage
        self._retry_queue = retry_queue
        self._metrics = metrics
        self._packer = msgspec.msgpack.Encoder()
        self.expects_grammars = False
        """Whether schedule's process knows that grammars come."""

    def expect_grammars(self) -> None:
        """A grammar is going to be checked: the executor can start the process for its masks meanwhile."""
        if not self.expects_grammars:
            self.expects_grammars = True
            self._retry_queue.send(self._stage.outbox("schedule"), m.ExpectGrammars())

    def admit(
        self,
        processor: PromptProcessor,
        submit: Submit,
        began_s: float,
        prepared: PreparedPrompt,
        images: Sequence[DecodedImage] = (),
    ) -> None:
        """Send the ids to the gateway, and to schedule unless max_tokens is 0; both read the same slab. Raises
        RequestRejected."""
        ids, max_tokens = prepared.ids, prepared.max_tokens
        if prepared.options.reasoning_budget is not None:
            self.expect_grammars()
        outputs = [self._stage.arrays.take(packed, np.int32) for packed in submit.outputs]
        finishes = processor.check_outputs(outputs, submit, max_tokens)
        gateway = f"gateway.{submit.gateway}"
        array = self._stage.arrays.put(ids, readers=(gateway, SCHEDULE) if max_tokens else (gateway,))
        done_s = self._stage.replay_context.monotonic()
        self._record_accepted(submit, ids, began_s, done_s)
        # The gateway first: it should have the prompt before any output comes.
        echo = prepared.text, prepared.token_strs, began_s, done_s, prepared.pieces, prepared.tail
        # As schedule gets it: submitted again, the request has only ids, which don't show how the reply begins.
        grammar = prepared.options.compiled_grammar or None
        accepted = m.Accepted(
            submit.request_id,
            submit.attempt,
            array,
            *echo,
            compiled_grammar=grammar,
            segment_start=prepared.options.segment_start,
            reasoning_budget=prepared.options.reasoning_budget,
        )
        # A gateway has nothing to do for a pooled prompt before its result, with which it is woken.
        wakes = max_tokens == 0 or prepared.options.pooling == m.Pooling.NONE
        self._retry_queue.send(self._stage.outbox("gateway", submit.gateway), accepted, wakes=wakes)
        if max_tokens == 0:
            return
        admit = m.Admit(
            request_id=submit.request_id,
            attempt=submit.attempt,
            gateway=submit.gateway,
            arrival_s=submit.arrival_s,
            prompt_ids=array,
            options=msgspec.Raw(self._packer.encode(prepared.options)),
            outputs=[self._stage.arrays.put(output, readers=(SCHEDULE,)) for output in outputs],
            finishes=finishes,
            gateway_incarnation=submit.gateway_incarnation,
            cut_positions=prepared.cut_positions,
            scope_id=submit.scope_id,
            media=media_items(
                images, prepared.image_runs, lambda pixels: self._stage.arrays.put(pixels, readers=(SCHEDULE,))
            ),
        )
        self._retry_queue.send(self._stage.outbox("schedule"), admit)

    def _record_accepted(self, submit: Submit, ids: Ids, began_s: float, done_s: float) -> None:
        """Count, log and trace an accepted prompt."""
        self._metrics.accepted(len(ids), done_s - began_s)
        if (log := self._stage.log).isEnabledFor(logging.DEBUG):
            log.debug("tokenized", extra={"fields": {"request": f"{submit.request_id:x}", "tokens": len(ids)}})
        if (trace := self._stage.trace).on:
            trace.span("tokenize", began_s, done_s, {"tokens": len(ids)}, (submit.request_id,))

    def reject(self, submit: Submit, failure: Failure) -> None:
        """Tell the gateway why the request fails."""
        self._metrics.num_rejected += 1
        rejected = m.Rejected(submit.request_id, submit.attempt, failure)
        self._retry_queue.send(self._stage.outbox("gateway", submit.gateway), rejected)
