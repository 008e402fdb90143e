"""Compile the CPU library into the user's cache for every instruction set that the tests use.

    python -m tests.kernels.cpu.compile

tools/check does this beside the steps that keep one core busy. Tests compile what is missing, or fail if it cannot be
compiled.
"""

from pipeline.kernels.cpu.build import build
from tests.kernels.cpu.samplers import EMULATED, ISAS


def main() -> None:
    for isa in ISAS:
        build(EMULATED.get(isa, isa), print, emulate=isa in EMULATED)


if __name__ == "__main__":
    main()
