"""The access log of a gateway: one line for each request at every listener, whatever becomes of it."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.client import protocol as p
from pipeline.config.settings import AccessLogSettings
from pipeline.errors import UserError
from pipeline.http_server.access_log import AccessLog, Entry, _text
from pipeline.runtime import messages as m
from pipeline.runtime.log.log_file import LogWriter
from tests.stages.gateway.gate import COMPLETION, MODEL
from tests.stages.gateway.http.access.test_guard import free_port
from tests.stages.gateway.http.access.test_key_limits import ALICE, KeyedGate, keys_of, table
from tests.stages.gateway.peers import RawPeer
from tests.stages.gateway.test_metrics import counts_of
from tests.zmq_requests import generate

PATIENCE_S = 30.0


@contextmanager
def logged(folder: Path, **gateway: Any) -> Iterator[tuple[KeyedGate, Path]]:
    one = KeyedGate(folder, keys_of(table("alice", ALICE, rpm=3)), **gateway)
    path = folder / "access.log"
    settings = msgspec.structs.replace(one.gate.rig.launch.settings, access_log=AccessLogSettings(file=str(path)))
    one.gate.rig.launch = msgspec.structs.replace(one.gate.rig.launch, settings=settings)
    with one.gate:
        yield one, path


def lines_of(path: Path, num: int) -> list[dict[str, Any]]:
    """The first `num` lines."""
    end = time.monotonic() + PATIENCE_S
    while len(lines := path.read_text().splitlines()) < num:
        assert time.monotonic() < end, lines
        time.sleep(0.01)
    return [json.loads(line) for line in lines]


def test_a_line_has_who_what_tokens_and_times(tmp_path: Path) -> None:
    with logged(tmp_path) as (one, path):
        response = one.post(ALICE)
        submit = one.gate.begin()
        one.gate.delta(submit, "Hello", num_cached=2)
        one.gate.finish(submit, "!")
        found = response.result()
        (line,) = lines_of(path, 1)
        assert line.pop("ts").endswith("Z") and 0 < line.pop("ttft_s") <= line.pop("total_s")
        assert line == {
            "client": "127.0.0.1",
            "key": "alice",
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "request_id": found.json()["id"],
            "model": MODEL,
            "prompt_tokens": 3,
            "cached_tokens": 2,
            "output_tokens": 2,
        }


def test_an_embedding_has_no_output_tokens(tmp_path: Path) -> None:
    with logged(tmp_path) as (one, path):
        response = one.post(ALICE, {"input": "Hi"}, "/v1/embeddings")
        one.gate.delta(one.gate.begin(), "x", token_outputs=np.ones(8, "<f4").tobytes(), finish=m.Finish.LENGTH)
        assert response.result().status_code == 200
        (line,) = lines_of(path, 1)
        assert (line["prompt_tokens"], line["output_tokens"]) == (3, 0)
        usage = one.used("alice")
        assert (usage.num_prompt_tokens, usage.num_output_tokens) == (3, 0)


def test_refused_requests_have_a_line_without_the_key(tmp_path: Path) -> None:
    with logged(tmp_path) as (one, path):
        one.get(ALICE, "/v1/models")
        one.get("sk-wrong-0123456789", "/v1/models?api_key=sk-in-the-query")
        one.post(ALICE, COMPLETION | {"temperature": -1}, **{"X-Request-Id": "mine"}).result()
        one.gate.client.get("/live")
        one.post(ALICE, COMPLETION | {"model": "other"}).result()
        one.post(ALICE, COMPLETION | {"temperature": -1}).result()
        one.post(ALICE).result()
        found = lines_of(path, 7)
        assert [(one.get("key"), one["path"], one["status"], one.get("error")) for one in found] == [
            ("alice", "/v1/models", 200, None),
            (None, "/v1/models", 401, "invalid_api_key"),
            ("alice", "/v1/completions", 400, "invalid_value"),
            (None, "/live", 200, None),
            ("alice", "/v1/completions", 404, "model_not_found"),
            ("alice", "/v1/completions", 400, "invalid_value"),
            ("alice", "/v1/completions", 429, "rate_limit_exceeded"),
        ]
        assert found[2]["request_id"] == "mine"
        assert "sk-" not in path.read_text() and ALICE not in path.read_text()


def test_a_preflight_has_no_line_of_the_key_before_it_on_the_connection(tmp_path: Path) -> None:
    """A proxy may send requests of several users over one connection. A preflight is answered before any key is read;
    it has no scope because aiohttp handles each request in a context of its own."""
    with logged(tmp_path, allowed_origins=("https://a.example",)) as (one, path):
        assert one.get(ALICE, "/v1/models").status_code == 200
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert one.gate.client.options("/v1/models", headers=headers).status_code == 204
        found = lines_of(path, 2)
        assert [(line.get("key"), line["method"], line["status"]) for line in found] == [
            ("alice", "GET", 200),
            (None, "OPTIONS", 204),
        ]


def test_a_client_that_leaves_has_status_499(tmp_path: Path) -> None:
    with logged(tmp_path) as (one, path):
        one.gate.client.headers["Authorization"] = f"Bearer {ALICE}"
        data = json.dumps(COMPLETION | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(one.gate.address) as connection:
            connection.sendall(head.encode() + data)
            submit = one.gate.begin()
            one.gate.delta(submit, "Hello")
            assert b"200 OK" in connection.recv(4096)
        (line,) = lines_of(path, 1)
        assert (line["status"], line["output_tokens"], line["key"]) == (499, 1, "alice")


def test_requests_over_zeromq_have_lines(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with logged(tmp_path, zmq=address) as (one, path):
        with RawPeer(address, hello=False) as peer:
            peer.send(p.Hello(2, 2, "a test", ALICE))
            peer.receive(p.Welcome)
            peer.send(generate(1, "Hi", credits=100, model="other"))
            peer.receive(p.Failed)
            peer.send(generate(2, "Hi", credits=100))
            one.gate.serve()
            while not isinstance(peer.receive(), p.Finished):
                pass
            peer.send(generate(3, "Hi", name="mine", credits=100))
            one.gate.begin()
        found = lines_of(path, 3)
        assert [(one["method"], one["client"], one["key"], one["status"]) for one in found] == [
            ("ZMQ", "127.0.0.1", "alice", 404),
            ("ZMQ", "127.0.0.1", "alice", 200),
            ("ZMQ", "127.0.0.1", "alice", 499),
        ]
        assert (found[1]["prompt_tokens"], found[1]["output_tokens"], found[1]["model"]) == (3, 1, MODEL)
        assert found[2]["request_id"].endswith("mine")


@pytest.mark.parametrize("stream", [False, True])
def test_a_background_response_has_a_line_at_its_end(tmp_path: Path, stream: bool) -> None:
    with logged(tmp_path) as (one, path):
        body = {"model": MODEL, "input": "Hi", "background": True, "stream": stream}
        started = one.post(ALICE, body, "/v1/responses")
        submit = one.gate.begin()
        if not stream:
            started.result()
            (first,) = lines_of(path, 1)
            assert first["status"] == 200 and "output_tokens" not in first
        one.gate.finish(submit, "Hello")
        started.result()
        found = {line["method"]: line for line in lines_of(path, 2)}
        end = found["BACKGROUND"]
        assert (end["status"], end["client"], end["key"]) == (200, "127.0.0.1", "alice")
        assert (end["prompt_tokens"], end["output_tokens"]) == (3, 1)
        assert end["request_id"] == found["POST"]["request_id"] and "output_tokens" not in found["POST"]
        assert one.used("alice").num_output_tokens == 1


def test_what_clients_choose_stays_in_its_line(tmp_path: Path) -> None:
    with logged(tmp_path) as (one, path):
        one.get(ALICE, "/%0a%1b[2J%e2%80%ae" + "x" * 5000)
        (line,) = lines_of(path, 1)
        assert len(line["path"]) <= 200
        assert all(char.isprintable() for char in path.read_text().rstrip("\n"))


class LineList(LogWriter):
    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_text_of_a_client_begins_another_line(form: str) -> None:
    writer = LineList()
    log = AccessLog(writer, form, lambda _: "alice")
    nasty = 'x" \n\r\x1b[31m\u202e\x85\udc80 key=bob'
    log.add("", client="::1", method="GET", path=nasty, status=200, model=nasty, total_s=0.12345)
    (line,) = writer.lines
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    text = line.decode().rstrip("\n")
    assert text.isprintable()
    if form == "json":
        assert json.loads(text)["key"] == "alice" and json.loads(text)["total_s"] == 0.1235
    else:
        assert len(text.split(" ")) == 8, "each part is one word"


def test_text_lines_are_for_people() -> None:
    entry = Entry(client="10.0.0.1", method="POST", path="/v1/completions", status=200, output_tokens=5, total_s=0.5)
    assert _text("T", entry) == "T 10.0.0.1 - POST /v1/completions 200 output_tokens=5 total_s=0.5"


def test_the_metrics_count_lines_that_were_not_written(tmp_path: Path) -> None:
    with logged(tmp_path) as (one, path):
        one.get(ALICE, "/v1/models")
        lines_of(path, 1)
        path.rename(tmp_path / "moved")
        path.mkdir()
        one.get(ALICE, "/v1/models")
        one.gate.rig.until(lambda _: counts_of(one.gate).num_log_lines_dropped == 1)


def test_the_settings_choose_form_and_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All lines are written at the end: in which pieces they come before depends on how fast this machine makes them.
    monkeypatch.setattr("pipeline.runtime.log.log_file.INTERVAL_S", 60.0)
    path = tmp_path / "access.log"
    settings = AccessLogSettings(file=str(path), format="text", max_bytes=64 * 1024, max_files=1)
    log = AccessLog.of(settings, lambda _: "alice")
    assert log is not None
    for i in range(3000):
        log.add("", client="::1", method="GET", path=f"/{i}", status=200, total_s=0.1)
    log.writer.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["access.log", "access.log.1"]
    assert all(30_000 < one.stat().st_size <= 64 * 1024 for one in tmp_path.iterdir())
    assert path.read_text().splitlines()[-1].endswith(" ::1 alice GET /2999 200 total_s=0.1")
    assert AccessLog.of(AccessLogSettings(), lambda _: "") is None


def test_a_file_that_can_t_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    for name, why in (("none/log", f"make the folder {tmp_path}/none first"), (".", "Is a directory")):
        with pytest.raises(UserError, match=rf"access_log\.file: .* can't be written: {why}"):
            AccessLog.of(AccessLogSettings(file=str(tmp_path / name)), lambda _: "")


def test_standard_error_is_a_file_too(capfd: pytest.CaptureFixture[str]) -> None:
    log = AccessLog.of(AccessLogSettings(file="-"), lambda _: "")
    assert log is not None
    log.add("", client="::1", method="GET", path="/", status=200, total_s=0.1)
    log.writer.close()
    assert json.loads(capfd.readouterr().err)["path"] == "/"
