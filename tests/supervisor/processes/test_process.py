"""A stage's process imports its code before the model's folder is known, and runs after that. It is forked by the fork
server, or started with exec."""

import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.processes.inline import InlineChild
from pipeline.supervisor.processes.process import ChildProcess
from pipeline.supervisor.serve import raise_descriptor_limit

PATIENCE_S = 60.0

STAGE = """
import os

def preload(launch):
    os.write(launch.segments[0].fd, b"preloaded,")

def run(launch):
    os.write(launch.segments[0].fd, b"runs with " + launch.model_dir.encode())
"""


class Stage:
    """A stage that writes to a pipe what it does."""

    def __init__(self, folder: Path, code: str = STAGE) -> None:
        self._read, self.write = os.pipe()
        self._death_read, self._death_write = os.pipe()
        (folder / "written_stage.py").write_text(code)
        self.launch = m.Launch(
            stage="schedule",
            replica=0,
            rank=0,
            incarnation=1,
            entry="written_stage",
            settings=Settings(),
            model_dir="",
            address=f"ipc://@pipeline/{os.getpid()}/written",
            peers=[m.PeerInbox(SUPERVISOR, f"ipc://@pipeline/{os.getpid()}/none", 1)],
            segments=[m.Segment("pipe", self.write, 0, True)],
            death_fd=self._death_read,
        )

    def read(self) -> str:
        return os.read(self._read, 1000).decode()

    def read_all(self) -> str:
        """What is left, once the stage has ended."""
        os.close(self.write)
        with open(self._read, closefd=False) as file:
            return file.read()

    def close(self) -> None:
        for fd in (self._read, self._death_read, self._death_write):
            os.close(fd)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Stage]:
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([inherited] if inherited else [])]))
    monkeypatch.syspath_prepend(str(tmp_path))
    one = Stage(tmp_path, getattr(request, "param", STAGE))
    yield one
    one.close()


Start = Callable[..., ChildProcess]
"""Starts a process: takes a launch, and perhaps `waits`."""


@pytest.fixture(params=["forked", "exec"])
def start(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Start]:
    fork_server = ForkServer(logging.getLogger("test")) if request.param == "forked" else None
    yield partial(ChildProcess, num_threads=1, fork_server=fork_server)
    if fork_server is not None:
        fork_server.close()


def test_a_process_that_waits_has_imported_its_code_and_runs_with_the_models_folder(stage: Stage, start: Start) -> None:
    child = start(stage.launch, waits=True)
    try:
        assert stage.read() == "preloaded,"
        assert child.is_alive and not child.has_begun
        child.begin("/models/a")
        assert child.has_begun
        assert child.wait(PATIENCE_S) and child.exit_code == 0
    finally:
        child.close()
    assert stage.read_all() == "runs with /models/a"


def test_a_process_that_does_not_wait_runs_at_once(stage: Stage, start: Start) -> None:
    child = start(stage.launch)
    try:
        assert child.has_begun
        assert child.wait(PATIENCE_S) and child.exit_code == 0
    finally:
        child.close()
    assert stage.read_all() == "preloaded,runs with "


def test_a_process_that_waits_can_be_killed(stage: Stage, start: Start) -> None:
    child = start(stage.launch, waits=True)
    assert stage.read() == "preloaded,"
    child.close()
    assert not child.is_alive
    assert stage.read_all() == ""


def test_a_process_that_ended_while_it_waited_is_reported_by_its_exit_and_not_by_begin(
    stage: Stage, start: Start
) -> None:
    child = start(stage.launch, waits=True)
    try:
        assert stage.read() == "preloaded,"
        child.kill()
        child.begin("/models/a")
        assert child.describe_end() == "was killed by the supervisor (SIGKILL)"
    finally:
        child.close()
    assert stage.read_all() == ""


def test_only_a_kill_by_others_may_be_the_out_of_memory_killer(stage: Stage, start: Start) -> None:
    child = start(stage.launch, waits=True)
    try:
        assert stage.read() == "preloaded,"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(PATIENCE_S)
        child.kill()  # of a process that has ended
        assert child.describe_end() == "was killed by SIGKILL, perhaps because the system ran out of memory"
    finally:
        child.close()
    assert stage.read_all() == ""


CLOSING = """
import os, time

def run(launch):
    os.close(launch.control_fd)
    os.write(launch.segments[0].fd, b"closed")
    time.sleep(60)
"""
SILENT = """
import os, time

def run(launch):
    os.write(launch.segments[0].fd, b"runs")
    time.sleep(60)
"""


@pytest.mark.parametrize("stage", [CLOSING], indirect=True)
def test_a_process_that_has_closed_its_control_socket_is_ending(stage: Stage, start: Start) -> None:
    child = start(stage.launch)
    try:
        assert stage.read() == "closed"
        with pytest.raises(ConnectionError):
            child.send_descriptors(1, [stage.write])
        assert child.is_alive, "its pidfd does not tell yet"
    finally:
        child.close()
    assert stage.read_all() == ""


@pytest.mark.parametrize("stage", [SILENT], indirect=True)
def test_descriptors_wait_for_a_process_that_reads_nothing_until_its_socket_is_full(stage: Stage, start: Start) -> None:
    child = start(stage.launch)
    try:
        assert stage.read() == "runs"
        num_sent = 0
        while num_sent < 10_000 and child.send_descriptors(num_sent, [stage.write] * 4):
            num_sent += 1
        assert 100 <= num_sent < 10_000, "more restarts than a stage that is busy or starting can miss"
    finally:
        child.close()
    assert stage.read_all() == ""


def test_a_thread_waits_too(stage: Stage) -> None:
    child = InlineChild(stage.launch, waits=True)
    assert child.is_alive and not child.has_begun
    child.begin("/models/a")
    assert child.has_begun and child.wait(PATIENCE_S) and child.exit_code == 0
    child.close()
    assert stage.read_all() == "runs with /models/a"


def test_the_supervisor_raises_the_limit_of_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
