"""A real server in processes of its own, with helpers for tests."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.guardian import guard
from tests.pipes import close_at_end

START_S = 180.0
"""The first start on a machine fetches and converts the model."""
KV_BYTES = 192 * 1024**2
"""Of servers without a configuration file: enough for the default model's longest sequence. The default takes a virtual
machine up to two seconds of CPU time at each start."""
THREADS = ["--set", "execute.num_threads=1"] if "PIPELINE_TEST_PROCESSES" in os.environ else []
"""Of servers without a configuration file. With several test processes, each has one core, and a second thread of
execute would wait for it in a loop: a quarter of the CPU time of generating."""
STAGES = ("gateway", "ingest", "schedule", "execute", "detokenize")


class Server:
    """`pipeline serve` on a free port. Use as a context manager: leaving it stops the server, and fails if any of its
    processes is left. The server also ends if the test's process is killed."""

    def __init__(
        self,
        *sets: str,
        config: Path | None = None,
        until_ready: bool = True,
        options: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        module: str = "pipeline",
    ) -> None:
        command = [sys.executable, "-m", module, "serve", "--set", "gateway.port=0"]
        command += ["--set", "supervisor.crash_reports=false"]  # they would replace those of the user's servers
        if config is None:
            command += ["--set", f"execute.kv_cache_bytes={KV_BYTES}", *THREADS]
        command += options
        for one in sets:
            command += ["--set", one]
        if config is not None:
            command += ["--config", str(config)]
        self.lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            env=os.environ | (environ or {}),
        )
        guard(self.process)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        self.zmq = ""
        """The ZeroMQ address, or "off"."""
        self.seen: dict[int, psutil.Process] = {}
        if until_ready:
            try:
                line = self.wait_for_line(r"ready on http", START_S)
            except AssertionError:
                self.process.kill()
                raise
            match = re.search(r"ready on (http://[^\s\"]+)", line)
            assert match
            self.url = match[1]
            match = re.search(r"zmq\"?[=:]\"?([^\s\",]+)", line)
            assert match
            self.zmq = match[1]
            self.look()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("<end of log>")
            self._news.notify_all()

    def wait_for_line(self, pattern: str, timeout_s: float) -> str:
        """The first log line that matches, waiting up to the timeout."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [line for line in self.lines if re.search(pattern, line)]
            return bool(found) or "<end of log>" in self.lines

        with self._news:
            self._news.wait_for(look, timeout_s)
        assert found, f"no line {pattern!r} in the log:\n" + "\n".join(self.lines)
        return found[0]

    def look(self) -> None:
        """Remember the current processes, to check later that none is left behind."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[child.pid] = child

    def stage(self, name: str) -> psutil.Process:
        """The process of a stage, found by its title."""
        for child in self.seen.values():
            if child.is_running() and child.cmdline()[:1] == [f"pipeline: {name}.0"]:
                return child
        raise AssertionError(f"no process is titled {name}")

    def health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        result: dict[str, Any] = json.loads(body)
        return result

    def until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 30.0) -> dict[str, Any]:
        """Poll health until it meets a condition. A gateway that is replaced meanwhile breaks its connections."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                if condition(health := self.health()):
                    return health
                problem = f"still {health}"
            except (ConnectionError, urllib.error.URLError) as error:
                problem = str(error)
            assert time.monotonic() < end, problem

    def until_idle(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until nothing runs, waits or holds memory, and no request is open."""
        return self.until(
            lambda health: (
                health["running"] == health["waiting"] == health["kv_blocks"]["held"] == health["open_requests"] == 0
            ),
            timeout_s,
        )

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send it a signal and wait for its exit code."""
        if self.process.poll() is None:
            self.look()
            os.kill(self.process.pid, number)
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def leftovers(self, timeout_s: float = 2.0) -> list[psutil.Process]:
        """Processes of this server that still run after `timeout_s`."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=timeout_s)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def log(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            close_at_end(self._reader, self.process.stderr)
        assert not self.leftovers(), "processes were left behind"
