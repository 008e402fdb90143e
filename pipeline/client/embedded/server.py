"""An embedded server: an ordinary supervisor with its stages, started by exec and owned by this Python process.

    EmbeddedServer() ──► starting ──► its ZeroMQ address accepts clients ──► close(): SIGTERM, wait, SIGKILL
                        └──► it ends: `reason()` has the errors in its log

It never outlives this process (see entry.py). Because it is started by exec, scripts need no main guard, and state of
this process, such as a notebook's running event loop, does not affect it.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from pipeline.client.embedded import server_log
from pipeline.config import vllm_names
from pipeline.config.load import ConfigError, load
from pipeline.config.settings import Settings
from pipeline.errors import StartError, UserError
from pipeline.own_files import open_to_append

ENTRY = Path(__file__).with_name("entry.py")
"""The script that the server's first process runs; it imports this module."""
STOP_S = 5.0
"""Maximum time to stop after a SIGTERM. This process's requests have been aborted before."""
MAX_LOG_BYTES = 64 * 1024
"""Maximum size of the end of the log that is read."""
NUM_LAST_LINES = 20
"""Number of log lines to show if a server ends without an error message."""


class EmbeddedLaunch(msgspec.Struct, array_like=True, frozen=True):
    """The parameters of the server's first process."""

    settings: Settings
    owner_fd: int
    """The owner's pidfd"""
    death_fd: int
    """The read end of a pipe; end-of-file when the owner has ended."""
    keys: bytes = b""
    """API keys, as of `Keys.packed`; empty: those of the settings and the environment."""


def settings_of(caller: str, config: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Settings:
    """Settings from a file or preset, overridden by a table such as `{"model": …, "schedule": {"max_num_seqs": 8}}`.
    Errors name `caller` as the table's source.

    Raises UserError with all problems.
    """
    try:
        return load(None if config is None else Path(config), tables={caller: dict(given)})
    except ConfigError as error:
        raise UserError(str(error)) from error


def with_ranks(given: Mapping[str, Any], **nums: int | None) -> dict[str, Any]:
    """Settings with `tensor_parallel` and `pipeline_parallel`, unless they are None. Raises UserError if the settings
    name other numbers."""
    return _with_values(given, {f"execute.{key}": (key, num) for key, num in nums.items() if num is not None})


def with_vllm_names(caller: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of which some have the names that the arguments of vLLM's `LLM` have. Raises UserError."""
    try:
        return _with_values(*vllm_names.from_arguments(given))
    except ValueError as error:
        raise UserError(f"{caller}(): {error}") from error


def _with_values(given: Mapping[str, Any], values: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Settings with more values, each with the name that it has for the user, by dotted key. Raises UserError if the
    settings have another value."""
    settings = dict(given)
    for key, (name, value) in values.items():
        section, _, field = key.rpartition(".")
        table = settings.get(section, {}) if section else settings
        if not isinstance(table, Mapping):
            continue  # loading settings of another form will fail with an error
        if table.get(field, value) != value:
            raise UserError(f"{name}: is {value}, but {key} is {table[field]}")
        settings.update({section: {**table, field: value}} if section else {field: value})
    return settings


def embedded_address(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The ZeroMQ address of an embedded server, and its settings. By default the address is random and HTTP uses a free
    port. Raises UserError."""
    gateway = given.get("gateway", {})
    if not isinstance(gateway, Mapping):
        return "", dict(given)  # loading these settings will fail with an error
    address = gateway.get("zmq", "auto")
    if address == "off":
        raise UserError("gateway.zmq: can't be off: the Python client needs it")
    if address == "auto":
        address = f"ipc://@pipeline/{os.getpid()}-{secrets.token_hex(8)}/zmq"
    return address, {**given, "gateway": {"port": 0, **gateway, "zmq": address}}


class EmbeddedServer:
    """The server's process and its log. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        log_path: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        keys: bytes = b"",
    ) -> None:
        """Start the server, without waiting until it is ready. Its log goes to `log_path`, or to an unlinked temporary
        file. Its environment is this process's, overridden by `environ`. `keys` are API keys, as of `Keys.packed`; if
        there are none, they are those of the settings and the environment. Raises StartError."""
        self.settings = settings
        self.log_path = None if log_path is None else Path(log_path)
        log = _open_log(self.log_path)
        self._log_begin = os.fstat(log.fileno()).st_size
        death_read, death_write = os.pipe()
        owner_fd = os.pidfd_open(os.getpid())
        launch_fd = os.memfd_create("pipeline-launch")
        try:
            os.write(launch_fd, msgspec.msgpack.encode(EmbeddedLaunch(settings, owner_fd, death_read, keys)))
            os.lseek(launch_fd, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(ENTRY), str(launch_fd)],
                pass_fds=(launch_fd, owner_fd, death_read),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                process_group=0,  # only the owner gets a terminal's Ctrl-C
                env=os.environ | (environ or {}),
            )
        except BaseException as error:
            os.close(death_write)
            log.close()
            if isinstance(error, OSError):
                raise StartError(f"can't start a server: {error}") from error
            raise
        finally:
            for fd in (death_read, owner_fd, launch_fd):
                os.close(fd)
        self._log = log
        self._close = weakref.finalize(self, _close, os.getpid(), self._process, log, death_write)
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the server's exit. Returns whether it has exited."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def ended(self) -> None:
        """Wait for the server's exit, without a deadline."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # exited and reaped
            return
        loop = asyncio.get_running_loop()
        end = asyncio.Event()
        loop.add_reader(pidfd, end.set)
        try:
            await end.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def log(self) -> str:
        """The end of the log so far."""
        if self._log.closed:
            return ""
        end = os.fstat(self._log.fileno()).st_size
        begin = max(self._log_begin, end - MAX_LOG_BYTES)
        return os.pread(self._log.fileno(), end - begin, begin).decode("utf-8", "replace")

    def last_line(self) -> str:
        """The message of the last log line: what the server is doing."""
        return server_log.last_message(self.log())

    def errors(self) -> str:
        """The supervisor's errors in the log; empty if there are none."""
        return server_log.errors(self.log())

    def reason(self) -> str:
        """Why the server ended: the errors in its log, or its exit code and the last log lines."""
        if errors := self.errors():
            return errors.removeprefix("cannot start: ")  # the caller says so
        last = "\n".join(self.log().splitlines()[-NUM_LAST_LINES:])
        code = self.exit_code
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return f"its first process {how}" + (f"; the end of its log:\n{last}" if last else "")

    def close(self) -> None:
        """Stop the server, and wait for its exit. May be called again."""
        self._close()


def _open_log(path: Path | None) -> IO[bytes]:
    """Open the log for appending and reading."""
    if path is None:
        return tempfile.TemporaryFile("a+b", buffering=0, prefix="pipeline-")
    try:
        return os.fdopen(open_to_append(path), "a+b", buffering=0)
    except OSError as error:
        raise UserError(f"log_path {path}: can't be written: {error.strerror}") from error


def _close(owner_pid: int, process: "subprocess.Popen[bytes]", log: IO[bytes], death_write: int) -> None:
    """Stop the server and release everything. A forked copy only closes its own descriptors."""
    if os.getpid() == owner_pid:
        _end(process)
    os.close(death_write)
    log.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM, a second one that skips the drain, then SIGKILL. The server's children die with it in any case."""
    for _ in range(2):
        if process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
        return
    process.kill()
    process.wait()
