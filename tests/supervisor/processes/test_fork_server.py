"""The fork server: what a forked process has and lacks, and when a process is started with exec instead."""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.messages.wire_version import wire_version
from pipeline.runtime.process import descriptors
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor.processes import fork_server as fork_server_module
from pipeline.supervisor.processes.fork_server import MAX_STARTS, ForkedProcess, ForkServer
from pipeline.supervisor.processes.process import ChildProcess
from pipeline.supervisor.restart.sleep import EXECUTOR_MODULES

PATIENCE_S = 60.0
STAGE = """
import ctypes, gc, json, os, random, signal, sys, threading
from pathlib import Path

import shared_code

def run(launch):
    signal_of_parent = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal_of_parent))  # PR_GET_PDEATHSIG
    found = {
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "death signal": signal_of_parent.value,
        "descriptors": sorted(os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()),
        "stdin": os.readlink("/proc/self/fd/0"),
        "title": Path("/proc/self/cmdline").read_bytes().split(b"\\0")[0].decode(),
        "threads": sorted(one.name for one in threading.enumerate()),
        "omp": os.environ["OMP_NUM_THREADS"],
        "openblas": os.environ["OPENBLAS_NUM_THREADS"],
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": [one for one in range(1, 32) if signal.getsignal(one) == signal.SIG_IGN],
        "collects": gc.isenabled(),
        "imported": [
            name for name in ("torch", "zmq", "ahead", "pipeline.stages.execute.loop") if name in sys.modules
        ],
        "code": shared_code.VERSION,
        "random": random.random(),
    }
    os.write(launch.segments[0].fd, json.dumps(found).encode() + b"\\n")
    os.read(launch.segments[1].fd, 1)
"""
"""Writes what it has, and runs until a pipe ends."""


class Bench:
    """Starts processes of a stage that says what it has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "written_stage.py").write_text(STAGE)
        self.install("1")
        self.out, self._write = os.pipe()
        self._end_read, self.end_write = os.pipe()
        self._death_read, self._death_write = os.pipe()
        self.children: list[ChildProcess] = []

    def install(self, version: str) -> None:
        """Write code that a sitecustomize, too, has imported: as the package's own."""
        (self.folder / "shared_code.py").write_text(f"VERSION = {version!r}\n")

    def start(
        self, fork_server: ForkServer | None, stage: str = "schedule", num_fds: int = 0, wire_version: str = ""
    ) -> ChildProcess:
        more = [m.Segment(f"more-{i}", self._end_read, 0, True) for i in range(num_fds)]
        launch = m.Launch(
            stage=stage,
            replica=0,
            rank=0,
            incarnation=1,
            entry="written_stage",
            settings=Settings(),
            model_dir="",
            address=f"ipc://@pipeline/{os.getpid()}/written",
            peers=[m.PeerInbox(SUPERVISOR, f"ipc://@pipeline/{os.getpid()}/none", 1)],
            segments=[m.Segment("out", self._write, 0, True), m.Segment("end", self._end_read, 0, True), *more],
            death_fd=self._death_read,
            wire_version=wire_version,
        )
        child = ChildProcess(launch, 3, fork_server=fork_server)
        self.children.append(child)
        return child

    def found(self) -> dict[str, object]:
        """What the process that started last has."""
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(self.out, 65536)
        return msgspec.json.decode(data, type=dict[str, object])

    def close(self) -> None:
        for child in self.children:
            child.close()
        for fd in (self.out, self._write, self._end_read, self.end_write, self._death_read, self._death_write):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    one = Bench(tmp_path)
    yield one
    one.close()


@pytest.fixture
def fork_server(bench: Bench) -> Iterator[ForkServer]:
    one = ForkServer(logging.getLogger("test"))
    yield one
    one.close()


def is_forked(child: ChildProcess) -> bool:
    return isinstance(child._process, ForkedProcess)


def test_a_forked_process_has_what_one_started_with_exec_has(bench: Bench, fork_server: ForkServer) -> None:
    child = bench.start(fork_server)
    forked = bench.found()
    assert is_forked(child) and not is_forked(bench.start(None))
    executed = bench.found()
    assert forked["parent"] == os.getpid() and forked["group"] == child.pid
    assert forked["death signal"] == signal.SIGKILL and forked["title"] == "pipeline: schedule.0"
    for found in (forked, executed):
        del found["group"], found["random"]
        found["descriptors"] = sorted(str(one).partition(":")[0] for one in found["descriptors"])  # type: ignore[attr-defined]
    assert forked == executed


@pytest.mark.parametrize(("stage", "num_threads"), [("schedule", "1"), ("execute", "3"), ("prepare", "3")])
def test_a_forked_process_has_the_threads_of_its_stage(
    bench: Bench, fork_server: ForkServer, stage: str, num_threads: str
) -> None:
    bench.start(fork_server, stage)
    found = bench.found()
    assert (found["omp"], found["openblas"]) == (num_threads, "1")


def test_forked_processes_draw_different_random_numbers(bench: Bench, fork_server: ForkServer) -> None:
    drawn = set()
    for _ in range(3):
        bench.start(fork_server)
        drawn.add(bench.found()["random"])
    assert len(drawn) == 3


def test_a_forked_process_runs_where_the_supervisor_may_run_now(bench: Bench, fork_server: ForkServer) -> None:
    cores = os.sched_getaffinity(0)
    bench.start(fork_server)
    assert bench.found()["cores"] == sorted(cores)
    one = max(cores)
    os.sched_setaffinity(0, {one})
    try:
        bench.start(fork_server)
        assert bench.found()["cores"] == [one]
    finally:
        os.sched_setaffinity(0, cores)


def test_more_descriptors_than_a_message_takes_reach_it(bench: Bench, fork_server: ForkServer) -> None:
    child = bench.start(fork_server, num_fds=500)
    descriptors_found = bench.found()["descriptors"]
    assert is_forked(child) and isinstance(descriptors_found, list) and len(descriptors_found) > 500


def test_exit_codes_and_signals_are_known(bench: Bench, fork_server: ForkServer) -> None:
    ended, killed = bench.start(fork_server), bench.start(fork_server)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(PATIENCE_S) and killed.exit_code == -signal.SIGKILL
    assert ended.exit_code is None and not ended.wait(0.0)
    os.close(bench.end_write)
    bench.end_write = -1
    assert ended.wait(PATIENCE_S) and ended.exit_code == 0


def test_processes_live_on_when_the_fork_server_is_killed_and_others_can_be_forked(
    bench: Bench, fork_server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    child = bench.start(fork_server)
    bench.found()
    before = fork_server.pid
    os.kill(before, signal.SIGKILL)
    deadline_s = time.monotonic() + PATIENCE_S
    while fork_server.pid == before:
        assert time.monotonic() < deadline_s
        fork_server.turn()
    assert "killed by signal 9" in caplog.text
    another = bench.start(fork_server)
    assert bench.found()["parent"] == os.getpid()
    assert is_forked(another) and another.is_alive and child.is_alive


def test_a_process_starts_with_exec_if_the_fork_server_was_just_killed(bench: Bench, fork_server: ForkServer) -> None:
    os.kill(fork_server.pid, signal.SIGKILL)
    child = bench.start(fork_server)
    assert bench.found()["parent"] == os.getpid()
    assert not is_forked(child)


def test_a_process_starts_with_exec_if_the_fork_server_is_stopped(
    bench: Bench, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "ANSWER_S", 0.2)
    bench.start(fork_server)
    bench.found()
    pid = fork_server.pid
    os.kill(pid, signal.SIGSTOP)
    child = bench.start(fork_server)
    assert bench.found()["parent"] == os.getpid() and not is_forked(child)
    assert not psutil.pid_exists(pid), "it would answer later"


def test_a_fork_server_that_dies_again_and_again_is_given_up(
    fork_server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while fork_server.pid:
        assert time.monotonic() < deadline_s
        os.kill(fork_server.pid, signal.SIGKILL)
        fork_server.turn()
    assert caplog.text.count("starting another one") == MAX_STARTS
    assert fork_server.fork({}, []) is None


def test_a_process_has_the_code_that_is_installed_when_it_starts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade: the fork server has imported the code before."""
    (bench.folder / "sitecustomize.py").write_text("import shared_code")
    with_old_code = ForkServer(logging.getLogger("test"))
    try:
        first = bench.start(with_old_code)
        assert bench.found()["code"] == "1"
        pid = with_old_code.pid
        bench.install("2, which is longer")
        second = bench.start(with_old_code, wire_version=wire_version())
        assert bench.found()["code"] == "2, which is longer"
        assert is_forked(first) and is_forked(second) and with_old_code.pid not in (pid, 0)
    finally:
        with_old_code.close()


def test_a_fork_server_with_threads_forks_nothing(bench: Bench) -> None:
    """A library that the user's environment loads may start them; they would be missing in the processes."""
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\n"
    (bench.folder / "sitecustomize.py").write_text(threads)
    fork_server = ForkServer(logging.getLogger("test"))
    try:
        child = bench.start(fork_server)
        assert not is_forked(child) and bench.found()["parent"] == os.getpid()
    finally:
        fork_server.close()


def test_without_subreapers_processes_start_with_exec(
    bench: Bench, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "PR_SET_CHILD_SUBREAPER", 1 << 20)  # unknown
    child = bench.start(fork_server)
    assert bench.found()["parent"] == os.getpid()
    assert not is_forked(child) and not fork_server.pid


def test_it_ends_with_the_supervisor(fork_server: ForkServer) -> None:
    """Its socket closes, however the supervisor ends."""
    process = psutil.Process(fork_server.pid)
    fork_server._connection.shutdown(socket.SHUT_RDWR)
    assert process.wait(PATIENCE_S) == 0


def test_this_process_adopts_others_only_while_one_is_forked(bench: Bench, fork_server: ForkServer) -> None:
    bench.start(fork_server)
    is_subreaper = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(is_subreaper), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    assert is_subreaper.value == 0


def test_every_descriptor_of_a_launch_is_renumbered() -> None:
    """A new field with a descriptor must be listed in descriptors.py."""
    names = {name for name in m.Launch.__struct_fields__ if name.endswith("_fd")}
    assert names == set(descriptors.FIELDS)
    assert {name for name in m.Ring.__struct_fields__ if name.endswith("_fd")} == set(descriptors.OF_A_RING)
    assert {name for name in m.BlackBox.__struct_fields__ if name.endswith("_fd")} == set(descriptors.OF_A_BLACK_BOX)


def test_a_forked_process_can_be_waited_for_with_a_timeout(bench: Bench, fork_server: ForkServer) -> None:
    process = bench.start(fork_server)._process
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)  # of one that has ended, whose number another may have


def test_a_forked_process_has_modules_that_were_imported_ahead(bench: Bench, fork_server: ForkServer) -> None:
    (bench.folder / "ahead.py").write_text("NAME = 'ahead'\n")
    bench.start(fork_server)
    assert "ahead" not in bench.found()["imported"]  # type: ignore[operator]
    for _ in range(2):
        fork_server.preload(["ahead", "there_is_no_such_module"])
        bench.start(fork_server)
        assert "ahead" in bench.found()["imported"]  # type: ignore[operator]
    assert all(is_forked(one) for one in bench.children)


def test_other_code_of_a_module_imported_ahead_starts_the_fork_server_again(
    bench: Bench, fork_server: ForkServer
) -> None:
    (bench.folder / "ahead.py").write_text("NAME = 'ahead'\n")
    fork_server.preload(["ahead"])
    bench.start(fork_server, wire_version=wire_version())
    assert "ahead" in bench.found()["imported"]  # type: ignore[operator]
    before = fork_server.pid
    (bench.folder / "ahead.py").write_text("NAME = 'other code'\n")
    bench.start(fork_server, wire_version=wire_version())
    assert "ahead" not in bench.found()["imported"] and fork_server.pid != before  # type: ignore[operator]


def test_modules_that_an_executor_needs_start_no_thread(bench: Bench, fork_server: ForkServer) -> None:
    fork_server.preload(EXECUTOR_MODULES)
    assert is_forked(bench.start(fork_server))
    assert bench.found()["imported"] == ["zmq", "pipeline.stages.execute.loop"]
