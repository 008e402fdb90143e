"""Memory, CPU time and threads of a process, from the kernel: it also works for a process that hangs."""

import mmap
from pathlib import Path

import msgspec
import psutil


class ProcessUsage(msgspec.Struct, frozen=True):
    rss_bytes: int
    cpu_s: float
    num_threads: int


NOTHING = ProcessUsage(0, 0.0, 0)


def usage_of(pid: int) -> ProcessUsage:
    """The resources that a process uses; zeros if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return ProcessUsage(process.memory_info().rss, cpu.user + cpu.system, process.num_threads())
    except psutil.NoSuchProcess:
        return NOTHING


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, cheaper than `usage_of`; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
