"""Large messages are parsed in a thread, one at a time: the loop serves others meanwhile. The messages of a client stay
in order."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.runtime import messages as m
from pipeline.stages.gateway.zmq import large_messages
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate, parse_generate
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer
from tests.zmq_requests import generate

TEXT = "a" * (LARGE_BYTES + 1)


class Parser:
    """Parses as the gateway does, when it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.num_begun = 0
        self._parse = parse_generate

    def __call__(self, message: ReceivedGenerate, *args: Any) -> Any:
        if len(message.request) > LARGE_BYTES:
            self.num_begun += 1
            assert self.may_go_on.wait(PATIENCE_S)
        return self._parse(message, *args)


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parser]:
    parser = Parser()
    monkeypatch.setattr(large_messages, "parse_generate", parser)
    yield parser
    parser.may_go_on.set()


def length(submit: m.Submit) -> int:
    assert isinstance(submit.prompt, m.TextPrompt)
    return len(submit.prompt.text)


def until_begun(gate: Gate, parser: Parser, num: int) -> None:
    gate.rig.until(lambda _: parser.num_begun >= num)


def test_the_loop_serves_others_while_a_large_message_is_parsed(tmp_path: Path, parser: Parser) -> None:
    with Gate(tmp_path) as gate, RawPeer(gate) as large, RawPeer(gate) as other:
        large.generate(1, TEXT)
        until_begun(gate, parser, 1)
        assert other.is_still_served()
        assert gate.client.get("/live").status_code == 200
        other.generate(1)
        assert length(gate.submit()) == 2
        large.send(p.Abort(1))
        large.send(p.Ping(5))
        assert large.receives_nothing()
        parser.may_go_on.set()
        assert length(gate.submit()) == len(TEXT)
        received = [large.receive() for _ in range(3)]
        assert {type(one) for one in received} == {p.Pong, p.Delta, p.Finished}, received  # it was aborted


def test_the_messages_of_a_client_stay_in_order(tmp_path: Path, parser: Parser) -> None:
    parser.may_go_on.set()
    with Gate(tmp_path) as gate, RawPeer(gate) as client:
        for number in range(6):
            client.generate(number, "Hi" if number % 2 else TEXT, num_credits=1)
        assert [length(gate.submit()) for _ in range(6)] == [len(TEXT), 2] * 3


def test_one_is_parsed_at_a_time_and_those_of_clients_that_left_are_dropped(tmp_path: Path, parser: Parser) -> None:
    with Gate(tmp_path) as gate, RawPeer(gate) as stays:
        with RawPeer(gate) as first, RawPeer(gate) as second:
            first.generate(1, TEXT)
            until_begun(gate, parser, 1)
            second.generate(1, TEXT)
            stays.generate(1, TEXT)
            assert stays.receives_nothing() and parser.num_begun == 1
        time.sleep(0.2)  # the gateway has seen that they left
        parser.may_go_on.set()
        gate.submit()
        assert stays.is_still_served() and parser.num_begun == 2


def test_what_can_t_be_read_ends_the_connection_and_what_is_wrong_fails_alone(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate, RawPeer(gate) as wrong, RawPeer(gate) as broken:
        wrong.send(generate(3, "Hi", credits=1, model=TEXT))
        assert wrong.receive(p.Failed).failure.code == "model_not_found"
        wrong.send(p.Ping(1))
        assert wrong.receive(p.Pong)
        wrong.send(msgspec.msgpack.encode(["generate", TEXT]))
        assert wrong.receive(p.Error) and wrong.is_disconnected()
        broken.send(b"\xc1" * len(TEXT))
        assert broken.receive(p.Error) and broken.is_disconnected()


def test_a_gateway_that_stops_does_not_wait_for_messages_that_wait(tmp_path: Path, parser: Parser) -> None:
    with Gate(tmp_path) as gate, RawPeer(gate) as first, RawPeer(gate) as second:
        first.generate(1, TEXT)
        until_begun(gate, parser, 1)
        second.generate(1, TEXT)
        assert second.receives_nothing()
        gate.do(lambda: time.sleep(0.2) or parser.may_go_on.set())  # when it has begun to stop
    assert parser.num_begun == 1


def test_a_fault_ends_the_connection_and_not_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Gate(tmp_path) as gate, RawPeer(gate) as client, RawPeer(gate) as other:
        monkeypatch.setattr(large_messages, "parse_generate", lambda *_: 1 // 0)
        client.generate(1, TEXT)
        assert client.receive(p.Error).failure.message == "internal server error" and client.is_disconnected()
        assert other.is_still_served()


def test_messages_that_are_parsed_or_wait_fail_when_the_server_does(tmp_path: Path, parser: Parser) -> None:
    with Gate(tmp_path) as gate, RawPeer(gate) as first, RawPeer(gate) as second, RawPeer(gate) as other:
        first.generate(1, TEXT)
        until_begun(gate, parser, 1)
        second.generate(2, TEXT)
        other.send(msgspec.msgpack.encode(["abort", TEXT]))  # asks for nothing
        assert second.receives_nothing()
        gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
        failed = second.receive(p.Failed)
        assert (failed.request_id, failed.failure.code) == (2, "stage_died")
        parser.may_go_on.set()
        failed = first.receive(p.Failed)
        assert (failed.request_id, failed.failure.code) == (1, "stage_died")
