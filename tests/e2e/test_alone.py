"""Real servers whose stages are recorded, stopped in a debugger, run as threads, or measured without a model."""

import fcntl
import http.client
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.__main__ import main
from pipeline.cli.profile.alone.chain import ChainProfile
from pipeline.cli.replay.replaying import replay
from pipeline.config.settings import GatewaySettings, Settings
from pipeline.replay import format as f
from pipeline.replay.compare import compare
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.supervisor.admin.admin_client import Admin, find_servers
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.serve import serve
from tests.e2e.embedded import until
from tests.e2e.server import STAGES, Server
from tests.rig import PATIENCE_S

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    log = logging.getLogger("pipeline")
    before = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.level, log.propagate = before


def complete(url: str, **body: Any) -> Any:
    data = json.dumps({"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8} | body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return reply.read() if body.get("stream") else json.loads(reply.read())


# ----------------------------------------------------------------------------------------------------------- recording


@pytest.fixture(scope="module")
def recordings(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recordings of every stage of a server with the real model, from start to end."""
    folder = tmp_path_factory.mktemp("recordings")
    files = {stage: folder / f"{stage}.rec" for stage in STAGES}
    options = [part for stage, path in files.items() for part in ("--record", f"{stage}={path}")]
    with Server(options=tuple(options)) as server:
        calls: list[dict[str, Any]] = [
            {"stream": True, "temperature": 0.8},
            {"n": 3, "stop": ["the"]},
            {"prompt": [1000] * 1100, "max_tokens": 4},  # its ids go through shared memory
        ]
        threads = [threading.Thread(target=complete, args=(server.url,), kwargs=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        host, port = server.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port))
        connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4000}))
        server.until(lambda health: health["running"] > 0)
        connection.close()  # a client that disconnects
        server.until_idle()
    return files


@pytest.mark.parametrize("stage", STAGES)
def test_the_replay_of_a_real_server_s_stage_is_bit_identical(
    stage: str, recordings: dict[str, Path], tmp_path: Path
) -> None:
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs if stage != "execute" else outs[:1]:  # loading a model twice would test nothing more
        replayed = replay(stage, recordings[stage], out, paced=False, inline=False)
        assert replayed.header.from_start
        comparison = compare(out, recordings[stage])
        assert comparison.are_same, comparison.difference
        assert comparison.num_same == sum(comparison.sent.values()) > 3
    if stage != "execute":
        assert outs[0].read_bytes() == outs[1].read_bytes()


def start_recording(stage: str, path: Path, pid: str) -> "subprocess.Popen[str]":
    """`pipeline record` without a time limit; returns once the stage records."""
    command = [sys.executable, "-m", "pipeline", "record", stage, "--out", str(path), "--pid", pid]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: path.exists() and path.stat().st_size > 0, "the recording to begin")
    return process


def test_a_live_stage_is_recorded_from_the_moment_of_the_command(
    smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(options=("--instant",)) as server:
        complete(server.url)
        pid = str(server.process.pid)
        for stage in STAGES:
            path = tmp_path / f"{stage}.rec"
            process = start_recording(stage, path, pid)
            for _ in range(4):
                complete(server.url)
            process.terminate()
            out, err = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, err
            size = re.search(r": ([\d,]+) bytes of", out)
            assert size and int(size[1].replace(",", "")) == path.stat().st_size > 500
            assert main(["replay", stage, str(path), "--out", str(tmp_path / "a"), "--inline"]) == 0
            assert main(["replay", stage, str(path), "--out", str(tmp_path / "b"), "--inline"]) == 0
            assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
            assert "recorded from the middle" in capsys.readouterr().out
            assert sum(compare(tmp_path / "a", None).sent.values()) > 3
        last = ["record", "schedule", "--out", str(tmp_path / "timed.rec"), "--seconds", "0.2", "--pid", pid]
        assert main(last) == 0, "it ends by itself"
        assert main(["record", "kitchen", "--out", str(tmp_path / "x"), "--pid", pid]) == 1
        assert "no stage 'kitchen'" in capsys.readouterr().err


def test_a_recording_ends_with_the_command_that_started_it(
    smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / f"{end}.rec" for end in ("killed", "ended", "left"))
    with Server(options=("--instant",)) as server:
        pid = str(server.process.pid)
        process = start_recording("schedule", first, pid)
        complete(server.url)
        process.kill()
        process.communicate(timeout=20)
        last = ["record", "schedule", "--out", str(tmp_path / "last.rec"), "--seconds", "0.2", "--pid", pid]
        assert main(last) == 1, "the stage does not know yet that it was killed"
        assert "is already being recorded" in capsys.readouterr().err
        until(lambda: main(last) == 0, "the stage to end it")
        with f.RecordingReader(first) as reader:
            assert len(list(reader)) > 3
            assert reader.end == f.End("its command was not heard from for 6 s")
        process = start_recording("schedule", second, pid)
        complete(server.url)
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode == 0
        with f.RecordingReader(second) as reader:
            assert len(list(reader)) > 3
            assert reader.end == f.End("who began it ended it")
        process = start_recording("schedule", third, pid)
        complete(server.url)
        assert server.stop() == 0
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "the server has ended" in stderr
        with f.RecordingReader(third) as reader:
            assert len(list(reader)) > 3
            assert reader.end == f.End("the stage ended")


# ---------------------------------------------------------------------------------------------------------- foreground


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self._master, slave = pty.openpty()
        self.text = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.slave = slave

    def until(self, pattern: bytes, timeout_s: float = PATIENCE_S) -> "re.Match[bytes]":
        """Read until a pattern matches, and drop everything up to its end."""
        end = time.monotonic() + timeout_s
        while (match := re.search(pattern, self.text)) is None:
            left_s = end - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {self.text.decode(errors='replace')}"
            if select.select([self._master], [], [], left_s)[0]:
                self.text += os.read(self._master, 65536)
        self.text = self.text[match.end() :]
        return match

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def has_echo(self) -> bool:
        return bool(termios.tcgetattr(self.slave)[3] & termios.ECHO)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
def terminal(smollm2_dir: Path) -> Iterator[Terminal]:
    stop = "pipeline.stages.schedule.scheduler:Scheduler.admit"
    sets = ("--set", "supervisor.health_timeout_s=0.2", "--set", "supervisor.stop_timeout_s=0.5")
    terminal = Terminal("serve", "--instant", "--port", "0", *sets, "--foreground", "schedule", "--break", stop)
    yield terminal
    terminal.close()


def test_a_stage_in_the_foreground_stops_in_the_debugger_and_continues(terminal: Terminal) -> None:
    url = terminal.until(rb"ready on (http://[\d.:]+)")[1].decode()
    replies: list[Any] = []
    call = threading.Thread(target=lambda: replies.append(complete(url, max_tokens=5)))
    call.start()
    terminal.until(rb"scheduler\.py\(\d+\)admit\(\)\r\n-> .*\r\n.*\(Pdb\) ")
    with pytest.raises(urllib.error.HTTPError) as health:
        urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S)
    states = {stage["name"]: stage["state"] for stage in json.loads(health.value.read())["stages"]}
    assert states["schedule.0"] == "late" and states["ingest.0"] == "ready", "it is late, but alive"
    terminal.type(b"p len(message.finishes) + message.attempt * 5000\n")
    terminal.until(rb"5000\r\n.*\(Pdb\) ")
    terminal.type(b"next\n")
    terminal.until(rb"-> .*\r\n.*\(Pdb\) ")
    terminal.type(b"continue\n")
    call.join(PATIENCE_S)
    assert replies[0]["usage"]["completion_tokens"] == 5
    terminal.type(b"\x03")
    terminal.until(rb"stopped code=0")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_ctrl_c_ends_the_server_while_the_stage_is_stopped(terminal: Terminal) -> None:
    url = terminal.until(rb"ready on (http://[\d.:]+)")[1].decode()
    ended: list[Any] = []

    def call() -> None:
        try:
            complete(url)
        except urllib.error.HTTPError as error:
            ended.append(error.code)

    thread = threading.Thread(target=call)
    thread.start()
    terminal.until(rb"\(Pdb\) ")
    terminal.type(b"\x03")
    terminal.until(rb"gateway\.0 draining")
    time.sleep(0.6)  # signals closer together count as one
    terminal.type(b"\x03")
    terminal.until(rb"stopped code=0")
    assert terminal.process.wait(PATIENCE_S) == 0
    thread.join(PATIENCE_S)
    assert ended == [503]
    assert terminal.has_echo(), "the terminal is restored"


# -------------------------------------------------------------------------------------------------------------- inline


def serve_inline(then: Any) -> int:
    """Serve in this process, and call `then` with the server's URL in a thread; a SIGINT ends the server."""

    def client() -> None:
        try:
            end = time.monotonic() + PATIENCE_S
            while not (names := [name for name in find_servers() if name.startswith(f"{os.getpid()}-")]):
                assert time.monotonic() < end
                time.sleep(0.01)
            with Admin(names[0]) as admin:
                while (stats := admin.stats()).state != "serving":
                    assert time.monotonic() < end
                    time.sleep(0.01)
            then(stats)
        finally:
            if not has_ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    has_ended = threading.Event()
    thread = threading.Thread(target=client)
    thread.start()
    try:
        return serve(Settings(gateway=GatewaySettings(port=0), log_level="warning"), RunMode(inline=True, instant=True))
    finally:
        has_ended.set()
        thread.join(PATIENCE_S)


def test_all_stages_are_threads_of_one_process_and_a_signal_ends_them(smollm2_dir: Path) -> None:
    seen: list[Any] = []

    def then(stats: Any) -> None:
        seen.append((stats, complete(stats.address, max_tokens=5), {thread.name for thread in threading.enumerate()}))

    assert serve_inline(then) == 0
    stats, reply, threads = seen[0]
    assert reply["usage"]["completion_tokens"] == 5
    assert {stage.pid for stage in stats.stages} == {os.getpid()}
    first, *others = stats.stages
    assert first.rss_bytes > 0 and first.has_process
    assert not any(stage.has_process or stage.rss_bytes or stage.cpu_s for stage in others), "no process counts twice"
    assert {f"stage {stage}.0" for stage in STAGES} <= threads
    assert not any(thread.name.startswith("stage ") for thread in threading.enumerate())
    assert not [name for name in find_servers() if name.startswith(f"{os.getpid()}-")]


def test_an_exception_of_an_inline_stage_is_raised_in_the_caller(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a broken scheduler")

    monkeypatch.setattr(Scheduler, "admit", broken)
    codes: list[int] = []

    def then(stats: Any) -> None:
        try:
            complete(stats.address)
        except urllib.error.HTTPError as error:
            codes.append(error.code)

    with pytest.raises(RuntimeError, match="a broken scheduler") as raised:
        serve_inline(then)
    assert raised.traceback[-1].name == "broken", "a debugger finds the stage's own frame"
    assert codes == [500]


# --------------------------------------------------------------------------------------------------------------- chain


def test_the_chain_is_measured_with_replicas(
    smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["profile", "pipeline", "--streams", "4", "--seconds", "0.5", "--warmup", "0.3", "--tokens", "16"]
    argv += ["--set", "gateway.replicas=2", "--set", "detokenize.replicas=2", "--json", str(tmp_path / "r.json")]
    assert main(argv) == 0
    result = msgspec.json.decode((tmp_path / "r.json").read_bytes(), type=ChainProfile)
    names = [one.name for one in result.stages]
    assert names[0] == "supervisor.0" and names[-1] == "clients"
    assert {"gateway.0", "gateway.1", "detokenize.0", "detokenize.1", "ingest.0", "schedule.0", "execute.0"} < set(
        names
    )
    assert result.num_tokens > 100
    assert result.num_tokens <= 4 * result.num_steps
    assert abs(result.num_calls * 16 - result.num_tokens) <= 16 * 4 * 2
    assert sum(one.cpu_s for one in result.stages if one.name.startswith("gateway")) > 0
    assert "tokens/s: 4 streams of 16 tokens" in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(SystemExit):
        main(["profile", "pipeline", "--streams", "x"])
    assert main(["profile", "pipeline", "--set", "gateway.replicas=0"]) == 2
