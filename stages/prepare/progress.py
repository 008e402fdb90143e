"""How a person is told what preparing does: a bar on a terminal, plain lines elsewhere, always on standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Protocol

Report = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); the second is 0 while it isn't known."""

LINE_EVERY_S = 5.0


class Progress(Protocol):
    """Where preparing reports to."""

    def say(self, line: str) -> None:
        """One event."""

    def measure(self, what: str) -> AbstractContextManager[Report]:
        """A context in which a number of bytes grows, told through the `Report` it gives."""


class Silence:
    """Tells nobody."""

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        yield lambda done, total: None


class Lines:
    """A line when something begins and ends, and one every few seconds between."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        begun = told = time.monotonic()
        last = 0

        def report(done: int, total: int) -> None:
            nonlocal told, last
            last = done
            if time.monotonic() - told >= LINE_EVERY_S:
                told = time.monotonic()
                self.say(f"{what}: {_mb(done)}" + (f" of {_mb(total)}" if total else ""))

        self.say(what)
        yield report
        self.say(f"{what}: done, {_mb(last)} in {time.monotonic() - begun:.1f} s")


class ProgressBar:
    """A bar on a terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        # Imported here: a warm start shows no bar, and the import would be a third of its time.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(file=self._stream)) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total or None)


def for_stream(stream: IO[str] | None = None) -> Progress:
    """What fits a stream; standard error where none is given."""
    stream = stream or sys.stderr
    return ProgressBar(stream) if stream.isatty() else Lines(stream)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
