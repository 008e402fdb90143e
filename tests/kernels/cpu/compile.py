"""Compile the CPU library into the user's cache for every instruction set that the tests use.

    python -m tests.kernels.cpu.compile
    python -m tests.kernels.cpu.compile --first     only the one that servers use

tools/check does this beside the steps before the tests that need all of them. The library that servers use comes first;
the others are compiled at a low priority. Tests compile what is missing, or fail if it cannot be compiled.
"""

import os
import sys

from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available
from tests.kernels.cpu.samplers import EMULATED


def main() -> None:
    for isa in available():
        build(isa, print)
        if "--first" in sys.argv:
            return
        os.nice(10 - os.nice(0))
    for isa in EMULATED.values():
        build(isa, print, emulate=True)


if __name__ == "__main__":
    main()
