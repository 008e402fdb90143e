"""Compile the CPU kernels and their driver, for this machine and for aarch64, and run them."""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.kernels.cpu.build import PROGRAM
from pipeline.kernels.cpu.compiler import FLAGS, ISA_FLAGS
from pipeline.kernels.cpu.isa import Isa
from pipeline.kernels.cpu.peaks import SOURCE as PEAKS

DRIVER = Path(__file__).parent / "driver.cpp"

LEVELS: tuple[Isa, ...] = ("portable", "neon")
"""Of aarch64."""

# The headers define more than the driver uses.
ONLY_DRIVER = ("-Wno-unused-function", f"-I{PROGRAM.parent}", *ISA_FLAGS["portable"])
FUSED = "-mfma"
"""Makes the portable level on x86-64 round a product and its sum once, as aarch64 does."""

COMPILE_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 600.0


class CheckError(Exception):
    """Something could not be compiled or run, or its own checks failed. The message has its output."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler, and what runs its programs."""

    compiler: tuple[str, ...]
    runner: tuple[str, ...] = ()

    def library(self, out: Path, options: Sequence[str], source: Path = PROGRAM) -> Path:
        """Compile a library of the kernels, as `build` does. Raises CheckError, also for a warning."""
        return self._compile(out, (*FLAGS, *options), source)

    def driver(self, out: Path) -> Path:
        """Compile the driver. Raises CheckError, also for a warning."""
        flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
        return self._compile(out, (*flags, *ONLY_DRIVER), DRIVER, "-ldl")

    def run(self, driver: Path, library: Path, num_threads: int, out: Path, every: int = 1) -> Path:
        """Run the driver with a library, and one of `every` models. Returns the file that it writes. Raises
        CheckError."""
        _run((*self.runner, str(driver), str(library), str(num_threads), str(out), str(every)), RUN_TIMEOUT_S)
        return out

    def _compile(self, out: Path, options: Sequence[str], source: Path, *libraries: str) -> Path:
        said = _run((*self.compiler, *options, str(source), "-o", str(out), *libraries), COMPILE_TIMEOUT_S)
        if said:
            raise CheckError(f"{self.compiler[0]} warns of {source.name}:\n{said}")
        return out


def _run(command: Sequence[str], timeout_s: float) -> str:
    """A command's errors and warnings. Raises CheckError if it can't be run, fails, or takes too long."""
    shown = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except OSError as error:
        raise CheckError(f"{shown}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{shown}: not done after {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise CheckError(f"{shown}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stderr.strip()


def sources() -> tuple[Path, ...]:
    """All that has to compile."""
    return PROGRAM, PEAKS
