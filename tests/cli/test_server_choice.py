"""Which running server `ps`, `top`, `trace` and `record` choose."""

import argparse
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
import pytest

from pipeline.__main__ import main
from pipeline.cli import server_choice
from pipeline.cli.no_server import no_server
from pipeline.cli.server_choice import choose_server
from pipeline.cli.server_options import add_server_options
from pipeline.cli.watch import ps
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats
from pipeline.supervisor.admin import admin_client
from tests.metrics.test_exposition import server

Run = Callable[[Sequence[ServerStats]], None]


def at(pid: int, address: str, model: str) -> ServerStats:
    return msgspec.structs.replace(server(), pid=pid, server=f"{pid}-ab", address=address, model=model)


SMALL = at(11, "http://127.0.0.1:8000", "small")
LARGE = at(2222, "http://0.0.0.0:8001", "large")
STARTING = at(33, "", "")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Makes these the running servers."""

    def run(servers: Sequence[ServerStats]) -> None:
        known = {one.server: one for one in servers}

        def look(names: Sequence[str]) -> tuple[list[ServerStats], list[str]]:
            return [known[name] for name in names], []

        for module in (server_choice, ps):
            monkeypatch.setattr(module, "find_servers", lambda: list(known))
            monkeypatch.setattr(module, "look", look)

    return run


def choose(*options: str) -> str:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return choose_server(parser.parse_args(options))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--port=8000",), "11-ab"),
        (("--port", "8001"), "2222-ab"),
        (("--url", "http://localhost:8000/v1"), "11-ab"),
        (("--url", "http://192.0.2.1:8001"), "2222-ab"),  # listens on all addresses
        (("--pid=2222",), "2222-ab"),
        (("--server=11",), "11-ab"),
    ],
)
def test_a_server_is_chosen_by_port_address_or_pid(running: Run, options: tuple[str, ...], name: str) -> None:
    running([SMALL, LARGE, STARTING])
    assert choose(*options) == name


@pytest.mark.parametrize(("port", "advice"), [(0, "--port)"), (1, "pid 11")])
def test_a_port_that_is_taken_says_by_which_server_of_ours(
    running: Run, capsys: pytest.CaptureFixture[str], port: int, advice: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        running([msgspec.structs.replace(SMALL, address=f"http://127.0.0.1:{number + 1 - port}"), STARTING])
        assert main(["serve", "--port", str(number)]) == 2
    assert capsys.readouterr().err.rstrip().endswith(advice)


def test_the_only_server_needs_no_option(running: Run) -> None:
    running([LARGE])
    assert choose() == "2222-ab"


def test_several_servers_are_listed_with_model_and_port(running: Run) -> None:
    running([SMALL, LARGE, STARTING])
    with pytest.raises(UserError) as caught:
        choose()
    first, *lines = str(caught.value).splitlines()
    assert first == "3 servers run: choose one with --port, --url or --pid"
    assert lines == [
        "  pid 11       http://127.0.0.1:8000  small",
        "  pid 2222     http://0.0.0.0:8001    large",
        "  pid 33       (starting)             …",
    ]


def test_a_port_of_two_addresses_needs_one_of_them(running: Run) -> None:
    other = at(44, "http://192.0.2.7:8000", "other")
    running([SMALL, other])
    with pytest.raises(UserError, match=r"2 servers have port 8000: choose one with --url or --pid\n  pid 11"):
        choose("--port=8000")
    assert choose("--url=http://192.0.2.7:8000") == "44-ab"


def test_a_missing_server_is_named_with_the_command_that_starts_it(running: Run) -> None:
    running([])
    with pytest.raises(
        UserError, match=r"^no server is running on this machine; start one with `pipeline serve MODEL`"
    ):
        choose()
    running([SMALL])
    with pytest.raises(UserError, match=r"no server at http://127\.0\.0\.1:8007; start one with") as caught:
        choose("--port=8007")
    assert "`pipeline serve MODEL --port 8007`; running are:\n  pid 11 " in str(caught.value)
    with pytest.raises(UserError, match=r"no server at http://127\.0\.0\.2:8000"):
        choose("--url=http://127.0.0.2:8000")
    with pytest.raises(UserError, match="no server has pid 5; `pipeline ps` lists them"):
        choose("--pid=5")


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("http://127.0.0.1:8000", "start one with `pipeline serve MODEL`"),
        ("http://localhost:9000", "start one with `pipeline serve MODEL --port 9000`"),
        ("http://gpu1:9000", "start one there with `pipeline serve MODEL --host gpu1 --port 9000`"),
    ],
)
def test_the_command_has_the_port_if_it_is_not_the_default(url: str, command: str) -> None:
    assert no_server(url, "Connection refused") == f"no server at {url} (Connection refused); {command}"


@pytest.mark.parametrize("command", [["ps"], ["top"], ["trace"], ["record", "ingest", "--out=f"]])
def test_an_invalid_port_is_an_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--port=65536"])
    assert stopped.value.code == 2
    assert "needs a port from 1 to 65535" in capsys.readouterr().err


def test_ps_lists_the_selected_server_only(running: Run, capsys: pytest.CaptureFixture[str]) -> None:
    running([SMALL, LARGE])
    assert main(["ps", "--port=8001"]) == 0
    out = capsys.readouterr().out
    assert "large" in out and "small" not in out
    assert all(line == line.rstrip() for line in out.splitlines())
    assert main(["ps", "--port=9"]) == 1
    start = "start one with `pipeline serve MODEL --port 9`"
    assert f"no server at http://127.0.0.1:9; {start}; running are:\n  pid 11 " in capsys.readouterr().err
    assert main(["ps", "--pid=9"]) == 1
    assert "no server has pid 9; running are:\n  pid 11 " in capsys.readouterr().err
    running([])
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no server is running; start one with `pipeline serve MODEL`\n"


CHAT = at(44, "http://127.0.0.1:8002", "chat")
VECTORS = msgspec.structs.replace(CHAT, server="44-cd", model="vectors")


def test_one_of_several_models_is_chosen_by_its_name(running: Run) -> None:
    running([SMALL, CHAT, VECTORS])
    assert choose("--port=8002", "--model=vectors") == choose("--model=vectors") == "44-cd"
    assert choose("--pid=44", "--model=chat") == "44-ab"
    for options in (("--pid=44",), ("--port=8002",)):
        with pytest.raises(UserError, match="this server has 2 models: choose one with --model"):
            choose(*options)
    with pytest.raises(UserError, match="no server has the model 'small-2'"):
        choose("--model=small-2")


def test_the_only_server_may_have_several_models(running: Run) -> None:
    running([CHAT, VECTORS])
    with pytest.raises(UserError, match="this server has 2 models"):
        choose()
    args = argparse.Namespace(port=None, url=None, pid=None, model=None)
    assert choose_server(args, takes_any_model=True) == "44-ab", "as `pipeline stop` asks: all have its pid"


def test_all_servers_are_asked_at_once_and_those_that_have_ended_cost_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Barrier(3)

    class Silent(admin_client.Admin):
        def stats(self, timeout_s: float = 0.0) -> ServerStats:
            asked.wait(60)  # broken, if they are asked one after the other
            return super().stats(timeout_s)

    monkeypatch.setattr(server_choice, "Admin", Silent)
    names = [f"{os.getpid()}-{uuid.uuid4().hex[:8]}" for _ in range(3)]
    begun_s = time.monotonic()
    assert server_choice.look(names) == ([], [f"server {name} has ended" for name in names])
    assert time.monotonic() - begun_s < admin_client.STAGES_S + admin_client.ANSWER_S
    assert server_choice.look([]) == ([], [])
