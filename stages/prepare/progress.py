"""Progress of preparing, on standard error: a bar on a terminal, plain lines elsewhere. Names of models may have any
characters; on a terminal, those that it would obey are shown as escapes."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Protocol

from pipeline.runtime.log.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[int, int], None]
"""Called with (bytes done, total bytes); the total is 0 while it is unknown."""

LINE_EVERY_S = 5.0
BAR_WIDTH = 16


class Progress(Protocol):
    """Receives the progress of preparing."""

    def say(self, line: str) -> None:
        """Report one event."""

    def measure(self, what: str) -> AbstractContextManager[Report]:
        """A context whose value takes the number of bytes done so far."""


class SilentProgress:
    """Reports nothing."""

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        yield lambda done, total: None


class Lines:
    """A line at the beginning, at the end, and every `LINE_EVERY_S` between."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def say(self, line: str) -> None:
        print(printable(line), file=self._stream, flush=True)

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        begun = reported = time.monotonic()
        last = 0

        def report(done: int, total: int) -> None:
            nonlocal reported, last
            last = done
            if time.monotonic() - reported >= LINE_EVERY_S:
                reported = time.monotonic()
                self.say(f"{what}: {_mb(done)}" + (f" of {_mb(total)}" if total else ""))

        self.say(what)
        yield report
        self.say(f"{what}: done, {_mb(last)} in {time.monotonic() - begun:.1f} s")


class ProgressBar:
    """A bar on a terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._console: Console | None = None
        """The one that draws a bar now."""

    def say(self, line: str) -> None:
        if self._console is None:
            print(printable(line), file=self._stream, flush=True)
        else:  # above the bar
            self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        # Imported here: a warm start shows no bar, and the import takes a third of its time.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        columns = (
            # The only one that is cut where the terminal is narrow.
            TextColumn(
                "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(BAR_WIDTH),
            DownloadColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[speed]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )

        class CursorStays(Console):
            def show_cursor(self, show: bool = True) -> bool:
                """Never hides it: Ctrl-C kills this process, and the terminal would keep it hidden."""
                return False

        begun = time.monotonic()
        first: int | None = None
        """The bytes of an earlier download, which took no time now."""
        console = CursorStays(file=self._stream)
        with RichProgress(*columns, console=console, expand=True) as bar:
            task = bar.add_task(printable(what), total=None, speed="")

            def report(done: int, total: int) -> None:
                nonlocal first
                first = done if first is None else first
                speed = f"{_mb(int((done - first) / max(time.monotonic() - begun, 1e-3)))}/s"
                bar.update(task, completed=done, total=total or None, speed=speed)

            self._console = console
            try:
                yield report
            finally:
                self._console = None


def for_stream(stream: IO[str] | None = None) -> Progress:
    """A bar if the stream (standard error by default) is a terminal, else lines."""
    stream = stream or sys.stderr
    return ProgressBar(stream) if stream.isatty() else Lines(stream)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
