"""Progress displays of an `LLM` on standard error; nothing is shown if it is not a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

REFRESH_PER_S = 4
"""Low, because drawing takes CPU time from an embedded server."""


def is_seen(progress: bool) -> bool:
    """Whether progress is shown: it is requested, and standard error is a terminal."""
    try:
        return progress and sys.stderr.isatty()
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return False


class StartStatus:
    """A status line for the start of a server."""

    def __init__(self, progress: bool) -> None:
        self._progress = progress
        self._status: Any = None

    def __enter__(self) -> "StartStatus":
        if is_seen(self._progress):
            from rich.console import Console

            self._status = Console(stderr=True).status("starting a server", refresh_per_second=REFRESH_PER_S)
            self._status.start()
        return self

    @property
    def is_seen(self) -> bool:
        return self._status is not None

    def say(self, line: str) -> None:
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(line or "starting a server", overflow="ellipsis", no_wrap=True))

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


class BatchBar:
    """Counts the tokens of a batch, and may draw a progress bar. `count` and `done` are called in different threads."""

    def __init__(self) -> None:
        self.num_prompt_ids = 0
        self.num_output_ids = 0
        self._begun_s = perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def count(self, num_prompt: int, num_output: int) -> None:
        """Add new ids of prompts and outputs."""
        self.num_prompt_ids += num_prompt
        self.num_output_ids += num_output

    def done(self) -> None:
        """A request has ended."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def all_read(self, num_items: int) -> None:
        """The input is exhausted: set the total number of requests."""
        if self._bar is not None:
            self._bar.update(self._task, total=num_items)

    def rates(self) -> str:
        """Average rates since the start, such as `in 1234.5, out 678.9 tokens/s`."""
        took_s = max(perf_counter() - self._begun_s, 1e-9)
        return f"in {self.num_prompt_ids / took_s:.1f}, out {self.num_output_ids / took_s:.1f} tokens/s"

    @contextmanager
    def drawn(self, progress: bool, num_items: int | None) -> Iterator[None]:
        """Draw the bar while the body runs, if standard error is a terminal. `num_items` is None for an iterator."""
        if not is_seen(progress):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        rates = self.rates

        class RatesColumn(ProgressColumn):
            def render(self, task: Any) -> Text:
                return Text(rates())

        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), RatesColumn())
        with RichProgress(*columns, console=Console(stderr=True), refresh_per_second=REFRESH_PER_S) as self._bar:
            self._task = self._bar.add_task("", total=num_items)
            try:
                yield
            finally:
                self._bar = None
