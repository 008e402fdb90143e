"""What a process has used, as the kernel counts it."""

from pathlib import Path

import msgspec


class Used(msgspec.Struct, frozen=True):
    """Since the process's start, in seconds; of all its threads."""

    cpu_s: float
    main_cpu_s: float
    """Of its first thread alone: the others are ZeroMQ's."""
    waited_s: float
    """Its first thread could have run, and had no core."""

    def since(self, before: "Used") -> "Used":
        return Used(self.cpu_s - before.cpu_s, self.main_cpu_s - before.main_cpu_s, self.waited_s - before.waited_s)


def used(pid: int) -> Used:
    """To the nanosecond, from the scheduler's own counts. Threads that have ended are not counted. Raises OSError."""
    total_ns = main_ns = waited_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran_ns, queued_ns, _ = map(int, (task / "schedstat").read_text().split())
        except FileNotFoundError:
            continue  # it has just ended
        total_ns += ran_ns
        if task.name == str(pid):
            main_ns, waited_ns = ran_ns, queued_ns
    return Used(total_ns / 1e9, main_ns / 1e9, waited_ns / 1e9)


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident now, and at most since the start."""
    kib = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            kib[name] = int(value.split()[0])
    return kib["VmRSS"] * 1024, kib["VmHWM"] * 1024
