"""OpenTelemetry's traces, as a collector gets them over HTTP."""

import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from pipeline.config.rules import contradictions
from pipeline.config.settings import GatewaySettings, Settings
from pipeline.metrics.request_timings import HOPS
from pipeline.runtime import messages as m
from pipeline.stages.gateway.otel.traces import checked_traceparent
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Its spans, in the order of their arrival."""

    def __init__(self) -> None:
        self.bodies: queue.Queue[bytes] = queue.Queue()
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.put(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Span]:
        """Those of all requests so far. The gateway has ended, and sent all."""
        found: list[Span] = []
        while not self.bodies.empty():
            parsed = ExportTraceServiceRequest.FromString(self.bodies.get(timeout=PATIENCE_S))
            for resource in parsed.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                assert names["service.name"] == "pipeline"
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_collector_gets_the_spans_of_requests(collector: Collector, tmp_path: Path) -> None:
    with Gate(tmp_path, otlp_traces_endpoint=collector.url) as gate:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        chat = gate.do(gate.client.post, "/v1/chat/completions", json=CHAT | {"temperature": 0.5}, headers=headers)
        gate.delta(gate.begin(), "Hello", num_ids=2, finish=m.Finish.STOP)
        assert chat.result().status_code == 200
        reply_id = chat.result().json()["id"]
        other = gate.complete(COMPLETION | {"n": 2})
        submit = gate.begin()
        for index in range(2):
            gate.delta(submit, "a", index=index, finish=m.Finish.LENGTH)
        assert other.result().status_code == 200
    spans = collector.spans()
    (root,) = [span for span in spans if span.name == f"chat {MODEL}"]
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, SPAN, Span.SPAN_KIND_SERVER)
    found = attributes(root)
    assert found["gen_ai.response.id"] == reply_id and found["gen_ai.operation.name"] == "chat"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 2)
    assert found["gen_ai.request.temperature"] == 0.5
    assert [one.string_value for one in found["gen_ai.response.finish_reasons"].values] == ["stop"]
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    hops = sorted((span for span in spans if span.parent_span_id == root.span_id), key=lambda one: HOPS.index(one.name))
    assert [one.name for one in hops] == list(HOPS)
    assert attributes(hops[4])["pipeline.stage"] == "execute"
    for before, after in pairwise(hops):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert root.start_time_unix_nano == hops[0].start_time_unix_nano
    assert root.end_time_unix_nano == hops[-1].end_time_unix_nano
    (second,) = [span for span in spans if span.name == f"text_completion {MODEL}"]
    assert not second.parent_span_id and second.trace_id.hex() != TRACE
    names = [span.name for span in spans if span.parent_span_id == second.span_id]
    assert (names.count("tokenize"), names.count("decode")) == (1, 2), "two sequences of one prompt"


def test_a_collector_that_is_gone_changes_nothing_for_clients_and_the_gateway_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Gate(tmp_path, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as gate:
        for _ in range(3):
            reply = gate.post(CHAT)
            gate.delta(gate.begin(), "Hello", finish=m.Finish.STOP)
            assert reply.result().status_code == 200
        ends_s = time.monotonic()
    took_s = time.monotonic() - ends_s
    assert took_s < 8, "the library alone tries for ten seconds, and the supervisor would kill the gateway"
    lines = [record for record in caplog.records if record.message == "traces are not sent"]
    assert len(lines) == 1 and lines[0].__dict__["fields"]["problem"].startswith("Transient")


@pytest.mark.parametrize("header", [None, "", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01\n"])
def test_a_header_that_is_not_valid_begins_a_trace(header: str | None) -> None:
    assert checked_traceparent(header) == ""


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "grpc://collector:4317", "http://", "http://a:b/", "/v1/traces"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    settings = Settings(gateway=GatewaySettings(otlp_traces_endpoint=endpoint))
    (problem,) = [one for one in contradictions(settings) if "otlp" in one]
    assert problem.startswith(f'gateway.otlp_traces_endpoint: "{endpoint}" is not') and "4318/v1/traces" in problem
