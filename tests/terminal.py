"""A program in a pseudo-terminal, as a user sees and types it."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")


# Its size is the terminal's: these variables, which a shell may export, would have precedence.
_ENVIRON = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
_ENVIRON |= {"TERM": "xterm-256color"}


class Terminal:
    """Use as a context manager: leaving it kills the program if it still runs."""

    def __init__(self, command: Sequence[str], folder: Path, columns: int = 100) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Its own terminal, so that Ctrl-C is a signal to it.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=_ENVIRON,
        )
        os.close(theirs)
        self._fd = ours
        self._raw = b""
        self._is_over = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # the program has ended
                data = b""
            with self._news:
                self._raw += data
                self._is_over = not data
                self._news.notify_all()
            if not data:
                return

    @property
    def text(self) -> str:
        """All output so far, without colors and cursor movements."""
        return _ESCAPES.sub("", self._raw.decode("utf-8", "replace")).replace("\r\n", "\n").replace("\r", "")

    @property
    def raw(self) -> bytes:
        return self._raw

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, words: str, times: int = 1, timeout_s: float = 30.0) -> str:
        """Wait until the words were shown this many times. Returns the output so far."""
        with self._news:
            self._news.wait_for(lambda: self.text.count(words) >= times or self._is_over, timeout_s)
        assert self.text.count(words) >= times, f"{words!r} was not shown {times} times:\n{self.text}"
        return self.text

    def wait_for_prompt(self, prompt: str = "> ", timeout_s: float = 30.0) -> None:
        """Wait until the output ends with a prompt. Before that, typed keys may have another meaning: Ctrl-C and Ctrl-D
        differ between a program that edits a line and one that does not."""
        with self._news:
            self._news.wait_for(lambda: self.text.endswith(prompt) or self._is_over, timeout_s)
        assert self.text.endswith(prompt), f"no prompt was shown:\n{self.text}"

    def interrupt(self, until: str, timeout_s: float = 30.0) -> None:
        """Press Ctrl-C, repeatedly if nothing happens, until words are shown: Python checks for signals before it waits
        for a key, so that a signal between the two takes effect only with the next key."""
        end = time.monotonic() + timeout_s
        with self._news:
            while until not in self.text and not self._is_over and time.monotonic() < end:
                self.type(CTRL_C)
                self._news.wait_for(lambda: until in self.text or self._is_over, 1.0)
        assert until in self.text, f"{until!r} was not shown:\n{self.text}"

    def enter(self, line: str, until: str, times: int = 1, timeout_s: float = 30.0) -> str:
        """Type a line, and wait for words."""
        self.type(f"{line}\r")
        return self.wait_for(until, times, timeout_s)

    def end(self, timeout_s: float = 30.0) -> int:
        """Wait until the program exits, and return its exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        os.close(self._fd)
