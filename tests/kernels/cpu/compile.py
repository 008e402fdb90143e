"""Compile the CPU library into the user's cache for every instruction set that the tests use.

    python -m tests.kernels.cpu.compile

tools/check does this beside the steps that keep one core busy. Tests compile what is missing, or fail if it cannot be
compiled.
"""

from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available
from tests.kernels.cpu.samplers import EMULATED


def main() -> None:
    for isa in available():
        build(isa, print)
    for isa in EMULATED.values():
        build(isa, print, emulate=True)


if __name__ == "__main__":
    main()
