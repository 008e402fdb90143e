"""The CUDA features that a step uses: memory, streams, events and graphs.

`Interpreted` provides them without a GPU, synchronously, while Triton's interpreter runs the kernels. Tests use it to
run the same code as on a GPU.
"""

import ctypes
import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.triton.launch import INTERPRETED, compiling
from pipeline.shm.available import available_bytes
from pipeline.stages.execute.kv import DeviceMemory

CONTEXT_BYTES = 512 * 1024**2
"""GPU memory of CUDA, cuBLAS and the kernels' code, estimated."""

EARLY = (9, 0)
"""Hopper, the first architecture with programmatic dependent launch."""

LOCKED_BYTES = 64 * 1024**3
"""Host memory is pinned in pieces of about this size: some drivers fail to pin 512 GiB or more at once."""

MAX_COMPILING = 16
"""Threads that compile kernels. More hardly help, because a part of the work holds Python's lock."""

Calls = Callable[[], None]


class StreamEvent(Protocol):
    """A point in a stream's work, as torch.cuda.Event."""

    def record(self) -> None:
        """Place the event after all work in the current stream."""

    def synchronize(self) -> None:
        """Sleep until the work before it is done."""

    def query(self) -> bool:
        """Whether the work before it is done."""

    def wait(self) -> None:
        """Make later work of the current stream wait for the work before it."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to a later event. Both must be timed and complete."""


class Device(ABC):
    """The device of tensors and kernels. One thread makes all launches; others may only wait for events."""

    where: torch.device
    name: str
    """Name for logs and reports."""
    captures_graphs = True
    """Graphs are captured and kernels compiled, so preparing them ahead is worthwhile."""
    launches_early = False
    """Whether it has programmatic dependent launch."""

    @abstractmethod
    def pinned(self, num: int, dtype: torch.dtype) -> Tensor:
        """Pinned host memory for asynchronous copies. Zeros, [num]."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy in the current stream. One side may be pinned memory of the host: leave it alone until an
        event that is recorded after this is over."""

    @abstractmethod
    def send(self, array: "np.ndarray[Any, Any]") -> Tensor:
        """An asynchronous copy in new device memory; complete before the next launch reads it."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Tensor:
        """An asynchronous copy in new host memory; complete when an event that is recorded after it is."""

    @abstractmethod
    def event(self, *, timed: bool = False) -> StreamEvent:
        """A new event."""

    @abstractmethod
    def graph(self, calls: Calls) -> Calls:
        """Capture launches. The returned function replays all of them on the compute stream.

        The launches also run once before the capture, so that nothing is compiled in it. Their inputs must be valid.
        """

    @abstractmethod
    def compiling(self) -> Any:
        """A context in which launches only compile their kernels. All are compiled when it ends."""

    @abstractmethod
    def copying(self) -> Any:
        """A context in which the copy stream is the current one."""

    @abstractmethod
    def lock(self, memory: "np.ndarray[Any, Any]") -> bool:
        """Pin host memory [blocks, bytes] until `close`, in pieces of `locked_blocks`: one copy must not touch two.
        Returns False on failure; copies from and to it then block the host."""

    @abstractmethod
    def memory(self, reserved_bytes: int) -> DeviceMemory:
        """The memory for KV blocks, if `reserved_bytes` are kept free for other uses of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work is done."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all work is done, and unpin memory that `lock` pinned."""


class Gpu(Device):
    """One NVIDIA GPU. The thread that creates it makes all launches; its current stream becomes the compute stream."""

    def __init__(self) -> None:
        assert not INTERPRETED, "TRITON_INTERPRET is set: kernels would run on the CPU"
        self.where = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.where)
        self.launches_early = torch.cuda.get_device_capability(self.where) >= EARLY
        # By default, cuBLAS may add the partial sums of split-K in bfloat16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._compute = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        self._copy = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._compute)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._locked: list[int] = []

    def pinned(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def send(self, array: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.where, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def event(self, *, timed: bool = False) -> StreamEvent:
        # Waiting for a blocking event sleeps. Spinning would occupy a core and the driver's lock.
        event: StreamEvent = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        return event

    def graph(self, calls: Calls) -> Calls:
        calls()
        # torch.cuda.graph() would synchronize the device and collect garbage while serving. Garbage collection is off
        # during the capture, because freeing a tensor or an event records work in the stream.
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                calls()
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self._graphs.append(graph)
        return graph.replay

    def compiling(self) -> AbstractContextManager[None]:
        return compiling(min(MAX_COMPILING, len(os.sched_getaffinity(0))))

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._copy):
            yield

    def lock(self, memory: "np.ndarray[Any, Any]") -> bool:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        step = locked_blocks(memory.shape[1])
        for begin in range(0, len(memory), step):
            piece = memory[begin : begin + step]
            address = int(piece.ctypes.data)
            if int(cudart.cudaHostRegister(address, piece.nbytes, 0)) != 0:
                # Clear the error, or the next launch would report it.
                _clear_last_error()
                return False
            self._locked.append(address)
        return True

    def memory(self, reserved_bytes: int) -> DeviceMemory:
        # Return cached memory that loading has freed, such as that of unquantized weights.
        self.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.where)
        used = torch.cuda.memory_reserved(self.where) + CONTEXT_BYTES
        return DeviceMemory(total, free, used, reserved_bytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def close(self) -> None:
        try:
            self.synchronize()
        finally:
            self._graphs.clear()
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for address in self._locked:
                cudart.cudaHostUnregister(address)
            self._locked.clear()


class Interpreted(Device):
    """No GPU: kernels run synchronously in Triton's interpreter."""

    captures_graphs = False

    class _Done:
        def __init__(self) -> None:
            self.recorded_s = 0.0

        def record(self) -> None:
            self.recorded_s = time.perf_counter()

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

        def wait(self) -> None:
            pass

        def elapsed_time(self, later: Any) -> float:
            return 1000 * float(later.recorded_s - self.recorded_s)

    def __init__(self) -> None:
        assert INTERPRETED, "TRITON_INTERPRET is not set"
        self.where = torch.device("cpu")
        self.name = "Triton's interpreter"

    def pinned(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def send(self, array: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(array.copy())

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def event(self, *, timed: bool = False) -> StreamEvent:
        return self._Done()

    def graph(self, calls: Calls) -> Calls:
        return calls

    def compiling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lock(self, memory: "np.ndarray[Any, Any]") -> bool:
        return True

    def memory(self, reserved_bytes: int) -> DeviceMemory:
        available = available_bytes()
        return DeviceMemory(available, available, 0, 0)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


def locked_blocks(block_bytes: int) -> int:
    """Blocks of a piece of host memory that is pinned at once."""
    return max(1, LOCKED_BYTES // block_bytes)


def make_device(index: int = 0) -> Device:
    """The GPU of this index among the visible ones, or `Interpreted` if TRITON_INTERPRET is set."""
    if INTERPRETED:
        return Interpreted()
    torch.cuda.set_device(index)
    return Gpu()


def _clear_last_error() -> None:
    """Call cudaGetLastError of each CUDA runtime in this process; torch does not expose it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in lines if "libcudart" in line}:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path).cudaGetLastError()
