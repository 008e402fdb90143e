"""Output on its way to detokenize: settled ids of running sequences, and the last ids of those that left their row.
Pooled prompts have none there (pooled_replies.py).

Output stays pending until it was sent. If a full socket refuses a message, the next one has its content too.

Sequences keep their ids and token outputs until their request is closed. When a process of detokenize has died, its
successor receives all of them again, in the same way."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime.messages import DraftCounts, Finish, FirstTimes, Settled
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.arrays import NO_ROWS, Ids, Int64s, Put
from pipeline.stages.schedule.output.pooled_replies import PooledReplies
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.steps.decode_run import DecodeRun


class ClosingOutput(msgspec.Struct, frozen=True):
    """What is left to send when a sequence leaves its row or the queue: it has finished, or it was preempted."""

    seq: int
    start: int
    """Output ids before these."""
    ids: Ids
    finish: int
    """`Finish`; NONE if it was preempted."""
    first: FirstTimes | None
    """If `ids` has the first id that was sampled for the sequence."""
    token_outputs: bytes
    """Token outputs of `ids`; empty if the request asks for none."""
    error: str = ""
    drafts: DraftCounts | None = None


class OutputBuffer:
    """Owns how many ids of each row were sent (`RowTracker.sent`), and the closing outputs that were not sent yet, for
    each replica of detokenize."""

    def __init__(self, rows: RowTracker, puts: list[Put], *, is_encoder: bool = False) -> None:
        """The rows of an encoder have no output before their sequences end."""
        self._rows = rows
        self._is_encoder = is_encoder
        self._puts = puts
        """By replica. The list grows."""
        self._closings: list[list[ClosingOutput]] = []
        self._prompts: list[list[tuple[int, int, bytes]]] = []
        """`seq`, number of token outputs before these, and logprobs of a prompt."""
        self._pending_rows: list[tuple[Int64s, Int64s]] = []
        """Rows in the last pending message, and how many of their ids are settled."""
        self.settled_run: DecodeRun | None = None
        """The run whose step was settled last, if that was a step of a run."""
        self.pooled = PooledReplies()
        for _ in puts:
            self.add_replica()

    def add_replica(self) -> None:
        """Detokenize has one more process."""
        self._closings.append([])
        self._prompts.append([])
        self._pending_rows.append((NO_ROWS, NO_ROWS))

    def remove_replica(self) -> None:
        """Detokenize has one process less: the last one, for which nothing waits."""
        self._closings.pop()
        self._prompts.pop()
        self._pending_rows.pop()

    def add_closing(self, sequence: Sequence, num_sent: int, finish: Finish) -> None:
        """Add the ids of a sequence without a row from `num_sent` on, and its finish."""
        if sequence.request.is_pooled:
            if finish != Finish.NONE:  # it was not preempted
                self.pooled.add(sequence, num_sent, finish)
            return
        fresh = sequence.ids[num_sent:]
        if len(fresh) or finish != Finish.NONE:
            start = num_sent - len(sequence.request.prompt)
            first = sequence.first_times if num_sent == sequence.num_resumed_tokens and len(fresh) else None
            token_outputs = sequence.unsent_token_outputs
            sequence.num_token_output_bytes_sent = len(sequence.token_outputs)
            closing = ClosingOutput(
                sequence.seq, start, fresh, finish, first, token_outputs, sequence.error, sequence.draft_counts
            )
            self._closings[sequence.detokenize].append(closing)

    def add_prompt_logprobs(self, sequence: Sequence, start: int, logprobs: bytes) -> None:
        """Add logprobs of a sequence's prompt, `start` of which were added before."""
        sequence.prompt_logprobs += logprobs
        self._prompts[sequence.detokenize].append((sequence.seq, start, logprobs))

    def forget(self, replica: int) -> None:
        """A process of detokenize has died: drop what waits for it. `resend` follows for each of its sequences."""
        self._closings[replica] = []
        self._prompts[replica] = []

    def resend(self, sequence: Sequence) -> None:
        """Make all output of a sequence pending again, from the first id after those that it was given."""
        replica = sequence.detokenize
        if sequence.request.beam_search is not None and not sequence.finish:
            return  # it has no output yet
        sequence.num_token_output_bytes_sent = 0
        if sequence.prompt_logprobs:
            self._prompts[replica].append((sequence.seq, 0, bytes(sequence.prompt_logprobs)))
        if sequence.row >= 0:
            self._rows.sent[sequence.row] = sequence.num_resumed_tokens
            self._rows.detokenize[sequence.row] = replica
        elif sequence.ended_by_text:
            # Detokenize finds the stop string again. A finish would say that the last id is a stop id.
            self.add_closing(sequence, sequence.num_resumed_tokens, Finish.NONE)
            self.add_closing(sequence, len(sequence.ids), Finish.ABORT)
        else:
            self.add_closing(sequence, sequence.num_resumed_tokens, sequence.finish)

    def pending(self, replica: int = 0, now_s: float = 0.0) -> Settled | None:
        """The next message to a replica, or None. `mark_sent` removes its content. `now_s` is by time.monotonic()."""
        rows, put = self._rows, self._puts[replica]
        closings, prompts = self._closings[replica], self._prompts[replica]
        if self._is_encoder and not (closings or prompts):
            return None
        if self.settled_run is not None and (settled := self._of_run(self.settled_run, replica, now_s)) is not None:
            return settled
        fresh = rows.order
        num_tokens, starts = rows.num_tokens[fresh], rows.sent[fresh]
        is_fresh = num_tokens > starts
        if len(self._puts) > 1:
            is_fresh &= rows.detokenize[fresh] == replica
        if np.count_nonzero(is_fresh) < len(is_fresh):
            fresh, num_tokens, starts = fresh[is_fresh], num_tokens[is_fresh], starts[is_fresh]
        self._pending_rows[replica] = fresh, num_tokens
        if len(fresh) == 0 and not closings and not prompts:
            return None
        counts = num_tokens - starts
        if np.count_nonzero(counts == 1) == len(counts):
            ids = rows.ids[fresh, starts]
        else:
            ids = np.concatenate([rows.ids[row, rows.sent[row] : rows.num_tokens[row]] for row in fresh.tolist()])
        # Closing outputs come first: a sequence that was preempted may run again and have newer ids.
        return Settled(
            seqs=put(_joined([p.seq for p in closings], rows.seq[fresh], np.uint64)),
            starts=put(_joined([p.start for p in closings], starts - rows.num_prompt[fresh], np.int32)),
            counts=put(_joined([len(p.ids) for p in closings], counts, np.int32)),
            ids=put(np.concatenate((*(p.ids for p in closings), ids)) if closings else ids),
            finishes=put(_joined([p.finish for p in closings], np.zeros(len(fresh), np.uint8), np.uint8)),
            firsts=self._firsts(closings, fresh, starts),
            settled_s=now_s,
            token_outputs=self._token_outputs(closings, fresh, put),
            prompt_seqs=[seq for seq, _, _ in prompts],
            prompt_starts=[start for _, start, _ in prompts],
            prompt_logprobs=[token_outputs for _, _, token_outputs in prompts],
            errors=[closing.error for closing in closings if closing.finish == Finish.ERROR],
            drafts=self._drafts(closings, fresh),
        )

    def _of_run(self, run: DecodeRun, replica: int, now_s: float) -> Settled | None:
        """The next message after a step of a run, if the ids of that step are all that is pending."""
        rows, index = self._rows, run.index
        if not run.is_valid or len(self._puts) > 1 or self._closings[replica] or self._prompts[replica]:
            return None
        num_tokens, starts = rows.num_tokens[index], rows.sent[index]
        if np.count_nonzero(num_tokens - starts == 1) < run.num_rows:
            return None
        self._pending_rows[replica] = run.order, num_tokens
        starts = (starts - run.num_prompt).astype(np.int32)
        return Settled(run.seqs, starts.tobytes(), run.counts, run.ids, run.finishes, settled_s=now_s)

    def _drafts(self, closings: list[ClosingOutput], fresh: Int64s) -> list[DraftCounts]:
        found = [(index, closing.drafts) for index, closing in enumerate(closings) if closing.drafts is not None]
        has_predictions = self._rows.all_flags & RowFlag.PREDICTION
        for index in np.flatnonzero(self._rows.have(RowFlag.PREDICTION, fresh)).tolist() if has_predictions else ():
            sequence = self._rows.sequences[int(fresh[index])]
            if sequence is not None and (counts := sequence.draft_counts) is not None:
                found.append((len(closings) + index, counts))
        return [msgspec.structs.replace(counts, index=index) for index, counts in found]

    def _token_outputs(self, closings: list[ClosingOutput], fresh: Int64s, put: Put) -> Array:
        """The token outputs of a message's ids, empty if no request asks for them."""
        running = (
            [one.unsent_token_outputs for one in self._recorded(fresh)]
            if self._rows.all_flags & RowFlag.LOGPROBS
            else []
        )
        token_outputs = b"".join([closing.token_outputs for closing in closings] + running)
        return put(np.frombuffer(token_outputs, np.uint8)) if token_outputs else b""

    def _recorded(self, rows: Int64s) -> Iterator[Sequence]:
        """The sequences in these rows whose ids have token outputs."""
        for row in rows[self._rows.token_output_bytes[rows] > 0].tolist():
            if (sequence := self._rows.sequences[row]) is not None:
                yield sequence

    def _firsts(self, closings: list[ClosingOutput], fresh: Int64s, starts: Int64s) -> list[FirstTimes]:
        found = [(index, closing.first) for index, closing in enumerate(closings) if closing.first is not None]
        for index in np.flatnonzero(starts == self._rows.num_resumed_tokens[fresh]).tolist():
            sequence = self._rows.sequences[int(fresh[index])]
            assert sequence is not None
            found.append((len(closings) + index, sequence.first_times))
        return [msgspec.structs.replace(first, index=index) for index, first in found]

    def mark_sent(self, replica: int = 0) -> None:
        """The last pending message to a replica was sent."""
        rows, num_tokens = self._pending_rows[replica]
        self._rows.sent[rows] = num_tokens
        self._closings[replica] = []
        self._prompts[replica] = []
        if self._rows.all_flags & RowFlag.LOGPROBS:
            for sequence in self._recorded(rows):
                sequence.num_token_output_bytes_sent = len(sequence.token_outputs)


def _joined(first: list[int], then: "np.ndarray[Any, Any]", dtype: Any) -> "np.ndarray[Any, Any]":
    """These numbers and an array, as one array of a dtype. Nearly always the list is empty."""
    then = then.astype(dtype, copy=False)
    return np.concatenate((np.array(first, dtype), then)) if first else then
