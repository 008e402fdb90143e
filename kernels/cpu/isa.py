"""Instruction sets (ISAs) that the kernels are compiled for, and which of them a CPU can run."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Isa = Literal["amx", "avx512_bf16", "avx512", "avx2", "neon", "portable"]

CPUINFO = Path("/proc/cpuinfo")

MAX_ISA = "PIPELINE_MAX_ISA"
"""Environment variable that limits the ISA: better ones are not used, as if the CPU lacked them."""

_AVX2 = frozenset({"avx2", "f16c", "fma"})
_X86_64_V3 = _AVX2 | {"abm", "bmi1", "bmi2", "movbe", "xsave"}
_X86_64_V4 = _X86_64_V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

_AVX512_BF16 = _X86_64_V4 | {"avx512_vnni", "avx512_bf16"}

NEEDED: dict[Isa, frozenset[str]] = {
    "amx": _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512_BF16,
    "avx512": _X86_64_V4 | {"avx512_vnni"},
    "avx2": _AVX2,
    "neon": frozenset({"asimddp", "asimdrdm", "atomics", "crc32"}),
    "portable": frozenset(),
}
"""Best first. For each ISA every flag, as Linux names it, that the compiler is allowed to count on. x86-64 and aarch64
have no flag in common, so one table serves both."""

_FLAGS = {"x86_64": "flags", "aarch64": "Features"}
"""The field of /proc/cpuinfo that has the flags."""


def available(environ: Mapping[str, str] = os.environ) -> list[Isa]:
    """The ISAs that this CPU and this system can run, best first, none better than PIPELINE_MAX_ISA.

    Raises ValueError if that variable does not name an ISA.
    """
    isas = runnable(platform.machine(), cpuinfo())
    name = environ.get(MAX_ISA, "")
    if not name:
        return isas
    best_first = list(NEEDED)
    if name not in best_first:
        raise ValueError(f"{MAX_ISA} is {name!r}; it must be one of {', '.join(best_first)}")
    allowed = best_first[best_first.index(name) :]
    return [isa for isa in isas if isa in allowed]


def runnable(machine: str, cpuinfo: str) -> list[Isa]:
    """The ISAs that a machine can run, best first, from its name (as of `uname -m`) and its /proc/cpuinfo.

    Linux leaves out the flags of registers that it does not save, so a flag says that both CPU and system can.
    """
    flags = frozenset(_field(cpuinfo, _FLAGS[machine]).split() if machine in _FLAGS else ())
    isas = [isa for isa, needed in NEEDED.items() if needed <= flags]
    if isas[0] == "avx512_bf16" and _field(cpuinfo, "vendor_id") == "GenuineIntel" and "avx_vnni" in flags:
        # Intel's cores since Golden Cove (the first with AVX-VNNI) multiply bfloat16 in AMX. Without it, vdpbf16ps has
        # half the throughput of float32's multiplications, 207 of 420 GFLOP/s on two cores of a Xeon; AMD's has twice.
        isas[:2] = ["avx512", "avx512_bf16"]
    return isas


def identity(machine: str, cpuinfo: str) -> str:
    """A text that is the same for all CPUs of a kind, and another for one that a compiler may tune for otherwise."""
    names = (
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
        *("isa", "uarch", "cpu"),
    )
    return "\n".join([machine, *(_field(cpuinfo, name) for name in names)])


def cpuinfo() -> str:
    """What the system says of its CPUs; empty where it says nothing."""
    try:
        return CPUINFO.read_text("utf-8", "replace")
    except OSError:
        return ""


def _field(cpuinfo: str, name: str) -> str:
    """The value of a field in the text of the first CPU that has it; empty where none has."""
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""
