"""The gateway's metrics of sequences, from admission to their end. Pure."""

from collections import defaultdict

from pipeline.metrics.histogram import REQUEST_S, TIME_TO_FIRST_TOKEN_S, TOKEN_S, TOKENS, Histogram, N
from pipeline.metrics.stats import GatewayCounts
from pipeline.runtime.messages import Finish
from pipeline.runtime.model.pooler import Task
from pipeline.stages.gateway.admission.admission import Admission


class GatewayMetrics:
    """Each opened sequence is counted again when it ends: by finish reason, or as rejected."""

    def __init__(self) -> None:
        self.num_overloaded = 0
        self.num_overloaded_by_size = 0
        self.num_timed_out = 0
        self.num_preemptions = 0
        self.num_log_lines_dropped = 0
        """Of the access log."""
        self._num_opened = 0
        self._num_rejected = 0
        self._num_finished = [0] * (max(Finish) + 1)
        self.first_s = Histogram(TIME_TO_FIRST_TOKEN_S)
        self.gap_s = Histogram(TOKEN_S)
        self._e2e_s = Histogram(REQUEST_S)
        self._prompt_tokens = Histogram(TOKENS)
        self._output_tokens = Histogram(TOKENS)
        self._per_token_s = Histogram(TOKEN_S)
        self._max_tokens = Histogram(TOKENS)
        self._n = Histogram(N)
        self._longest = Histogram(TOKENS)
        self._pooled: defaultdict[Task, list[int]] = defaultdict(lambda: [0, 0, 0])
        """Requests opened, and inputs and their tokens that ended by stop or length."""

    def opened(self, num_sequences: int, n: int, max_tokens: int | None) -> None:
        """A prompt was opened: `num_sequences` are generated, `n` are returned."""
        self._num_opened += num_sequences
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def rejected(self) -> None:
        self._num_rejected += 1

    def ended(self, finish: int) -> None:
        """A sequence ended other than by stop or length. Its times and lengths are not observed."""
        self._num_finished[finish] += 1

    def finished(self, finish: int, e2e_s: float, decode_s: float, num_output: int) -> None:
        """A sequence ended by stop or length. `num_output` ids were generated; `decode_s` is from the first delta to
        the last."""
        self._num_finished[finish] += 1
        self._e2e_s.observe(e2e_s)
        self._output_tokens.observe(num_output)
        if num_output > 1:
            self._per_token_s.observe(decode_s / (num_output - 1))

    def prompt(self, num_tokens: int, task: Task = "generate") -> None:
        """The length of the prompt of a sequence that has ended by stop or length."""
        self._prompt_tokens.observe(num_tokens)
        if task != "generate":
            counts = self._pooled[task]
            counts[1] += 1
            counts[2] += num_tokens

    def pooled(self, task: Task) -> None:
        """A request of this task, which generates no text, was opened."""
        self._pooled[task][0] += 1

    def longest(self, num_output: int) -> None:
        """All sequences of a prompt have ended; the longest has `num_output` ids."""
        self._longest.observe(num_output)

    def counts(
        self, num_open: int, admission: Admission, num_unread_bytes: int = 0, num_given_up: int = 0
    ) -> GatewayCounts:
        """`num_unread_bytes`: of replies that clients have not taken, besides those of open requests. `num_given_up`:
        replies that clients took too slowly."""
        return GatewayCounts(
            num_open=num_open,
            num_opened=self._num_opened,
            num_finished=self._num_finished[Finish.STOP :],
            num_rejected=self._num_rejected,
            num_overloaded=self.num_overloaded,
            time_to_first_token_s=self.first_s.counts(),
            inter_token_s=self.gap_s.counts(),
            e2e_s=self._e2e_s.counts(),
            prompt_tokens=self._prompt_tokens.counts(),
            output_tokens=self._output_tokens.counts(),
            time_per_output_token_s=self._per_token_s.counts(),
            max_tokens=self._max_tokens.counts(),
            n=self._n.counts(),
            longest_output_tokens=self._longest.counts(),
            num_open_tokens=admission.num_tokens,
            max_open_tokens=admission.max_tokens,
            num_open_sequences=admission.num_sequences,
            max_open_sequences=admission.max_sequences,
            num_timed_out=self.num_timed_out,
            num_open_bytes=admission.num_bytes + num_unread_bytes,
            max_open_bytes=admission.max_bytes,
            num_open_media_bytes=admission.media.num_bytes,
            max_open_media_bytes=admission.media.max_bytes,
            num_preempted=admission.num_preempted,
            num_preemptions=self.num_preemptions,
            num_overloaded_by_size=self.num_overloaded_by_size,
            num_log_lines_dropped=self.num_log_lines_dropped,
            num_given_up=num_given_up,
            pooled={task: list(counts) for task, counts in self._pooled.items()},
        )
