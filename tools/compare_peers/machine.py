"""What identifies a measurement: the machine, its CPU, and the commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from pipeline.kernels.cpu.isa import available
from pipeline.version import VERSION
from tools.compare_peers.children import ROOT

GIT_S = 10.0


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    flags: tuple[str, ...]
    """The CPU's features, as in /proc/cpuinfo."""
    isa: str
    """The best instruction set that our kernels have for this CPU."""
    num_cores: int
    """Cores that this process may use. All servers use as many threads."""
    memory_bytes: int
    platform: str
    python: str

    @classmethod
    def this(cls) -> "Machine":
        cpu, flags = _cpu()
        return cls(
            cpu,
            flags,
            available()[0],
            len(os.sched_getaffinity(0)),
            psutil.virtual_memory().total,
            platform.platform(),
            platform.python_version(),
        )

    def __str__(self) -> str:
        return f"{self.num_cores} cores of {self.cpu} ({self.isa}), {self.memory_bytes / 2**30:.0f} GiB"


class Commit(msgspec.Struct, frozen=True):
    """The state of this checkout."""

    version: str
    id: str | None
    """None outside of a git checkout."""
    is_changed: bool
    """Tracked files differ from the commit."""

    @classmethod
    def this(cls) -> "Commit":
        found = _git("rev-parse", "HEAD")
        return cls(VERSION, found, bool(_git("status", "--porcelain", "--untracked-files=no")) if found else False)

    def __str__(self) -> str:
        return f"commit {self.id[:7]}{' with changes' if self.is_changed else ''}" if self.id else self.version


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu() -> tuple[str, tuple[str, ...]]:
    """Name and features of the first CPU; empty if /proc does not tell them."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields.get("model name", platform.machine()), tuple(fields.get("flags", fields.get("Features", "")).split())


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
