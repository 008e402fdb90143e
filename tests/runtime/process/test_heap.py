"""Large blocks go back to the kernel when they are freed, whatever was allocated between them."""

import subprocess
import sys

NUM, MIB = 24, 1024**2
SCRIPT = f"""
import os, sys
from pipeline.runtime.process import heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

if sys.argv[1] == "unmapped":
    assert heap.unmap_large_blocks()
bytearray(30 * {MIB})  # glibc takes blocks of this size from its heap from now on
before = resident()
large, small = [], []
for _ in range({NUM}):
    large.append(bytearray(3 * {MIB}))
    small.append(bytearray(50_000))  # stays, behind the large one
del large
print((resident() - before) // {MIB})
"""


def test_freed_large_blocks_are_given_back() -> None:
    kept_mib = {
        how: int(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("default", "unmapped")
    }
    assert kept_mib["unmapped"] < NUM // 4 < kept_mib["default"], kept_mib
