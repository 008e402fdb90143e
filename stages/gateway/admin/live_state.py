"""GET /pipeline: the stages, the KV cache and the latest requests, for the live view of the web page.

Nothing is collected between two requests: counts come from the supervisor, as for /metrics, and requests from this
gateway's own table. With API keys, a client sees the requests of its own key only. Ids are those of log lines, which
give no access to a request or its response.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from pipeline.metrics.request_timings import HOPS, RequestTimings, stamps
from pipeline.metrics.stats import (
    ExecuteCounts,
    GatewayCounts,
    IngestCounts,
    OwnCounts,
    ScheduleCounts,
    ServerStats,
    StageStats,
)
from pipeline.runtime import messages as m
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
from pipeline.stages.gateway.open_requests.table import RequestTable

MAX_OPEN, MAX_FINISHED = 64, 64
"""Sequences in a reply."""
MAX_SCANNED = 1024
"""Entries of the table that are looked at for these."""

C = TypeVar("C", bound=OwnCounts)


class StageState(msgspec.Struct):
    name: str
    state: Annotated[str, Meta(description="starting, ready, late, recovering, joining, leaving, stopping or dead")]
    num_queued: Annotated[int, Meta(description="Items that wait in the stage.")]
    num_active: Annotated[
        int,
        Meta(
            description="Open prompts of a gateway, prompts in ingest, running sequences of schedule, rows of execute, "
            "open sequences of detokenize."
        ),
    ]
    num_received: Annotated[int, Meta(description="Messages since the start.")]
    cpu_s: Annotated[float, Meta(description="CPU time since the start.")]
    rss_bytes: int
    idle_s: Annotated[
        float | None,
        Meta(description="Time without work since the start; null for gateways and ingest, which serve many at once."),
    ]


class LiveCounters(msgspec.Struct):
    """Since the start."""

    prompt_tokens: int
    cached_tokens: Annotated[int, Meta(description="Part of `prompt_tokens` found in the prefix cache.")]
    output_tokens: int
    steps: int
    preemptions: int
    finished: Annotated[int, Meta(description="Sequences that have ended.")]


class RequestState(msgspec.Struct):
    """One sequence of a request."""

    id: Annotated[str, Meta(description="As in log lines and in `timings`.")]
    index: Annotated[int, Meta(description="Of the sequence: a request with n = 2 has two.")]
    hop: Annotated[
        str | None,
        Meta(
            description="Where it is: tokenize, queue (also prefill, until the first token), decode or deliver; null: "
            "it has ended."
        ),
    ]
    received: Annotated[float, Meta(description="Unix time, in seconds.")]
    total_ms: Annotated[float, Meta(description="From its arrival to its end, or to now.")]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hops_ms: Annotated[dict[str, float], Meta(description="Durations of the hops that have ended.")]


class LiveState(msgspec.Struct):
    """GET /pipeline"""

    model: str
    version: str
    state: Annotated[str, Meta(description="starting, serving, draining or stopping")]
    unix_s: Annotated[float, Meta(description="When the counts were collected.")]
    uptime_s: float
    gateway: Annotated[int, Meta(description="The gateway that answers: `requests` are its own.")]
    num_running: int
    num_waiting: int
    num_swapped: int
    max_model_len: int
    block_size: Annotated[int, Meta(description="Tokens in a KV block.")]
    kv_blocks: Annotated[dict[str, int], Meta(description="free, cached and held make up the total")]
    counters: LiveCounters
    stages: Annotated[list[StageState], Meta(description="In the order of the flow.")]
    requests: Annotated[list[RequestState], Meta(description="The newest first: open ones, then ended ones.")]


def state_of(stats: ServerStats, table: RequestTable, scope: str) -> LiveState:
    """The reply to a client of a scope."""
    schedule = _counts(stats, ScheduleCounts)
    gateways = _counts(stats, GatewayCounts)
    return LiveState(
        model=stats.model,
        version=stats.version,
        state=stats.state,
        unix_s=stats.unix_s,
        uptime_s=round(stats.uptime_s, 3),
        gateway=table.replica,
        num_running=sum(one.num_running for one in schedule),
        num_waiting=sum(one.num_waiting for one in schedule),
        num_swapped=sum(one.num_swapped for one in schedule),
        max_model_len=stats.max_model_len,
        block_size=stats.block_size,
        kv_blocks={
            "free": sum(one.num_blocks_free for one in schedule),
            "cached": sum(one.num_blocks_cached for one in schedule),
            "held": sum(one.num_blocks_held for one in schedule),
            "total": sum(one.num_blocks_total for one in schedule),
        },
        counters=LiveCounters(
            prompt_tokens=sum(one.num_prompt_tokens for one in schedule),
            cached_tokens=sum(one.num_cached_tokens for one in schedule),
            output_tokens=sum(one.num_output_tokens for one in schedule),
            steps=sum(one.num_steps for one in schedule),
            preemptions=sum(one.num_preemptions for one in schedule),
            finished=sum(sum(one.num_finished) for one in gateways),
        ),
        stages=[_stage(one) for one in stats.stages if one.name.partition(".")[0] != "supervisor"],
        requests=[*_open_requests(table, scope, time.monotonic()), *_finished_requests(table, scope)],
    )


def _counts(stats: ServerStats, kind: type[C]) -> list[C]:
    found = [stage.counts.own for stage in stats.stages if stage.counts is not None]
    return [own for own in found if isinstance(own, kind)]


def _stage(stats: StageStats) -> StageState:
    counts = stats.counts
    own = None if counts is None else counts.own
    return StageState(
        name=stats.name,
        state=stats.state,
        num_queued=0 if counts is None else counts.num_queued,
        num_active=_num_active(own),
        num_received=0 if counts is None else counts.num_received,
        cpu_s=round(stats.cpu_s, 3),
        rss_bytes=stats.rss_bytes,
        # In the two stages that serve many clients at once, `wait_s` is the time that messages waited.
        idle_s=None if counts is None or isinstance(own, GatewayCounts | IngestCounts) else round(counts.wait_s, 4),
    )


def _num_active(own: OwnCounts | None) -> int:
    match own:
        case None:
            return 0
        case GatewayCounts():
            return own.num_open
        case IngestCounts():
            return own.num_waiting + own.num_encoding
        case ScheduleCounts():
            return own.num_running
        case ExecuteCounts():
            return own.num_rows
    return own.num_sequences


# ------------------------------------------------------------------------------------------------------------ requests


def _open_requests(table: RequestTable, scope: str, now_s: float) -> list[RequestState]:
    found = (
        _open_request(prompt_request, index, sequence, now_s)
        for prompt_request in itertools.islice(table.newest(), MAX_SCANNED)
        if not prompt_request.is_released and prompt_request.request.parsed.scope == scope and prompt_request.generates
        for index, sequence in enumerate(prompt_request.sequences)
    )
    return list(itertools.islice(found, MAX_OPEN))


def _open_request(prompt_request: PromptRequest, index: int, sequence: SequenceOutput, now_s: float) -> RequestState:
    begin_s = prompt_request.request.received_s
    first = sequence.first
    ends = [prompt_request.began_s, prompt_request.done_s]
    if first is not None:
        ends += [first.queued_s, first.started_s, first.first_s]
    if sequence.finish != m.Finish.NONE:
        ends += [sequence.settled_s, sequence.sent_s]
        hop = "deliver"
    elif sequence.num_generated:
        hop = "decode"
    else:
        hop = "tokenize" if prompt_request.prompt_ids is None else "queue"
    return RequestState(
        id=f"{prompt_request.id:x}",
        index=index,
        hop=hop,
        received=prompt_request.submit.arrival_s,
        total_ms=_ms(now_s - begin_s),
        prompt_tokens=0 if prompt_request.prompt_ids is None else len(prompt_request.prompt_ids),
        cached_tokens=0 if first is None else first.num_cached,
        output_tokens=sequence.num_generated,
        hops_ms={} if prompt_request.prompt_ids is None else _durations(stamps(begin_s, *ends)),
    )


def _finished_requests(table: RequestTable, scope: str) -> Iterator[RequestState]:
    found = (_finished_request(times, index) for times in table.recent.newest(scope) for index in _indices(times))
    return itertools.islice(found, MAX_FINISHED)


def _indices(times: RequestTimings) -> range:
    return range(len(times.sequences))


def _finished_request(times: RequestTimings, index: int) -> RequestState:
    sequence = times.sequences[index]
    return RequestState(
        id=f"{sequence.request_id:x}",
        index=sequence.index,
        hop=None,
        received=times.received_unix_s,
        total_ms=_ms(sequence.stamps_s[-1] - sequence.stamps_s[0]),
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.num_cached,
        output_tokens=sequence.num_output,
        hops_ms=_durations(sequence.stamps_s),
    )


def _durations(stamps_s: list[float]) -> dict[str, float]:
    """Hops by name: as many as have ended."""
    return {name: _ms(end - begin) for name, begin, end in zip(HOPS, stamps_s, stamps_s[1:], strict=False)}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
