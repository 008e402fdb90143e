"""Compile kernels for a GPU that need not be present, and report what each launch would run and use.

A fake driver replaces Triton's own. A launch compiles to machine code as in production, and then runs nothing. Use this
in a separate process without TRITON_INTERPRET, such as `tests/kernels/triton/compile.py`.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

HOPPER = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024
"""Limit of one program on a Hopper GPU (CUDA C++ programming guide, compute capability 9.0)."""
MAX_REGISTERS = 65536


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel, as machine code."""

    name: str
    num_warps: int
    num_registers: int
    """Per thread"""
    stack_bytes: int
    """Per thread: spilled registers, and memory that needs an address"""
    shared_bytes: int
    """Per program"""


class PretendDriver(DriverBase):
    def __init__(self) -> None:
        self.compiled: list[Compiled] = []
        self.launched: Callable[[list[str]], object] = lambda names: None
        """Called with the name of each launch."""
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": MAX_SHARED_BYTES, "multiprocessor_count": 132},
            load_binary=self._load,
        )
        self.launcher_cls = lambda source, metadata: self._launcher(metadata)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def _launcher(self, metadata: Any) -> Any:
        self._num_warps = metadata.num_warps
        return lambda *args, **kwargs: self.launched([metadata.name])

    def _load(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[int, int, int, int, int]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        found = re.search(r"REG:(\d+) STACK:(\d+)", output.stdout + output.stderr)
        assert found is not None, output
        registers, stack_bytes = int(found[1]), int(found[2])
        assert registers * self._num_warps * 32 <= MAX_REGISTERS
        self.compiled.append(Compiled(name, self._num_warps, registers, stack_bytes, shared_bytes))
        return 0, 0, registers, 0, 1024


def pretend() -> PretendDriver:
    """From now on, launches compile but run nothing."""
    assert not knobs.runtime.interpret
    driver = PretendDriver()
    triton.runtime.driver.set_active(driver)
    return driver


def pretend_h100() -> None:
    """From now on, torch says that its GPU is an H100."""
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(  # type: ignore[assignment, misc]
        multi_processor_count=132, major=9, minor=0, name="NVIDIA H100"
    )
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
