"""What the kernel knows about a process: memory, processor time, threads. Works for one that hangs, too."""

import os
import time
from pathlib import Path

import msgspec

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Fields of /proc/PID/stat behind the name in parentheses, which may hold anything; see proc(5), whose count begins at 1
# with the pid, so that field 3 is number 0 here.
_UTIME, _STIME, _NUM_THREADS, _STARTED, _RSS_PAGES = 14 - 3, 15 - 3, 20 - 3, 22 - 3, 24 - 3


class Usage(msgspec.Struct, frozen=True):
    rss_bytes: int
    cpu_s: float
    num_threads: int
    age_s: float
    """Since it was started."""


NOTHING = Usage(0, 0.0, 0, 0.0)


def usage_of(pid: int) -> Usage:
    """What a process takes; zeros where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return NOTHING
    fields = stat[stat.rindex(")") + 2 :].split()
    return Usage(
        int(fields[_RSS_PAGES]) * _PAGE_BYTES,
        (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S,
        int(fields[_NUM_THREADS]),
        time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / _TICKS_PER_S,
    )
