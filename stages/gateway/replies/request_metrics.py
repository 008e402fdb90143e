"""vLLM's `metrics` of a request in its reply, with gateway.per_request_metrics.

queued ──queue_time_ms──► scheduled ──time_to_first_token_ms──► first token ──generation_time_ms──► last token
"""

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from pipeline.stages.gateway.open_requests.request import Request


class SpeculativeDecodingMetrics(msgspec.Struct):
    """What came of the tokens that were proposed for the request; the names are those of vLLM's counters."""

    num_draft_tokens: int
    num_accepted_tokens: int


class RequestMetrics(msgspec.Struct):
    """Null values are not known."""

    time_to_first_token_ms: float | None = None
    """From the start of its computation"""
    generation_time_ms: float | None = None
    """From the first token to the last"""
    queue_time_ms: float | None = None
    mean_itl_ms: float | UnsetType = UNSET
    """Mean time between two tokens; absent if there are no two, as in vLLM"""
    tokens_per_second: float | None = None
    """From the start of its computation to the last token"""
    speculative_decoding: SpeculativeDecodingMetrics | None = None
    """None if nothing was proposed"""


def request_metrics(request: "Request") -> RequestMetrics | None:
    """The metrics of a finished request. None if they are off, or if it has several sequences: the times are those of
    one sequence, as in vLLM."""
    if not request.parsed.with_metrics or len(request.sequences) != 1:
        return None
    (sequence,) = request.sequences
    metrics, first = RequestMetrics(), sequence.first
    if (drafts := sequence.drafts) is not None:
        num_draft_tokens = drafts.num_accepted + drafts.num_rejected
        metrics.speculative_decoding = SpeculativeDecodingMetrics(num_draft_tokens, drafts.num_accepted)
    if first is None or not sequence.settled_s:
        return metrics
    metrics.queue_time_ms = (first.started_s - first.queued_s) * 1000
    metrics.time_to_first_token_ms = (first.first_s - first.started_s) * 1000
    metrics.generation_time_ms = (sequence.settled_s - first.first_s) * 1000
    if sequence.num_generated > 1:
        metrics.mean_itl_ms = metrics.generation_time_ms / (sequence.num_generated - 1)
    if (computed_s := sequence.settled_s - first.started_s) > 0:
        metrics.tokens_per_second = sequence.num_generated / computed_s
    return metrics
