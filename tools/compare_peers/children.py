"""Child processes: each has a name, a log file and a deadline, and is ended with its own children on every path."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from pipeline.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_S = 0.1
TELL_EVERY_S = 10.0
"""Seconds between two lines of progress."""
STOP_S = 30.0
"""Time to end after SIGTERM; then a process and its children are killed."""
KILL_S = 10.0
"""Time until killed processes have disappeared."""
NUM_LAST_LINES = 25
SECRETS = ("PIPELINE_API_KEYS", "PIPELINE_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY")
"""Servers that need keys would refuse the benchmark."""

Tell = Callable[[str], None]
"""Prints a line of progress."""


def run(
    name: str,
    command: Sequence[str],
    log: Path,
    deadline_s: float,
    tell: Tell,
    progress: Callable[[str], str | None] = lambda line: None,
    env: Mapping[str, str] | None = None,
    codes: Sequence[int] = (0,),
) -> int:
    """Run a command to its end, with its output in `log`, and return its exit code. `progress` turns a line of output
    into what is shown, or None. Raises UserError with the end of the log if it takes longer than `deadline_s`, or ends
    with a code that is not in `codes`."""
    with _started(name, command, log, env) as process, log.open("rb") as output:
        begun_s = shown_s = time.monotonic()
        shown = ""
        while (code := process.poll()) is None:
            took_s = time.monotonic() - begun_s
            if took_s > deadline_s:
                raise UserError(f"{name}: did not end within {deadline_s:g} s{_end_of(log)}")
            for line in output.read().decode("utf-8", "replace").splitlines():
                shown = progress(line) or shown
            if time.monotonic() - shown_s >= TELL_EVERY_S:
                shown_s = time.monotonic()
                tell(f"  {name}: {shown + ', ' if shown else ''}{took_s:.0f} s of at most {deadline_s:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    if code not in codes:
        raise UserError(f"{name}: ended with code {code}{_end_of(log)}")
    return code


class Serving:
    """A running server with the OpenAI API, at `url`. It became ready `start_s` seconds after its start."""

    def __init__(self, url: str, command: list[str], start_s: float, process: "subprocess.Popen[bytes]") -> None:
        self.url = url
        self.command = command
        self.start_s = start_s
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid


@contextlib.contextmanager
def serving(
    name: str, command: Sequence[str], log: Path, deadline_s: float, tell: Tell, env: Mapping[str, str] | None = None
) -> Iterator[Serving]:
    """Start a server on a free port, which replaces `{port}` in its command, and wait until /health answers 200.

    Raises UserError with the end of the log if that takes longer than `deadline_s`, or if the server ends.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own_command = with_port(command, port)
    with _started(name, own_command, log, env) as process:
        begun_s = shown_s = time.monotonic()
        while not _is_healthy(url):
            took_s = time.monotonic() - begun_s
            if process.poll() is not None:
                raise UserError(f"{name}: ended with code {process.returncode} before it was ready{_end_of(log)}")
            if took_s > deadline_s:
                raise UserError(f"{name}: was not ready within {deadline_s:g} s{_end_of(log)}")
            if time.monotonic() - shown_s >= TELL_EVERY_S:
                shown_s = time.monotonic()
                tell(f"  {name}: starting, {took_s:.0f} s of at most {deadline_s:.0f} s")
            time.sleep(POLL_S)
        yield Serving(url, own_command, time.monotonic() - begun_s, process)


def with_port(command: Sequence[str], port: int) -> list[str]:
    return [part.replace("{port}", str(port)) for part in command]


def free_port() -> int:
    """A port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _started(
    name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None
) -> Iterator["subprocess.Popen[bytes]"]:
    environ = {key: value for key, value in os.environ.items() if key not in SECRETS} | dict(env or {})
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environ,
                process_group=0,  # Ctrl-C in a terminal is for this program, which then ends the child
            )
    except OSError as error:
        raise UserError(f"{name}: {command[0]} can't be run: {error.strerror}") from error
    try:
        yield process
    finally:
        end(name, process)


def end(name: str, process: "subprocess.Popen[bytes]") -> None:
    """End a process, its children, and whatever remains of its process group. Raises UserError if one of them does not
    disappear."""
    family = _family(process.pid)
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
    finally:  # a second Ctrl-C ends the wait, but leaves no process behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(KILL_S)
        _, alive = psutil.wait_procs(family, KILL_S)
    if alive:
        raise UserError(f"{name}: processes {[one.pid for one in alive]} did not end {KILL_S:g} s after SIGKILL")


def _family(pid: int) -> list[psutil.Process]:
    """All descendants of a process. Some of them may have left its process group."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):  # not listening yet, or still loading
        return False


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LAST_LINES:]
    return f"; its output is in {log}" + (":\n" + "\n".join(f"    {line}" for line in lines) if lines else "")
