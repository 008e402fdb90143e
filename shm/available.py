"""How much memory this process can still allocate.

The machine's available memory is not enough: in a container the control group has the limit, and a process that exceeds
it is killed without an error.
"""

from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be reserved now: the minimum over the machine and all control groups of this process.

    `root` contains `proc` and `sys`.
    """
    return min([_machine(root), *_control_groups(root)])


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _control_groups(root: Path) -> Iterator[int]:
    """Available bytes of each group. In a container the group's own path is not visible; its files are at the top."""
    mount = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            yield from _leaves(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _leaves(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _leaves(mount: Path, path: str, limit_file: str, usage_file: str, prefix: str) -> Iterator[int]:
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        try:
            limit = (folder / limit_file).read_text().strip()
            usage = int((folder / usage_file).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except FileNotFoundError:
            continue  # hidden from this process, or the top, which has no limit
        if limit != "max":
            # Cached file pages count as used, but the kernel reclaims them.
            cached = int(counts[f"{prefix}inactive_file"]) + int(counts[f"{prefix}active_file"])
            yield max(0, int(limit) - usage + cached)
