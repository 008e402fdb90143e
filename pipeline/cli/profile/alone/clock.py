"""CPU time and memory of a process, from the kernel."""

from pathlib import Path

import msgspec


class ProcessTimes(msgspec.Struct, frozen=True):
    """Seconds since the process started, for all its threads."""

    cpu_s: float
    main_cpu_s: float
    """CPU time of the first thread; the others belong to ZeroMQ."""
    waited_s: float
    """Time in which the first thread was runnable but had no core."""

    def since(self, before: "ProcessTimes") -> "ProcessTimes":
        return ProcessTimes(
            self.cpu_s - before.cpu_s, self.main_cpu_s - before.main_cpu_s, self.waited_s - before.waited_s
        )


def used(pid: int) -> ProcessTimes:
    """Usage in nanosecond resolution, from the scheduler's counters. Threads that have ended don't count. Raises
    OSError."""
    total_ns = main_ns = waited_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran_ns, queued_ns, _ = map(int, (task / "schedstat").read_text().split())
        except FileNotFoundError:
            continue  # the thread has just ended
        total_ns += ran_ns
        if task.name == str(pid):
            main_ns, waited_ns = ran_ns, queued_ns
    return ProcessTimes(total_ns / 1e9, main_ns / 1e9, waited_ns / 1e9)


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident memory now, and its maximum since the start."""
    kib = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            kib[name] = int(value.split()[0])
    return kib["VmRSS"] * 1024, kib["VmHWM"] * 1024
