"""Compile the CPU library into the user's cache for every instruction set that the tests use.

    python -m tests.kernels.cpu.compile
    python -m tests.kernels.cpu.compile --first     only the one that servers use

With PIPELINE_ALL_CASES=1, all of them as servers have them. Without it, only the one that servers use here: the others
are quick ones (`compiler.QUICK`), which compute the same bits and take two thirds of the time to compile.

tools/check does this beside the steps before the tests that need all of them. The library that servers use comes first;
the others are compiled at a low priority. Tests compile what is missing, or fail if it cannot be compiled.
"""

import os
import sys
from pathlib import Path

from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import Isa, available
from tests.kernels.cpu.samplers import EMULATED
from tests.slices import ALL_CASES


def library_of(isa: Isa) -> Path:
    """The library for an instruction set that this CPU has, from the user's cache or compiled into it."""
    return build(isa, print, quick=not ALL_CASES and isa != available()[0])


def main() -> None:
    for isa in available():
        library_of(isa)
        if "--first" in sys.argv:
            return
        os.nice(10 - os.nice(0))
    for isa in EMULATED.values():
        build(isa, print, emulate=True)


if __name__ == "__main__":
    main()
