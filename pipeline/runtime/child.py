"""Start and end of a child process: title, log, parent death, `StageFailed`, exit code."""

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import msgspec
import setproctitle
import zmq

from pipeline.errors import UserError
from pipeline.runtime.log.logs import of_model, open_log
from pipeline.runtime.messages import Envelope, Launch, StageFailed, SupervisorInbox
from pipeline.runtime.messages.lifecycle import LENGTH
from pipeline.runtime.process import black_box
from pipeline.runtime.process.descriptors import descriptors_of, renumbered
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.curve import ClientKeys, CurveKeys
from pipeline.runtime.transport.outbox import Outbox
from pipeline.version import VERSION

EXIT_FAILED = 1
EXIT_ORPHANED = 4
REPORT_S = 10.0
"""Maximum time for sending a report, on a machine however busy."""
PR_SET_PDEATHSIG = 1
INTERRUPT = signal.SIGUSR2
"""Ends a process that prepares a model or compiles. No terminal and no service manager sends it."""
AGAIN_S = 0.001
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Library threads of the CPU stages would compete with the step for cores. The variables must be set before any
import."""


def main(launch_fd: int, fds: Sequence[int] | None = None) -> NoReturn:
    """Run the stage that the supervisor describes on `launch_fd`. Ends the process. `fds` are its descriptors, in the
    order of `descriptors_of`; None if it has them under the numbers in the launch.

    The stage's code is imported while the model is prepared. If the stage has a function `preload`, it is called with
    the launch, which may lack the `model_dir`, and imports what `run` is going to need.
    """
    file = open(launch_fd, "rb")  # noqa: SIM115 - until the launch is complete, below
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    launch = msgspec.msgpack.decode(file.read(length), type=Launch)
    if fds is not None:
        launch = renumbered(launch, dict(zip(descriptors_of(launch), fds, strict=True)))
    _die_with_parent(launch.death_fd)
    signal.signal(INTERRUPT, _interrupted)
    setproctitle.setproctitle(f"pipeline: {launch.name}{f' {launch.model}' if launch.model else ''}")
    # A crash writes the stacks of all threads into the black box, from where the supervisor logs them.
    faulthandler.enable(sys.stderr if launch.black_box is None else launch.black_box.stacks_fd)
    log = open_log(of_model(launch.name, launch.model), launch.settings.log_level, launch.settings.log_format)
    if launch.black_box is not None:
        black_box.keep_lines(log, black_box.attach(launch.black_box))
    try:
        if launch.wire_version:
            _check_version(launch.wire_version)
        if launch.foreground:
            importlib.import_module("pipeline.runtime.process.debugging").install(launch.break_at)
        module = importlib.import_module(launch.entry)
        if (preload := getattr(module, "preload", None)) is not None:
            preload(launch)
        with file:
            if model_dir := file.read():
                launch = msgspec.structs.replace(launch, model_dir=os.fsdecode(model_dir))
        gc.freeze()
        gc.enable()
        module.run(launch)
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        if _is_interrupt(error):
            _exit(0)
        reason = str(error) or type(error).__name__
        if not isinstance(error, UserError):
            log.exception("failed")
            reason = f"{type(error).__name__}: {reason}"
        report_failure(launch, reason)
        _exit(EXIT_FAILED)
    _exit(0)


def _interrupted(_signal: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or a moment later: in a callback of weak references, which each import has, it would be
    printed and lost."""
    signal.signal(INTERRUPT, lambda *_: None)  # with SIG_IGN, one that is pending would be an error
    while frame is not None:
        if frame.f_code.co_name == "cb" and frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, _interrupted)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_interrupt(error: BaseException) -> bool:
    """Whether an interrupt caused it. Python 3.11 raises RuntimeError if one comes in a descriptor's `__set_name__`, so
    in the import of each module with a dataclass."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _exit(code: int) -> NoReturn:
    """End without waiting for library threads. All sockets and files are closed by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check_version(expected: str) -> None:
    """Raise UserError if the code that is installed now sends other messages than the server's."""
    from pipeline.runtime.messages.wire_version import wire_version

    if wire_version() != expected:
        raise UserError(
            f"the installed code is Pipeline {VERSION}, whose stages don't understand those of the running server; "
            "restart the whole server"
        )


def set_parent_death_signal() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_parent(death_fd: int) -> None:
    """End when the supervisor ends: its end of a pipe closes. If this interpreter is stuck, the kernel's SIGKILL ends
    it."""
    set_parent_death_signal()

    def watch() -> None:
        os.read(death_fd, 1)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()


def report_failure(launch: Launch, reason: str) -> None:
    """Send the reason of a failure to the supervisor."""
    report(launch, StageFailed(reason))


def report(launch: Launch, message: SupervisorInbox) -> None:
    """Send one message to the supervisor from a process without a `Stage`."""
    peer = next((peer for peer in launch.peers if peer.name == SUPERVISOR), None)
    if peer is None:  # the gateway of several models: the log has the reason
        return
    keys = None
    if launch.tcp is not None and peer.public_key:
        keys = ClientKeys(peer.public_key, CurveKeys(launch.tcp.public_key, launch.tcp.secret_key))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    envelope = Envelope(launch.name, launch.incarnation)
    outbox: Outbox[SupervisorInbox] = Outbox(context, peer.address, envelope, bound=1, keys=keys)
    outbox.send(message)
    outbox.flush(REPORT_S)
    context.term()
