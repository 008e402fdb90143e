"""The media items of a prompt, by position."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipeline.runtime.messages import KEY_BYTES, MediaItem
from pipeline.shm.arrays import Array, ShmRef


class Span(NamedTuple):
    """Consecutive positions of a prompt, whose embeddings are consecutive rows of an item."""

    item: int
    """Its index in the prompt."""
    start: int
    num: int
    first_row: int


class RequestMedia:
    """The items of a prompt, in order, and their pixels, which are kept until the request ends: an item may have to be
    encoded again."""

    def __init__(self, items: list[MediaItem], num_prompt: int) -> None:
        """Asserts that the runs are in order and within the prompt."""
        self.items = items
        self.pixels: list[Array] = [item.pixels for item in items]
        self.num_rows = [item.num_rows for item in items]
        self.firsts: list[int] = []
        """The first position of each item."""
        self.ends: list[int] = []
        """The position behind the last one of each."""
        self._runs: list[Span] = []
        end = 0
        for index, item in enumerate(items):
            assert len(item.key) == KEY_BYTES and item.runs, "a media item without a key or without rows"
            self.firsts.append(item.runs[0][0])
            row = 0
            for offset, length in item.runs:
                assert end <= offset and length > 0, "runs of media items overlap, or are not in order"
                self._runs.append(Span(index, offset, length, row))
                row, end = row + length, offset + length
            self.ends.append(end)
        assert end <= num_prompt, "a media item reaches behind its prompt"
        self._run_ends = [run.start + run.num for run in self._runs]

    @property
    def grids(self) -> list[list[int]]:
        """As in `RowAdd`."""
        return [[first, *item.grid] for first, item in zip(self.firsts, self.items, strict=True)]

    @property
    def end(self) -> int:
        """The position behind the last one that any item has."""
        return self.ends[-1]

    def between(self, start: int, end: int) -> range:
        """The items that have been begun and not ended at `start`, or that begin before `end`."""
        first = last = bisect_right(self.ends, start)
        while last < len(self.firsts) and self.firsts[last] < end:
            last += 1
        return range(first, last)

    def spans(self, start: int, end: int) -> Iterator[Span]:
        """The parts of runs among the positions `start .. end`."""
        for index in range(bisect_right(self._run_ends, start), len(self._runs)):
            run = self._runs[index]
            if run.start >= end:
                return
            begin = max(run.start, start)
            yield Span(run.item, begin, min(self._run_ends[index], end) - begin, run.first_row + begin - run.start)

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Begins and ends of the runs that have positions among `start .. end`, less `start`."""
        found = []
        for index in range(bisect_right(self._run_ends, start), len(self._runs)):
            if self._runs[index].start >= end:
                break
            found.append((self._runs[index].start - start, self._run_ends[index] - start))
        return found

    def keep(self, segment: str, read: Callable[[Array], bytes]) -> None:
        """The process that wrote this segment is gone: keep the pixels that are there."""
        self.pixels = [read(one) if isinstance(one, ShmRef) and one.segment == segment else one for one in self.pixels]
