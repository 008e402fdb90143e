"""The C++ compiler: which one, with which options for an instruction set, and how it is run."""

import os
import platform
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.isa import Isa

COMPILERS = ("c++", "g++", "clang++")
"""Tried in this order if CXX is not set."""

FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread"),
    # Sums are rounded as they are written, whatever is inlined where. Errno and traps are never read.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # A newer compiler's warnings must not cost a user the kernels; only what can't be meant is an error.
    *("-Wall", "-Wextra", "-Wno-psabi", "-Werror=return-type"),
)
QUICK = ("-O1", "-fpeel-loops")
"""What makes a quick library, in two thirds of the time. Without unrolled loops, sums would stay in memory: -O1 alone
computes up to 2.4 times as long as -O3, this up to 1.5. No option lets a compiler change a rounding or the order of a
sum, so the numbers have the same bits as the optimized library's, and `code_of` does not count it."""
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-march=x86-64-v4", "-mavx512vnni", "-mprfchw", "-mprefer-vector-width=512")
_AVX512_FLAGS = (*_AVX512, "-DISA_AVX512")
_AVX512_BF16_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-DDOT_BF16")
ISA_FLAGS: dict[Isa, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-DAMX"),
    "avx512_bf16": _AVX512_BF16_FLAGS,
    "avx512": _AVX512_FLAGS,
    "avx2": (*_AVX2, "-DISA_AVX2"),
    "neon": ("-march=armv8.2-a+dotprod", "-DISA_PORTABLE"),
    "portable": ("-DISA_PORTABLE",),
}
EMULATED: dict[Isa, tuple[str, ...]] = {"amx": ("-DAMX", "-DEMULATE_TILES"), "avx512_bf16": ()}
"""The ISAs that can do without their instructions, and what each of them defines besides DOT_BF16."""
TUNED_MACHINES = ("x86_64", "aarch64")
"""Where both compilers know -mtune=native."""

VERSION_TIMEOUT_S = 20.0
PROGRESS_S = 10.0
"""How often a user hears that the compiler still runs."""


class BuildError(Exception):
    """The kernels could not be compiled. The message tells the user why and how to fix it."""


class NoCompiler(BuildError):
    """No usable C++ compiler."""


class CompileError(BuildError):
    """The compiler failed or timed out, or its output can't be loaded."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    """Absolute path, and the options that CXX gives with it."""
    version: str
    """All that it says of itself."""

    def options(self, isa: Isa, emulate: bool, quick: bool = False) -> tuple[str, ...]:
        """Compiler options for an ISA."""
        chosen = _emulated_flags(isa) if emulate else ISA_FLAGS[isa]
        tuned = ("-mtune=native",) if platform.machine() in TUNED_MACHINES else ()
        # GCC makes statics of templates the same object in every library of a process, so that libraries of two
        # levels would share them; and GCC 12 takes its own AVX-512 headers for unsafe. Clang does neither, and does not
        # know these options.
        only_gcc = (
            ()
            if "clang" in self.version.lower()
            else ("-fno-gnu-unique", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
        )
        return (*self.command[1:], *FLAGS, *chosen, *tuned, *only_gcc, *(QUICK if quick else ()))


def find_compiler() -> Compiler:
    """The compiler that CXX names, or the first of COMPILERS in PATH. Raises NoCompiler."""
    named = os.environ.get("CXX", "").strip()
    if named:
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise NoCompiler(f"CXX is {named!r}, which can't be read as a command: {error}") from error
        path = shutil.which(words[0]) if words else None
        if path is None:
            raise NoCompiler(f"CXX is {named!r}, and there is no such program: name another, or unset it")
    else:
        words = []
        path = next(filter(None, map(shutil.which, COMPILERS)), None)
        if path is None:
            raise NoCompiler(
                f"no C++ compiler found ({', '.join(COMPILERS)}): install one, as with `apt install g++`, or name one "
                "in CXX"
            )
    command = (str(Path(path).absolute()), *words[1:])
    code, said = run((*command, "--version"), VERSION_TIMEOUT_S, Path("/"))
    if code != 0:
        raise NoCompiler(f"{path} does not work: {first_error(said) or describe_end(code)}; name another in CXX")
    return Compiler(command, said)


def _emulated_flags(isa: Isa) -> tuple[str, ...]:
    """Compiler options for an ISA without its own instructions. The compiler may use this CPU's for the rest: longer
    vectors take less code, and so less time to compile and to run. Only tests use it, and -O1 halves the time to
    compile; vectors and inlining are explicit in the source."""
    here = cpu_isa.available()
    if isa == "amx" and "avx512_bf16" in here:
        return (*_AVX512_BF16_FLAGS, "-O1", *EMULATED[isa])
    widest = _AVX512 if "avx512" in here else _AVX2 if "avx2" in here else ()
    return (*widest, "-O1", "-DISA_AVX512", "-DDOT_BF16", "-DEMULATE", *EMULATED[isa])


def run(
    command: tuple[str, ...], timeout_s: float, folder: Path, progress: Callable[[], None] = lambda: None
) -> tuple[int | None, str]:
    """A command's exit code, None if it had to be ended, and all that it wrote. Its temporary files go into `folder`,
    where it runs. Whatever it has started ends with it. `progress` is called every PROGRESS_S. Raises NoCompiler where
    it can't be run."""
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        environment = os.environ | {"LC_ALL": "C", "TMPDIR": "."}
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # a compiler is several processes
            )
        except OSError as error:
            raise NoCompiler(f"{command[0]} can't be run: {error.strerror}; name another in CXX") from error
        code: int | None = None
        end = time.monotonic() + timeout_s
        try:
            while code is None and (left_s := end - time.monotonic()) > 0:
                try:
                    code = process.wait(min(left_s, PROGRESS_S))
                except subprocess.TimeoutExpired:
                    if left_s > PROGRESS_S:
                        progress()
        finally:
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read().decode("utf-8", "replace").strip()


def first_error(said: str) -> str:
    """The most useful line of the compiler's output; empty if there is none."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "")


def describe_end(code: int | None) -> str:
    if code is None:
        return "it did not answer"
    if code >= 0:
        return f"it exited with code {code}"
    hint = ", perhaps by the system for want of memory" if -code == signal.SIGKILL else ""
    return f"it was killed by signal {-code}{hint}"
