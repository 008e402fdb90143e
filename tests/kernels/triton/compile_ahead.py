"""Compile kernels ahead in threads, for a GPU that need not be present. See test_launch.py.

    python -m tests.kernels.triton.compile_ahead

Run this without TRITON_INTERPRET. Prints what was launched and compiled, as JSON.
"""

import json
import tempfile

import torch
from triton import knobs

from pipeline.kernels.triton import copy
from pipeline.kernels.triton.launch import compiling
from tests.kernels.triton.pretending import pretend


def main() -> None:
    driver = pretend()
    launched: list[str] = []
    driver.launched = launched.extend
    memory, packed = torch.zeros(2, 8, 64, dtype=torch.int32), torch.zeros(4, 2, 64, dtype=torch.int32)
    blocks = torch.zeros(1, dtype=torch.int32)

    def launch() -> None:
        for _ in range(2):
            copy.gather(packed, memory, blocks)
            copy.scatter(memory, blocks, packed)

    compiled: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        knobs.cache.dir = name
        knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["fn"].name)
        with compiling(2):
            launch()
        ahead, launched_ahead = len(set(map(id, _kernels()))), len(launched)
        compiled.clear()
        launch()
    print(json.dumps({"ahead": ahead, "launched_ahead": launched_ahead, "later": compiled, "launched": launched}))


def _kernels() -> list[object]:
    """The kernels in Triton's cache."""
    (cache, *_) = copy._copy.device_caches[0]
    return [kernel for kernel in cache.values() if not hasattr(kernel, "result")]


if __name__ == "__main__":
    main()
