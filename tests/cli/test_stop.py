"""`pipeline stop` ends a server and waits for its end."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from pipeline.__main__ import main
from pipeline.cli.stop import command

PROGRAM = """
import os, signal, sys, time
left = [int(sys.argv[1])]
def one(*_):
    left[0] -= 1
    left[0] > 0 or os._exit(0)
signal.signal(signal.SIGTERM, one)
print(flush=True)
time.sleep(60)
while True:
    time.sleep(60)
"""
"""A server that ends with the n-th SIGTERM."""

Start = Callable[[int], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts what stands for a server, and is found as one until it ends."""
    servers: list[subprocess.Popen[bytes]] = []

    def find() -> list[str]:
        return [f"{one.pid}-ab" for one in servers if one.poll() is None]

    def begin(num_signals: int) -> "subprocess.Popen[bytes]":
        server = subprocess.Popen([sys.executable, "-c", PROGRAM, str(num_signals)], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        servers.append(server)
        return server

    monkeypatch.setattr(command, "find_servers", find)
    monkeypatch.setattr(command, "is_running", lambda name: name in find())
    monkeypatch.setattr(command, "choose_server", lambda args, **_: find()[0])
    monkeypatch.setattr(command, "_is_draining", lambda name: False)
    yield begin
    for server in servers:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def test_it_waits_until_the_server_has_ended(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(1)
    assert main(["stop"]) == 0
    assert server.wait(10) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"pid {server.pid} has ended after ")
    assert err == f"pid {server.pid}: stopping; requests in flight may end first\n"


def test_all_ends_each(start: Start) -> None:
    servers = [start(1), start(1)]
    assert main(["stop", "--all"]) == 0
    assert [server.wait(10) for server in servers] == [0, 0]
    assert main(["stop", "--all"]) == 1


def test_a_server_that_drains_is_reported_and_now_ends_the_drain(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(3)
    assert main(["stop", "--timeout", "0.1"]) == 1
    words = "has not ended within 0.1 s: wait for its requests, or add --now"
    assert capsys.readouterr().err.endswith(f"pipeline stop: error: the server with pid {server.pid} {words}\n")
    assert main(["stop", "--now"]) == 0
    assert server.wait(10) == 0


def test_a_server_that_drains_gets_no_second_signal_unless_now_is_given(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would end the requests for which the server waits."""
    monkeypatch.setattr(command, "_is_draining", lambda name: True)
    server = start(1)
    assert main(["stop", "--timeout", "0.1"]) == 1
    assert server.poll() is None
    assert f"pid {server.pid}: is stopping already; requests in flight may end first\n" in capsys.readouterr().err
    assert main(["stop", "--now"]) == 0
    assert server.wait(10) == 0


def test_all_does_not_wait_for_one_before_the_next(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    servers = [start(2), start(1)]
    assert main(["stop", "--all", "--timeout", "2"]) == 1
    assert servers[1].wait(10) == 0
    assert servers[0].poll() is None
    out, err = capsys.readouterr()
    assert f"pid {servers[1].pid} has ended" in out
    assert f"pid {servers[0].pid} has not ended within 2 s" in err


@pytest.mark.parametrize(
    "words", [["--timeout", "-1"], ["--timeout", "nan"], ["--timeout", "inf"], ["--all", "--port", "1"]]
)
def test_wrong_options_are_refused(start: Start, words: list[str]) -> None:
    server = start(1)
    with pytest.raises(SystemExit) as end:
        main(["stop", *words])
    assert end.value.code == 2
    assert server.poll() is None


def test_a_pid_that_is_no_server_any_more_gets_no_signal(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(1)
    monkeypatch.setattr(command, "is_running", lambda name: False)
    assert main(["stop"]) == 0
    assert server.poll() is None
