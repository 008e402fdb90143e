"""The result of a computed step, and how it is published."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.kernels.sampling.logits_processor_inputs import NO_IDS
from pipeline.kernels.sampling.logprob_inputs import ByteArray
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.runtime.topology import SCHEDULE
from pipeline.runtime.tracing import Args
from pipeline.stages.execute.metrics import ExecuteMetrics
from pipeline.stages.execute.prompt_logprobs import NO_BYTES

_slow = msgspec.msgpack.Decoder(dict[int, float])


class Sampled(NamedTuple):
    """What a step sampled: parallel arrays, one value for each of its entries with `samples` set."""

    rows: IntArray
    generations: "np.ndarray[Any, np.dtype[np.uint32]]"
    ids: IntArray
    finishes: "np.ndarray[Any, np.dtype[np.uint8]]"
    num_rows: int = 0
    """Entries that were computed. Entries that had ended before are not counted, nor are their tokens."""
    num_tokens: int = 0
    num_copies: int = 0
    copy_s: float = 0.0
    """Time of the step's block copies."""
    token_outputs: ByteArray = NO_BYTES
    """The logprobs or the embedding of each of `ids` whose row requests one, concatenated."""
    prompt_logprobs: ByteArray = NO_BYTES
    """`StepResult.prompt_logprobs`"""
    errors: tuple[str, ...] = ()
    """The reason for each finish that is `ERROR`, in order."""
    num_ids: IntArray = NO_IDS
    """If ids were proposed, how many of `ids` each entry has; empty for one each."""
    num_drafts: IntArray = NO_IDS
    """How many ids were proposed for each entry; empty for none."""
    draft_s: float = 0.0
    """Time of the draft model."""
    draft_pass_s: float = 0.0
    """Of one of its passes."""
    elsewhere_s: float = 0.0
    """Time in which other stages of a pipeline have computed the step, less that in which this one waited for them."""
    encode_s: float = 0.0
    """Time of the step's encodes."""


class StepTiming(NamedTuple):
    """Times of one step, by the stage's clock."""

    began_s: float
    ended_s: float
    wait_s: float
    """From the end of the previous step to the start of this one."""


class Publisher:
    """Sends results to the scheduler, updates metrics and writes trace spans."""

    def __init__(
        self,
        stage: "Stage[m.ExecuteInbox]",
        metrics: ExecuteMetrics,
        take_slow_masks: Callable[[], dict[int, float] | None],
        *,
        answers: bool = True,
    ) -> None:
        """Of several ranks, one `answers`. `take_slow_masks` returns those of the last steps, by row, in seconds; None
        if no row has a grammar."""
        self._stage = stage
        self._answers = answers
        self._metrics = metrics
        self._take_slow_masks = take_slow_masks

    def publish(
        self, incarnation: int, step_id: int, sampled: Sampled, times: StepTiming, requests: Sequence[int]
    ) -> None:
        """Publish a step. `requests` are the requests that start with it."""
        if self._answers:
            if sampled.errors:
                self._metrics.failed(sampled.errors, self._stage.replay_context.time())
            self._send(incarnation, step_id, sampled, times)
        self._account(step_id, sampled, times, requests)

    def _send(self, incarnation: int, step_id: int, sampled: Sampled, times: StepTiming) -> None:
        stage = self._stage
        compute_s = max(0.0, times.ended_s - times.began_s + sampled.elsewhere_s)
        put = partial(stage.arrays.put, readers=(SCHEDULE,))
        slow_masks = self._slow_masks(step_id)
        result = m.StepResult(
            incarnation=incarnation,
            step_id=step_id,
            rows=put(sampled.rows),
            generations=put(sampled.generations),
            ids=put(sampled.ids),
            finishes=put(sampled.finishes),
            compute_s=compute_s,
            wait_s=times.wait_s,
            copy_s=sampled.copy_s,
            encode_s=sampled.encode_s,
            token_outputs=put(sampled.token_outputs) if len(sampled.token_outputs) else b"",
            prompt_logprobs=put(sampled.prompt_logprobs) if len(sampled.prompt_logprobs) else b"",
            errors=list(sampled.errors),
            num_ids=put(sampled.num_ids) if len(sampled.num_ids) else b"",
            num_drafts=put(sampled.num_drafts) if len(sampled.num_drafts) else b"",
            draft_s=sampled.draft_s,
            draft_pass_s=sampled.draft_pass_s,
            slow_rows=list(slow_masks),
            slow_s=list(slow_masks.values()),
        )
        sent = stage.outbox("schedule").send(result)
        assert sent, "the scheduler's inbox is full: more steps are in flight than it holds"

    def _slow_masks(self, step_id: int) -> dict[int, float]:
        """The slow masks that this result tells of. The time of another process varies: a replay has the recorded
        ones."""
        if (slow := self._take_slow_masks()) is None:
            return {}
        replay = self._stage.replay_context
        if not (replay.is_recording or replay.is_replaying):
            return slow
        return _slow.decode(replay.observe("slow masks", step_id, msgspec.msgpack.encode(slow)))

    def _account(self, step_id: int, sampled: Sampled, times: StepTiming, requests: Sequence[int]) -> None:
        """Count a step, and trace it."""
        stage = self._stage
        self._metrics.stepped(sampled.num_tokens, times.ended_s - times.began_s, times.wait_s)
        if stage.trace.on:
            args: Args = {
                "step": step_id,
                "rows": sampled.num_rows,
                "tokens": sampled.num_tokens,
                "sampled": len(sampled.rows),
                "wait_ms": round(times.wait_s * 1000, 3),
            }
            if len(sampled.num_drafts):
                accepted = len(sampled.ids) - len(sampled.rows)
                args |= {"drafts": int(sampled.num_drafts.sum()), "accepted": accepted}
            if sampled.num_copies:
                args |= {"copies": sampled.num_copies, "copy_ms": round(sampled.copy_s * 1000, 3)}
            stage.trace.span("step", times.began_s, times.ended_s, args, requests)
