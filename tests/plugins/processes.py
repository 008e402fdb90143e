"""A pytest plugin that runs tests in several processes: pytest -p tests.plugins.processes --processes 4

One process imports and collects all tests, which takes longer than most files do, and is then forked. Each of its
processes runs whole files: what a file's tests share is made once, and what all tests share once in each process. A
process that has nothing to do takes the next file, in the order of the collection. If one dies, its test has failed,
and another process runs the rest of its file. One whose test hangs is killed, and the report shows where its threads
were: pytest-timeout raises an exception in the test, which ends nothing if the test or a library swallows it, or if
what runs next waits too.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

STOP_S = 60.0
"""After Ctrl-C, the time for processes to tear down what they have set up."""
FEW = 2
"""With no more processes than that, other tests can run beside the last ones."""
GRACE_S = 60.0
"""From a test's own limit, which is pytest-timeout's to keep, until its process is killed."""

os.environ["PIPELINE_TEST_PROCESSES"] = "1"  # tests/conftest.py and some helpers then compute with one thread


class _Task(NamedTuple):
    """Tests of one file, which one process runs in this order."""

    first: int
    """Index in the session's items."""
    end: int


class _Process:
    """One that runs tests, as the process that has forked it sees it."""

    def __init__(self, session: pytest.Session, number: int, others: list["_Process"]) -> None:
        self.session = session
        self.stacks = _folder(session.config, number).with_suffix(".stacks")
        """A file with where its threads were, if it was killed because it hung."""
        self.stacks.touch(mode=0o600)
        self._connection, theirs = Pipe()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.pid = os.fork()  # a thread that torch starts at its import is idle
        if not self.pid:
            for connection in (self._connection, *(one._connection for one in others)):
                connection.close()
            _main(session, number, theirs, self.stacks)
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self.ends: tuple[Connection, int] = (self._connection, self._pidfd)
        """One of them is readable if `receive` does not wait."""
        self.task: _Task | None = None
        """What it runs. The first test is the one whose last report has not come."""
        self._heard_s = time.monotonic()

    @property
    def item(self) -> pytest.Item | None:
        """The test that it runs."""
        return self.session.items[self.task.first] if self.task and self.task.first < self.task.end else None

    @property
    def deadline_s(self) -> float:
        """When it hangs if it has reported nothing until then, on the monotonic clock."""
        mark = self.item.get_closest_marker("timeout") if self.item else None
        return self._heard_s + max(self.session.config.option.hang_s, mark.args[0] + GRACE_S if mark else 0.0)

    def send(self, task: _Task | None) -> None:
        """Give it something to run, or let it end."""
        self.task = task
        self._heard_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # `receive` is going to tell
            self._connection.send(task)

    def receive(self) -> Any:
        """The next report, None if the process wants a task, or its exit code (an int) if it has ended."""
        self._heard_s = time.monotonic()
        if wait([self._connection], 0 if wait([self._pidfd], 0) else None):
            with contextlib.suppress(EOFError, ConnectionResetError):
                return self._connection.recv()
        self._connection.close()
        os.close(self._pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End one that hangs. Its stacks are in the file then."""
        os.kill(self.pid, signal.SIGUSR1)
        if not wait([self._pidfd], GRACE_S):
            os.kill(self.pid, signal.SIGKILL)

    def interrupt(self) -> None:
        """End it like Ctrl-C does: it tears down what it has set up."""
        os.kill(self.pid, signal.SIGINT)
        self._connection.close()

    def end(self, deadline_s: float) -> None:
        """Wait until it has ended, and kill it at the deadline."""
        if not wait([self._pidfd], max(0.0, deadline_s - time.monotonic())):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, required=True, help="how many processes run tests")
    parser.addoption(
        "--hang-s",
        type=float,
        default=300.0 + GRACE_S,
        help="kill a process that reports nothing for so many seconds; a test's timeout mark is respected",
    )
    parser.addoption("--tell-fd", type=int, default=-1, help="write to it when only the last few files run")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tell_fd >= 0:
        os.set_inheritable(config.option.tell_fd, False)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.testsfailed or session.config.option.collectonly:
        return None  # pytest handles it
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # one for all
    tasks = deque(_tasks(session))
    processes: list[_Process] = []
    try:
        for number in range(min(session.config.option.processes, len(tasks))):
            processes.append(_Process(session, number, processes))
        num_forked = len(processes)
        tell_fd = session.config.option.tell_fd
        while processes:
            if tell_fd >= 0 and not tasks and len(processes) <= FEW:
                with contextlib.suppress(BrokenPipeError):  # its reader has ended
                    os.write(tell_fd, b"\n")
                tell_fd = -1
            first_deadline_s = min(one.deadline_s for one in processes)
            ready = wait([end for one in processes for end in one.ends], max(0.0, first_deadline_s - time.monotonic()))
            if not ready:
                min(processes, key=lambda one: one.deadline_s).kill()  # its end is reported in the next round
            for one in [one for one in processes if not {*one.ends}.isdisjoint(ready)]:
                match one.receive():
                    case None:
                        one.send(tasks.popleft() if tasks else None)
                    case int(code):
                        processes.remove(one)
                        if one.task is not None or code:
                            tasks.extendleft(_after_death(session, one, code))
                        if tasks and len(processes) < session.config.option.processes:
                            processes.append(_Process(session, num_forked, processes))
                            num_forked += 1
                    case data:
                        _log(session, one, data)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
    finally:
        for one in processes:
            one.interrupt()
        deadline_s = time.monotonic() + STOP_S
        for one in processes:
            one.end(deadline_s)
    return True


def _tasks(session: pytest.Session) -> Iterator[_Task]:
    first = 0
    for _, items in groupby(session.items, key=lambda item: item.nodeid.partition("::")[0]):
        end = first + len(list(items))
        yield _Task(first, end)
        first = end


def _log(session: pytest.Session, process: _Process, data: dict[str, Any]) -> None:
    """Let the plugins of this process know a report of another, as if the test had run here."""
    hook = session.config.hook
    report = hook.pytest_report_from_serializable(config=session.config, data=data)
    hook.pytest_runtest_logreport(report=report)
    if report.when == "teardown" and process.task is not None:
        hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        process.task = process.task._replace(first=process.task.first + 1)


def _after_death(session: pytest.Session, process: _Process, code: int) -> Iterator[_Task]:
    """Report a process that has died; its exit code is negative if a signal has killed it. What remains of its task."""
    first, end = process.task or (0, 0)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if stacks := process.stacks.read_text("utf-8", errors="replace"):
        how = f"it hung, and was {how}; its threads were at\n{stacks}"
    if first < end:
        nodeid, location = session.items[first].nodeid, session.items[first].location
        text = f"process {process.pid} died in this test: {how}"
    else:
        nodeid, location = "tests/plugins/processes.py", ("tests/plugins/processes.py", None, "")
        text = f"process {process.pid} died while it tore down what its tests share: {how}"
    report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
    session.config.hook.pytest_runtest_logreport(report=report)
    if first + 1 < end:
        yield _Task(first + 1, end)


# ── in the processes that run tests ──


def _main(session: pytest.Session, number: int, connection: Connection, stacks: Path) -> NoReturn:
    code = 1
    try:
        _isolate(session.config, number)
        faulthandler.register(signal.SIGUSR1, stacks.open("w"), chain=True)  # which then ends the process
        sender = _Sender(session.config, connection)
        session.config.pluginmanager.register(sender)
        try:
            _run(session, sender)
        except (KeyboardInterrupt, ConnectionError):  # Ctrl-C, or the process that reports are sent to is gone
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends one too
            session._setupstate.teardown_exact(None)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _isolate(config: pytest.Config, number: int) -> None:
    """Have a folder, and files for captured output, that no other process writes to; and print nothing."""
    folder = _folder(config, number)
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    capture = config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    for stream in (capture._global_capturing.out, capture._global_capturing.err):
        if hasattr(stream, "targetfd"):  # It is a file. Handlers of libraries' logs have it, so it stays open.
            with tempfile.TemporaryFile() as file:
                os.dup2(file.fileno(), stream.tmpfile.fileno())
    reporter = config.pluginmanager.unregister(name="terminalreporter")
    assert reporter is not None
    config.pluginmanager.register(_Terminal(reporter._tw), "terminalreporter")


def _folder(config: pytest.Config, number: int) -> Path:
    """Where a process has its temporary files, as the process that forks it sees it."""
    return Path(config._tmp_path_factory.getbasetemp() / f"process-{number}")  # type: ignore[attr-defined]


class _Terminal:
    """What of the terminal's plugin others use: where pytest-timeout prints stacks."""

    def __init__(self, writer: object) -> None:
        self._tw = writer


class _Sender:
    """A plugin that sends the reports of tests."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self.connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.connection.send(data)


def _run(session: pytest.Session, sender: _Sender) -> None:
    item = None
    while (task := _next_task(sender.connection)) is not None:
        for index in range(task.first, task.end):
            item = session.items[index]
            # In front of another file, tear down all but what the session has.
            following = session.items[index + 1] if index + 1 < task.end else session
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    if item is not None:  # the last of them tears down what the session has
        call = pytest.CallInfo.from_call(lambda: session._setupstate.teardown_exact(None), "teardown")
        sender.pytest_runtest_logreport(item.ihook.pytest_runtest_makereport(item=item, call=call))


def _next_task(connection: Connection) -> _Task | None:
    """None if there is none left, or if the process that has them is gone."""
    try:
        connection.send(None)
        task: _Task | None = connection.recv()
    except (EOFError, ConnectionError):
        return None
    return task
