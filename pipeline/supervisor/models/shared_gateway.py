"""The gateway's process of a server of several models, which has a gateway stage for each that is loaded.

The manager's loop owns it. The threads of the models start and end their stages in it.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.messages.models import (
    MAX_PACKET_BYTES,
    DropStage,
    FromSharedGateway,
    Models,
    ReleaseModel,
    StartStage,
    StopProcess,
    ToSharedGateway,
)
from pipeline.runtime.process.descriptors import descriptors_of
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.supervisor.processes.child import LocalChild, signal_name
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.processes.process import ChildProcess
from pipeline.supervisor.shared.shared_keys import SharedKeys

ENTRY = "pipeline.stages.gateway.models.stage"
SEND_S = 5.0
"""Time for the process to take a packet: it hangs if it does not."""
END_S = 2.0
"""Time for a stage to end that is dropped."""


class SharedGateway:
    """Starts the process, and starts it again when it has died."""

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[socket.socket],
        admins: Sequence[socket.socket],
        keys: SharedKeys,
        log: logging.Logger,
        fork_server: ForkServer | None = None,
        *,
        takes_over: bool = False,
    ) -> None:
        """If it `takes_over`, it listens when the models of the start are loaded."""
        self._takes_over = takes_over
        self._fork_server = fork_server
        self._settings = msgspec.structs.replace(settings, keys=())
        self._listeners, self._admins = listeners, admins
        self._keys = keys
        self._log = log
        self._lock = threading.RLock()
        self._death_read, self._death_write = os.pipe()
        self._decoder: MessageDecoder[FromSharedGateway] = MessageDecoder(FromSharedGateway)
        self._child: ChildProcess | None = None
        self._socket: socket.socket | None = None
        """Sends, for `SEND_S` at most."""
        self._receiver: socket.socket | None = None
        """The same, without waiting."""
        self._ends: dict[int, str] = {}
        """Of the process before, by its pid."""
        self._last_number = 0
        self._models = Models([])
        self.num_started = 0

    @property
    def pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive

    def filenos(self) -> list[int]:
        """Readable when the process has sent something, or has ended."""
        assert self._child is not None and self._socket is not None
        return [self._child.pidfd, self._socket.fileno()]

    def ensure_alive(self) -> None:
        """Start the process if there is none."""
        with self._lock:
            if self.is_alive:
                return
            self._close_process()
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.settimeout(SEND_S)
            self._receiver = self._socket.dup()
            self._receiver.setblocking(False)
            self.num_started += 1
            launch = m.Launch(
                stage="gateway",
                replica=0,
                rank=0,
                incarnation=self.num_started,
                entry=ENTRY,
                settings=self._settings,
                model_dir="",
                address="",
                peers=[],
                segments=[],
                death_fd=self._death_read,
                listen_fd=self._listeners[0].fileno(),
                admin_fd=self._admins[0].fileno() if self._admins else -1,
                keys_fd=self._keys.fd,
                usage_fd=self._keys.usage_fd,
                models_fd=theirs.fileno(),
                takes_over=self._takes_over,
            )
            try:
                self._child = ChildProcess(launch, 1, fork_server=self._fork_server)
            finally:
                theirs.close()
            self._send(self._models)

    def why_ended(self, pid: int = 0) -> str:
        """Of the process, or of one before it."""
        if self._child is None or (pid and pid != self._child.pid):
            return self._ends.get(pid, "has ended")
        return self._child.describe_end()

    def tell(self, models: Models) -> None:
        """The states of all models."""
        with self._lock:
            self._models = models
            if self.is_alive:
                self._send(models)

    def start(self, launch: m.Launch, end_fd: int) -> int:
        """Begin a stage. `end_fd` closes there when it ends. Returns its number, for `drop`."""
        with self._lock:
            self.ensure_alive()
            self._last_number += 1
            fds = descriptors_of(launch)
            self._send(StartStage(self._last_number, launch, fds), [*fds, end_fd])
            return self._last_number

    def drop(self, number: int) -> None:
        """End a stage at once."""
        with self._lock:
            if self.is_alive:
                self._send(DropStage(number))

    def release(self, name: str) -> None:
        """Ask whether a model is idle, and have its requests wait from then on. Without a process, there is no answer,
        and the next one does not know that it was asked."""
        with self._lock:
            if self.is_alive:
                self._send(ReleaseModel(name))

    def receive(self) -> list[FromSharedGateway]:
        """What has arrived."""
        found: list[FromSharedGateway] = []
        assert self._receiver is not None
        while True:
            try:
                data = self._receiver.recv(MAX_PACKET_BYTES)
            except (BlockingIOError, ConnectionError):
                return found
            if not data:
                return found
            found.append(self._decoder.decode(data))

    def _send(self, message: ToSharedGateway, fds: Sequence[int] = ()) -> None:
        data = msgspec.msgpack.encode(message)
        assert self._socket is not None and len(data) <= MAX_PACKET_BYTES, "the packet is too large"
        try:
            socket.send_fds(self._socket, [data], list(fds))
        except TimeoutError:
            self._log.error("the gateway does not accept messages; killing it")
            self.kill()
        except OSError:
            return  # it has ended: its stages' ends show it

    def kill(self) -> None:
        """Kill the process, and all its stages."""
        if self._child is not None and self._child.is_alive:
            self._child.abort()

    def stop(self, timeout_s: float) -> bool:
        """End the process, which has no stage left. Returns whether it did in time."""
        with self._lock:
            if self._child is None:
                return True
            self._send(StopProcess())
        return self._child.wait(timeout_s)

    def _close_process(self) -> None:
        if self._child is not None:
            self._ends = {self._child.pid: self._child.describe_end()}
            self._child.close()
        if self._socket is not None and self._receiver is not None:
            self._socket.close()
            self._receiver.close()

    def close(self) -> None:
        """Kill the process if it is alive, and free everything."""
        self._close_process()
        os.close(self._death_read)
        os.close(self._death_write)


class ModelGateway(LocalChild):
    """The gateway stage of one model, in the process of `SharedGateway`."""

    def __init__(self, launch: m.Launch, gateway: SharedGateway, *, waits: bool = False) -> None:
        """Start it. If it `waits`, it runs after `begin`."""
        super().__init__(launch)
        self._gateway = gateway
        self._code: int | None = None
        self._number = 0
        control_fd = self._their_control.fileno()
        self._launch = msgspec.structs.replace(launch, listen_fd=-1, admin_fd=-1, death_fd=-1, control_fd=control_fd)
        self.pidfd, self._end_fd = os.pipe()
        os.set_blocking(self.pidfd, False)
        if not waits:
            self._begin()

    @property
    def has_begun(self) -> bool:
        return self._end_fd < 0

    def begin(self, model_dir: str) -> None:
        self._launch = msgspec.structs.replace(self._launch, model_dir=model_dir)
        self._begin()

    def _begin(self) -> None:
        self._number = self._gateway.start(self._launch, self._end_fd)
        self.pid = self._gateway.pid
        self._end_launch()

    def _end_launch(self) -> None:
        if self._end_fd >= 0:
            os.close(self._end_fd)
            self._end_fd = -1
            self._their_control.close()

    @property
    def exit_code(self) -> int | None:
        """0 if it has ended as it was asked to, 1 if its process has ended, or it has failed."""
        if self._code is None and self.pidfd >= 0 and self.has_begun:
            with contextlib.suppress(BlockingIOError):
                self._code = 0 if os.read(self.pidfd, 1) else 1
        return self._code

    def describe_end(self) -> str:
        if self.is_alive:
            return "is running"
        if self._was_killed:
            return f"was killed by the supervisor ({signal_name(signal.SIGKILL)})"
        if self.exit_code == 0:
            return "ended"
        return f"its process {self._gateway.why_ended(self.pid)}"

    def wait(self, timeout_s: float) -> bool:
        if self.is_alive and self.has_begun and self.pidfd >= 0:
            select.select([self.pidfd], [], [], timeout_s)
        return not self.is_alive

    def kill(self) -> None:
        """End the stage at once. If it does not, its process hangs, and ends with all stages."""
        if self.has_begun and self.is_alive:
            self._was_killed = True
            self._gateway.drop(self._number)
            if not self.wait(END_S):
                self._gateway.kill()
                self.wait(END_S)
        elif not self.has_begun:
            self._end_launch()

    def abort(self) -> None:
        """The stage hangs, and so does its process."""
        self._was_killed = True
        self._gateway.kill()

    def close(self) -> None:
        self.kill()
        self._code = 1 if self.exit_code is None else self._code
        super().close()
        self._end_launch()
