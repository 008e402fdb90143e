"""Start and end of a child process: title, log, parent death, `StageFailed`, exit code."""

import ctypes
import importlib
import os
import signal
import sys
import threading

import msgspec
import setproctitle
import zmq

from pipeline.errors import UserError
from pipeline.runtime.channels import Outbox
from pipeline.runtime.logs import open_log
from pipeline.runtime.messages import Envelope, Launch, StageFailed, SupervisorInbox
from pipeline.runtime.stage import SUPERVISOR

EXIT_FAILED = 1
EXIT_ORPHANED = 4
REPORT_S = 1.0
"""Maximum time for sending the reason of a failure."""
PR_SET_PDEATHSIG = 1


def main(launch_fd: int) -> None:
    """Run the stage that the supervisor describes on `launch_fd`. Ends the process."""
    with open(launch_fd, "rb") as file:
        launch = msgspec.msgpack.decode(file.read(), type=Launch)
    _die_with_parent(launch.death_fd)
    setproctitle.setproctitle(f"pipeline: {launch.name}")
    log = open_log(launch.name, launch.settings.log_level, launch.settings.log_format)
    try:
        if launch.foreground:
            importlib.import_module("pipeline.runtime.debugging").install(launch.break_at)
        importlib.import_module(launch.entry).run(launch)
    except BaseException as error:
        reason = str(error) or type(error).__name__
        if not isinstance(error, UserError):
            log.exception("failed")
            reason = f"{type(error).__name__}: {reason}"
        report_failure(launch, reason)
        _exit(EXIT_FAILED)
    _exit(0)


def _exit(code: int) -> None:
    """End without waiting for library threads. All sockets and files are closed by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent(death_fd: int) -> None:
    """End when the supervisor ends: its end of a pipe closes. If this interpreter is stuck, the kernel's SIGKILL ends
    it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        os.read(death_fd, 1)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()


def report_failure(launch: Launch, reason: str) -> None:
    """Send the reason of a failure to the supervisor."""
    address = next(peer.address for peer in launch.peers if peer.name == SUPERVISOR)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    outbox: Outbox[SupervisorInbox] = Outbox(context, address, Envelope(launch.name, launch.incarnation), bound=1)
    outbox.send(StageFailed(reason))
    outbox.flush(REPORT_S)
    context.term()
