"""User scripts, each run in a process of its own."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from tests.pipes import close_at_end

ROOT = Path(__file__).resolve().parents[3]


class Script:
    """A program without a main guard. Use as a context manager: leaving it kills the remaining processes."""

    def __init__(self, folder: Path, text: str) -> None:
        path = folder / "script.py"
        # The package under test comes first. Child processes do not inherit the path.
        path.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{text}")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-u", str(path)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": ""},
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._out = threading.Thread(target=self._read, daemon=True)
        self._out.start()
        self.errors = ""
        self._err = threading.Thread(target=self._read_errors, daemon=True)
        self._err.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("<end>")
            self._news.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def wait_for(self, word: str, timeout_s: float = 60.0) -> str:
        """The rest of the first line that begins with a word."""

        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(word)]

        with self._news:
            self._news.wait_for(lambda: found() or "<end>" in self.lines, timeout_s)
        assert found(), f"no line {word!r}: {self.lines}\n{self.errors if self.process.poll() is not None else ''}"
        return found()[0].removeprefix(word).strip()

    def family(self) -> list[psutil.Process]:
        """All descendants of this process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait until the program exits, and return its exit code."""
        code = self.process.wait(timeout_s)
        self._out.join(10)
        self._err.join(10)
        return code

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        try:
            close_at_end(self._out, self.process.stdout)
        finally:
            close_at_end(self._err, self.process.stderr)


def alive(processes: list[psutil.Process], timeout_s: float = 3.0) -> list[psutil.Process]:
    """The processes that still run after a timeout."""
    _, left = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
