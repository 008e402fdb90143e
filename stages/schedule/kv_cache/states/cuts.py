"""Where prompts are cut so that a snapshot of the recurrent state is kept: at multiples of the block size, for KV is
found by whole blocks.

    0 ........ found ......... mark ........ branch .................. end      multiples of the block size
                 |               |             |           |            | |
                 the step that reaches a cut ends there: the next one writes to another slot

Each cut costs a chunk more, so none is closer than `min_interval` to another or to where the sequence starts. The end
of the prompt comes first: the next turn of a chat has it in common with this one, whatever it drops of the output.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from pipeline.stages.schedule.scheduler_config import StateConfig


class StateCut(NamedTuple):
    position: int
    """The snapshot is the state behind the positions before this one."""
    is_spare: bool = False
    """Nothing but its distance from others speaks for it: it is evicted first."""


def cuts_of(
    start: int, ends: Iterable[int], marks: Iterable[int], config: StateConfig, block_size: int
) -> list[StateCut]:
    """The cuts of a sequence that is computed from `start` on, by position. The last of all is before the first of
    `ends`. Others are wanted at the following `ends` and at `marks`, if they are before it."""
    wanted = [max(0, end) // block_size * block_size for end in (*ends, *marks)]
    last = wanted[0]
    regular = range((start // config.interval + 1) * config.interval, last, config.interval)
    kept: list[StateCut] = []
    known = [start]
    for is_spare, positions in ((False, wanted), (True, regular)):
        for position in positions:
            if not start < position <= last:
                continue
            index = bisect_left(known, position)
            following = known[index] if index < len(known) else position + config.min_interval
            if min(position - known[index - 1], following - position) >= config.min_interval:
                known.insert(index, position)
                insort(kept, StateCut(position, is_spare))
    return kept


def next_in_output(position: int, config: StateConfig) -> StateCut:
    """The cut of a sequence that has passed those of its prompt, and is at `position`."""
    earliest = position + config.min_interval
    return StateCut(-(-earliest // config.decode_interval) * config.decode_interval, is_spare=True)
