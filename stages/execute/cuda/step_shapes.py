"""Which sizes steps are padded to, so that a few recorded graphs serve all of them. Pure.

A step that only decodes has one token an entry; its sizes are close together, for each row of padding costs. A mixed
step has few entries and samples or as many as there can be (their cost is small beside its tokens'), and its tokens
are rounded up by an eighth at most where they make up the time. Beyond the largest size nothing is recorded: launches
take less time than what they launch.
"""

from bisect import bisect_left
from dataclasses import dataclass

FEW = 16
"""Entries, or samples, of a mixed step: there are so many at most or as many as there can be."""
MAX_TOKENS = 4096
"""Of a step that is recorded."""
FIRST_DECODES = (1, 2, 4, 8)
"""Captured before the server is ready, with the largest; others when they come, or when there is nothing to do."""


@dataclass(frozen=True, slots=True)
class PaddedStepShape:
    """Sizes of a step with padding."""

    num_tokens: int
    num_entries: int
    num_samples: int
    one_each: bool
    """Each entry has one token."""
    is_captured: bool = True


class StepShapes:
    """The shapes of a runner's steps."""

    def __init__(self, max_num_rows: int, max_num_tokens: int) -> None:
        self._max_num_rows = max_num_rows
        most = min(max_num_rows, max_num_tokens)
        self.decodes = decode_sizes(most)
        self._decodes = [PaddedStepShape(size, size, size, one_each=True) for size in self.decodes]
        self.mixed = mixed_sizes(min(max_num_tokens, MAX_TOKENS))

    def decode(self, num_rows: int) -> PaddedStepShape:
        """Of a step in which `num_rows` rows decode."""
        return self._decodes[bisect_left(self.decodes, num_rows)]

    def mix(self, num_tokens: int, num_entries: int, num_samples: int) -> PaddedStepShape:
        """Of any other step."""
        entries, samples = self._most_of(num_entries), self._most_of(num_samples)
        if num_tokens > self.mixed[-1]:
            return PaddedStepShape(num_tokens, entries, samples, one_each=False, is_captured=False)
        size = self.mixed[bisect_left(self.mixed, num_tokens)]
        return PaddedStepShape(size, entries, samples, one_each=False)

    def _most_of(self, num: int) -> int:
        return min(FEW, self._max_num_rows) if num <= FEW else self._max_num_rows

    def first(self) -> list[PaddedStepShape]:
        """Those to be recorded before the server is ready, largest first, as their memory is shared."""
        sizes = {self.decode(size).num_tokens for size in FIRST_DECODES if size <= self.decodes[-1]}
        return [self.decode(size) for size in sorted(sizes | {self.decodes[-1]}, reverse=True)]

    def others(self) -> list[PaddedStepShape]:
        """The other shapes of decoding, in the order in which they are worth it."""
        first = self.first()
        return [shape for shape in map(self.decode, self.decodes) if shape not in first]


def decode_sizes(most: int) -> list[int]:
    """Up to `most`, which is the last: at most a third of a step is padding, an eighth beyond 128."""
    sizes = [1, 2, 4, 8, *range(16, 32, 8), *range(32, 64, 16), *range(64, 192, 32), *range(192, 512, 64)]
    sizes += range(512, most + 1, 128)
    return [size for size in sizes if size < most] + [most]


def mixed_sizes(most: int) -> list[int]:
    """Likewise of tokens."""
    sizes = [16, 32, 48, 64, 96, 128, *range(192, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256)]
    sizes += range(2048, most + 1, 512)
    return [size for size in sizes if size < most] + [most]
