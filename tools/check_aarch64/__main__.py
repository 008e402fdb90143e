"""Check the CPU kernels on aarch64: compile them, run them in QEMU, and compare every number with x86-64.

    python -m tools.check_aarch64                   both levels of aarch64
    python -m tools.check_aarch64 --level neon      one of them
    python -m tools.check_aarch64 --keep FOLDER     leave libraries and results there

Needs an x86-64 machine with FMA, g++, and Debian's packages g++-aarch64-linux-gnu and qemu-user. Takes about a minute.

The driver (driver.cpp) runs whole steps of tiny models with random weights through the library's C interface. The
reference is level `portable` on x86-64 with fused products. All arrays must have the same bits: hidden states, logits,
keys and values, quantized activations, ids, logprobs, with one thread and with two. QEMU does not imitate the order in
which an ARM CPU shows its stores to other cores, so this does not check that.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.compiler import ISA_FLAGS, NoCompiler, find_compiler
from tools.check_aarch64.builds import FUSED, LEVELS, CheckError, Toolchain, sources
from tools.check_aarch64.compare import differences, read

SYSROOT = "/usr/aarch64-linux-gnu"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
MAX_SHOWN = 20
"""Arrays that are named if they differ."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.check_aarch64", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", choices=LEVELS, action="append", help="a level of the kernels; by default all")
    parser.add_argument(
        "--cross", default="aarch64-linux-gnu-g++", help="the compiler for aarch64; by default %(default)s"
    )
    parser.add_argument("--sysroot", default=SYSROOT, help="its libraries, for QEMU; by default %(default)s")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write libraries and results here, and keep them")
    args = parser.parse_args()
    try:
        native, cross = toolchains(args.cross, args.sysroot)
        with tempfile.TemporaryDirectory(prefix="check-aarch64-") as temporary:
            folder = Path(temporary) if args.keep is None else args.keep.resolve()
            folder.mkdir(parents=True, exist_ok=True)
            return check(native, cross, args.level or list(LEVELS), folder)
    except (CheckError, NoCompiler) as error:
        print(error, file=sys.stderr)
        return 1


def toolchains(cross: str, sysroot: str) -> tuple[Toolchain, Toolchain]:
    """Those of this machine and of aarch64. Raises CheckError, with what is missing, or NoCompiler."""
    if "avx2" not in cpu_isa.available({}):
        raise CheckError("the reference needs an x86-64 CPU with FMA; on aarch64, the project's tests run the kernels")
    emulator = next((path for name in EMULATORS if (path := shutil.which(name))), None)
    missing = [] if shutil.which(cross) else [f"{cross} (Debian: g++-aarch64-linux-gnu)"]
    missing += [] if emulator else [f"{EMULATORS[0]} (Debian: qemu-user)"]
    if missing or emulator is None:
        raise CheckError(f"not found: {', '.join(missing)}")
    return (
        Toolchain(find_compiler().command),
        Toolchain((cross,), (emulator, "-cpu", "max", "-L", sysroot)),
    )


def check(native: Toolchain, cross: Toolchain, levels: list[str], folder: Path) -> int:
    """Compile, run and compare in a folder. Returns the exit code. Raises CheckError."""
    start_s = time.monotonic()
    reference = native.run(
        native.driver(folder / "driver-x86_64"),
        native.library(folder / "portable-x86_64.so", (*ISA_FLAGS["portable"], FUSED)),
        1,
        folder / "x86_64.results",
    )
    driver = cross.driver(folder / "driver-aarch64")
    failed = False
    for level in LEVELS:
        if level not in levels:
            continue
        library, *_ = [
            cross.library(folder / f"{source.stem}-{level}-aarch64.so", ISA_FLAGS[level], source)
            for source in sources()
        ]
        for num_threads in (1, 2):
            results = cross.run(driver, library, num_threads, folder / f"{level}-{num_threads}.results")
            found = differences(reference, results)
            num_arrays = sum(1 for _ in read(results))
            threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
            print(
                f"{level}, {threads}: {num_arrays - len(found)} of {num_arrays} arrays have the same bits", flush=True
            )
            for difference in found[:MAX_SHOWN]:
                print(f"    {difference}")
            failed |= bool(found)
    print(f"{'FAILED' if failed else 'ok'}, {time.monotonic() - start_s:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
