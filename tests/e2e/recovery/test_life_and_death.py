"""How a server starts, stops, and fails."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.e2e.recovery.streams import Stream
from tests.e2e.server import STAGES, Server

ROOT = Path(__file__).resolve().parents[3]
MAX_START_CPU_S = 10.0
"""CPU time of a whole start, of all processes: unlike wall-clock time it does not grow with other load."""

pytestmark = pytest.mark.usefixtures("smollm2_dir")


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_each_stage_is_a_process_with_its_title(server: Server) -> None:

    def titles() -> set[str]:
        return {process.cmdline()[0] for process in server.seen.values()}

    # Two stages start one with the first grammar, which another test of this server may have sent.
    own = {"pipeline: execute masks", "pipeline: ingest.0 grammars"}
    assert titles() - own == {"pipeline: fork server", *(f"pipeline: {name}.0" for name in STAGES)}


def test_no_process_loads_torch(server: Server) -> None:
    """The CPU library computes without it. test_start_imports.py has a server that needs it."""
    with_torch = set()
    for name in STAGES:
        maps = Path(f"/proc/{server.stage(name).pid}/maps").read_text()
        if "libtorch" in maps:
            with_torch.add(name)
    assert with_torch == set()


def test_a_server_leaves_nothing_on_disk(server: Server) -> None:
    for process in [psutil.Process(server.process.pid), *server.seen.values()]:
        written = [file.path for file in process.open_files() if file.mode != "r"]
        assert written == [], f"{process.cmdline()[0]} writes to files"
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
                assert not str(fd.readlink()).startswith("/dev/shm/")
    unix = Path("/proc/net/unix").read_text()
    assert f"@pipeline/{server.process.pid}-" in unix, "its sockets are abstract: no file remains"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_under_load_finishes_streams_and_leaves_no_process(number: signal.Signals) -> None:
    with Server("supervisor.drain_timeout_s=600") as server:
        streams = [Stream(server, max_tokens=60) for _ in range(4)]
        for stream in streams:
            assert stream.has_text.wait(30)
        for process in [psutil.Process(server.process.pid), *server.seen.values()]:
            process.send_signal(number)  # to every process, as a terminal or a service manager does
        server.wait_for_line(r"gateway\.0 draining", 30)
        late = Stream(server)
        for stream in streams:
            stream.join(60)
        assert server.process.wait(60) == 0, "it ends with its streams, before the drain timeout"
        for stream in streams:
            assert stream.error is None
            assert stream.events[-1] == "[DONE]"
            finishes = [
                choice["finish_reason"]
                for event in stream.events[:-1]
                for choice in json.loads(event)["choices"]
                if choice["finish_reason"]
            ]
            assert finishes == ["length"], "a stream that was open when the signal came ends properly"
        late.join(30)
        assert late.status == 503 or isinstance(late.broken, urllib.error.URLError), (
            "no new request is accepted during the drain"
        )
        assert not server.leftovers()
        assert f"@pipeline/{server.process.pid}-" not in Path("/proc/net/unix").read_text()


def test_streams_and_restarts_go_on_when_the_fork_server_is_killed() -> None:
    with Server() as server:
        (fork_server,) = (one for one in server.seen.values() if one.cmdline()[:1] == ["pipeline: fork server"])
        stream = Stream(server, max_tokens=200)
        assert stream.has_text.wait(30)
        fork_server.kill()
        server.wait_for_line("fork server was killed by signal 9; starting another one", 30)
        server.stage("schedule").kill()
        server.wait_for_line(r"schedule\.0 is back", 30)
        stream.join(60)
        assert stream.error is None and stream.events[-1] == "[DONE]"
        supervisor = psutil.Process(server.process.pid)
        children = {one.cmdline()[0] for one in supervisor.children() if one.status() != psutil.STATUS_ZOMBIE}
        assert children == {"pipeline: fork server", *(f"pipeline: {name}.0" for name in STAGES)}
        assert not [one for one in supervisor.children() if one.status() == psutil.STATUS_ZOMBIE]
        server.look()


def test_streams_that_outlast_the_drain_end_with_a_clear_error() -> None:
    with Server("supervisor.drain_timeout_s=0.5") as server:
        stream = Stream(server, max_tokens=6000)
        assert stream.has_text.wait(30)
        assert server.stop() == 0
        stream.join(30)
        assert len(stream.events) < 6000, "the server ended first"
        assert stream.events[-1] == "[DONE]"
        assert stream.error is not None
        assert "shutting down" in stream.error["message"]


def test_a_second_signal_ends_the_drain() -> None:
    with Server("supervisor.drain_timeout_s=600") as server:
        stream = Stream(server, max_tokens=6000)
        assert stream.has_text.wait(30)
        server.process.send_signal(signal.SIGINT)
        server.wait_for_line(r"gateway\.0 draining", 30)
        threading.Event().wait(0.6)  # sooner, it would count as a duplicate of the first
        assert server.stop(signal.SIGINT) == 0, "long before the drain timeout"
        stream.join(30)
        assert not stream.is_alive()
        assert stream.broken is not None or len(stream.events) < 6000, "and before the stream had ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_startup_ends_the_start(number: signal.Signals) -> None:
    with Server("log_level=debug", until_ready=False) as server:
        server.wait_for_line("started stage=execute", 60)
        assert server.stop(number) == 128 + number
        assert "Traceback" not in server.log()
        assert f"stopped by {number.name}" in server.log()


def test_a_stage_that_is_killed_during_the_start_is_started_again() -> None:
    with Server("log_level=debug", until_ready=False) as server:
        line = server.wait_for_line(r"started stage=detokenize\.0 pid=\d+", 60)
        os.kill(int(line.rpartition("=")[2]), signal.SIGKILL)
        server.wait_for_line(r"\.0: was killed by SIGKILL.*; starting the stages again", 30)
        server.wait_for_line("ready on http", 60)
        server.look()
        assert server.stop() == 0


def test_each_stage_that_is_stopped_is_killed_and_requests_go_on() -> None:
    with Server("supervisor.hang_timeout_s=2", "supervisor.health_timeout_s=0.5") as server:
        for name in ("ingest", "schedule", "execute", "detokenize"):
            streams = [Stream(server, max_tokens=300)]
            assert streams[0].has_text.wait(30)
            server.stage(name).suspend()
            streams.append(Stream(server, max_tokens=3))
            server.wait_for_line(rf"{name}\.0 hangs; killing it", 30)
            for stream in streams:
                stream.join(60)
                assert stream.error is None and stream.events[-1] == "[DONE]", name
            server.until(lambda health: health["status"] == "ok")
        server.stage("gateway").suspend()
        waiting = Stream(server, max_tokens=3)  # in its socket, which outlives it, or lost with it
        server.wait_for_line(r"gateway\.0 hangs; killing it", 30)
        waiting.join(60)
        server.until(lambda health: health["status"] == "ok")
        served = Stream(server, max_tokens=3)
        served.join(60)
        assert served.error is None and served.events[-1] == "[DONE]"
        server.look()


SPINS = """
import signal

def spin(*_):
    while True:
        pass

signal.signal(signal.SIGUSR1, spin)
"""
"""A `sitecustomize`: a process that gets the signal loops for ever."""


@pytest.mark.parametrize("name", ["schedule", "execute"])
def test_a_stage_in_an_endless_loop_is_killed_and_streams_go_on(name: str, tmp_path: Path) -> None:
    """The executor later than others, because it may be computing: it uses the CPU in both cases."""
    (tmp_path / "sitecustomize.py").write_text(SPINS)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    limits = ("supervisor.hang_timeout_s=0.5", "supervisor.health_timeout_s=0.5", "supervisor.max_restarts=100")
    with Server(*limits, environ={"PYTHONPATH": os.pathsep.join(paths)}) as server:
        stream = Stream(server, max_tokens=200)
        assert stream.has_text.wait(30)
        server.stage(name).send_signal(signal.SIGUSR1)
        server.wait_for_line(rf"{name}\.0 hangs; killing it", 60)
        stream.join(60)
        assert stream.error is None and stream.events[-1] == "[DONE]"
        assert "in spin" in server.log(), "the stacks show where it was"
        server.until(lambda health: health["status"] == "ok")
        server.look()


def test_a_server_that_was_suspended_for_longer_than_the_hang_timeout_goes_on() -> None:
    """As by a pause of its container. The stages stop first, so pings are on their way, and run again last."""
    with Server("supervisor.hang_timeout_s=5", "supervisor.health_timeout_s=0.5") as server:
        stream = Stream(server, max_tokens=300)
        assert stream.has_text.wait(30)
        pids = {name: server.stage(name).pid for name in STAGES}
        supervisor, stages = psutil.Process(server.process.pid), children_of(server.process.pid)
        for one in stages:
            one.suspend()
        server.wait_for_line(r"detokenize\.0 is late", 30)
        supervisor.suspend()
        time.sleep(6)
        supervisor.resume()
        server.wait_for_line(r"was suspended", 30)
        for one in stages:
            one.resume()
        stream.join(60)
        assert stream.error is None and stream.events[-1] == "[DONE]"
        server.until(lambda health: health["status"] == "ok")
        server.look()
        assert {name: server.stage(name).pid for name in STAGES} == pids
        assert "killing" not in server.log()


def test_a_stage_that_dies_during_the_drain_is_restarted_and_streams_end_well() -> None:
    with Server("supervisor.drain_timeout_s=600") as server:
        stream = Stream(server, max_tokens=150)
        assert stream.has_text.wait(30)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line(r"gateway\.0 draining", 30)
        server.stage("execute").kill()
        stream.join(60)
        assert stream.error is None and stream.events[-1] == "[DONE]"
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("name", ["gateway", "schedule"])
def test_without_restarts_a_killed_stage_is_named_in_the_log_and_to_clients_and_the_server_ends(name: str) -> None:
    with Server("supervisor.max_restarts=0") as server:
        stream = Stream(server)
        assert stream.has_text.wait(30)
        server.stage(name).kill()
        line = server.wait_for_line(f"{name}.0 died", 30)
        assert "SIGKILL" in line and "not restarted: supervisor.max_restarts is 0" in line
        stream.join(30)
        assert not stream.is_alive()
        if name == "gateway":
            assert stream.broken is not None or stream.events[-1] != "[DONE]"
        else:
            assert stream.error is not None
            assert name in stream.error["message"]
        assert server.process.wait(30) == 3
        assert not server.leftovers()


def test_a_stage_that_dies_too_often_ends_the_server() -> None:
    with Server("supervisor.max_restarts=1", options=("--instant",)) as server:
        server.stage("detokenize").kill()
        server.wait_for_line(r"detokenize\.0 is back", 30)
        server.look()
        server.stage("detokenize").kill()
        server.wait_for_line(r"not restarted: it has died 2 times within 60 s \(supervisor\.max_restarts\)", 30)
        assert server.process.wait(30) == 3


def test_when_the_supervisor_is_killed_all_children_are_gone_within_two_seconds() -> None:
    with Server() as server:
        stream = Stream(server)
        assert stream.has_text.wait(30)
        server.process.kill()
        assert not server.leftovers(timeout_s=2.0)
        assert f"@pipeline/{server.process.pid}-" not in Path("/proc/net/unix").read_text()


def test_a_port_in_use_is_reported_before_anything_starts(server: Server) -> None:
    port = server.url.rsplit(":", 1)[1]
    result = subprocess.run(
        [sys.executable, "-m", "pipeline", "serve", "--port", port], capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "gateway.port" in result.stderr
    assert "Traceback" not in result.stderr
    assert "starting" not in result.stderr, "the error precedes the start"


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pipeline", "serve", "--port", "0", "--model", str(tmp_path / "nothing.gguf")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "nothing.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_too_little_kv_memory_is_a_clear_error() -> None:
    with Server("execute.kv_cache_bytes=9000000000000", until_ready=False) as server:
        line = server.wait_for_line("cannot start: execute", 60)
        assert "execute.kv_cache_bytes" in line
        assert server.process.wait(20) == 1


def test_a_missing_gpu_is_an_error_of_one_line() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    with Server("execute.device=cuda", until_ready=False, environ=environ) as server:
        assert server.process.wait(60) == 1
        server.wait_for_line("execute.device is 'cuda', but ", 20)
        assert not any("Traceback" in line for line in server.lines)


def test_it_starts_fast_and_is_quiet_when_idle() -> None:
    with Server() as server:
        processes = [psutil.Process(server.process.pid), *server.seen.values()]
        server.until(lambda health: health["status"] == "ok")

        def cpu_s() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        prepare_s = sum(processes[0].cpu_times()[2:4])  # of the child that has ended
        before, deadline_s = -1.0, time.monotonic() + 20
        while cpu_s() > before:  # the mask process is ready a little later than the server
            assert time.monotonic() < deadline_s, "it does not become idle"
            before = cpu_s()
            threading.Event().wait(0.5)
        took_s = cpu_s() + prepare_s
        assert took_s < MAX_START_CPU_S, "warm; docs/performance.md has the time on a quiet machine"
        shares: list[float] = []
        while not shares or (shares[-1] >= 0.02 and len(shares) < 4):  # a process may end its start late
            before, started = cpu_s(), time.monotonic()
            threading.Event().wait(5.0)  # the measured idle time
            shares.append((cpu_s() - before) / (time.monotonic() - started))
        assert shares[-1] < 0.02, f"an idle server takes {min(shares):.1%} of a core and more, four times in a row"


def test_a_server_of_killed_tests_is_killed_too(tmp_path: Path) -> None:
    script = tmp_path / "tests_that_hang.py"
    script.write_text(
        "import signal\n"
        "from tests.e2e.server import Server\n"
        "with Server('gateway.zmq=off', options=('--instant',)) as server:\n"
        "    print(server.process.pid, *server.seen, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        pids = [int(pid) for pid in tests.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids]
        assert len(processes) > len(STAGES)
        tests.kill()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
