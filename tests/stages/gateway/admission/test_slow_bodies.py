"""The deadline of a request with a slow body runs from its arrival, not from the end of its body."""

import json
import socket

from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, Gate, read_until

BODY = json.dumps(CHAT | {"timeout_s": 2.0}).encode()


def test_the_first_arrival_times_out_first_even_if_its_body_is_last(gate: Gate) -> None:
    with socket.create_connection(gate.address, timeout=PATIENCE_S) as slow:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        slow.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode())
        read_until(slow, b"100 Continue\r\n\r\n")
        gate.post(BODY)
        fast = gate.begin()
        slow.sendall(BODY)
        first = gate.begin()
        ended = [gate.rig.receive("schedule", m.Abort).request_id for _ in range(2)]
        assert ended == [first.request_id, fast.request_id]
        for submit in (fast, first):
            gate.finish(submit, finish=m.Finish.ABORT)
        read_until(slow, b'"code":"timeout"')
