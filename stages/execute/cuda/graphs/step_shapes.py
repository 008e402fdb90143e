"""The sizes that steps are padded to, so that a few captured graphs serve all of them. Pure.

A decode step has one token per entry. Its sizes are close together, because every row of padding costs. A mixed step is
padded to `FEW` entries and samples or to the maximum, which cost little beside its tokens. At most a
third of a mixed step above 64 tokens is padding, a fifth above 256. A step that verifies proposed ids samples after
each of its tokens, and its samples are padded like a decode step's; with a prompt in it, to the maximum. Beyond the
largest size no graph is captured: the launches take less time than the kernels.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

FEW = 16
"""Entries and samples of a mixed step are padded to this number or to the maximum."""
MAX_TOKENS = 4096
"""Tokens of the largest step that is captured."""
FIRST_DECODES = (1, 2, 4, 8, 16)
"""Sizes to capture before the server is ready, besides the largest. Others are captured on first use or when idle."""

MAX_TOKENS_OF_MATMULS = 128
"""Up to so many tokens, the variant of a matmul's kernel depends on their number."""


@dataclass(frozen=True, slots=True)
class PaddedStepShape:
    """Sizes of a step with padding."""

    num_tokens: int
    num_entries: int
    num_samples: int
    one_each: bool
    """Each entry has one token."""
    is_captured: bool = True
    verifies: bool = False
    """It has proposed ids: sampled ids are verified before they are appended to their rows."""
    has_adapters: bool = False
    """A row has a LoRA adapter. Which one is data."""

    def with_adapters(self) -> "PaddedStepShape":
        return replace(self, has_adapters=True)


class StepShapes:
    """The shapes of a runner's steps."""

    def __init__(self, max_num_rows: int, max_num_tokens: int, max_num_samples: int) -> None:
        self._max_num_rows, self._max_num_samples = max_num_rows, max_num_samples
        most = min(max_num_rows, max_num_tokens)
        self.decodes = decode_sizes(most)
        self._decodes = [PaddedStepShape(size, size, size, one_each=True) for size in self.decodes]
        self.mixed = mixed_sizes(min(max_num_tokens, MAX_TOKENS))
        self.verified = decode_sizes(min(max_num_tokens, max_num_samples, MAX_TOKENS))

    def of(self, num_tokens: int, num_entries: int, num_samples: int) -> PaddedStepShape:
        """The shape of a step without adapters."""
        if num_tokens == num_entries == num_samples:
            return self.decode(num_entries)
        return self.mix(num_tokens, num_entries, num_samples)

    def mixes(self, num_rows: int) -> list[PaddedStepShape]:
        """The shapes of steps with prompts and up to `num_rows` entries and samples."""
        return [self.mix(size, num_rows, num_rows) for size in self.mixed]

    def decode(self, num_rows: int) -> PaddedStepShape:
        """The shape of a step in which `num_rows` rows decode."""
        return self._decodes[bisect_left(self.decodes, num_rows)]

    def mix(self, num_tokens: int, num_entries: int, num_samples: int) -> PaddedStepShape:
        """The shape of any other step."""
        entries, samples = self._most_of(num_entries), self._most_of(num_samples)
        if num_tokens > self.mixed[-1]:
            return PaddedStepShape(num_tokens, entries, samples, one_each=False, is_captured=False)
        size = self.mixed[bisect_left(self.mixed, num_tokens)]
        return PaddedStepShape(size, entries, samples, one_each=False)

    def verify(self, num_tokens: int, num_entries: int, num_samples: int) -> PaddedStepShape:
        """The shape of a step with proposed ids."""
        entries = self._most_of(num_entries)
        if num_tokens == num_samples <= self.verified[-1]:
            size = self.verified[bisect_left(self.verified, num_tokens)]
            return PaddedStepShape(size, entries, size, one_each=False, verifies=True)
        shape = self.mix(num_tokens, num_entries, 1)
        return replace(shape, num_samples=self._max_num_samples, verifies=True)

    def verifying(self) -> list[PaddedStepShape]:
        """The shapes of steps with few rows that verify proposed ids and have no prompt, most useful first. None
        without speculative decoding."""
        if self._max_num_samples == self._max_num_rows:
            return []
        return [self.verify(size, 1, size) for size in self.verified if size > 1]

    def _most_of(self, num: int) -> int:
        return min(FEW, self._max_num_rows) if num <= FEW else self._max_num_rows

    def compiled(self) -> list[PaddedStepShape]:
        """Shapes that together have the kernels of all steps without proposed ids."""
        few = [shape for shape in (*self._decodes, *self.mixes(1)) if shape.num_tokens <= MAX_TOKENS_OF_MATMULS]
        return list(dict.fromkeys((*few, self._decodes[-1], *self.first_mixes())))

    def first_mixes(self) -> list[PaddedStepShape]:
        """The smallest and the largest shape of a step with few prompts."""
        return [self.mix(size, 1, 1) for size in (self.mixed[0], self.mixed[-1])]

    def first(self) -> list[PaddedStepShape]:
        """The shapes to capture before the server is ready, largest first, because they share memory."""
        sizes = {self.decode(size).num_tokens for size in FIRST_DECODES if size <= self.decodes[-1]}
        return [self.decode(size) for size in sorted(sizes | {self.decodes[-1]}, reverse=True)]

    def others(self) -> list[PaddedStepShape]:
        """The other decode shapes, most useful first."""
        first = self.first()
        return [shape for shape in map(self.decode, self.decodes) if shape not in first]


def decode_sizes(most: int) -> list[int]:
    """Sizes up to and including `most`. At most 44 % of a step is padding, a quarter beyond 128 rows."""
    sizes = [1, 2, 4, 8, *range(16, 32, 8), *range(32, 64, 16), *range(64, 192, 32), *range(192, 512, 64)]
    sizes += range(512, most + 1, 128)
    return [size for size in sizes if size < most] + [most]


def mixed_sizes(most: int) -> list[int]:
    """Numbers of tokens up to and including `most`."""
    sizes = [16, 32, 48, 64, 96, 128, *range(192, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256)]
    sizes += range(2048, most + 1, 512)
    return [size for size in sizes if size < most] + [most]
