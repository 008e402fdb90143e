"""OpenTelemetry's traces of finished requests, with gateway.otlp_traces_endpoint.

    chat MODEL            the request, with the names of OpenTelemetry's GenAI conventions
      gateway, tokenize, admit, queue, prefill, decode, detokenize, deliver      its hops, by stage

The times of a request are known when it ends (pipeline/metrics/request_timings.py), so its spans are made then. A
thread of the library sends them; if the collector is slow or gone, spans are dropped.
"""

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from pipeline.http_server.errors import truncated
from pipeline.metrics.request_timings import HOPS, STAGE_OF, RequestTimings, SequenceTimings
from pipeline.runtime import messages as m

if TYPE_CHECKING:
    from pipeline.stages.gateway.open_requests.request import Request

MAX_SEQUENCES = 16
"""Of a request, whose hops have spans."""
NUM_SHARED = HOPS.index("queue")
"""The first hops, which the sequences of a prompt have in common."""
TRACEPARENT = "traceparent"
CLOSE_S = 0.5
LOG_EVERY_S = 60.0
_VALID = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_OPERATIONS = {"generate": "text_completion", "embed": "embeddings"}


def checked_traceparent(header: str | None) -> str:
    """The W3C header of a request; empty if there is none, or if it is not valid: then the trace begins here."""
    return header if header is not None and _VALID.fullmatch(header) else ""


class Traces:
    """Makes and sends the spans of requests. `server` is the process in them, as HOST/STAGE."""

    def __init__(self, endpoint: str, server: str, log: logging.Logger) -> None:
        """To a collector that speaks OTLP over HTTP. The extra `otel` is installed: config/rules.py looks for it."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = OTLPSpanExporter(endpoint)
        resource = Resource.create({"service.name": "pipeline", "service.instance.id": server})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pipeline")
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [_Handler(log)], False

    def close(self) -> None:
        """Send what was not sent yet, if the collector takes it within `CLOSE_S`, and end the threads. Blocks."""
        sending = threading.Thread(target=self._provider.shutdown, name="otel close", daemon=True)
        sending.start()
        sending.join(CLOSE_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # it waits for no further attempt
        sending.join(CLOSE_S)

    def add(self, request: "Request", times: RequestTimings) -> None:
        """The request has ended, and its times are known."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if not times.sequences:
            return
        parsed = request.parsed
        unix_s = time.time() - time.monotonic()

        def ns(stamp_s: float) -> int:
            return int((stamp_s + unix_s) * 1e9)

        context = TraceContextTextMapPropagator().extract({TRACEPARENT: parsed.traceparent})
        span = self._tracer.start_span(
            f"{_operation(request)} {parsed.model}",
            context,
            SpanKind.SERVER,
            attributes=_attributes(request, times),
            start_time=ns(times.sequences[0].stamps_s[0]),
        )
        within = set_span_in_context(span)
        prompts: set[int] = set()
        for sequence in times.sequences[:MAX_SEQUENCES]:
            first = NUM_SHARED if sequence.request_id in prompts else 0
            prompts.add(sequence.request_id)
            for number in range(first, len(HOPS)):
                begin_s, end_s = sequence.stamps_s[number : number + 2]
                attributes: dict[str, str | int] = {
                    "pipeline.stage": STAGE_OF[HOPS[number]],
                    "pipeline.request_id": f"{sequence.request_id:x}",
                    "pipeline.index": sequence.index,
                }
                hop = self._tracer.start_span(HOPS[number], within, attributes=attributes, start_time=ns(begin_s))
                hop.end(ns(end_s))
        span.end(ns(max(one.stamps_s[-1] for one in times.sequences)))


class _Handler(logging.Handler):
    """Writes what the library says of a collector that does not answer into the stage's log, a line a minute."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            fields = {"problem": truncated(record.getMessage())}
            self._log.warning("traces are not sent", extra={"fields": fields})


def _operation(request: "Request") -> str:
    if request.is_chat:
        return "chat"
    return _OPERATIONS.get(request.parsed.task, request.parsed.task)


def _attributes(request: "Request", times: RequestTimings) -> dict[str, Any]:
    """GenAI's conventions, and under `gen_ai.latency` the names that vLLM has."""
    parsed = request.parsed
    found: dict[str, Any] = {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": "pipeline",
        "gen_ai.request.model": parsed.model,
        "gen_ai.response.id": request.id,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.usage.output_tokens": sum(one.num_output for one in times.sequences),
    }
    if parsed.task != "generate":
        return found
    options = parsed.options
    found |= {
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
        "gen_ai.request.choice.count": parsed.n,
        "gen_ai.response.finish_reasons": [m.Finish(one.finish).name.lower() for one in request.choices],
    }
    if options.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = options.max_tokens
    return found | _latencies(times.sequences[0])


def _latencies(first: SequenceTimings) -> dict[str, float]:
    """Of the first sequence, in seconds."""
    hops_s = dict(zip(HOPS, first.hops_s, strict=True))
    return {
        "gen_ai.latency.time_to_first_token": max(0.0, first.first_text_s - first.stamps_s[0]),
        "gen_ai.latency.e2e": first.stamps_s[-1] - first.stamps_s[0],
        "gen_ai.latency.time_in_queue": hops_s["queue"],
        "gen_ai.latency.time_in_model_prefill": hops_s["prefill"],
        "gen_ai.latency.time_in_model_decode": hops_s["decode"],
        "gen_ai.latency.time_in_model_inference": hops_s["prefill"] + hops_s["decode"],
    }
