"""The output of a process that a thread reads until its end.

The end comes when the last process has closed the pipe, be it a child of a child. To close a file that another thread
reads waits for that thread, for ever and deaf to signals: such a test would hang beyond all its limits.
"""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil

WAIT_S = 10.0
STACK_S = 30.0
"""Time to look at the stack of a process that should have ended."""
_WRITES = os.O_WRONLY | os.O_RDWR


def close_at_end(reader: threading.Thread, output: IO[Any] | None) -> None:
    """Wait for the reader of a process that has ended, and close its output.

    Raises AssertionError with the names and stacks of other processes that hold it, and kills them.
    """
    assert output is not None
    reader.join(WAIT_S)
    left = []
    while reader.is_alive():
        found = [*_holders(os.fstat(output.fileno()).st_ino)]
        assert found, "no process writes, and the reader does not end"
        left += [_description(process) for process in found]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        reader.join(WAIT_S)
    output.close()
    assert not left, "processes were left behind that held the output, and were killed:\n" + "\n".join(left)


def _holders(inode: int) -> Iterator[psutil.Process]:
    """The processes that can write to a pipe."""
    for process in psutil.process_iter():
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                if link.readlink() == Path(f"pipe:[{inode}]"):
                    flags = re.search(r"flags:\s+(\d+)", (folder / "fdinfo" / link.name).read_text())
                    if flags and int(flags[1], 8) & _WRITES:
                        yield process
                        break


def _description(process: psutil.Process) -> str:
    """Its id, state, command line and stack."""
    try:
        about = f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
        command = [str(Path(sys.executable).parent / "py-spy"), "dump", "--pid", str(process.pid)]
        stack = subprocess.run(command, capture_output=True, text=True, timeout=STACK_S, check=False)
    except (psutil.NoSuchProcess, OSError, subprocess.TimeoutExpired) as error:
        return f"{process.pid}: {error}"
    return f"{about}\n{stack.stdout or stack.stderr}"
