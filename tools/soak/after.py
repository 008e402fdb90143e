"""What must be true of an idle server."""

import time

from pipeline.metrics.stats import DetokenizeCounts, GatewayCounts, IngestCounts, ScheduleCounts, ServerStats
from tools.benchmarks.served import Served
from tools.benchmarks.watch import SLACK_FDS, Sample, sample

IDLE_S = 60.0
POLL_S = 0.1
SLACK_ARENA_BYTES = 65536
"""Time for the next turns to release what the last messages named."""


def leftovers(stats: ServerStats) -> list[str]:
    """What is still open, running or held, one line each."""
    found = []
    for stage in stats.stages:
        match stage.counts.own if stage.counts is not None else None:
            case GatewayCounts(num_open=number):
                found.append((number, f"{stage.name} has {number} requests open"))
            case IngestCounts() as own:
                number = own.num_waiting + own.num_encoding
                found.append((number, f"{stage.name} works on {number}"))
            case ScheduleCounts() as own:
                found.append((own.num_running, f"{own.num_running} running"))
                found.append((own.num_waiting, f"{own.num_waiting} waiting"))
                found.append((own.num_swapped, f"{own.num_swapped} swapped"))
                found.append((own.num_blocks_held, f"{own.num_blocks_held} KV blocks held"))
                lost = own.num_blocks_total - own.num_blocks_free - own.num_blocks_cached - own.num_blocks_held
                found.append((lost, f"{lost} KV blocks lost"))
                kept = own.num_swap_blocks_total - own.num_swap_blocks_free
                found.append((kept, f"{kept} swap blocks not free"))
            case DetokenizeCounts(num_sequences=number):
                found.append((number, f"{stage.name} has {number} sequences"))
    return [words for number, words in found if number]


def settle(server: Served) -> list[str]:
    """Wait until the server is idle. Returns what is left at the deadline."""
    end = time.monotonic() + IDLE_S
    while (left := leftovers(server.stats())) and time.monotonic() < end:
        time.sleep(POLL_S)
    return left


class Idle:
    """Descriptors and arena usage of an idle server."""

    def __init__(self, server: Served) -> None:
        self.sample: Sample = sample(server.pids)
        self.arenas = {
            stage.name: stage.counts.arena_bytes_used for stage in server.stats().stages if stage.counts is not None
        }

    def grown_since(self, before: "Idle") -> list[str]:
        """Resources whose usage has grown, one line each."""
        found = []
        for name, number in self.sample.num_fds.items():
            if number > before.sample.num_fds[name] + SLACK_FDS:
                found.append(f"{name} has {number} descriptors open, {before.sample.num_fds[name]} before")
        for name, used in self.arenas.items():
            if used > before.arenas.get(name, 0) + SLACK_ARENA_BYTES:
                found.append(f"{name} has {used} bytes of its arena in use, {before.arenas.get(name, 0)} before")
        return found
