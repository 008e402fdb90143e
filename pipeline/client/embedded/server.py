"""A server that belongs to this Python process: an ordinary supervisor with its stages, started by exec.

    EmbeddedServer() ──► starting ──► its ZeroMQ address accepts clients ──► close(): SIGTERM, a while, SIGKILL
                        └──► it ends: `reason()` says why, in its own words

It never outlives this process, however that ends (see entry.py). Started by exec it needs no main guard, and
nothing of this process, a notebook's running event loop for one, reaches it.
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
from pipeline.config.load import ConfigError, load
from pipeline.config.settings import Settings
from pipeline.errors import StartError, UserError

ENTRY = Path(__file__).with_name("entry.py")
"""The script that the server's first process runs; it imports this module."""
STOP_S = 5.0
"""How long a server may take to end by itself. Everything of this process was aborted before."""
MAX_LOG_BYTES = 64 * 1024
"""The most of a log that is read at once."""
NUM_LAST_LINES = 20
"""Of the log, where a server ends without saying why."""


class EmbeddedLaunch(msgspec.Struct, array_like=True, frozen=True):
    """What the first process of the server is told."""

    settings: Settings
    owner_fd: int
    """pidfd of the owner"""
    death_fd: int
    """Reads end-of-file when the owner is gone."""


def settings_of(caller: str, config: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Settings:
    """Settings from a file or preset, and over it a table such as `{"model": …, "schedule": {"max_num_seqs": 8}}`,
    that was given to `caller`.

    Raises UserError with every problem, in the user's words.
    """
    try:
        return load(None if config is None else Path(config), tables={caller: dict(given)})
    except ConfigError as error:
        raise UserError(str(error)) from error


def private_address(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where the ZeroMQ door of a server of one's own is, and the settings for it with what is its owner's besides:
    a door that nobody else knows, and HTTP on a free port; both may be given otherwise. Raises UserError."""
    gateway = given.get("gateway", {})
    if not isinstance(gateway, Mapping):
        return "", dict(given)  # wrong, which the settings will say
    address = gateway.get("zmq", "auto")
    if address == "off":
        raise UserError("gateway.zmq: can't be off: the Python client needs it")
    if address == "auto":
        address = f"ipc://@pipeline/{os.getpid()}-{secrets.token_hex(8)}/door"
    return address, {**given, "gateway": {"port": 0, **gateway, "zmq": address}}


class EmbeddedServer:
    """The process, its log and its end. Usable from any thread."""

    def __init__(
        self,
        settings: Settings,
        log_path: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; waiting until it serves is the caller's. Its log goes to `log_path`, by default to a file that
        nobody else sees and that goes with the last who has it open. Its environment is this process's, and `environ`
        over it. Raises StartError."""
        self.settings = settings
        self.log_path = None if log_path is None else Path(log_path)
        log = _open_log(self.log_path)
        self._log_begin = os.fstat(log.fileno()).st_size
        death_read, death_write = os.pipe()
        owner_fd = os.pidfd_open(os.getpid())
        launch_fd = os.memfd_create("pipeline-launch")
        try:
            os.write(launch_fd, msgspec.msgpack.encode(EmbeddedLaunch(settings, owner_fd, death_read)))
            os.lseek(launch_fd, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(ENTRY), str(launch_fd)],
                pass_fds=(launch_fd, owner_fd, death_read),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                process_group=0,  # a terminal's Ctrl-C is for the owner
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
        """Wait for its end. Returns whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def ended(self) -> None:
        """Wait for its end. No deadline of its own: a server may serve for ever."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # ended, and reaped
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
        """The end of what it has logged so far."""
        if self._log.closed:
            return ""
        end = os.fstat(self._log.fileno()).st_size
        begin = max(self._log_begin, end - MAX_LOG_BYTES)
        return os.pread(self._log.fileno(), end - begin, begin).decode("utf-8", "replace")

    def last_line(self) -> str:
        """What it does just now, for a person."""
        return server_log.last_words(self.log())

    def complaints(self) -> str:
        """What it has said that is wrong; empty where it has nothing to complain of."""
        return server_log.complaints(self.log())

    def reason(self) -> str:
        """Why it ended, in its own words, which come from its log."""
        if said := self.complaints():
            return said
        last = "\n".join(self.log().splitlines()[-NUM_LAST_LINES:])
        code = self.exit_code
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return f"its first process {how}" + (f"; the end of its log:\n{last}" if last else "")

    def close(self) -> None:
        """End it, and wait until it has ended. May be called again."""
        self._close()


def _open_log(path: Path | None) -> IO[bytes]:
    """A log to append to, and to read."""
    if path is None:
        return tempfile.TemporaryFile("a+b", buffering=0, prefix="pipeline-")
    try:
        return path.open("a+b", buffering=0)
    except OSError as error:
        raise UserError(f"log_path {path}: can't be written: {error.strerror}") from error


def _close(owner_pid: int, process: "subprocess.Popen[bytes]", log: IO[bytes], death_write: int) -> None:
    """Give everything back. In a process that was forked from the owner, only the copies."""
    if os.getpid() == owner_pid:
        _end(process)
    os.close(death_write)
    log.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let it end in order; its second signal says that it is urgent, and its children die with it whatever happens."""
    for patience_s in (STOP_S, STOP_S):
        if process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        return
    process.kill()
    process.wait()
