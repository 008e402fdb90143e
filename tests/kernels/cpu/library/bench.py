"""A small source, a cache and a compiler, to test when libraries are compiled."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.library_file import load

ROOT = Path(__file__).resolve().parents[4]
PATIENCE_S = 60

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'

BUILD = """
import sys
from pathlib import Path
from pipeline.kernels.cpu.build import build
log = lambda line: print(line, flush=True)
print(build("portable", log, Path(sys.argv[1]), cache_root=Path(sys.argv[2])), flush=True)
"""


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.01)


class Bench:
    """A small source, an empty cache, and a compiler that counts its runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cache_root = folder / "cache"
        self.kernels = self.cache_root / "kernels"
        self.log_lines: list[str] = []
        self.say: Callable[[str], None] = self.log_lines.append
        self.source = folder / "source" / "answer.cpp"
        self.source.parent.mkdir()
        self.source.write_text(SOURCE)
        self.write_header("#define ANSWER 42\n")
        self._monkeypatch = monkeypatch
        self._real = shutil.which("c++")
        assert self._real is not None, "these tests need a C++ compiler"
        self.compile_with(f'exec {self._real} "$@"')

    def write_header(self, text: str) -> None:
        self.source.with_name("answer.h").write_text(text)

    def compile_with(self, script: str, *, version: str = "a compiler, 1.0") -> Path:
        """Set CXX to a shell script that runs `script` to compile. Returns its path."""
        path = self.folder / "compiler"
        path.write_text(
            f"#!/bin/sh\ncase \"$*\" in *--version) echo '{version}'; exit 0 ;; esac\n"
            f"echo compiling >> {self.folder}/count\n{script}\n"
        )
        path.chmod(0o755)
        self._monkeypatch.setenv("CXX", str(path))
        return path

    def wait_in_compiler(self) -> Path:
        """Make the compiler wait for a line in the returned pipe."""
        gate = self.folder / "gate"
        os.mkfifo(gate)
        self.compile_with(f'echo $$ > {self.folder}/pid\nread line < {gate}\nexec {self._real} "$@"')
        return gate

    def pid_in_compiler(self) -> int:
        """The id of the process that waits in the compiler. Waits until it exists."""
        path = self.folder / "pid"
        eventually(lambda: path.exists() and path.read_text().endswith("\n"))
        return int(path.read_text())

    def build(
        self,
        isa: cpu_isa.Isa = "portable",
        *,
        emulate: bool = False,
        quick: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> Path:
        return build(
            *(isa, self.say, self.source),
            cache_root=self.cache_root,
            emulate=emulate,
            quick=quick,
            timeout_s=timeout_s,
        )

    def start(self) -> subprocess.Popen[str]:
        """`build` in another process, which prints its log lines and then the path."""
        command = (sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BUILD}")
        arguments = (str(self.source), str(self.cache_root))
        return subprocess.Popen((*command, *arguments), stdout=subprocess.PIPE, text=True)

    @property
    def num_compiled(self) -> int:
        count = self.folder / "count"
        return len(count.read_text().splitlines()) if count.exists() else 0

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.kernels.iterdir() if not path.name.startswith(".lock-"))


def answer(library: Path) -> int:
    result = load(library).answer()
    assert isinstance(result, int)
    return result


# --- incomplete libraries ---


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
