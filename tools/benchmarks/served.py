"""A real server for one measurement. It is started with exec and stopped on every path."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, TypeVar

from pipeline.cli.bench.client import ServerError
from pipeline.config.load import ConfigError
from pipeline.errors import UserError
from pipeline.metrics.stats import ExecuteCounts, OwnCounts, ScheduleCounts, ServerStats
from pipeline.runtime.messages import ControlRequest
from pipeline.supervisor.admin.admin_client import Admin, find_servers

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 180.0
"""The first start on a machine downloads and converts the model."""
STOP_S = 60.0
"""Time to drain and stop; then the server is killed."""
HEALTH_S = 30.0
POLL_S = 0.02
NUM_LAST_LINES = 30
EMPTY: Mapping[str, str] = MappingProxyType({})

T = TypeVar("T", bound=OwnCounts)


class Served:
    """`pipeline serve` on a free port, as a context manager. Its log goes to a file, because a full pipe would block
    it. `root` is the working tree whose code runs, `module` what has its command line. Raises UserError with the end of
    the log if it does not start. A server of several models has no stats here, and no `pids`."""

    def __init__(
        self,
        *sets: str,
        options: Sequence[str] = (),
        root: Path = ROOT,
        module: str = "pipeline",
        environ: Mapping[str, str] = EMPTY,
    ) -> None:
        command = [sys.executable, "-m", module, "serve", "--set", "gateway.port=0", *options]
        for one in sets:
            command += ["--set", one]
        self.sets = sets
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at exit
        self._admin: Admin | None = None
        begun_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                command,
                stderr=self._log,
                stdout=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
                cwd=root,
                env=os.environ | {"PYTHONPATH": os.pathsep.join((str(root), *_given_path())), **environ},
                process_group=0,  # Ctrl-C in a terminal is for this program, which then stops the server
            )
        except BaseException:
            self._log.close()
            raise
        try:
            line = self._wait_until_ready()
            self.ready_s = time.monotonic() - begun_s
            """From the start of the command to the line `ready`."""
            self.url = _found(r"ready on (http://[^\s\"]+)", line)
            self.zmq = _found(r"zmq\"?[=:]\"?([^\s\",]+)", line)
            self.pid = self._process.pid
            self.pids = {}
            names = [name for name in find_servers() if name.startswith(f"{self.pid}-")]
            if len(names) == 1:
                self._admin = Admin(names[0])
                self.pids = {stage.name: stage.pid for stage in self._admin.stats().stages}
        except BaseException:
            self.__exit__()
            raise

    def stats(self) -> ServerStats:
        """The server's stats. Blocks; call it from the thread that created this object. Raises UserError."""
        assert self._admin is not None
        return self._admin.stats()

    def health(self) -> dict[str, Any]:
        """The body of /health, which comes with other statuses than 200 too. Blocks, in any thread. Raises OSError."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_S) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        found: dict[str, Any] = json.loads(body)
        return found

    def command(self, request: ControlRequest) -> dict[str, bytes]:
        """Send a control request to all stages. Returns the bodies of their answers by name. Blocks and raises as
        `stats`, also if a stage does not answer."""
        assert self._admin is not None
        answers = self._admin.send_command(request, [])
        for name, answer in answers.items():
            if answer.error:
                raise UserError(f"{name}: {answer.error}")
        return {name: bytes(answer.body) for name, answer in answers.items()}

    def schedule(self) -> ScheduleCounts:
        return _counts(self.stats(), ScheduleCounts)

    def execute(self) -> ExecuteCounts:
        return _counts(self.stats(), ExecuteCounts)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        """The whole log."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def stop(self) -> int:
        """Stop the server. Returns its exit code. Raises TimeoutExpired if it had to be killed."""
        if self._admin is not None:
            self._admin.__exit__()
            self._admin = None
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            return self._process.wait(STOP_S)
        finally:
            self._process.kill()  # harmless if it has ended; its children end with it
            self._process.wait()

    def _wait_until_ready(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            for line in self.log().splitlines():
                if "ready on http" in line:
                    return line
            if not self.is_alive:
                break
            time.sleep(POLL_S)
        last = "\n".join(self.log().splitlines()[-NUM_LAST_LINES:])
        raise UserError(f"the server did not start within {START_S:g} s; the end of its log:\n{last}")

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        finally:
            self._log.close()


def _counts(stats: ServerStats, kind: type[T]) -> T:
    for stage in stats.stages:
        if stage.counts is not None and isinstance(stage.counts.own, kind):
            return stage.counts.own
    raise UserError(f"the server's stats have no {kind.__name__}")


def _found(pattern: str, line: str) -> str:
    match = re.search(pattern, line)
    if match is None:
        raise UserError(f"unexpected 'ready' line in the server's log: {line}")
    return match[1]


def _given_path() -> list[str]:
    """PYTHONPATH of this process, which may have the server's packages."""
    given = os.environ.get("PYTHONPATH")
    return [given] if given else []


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end this program like Ctrl-C, so that its servers are stopped."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(tool: str, run: Callable[[], int]) -> int:
    """Run a benchmark. Returns its exit code, or 2 after an error, which is printed with the tool's name."""
    try:
        with ending_in_order():
            return run()
    except (UserError, ServerError, ConfigError) as error:
        print(f"{tool}: error: {error}", file=sys.stderr)
        return 2
