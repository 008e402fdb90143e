"""Available memory: the machine's, limited by the control groups of the process."""

from pathlib import Path

import pytest

from pipeline.shm.available import available_bytes

MIB = 1 << 20


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8192 kB\n")
    write(tmp_path / "proc/self/cgroup", "")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(folder: Path, limit: str, usage: int, cached: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 0\n")


def test_without_groups_the_machines_memory_counts(root):
    assert available_bytes(root) == 8 * MIB


def test_the_tightest_group_above_the_process_counts(root):
    write(root / "proc/self/cgroup", "0::/a/b\n")
    group(root / "sys/fs/cgroup/a/b", "max", MIB)
    group(root / "sys/fs/cgroup/a", str(4 * MIB), 3 * MIB)
    assert available_bytes(root) == MIB


def test_cached_file_pages_of_a_group_are_free(root):
    write(root / "proc/self/cgroup", "0::/a\n")
    group(root / "sys/fs/cgroup/a", str(4 * MIB), 3 * MIB, cached=2 * MIB)
    assert available_bytes(root) == 3 * MIB


def test_a_container_that_sees_only_its_own_group(root):
    write(root / "proc/self/cgroup", "0::/somewhere/outside\n")
    group(root / "sys/fs/cgroup", str(2 * MIB), MIB)
    assert available_bytes(root) == MIB


def test_version_1_groups(root):
    write(root / "proc/self/cgroup", "5:cpu:/\n4:memory:/a\n0::/\n")
    folder = root / "sys/fs/cgroup/memory/a"
    write(folder / "memory.limit_in_bytes", f"{4 * MIB}")
    write(folder / "memory.usage_in_bytes", f"{5 * MIB}")
    write(folder / "memory.stat", "inactive_file 0\ntotal_inactive_file 0\ntotal_active_file 0\n")
    assert available_bytes(root) == 0


def test_this_machine_has_available_memory():
    assert available_bytes() > MIB
