"""The few things that a step needs of CUDA: memory, streams, events and graphs.

`Interpreted` does the same without a GPU, where Triton's interpreter runs the kernels: everything is done when it is
asked for. It is there for tests, which so run the very code that launches on a GPU.
"""

import ctypes
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.shm.available import available_bytes
from pipeline.stages.execute.kv import DeviceMemory

CONTEXT_BYTES = 512 * 1024**2
"""What CUDA, cuBLAS and our kernels' code take of a GPU's memory, about."""

Calls = Callable[[], None]


class StreamEvent(Protocol):
    """A place in the order of a stream's work, as torch.cuda.Event."""

    def record(self) -> None:
        """All that the current stream has been given until now is before it."""

    def synchronize(self) -> None:
        """Wait for what is before it, asleep."""

    def query(self) -> bool:
        """Whether all that is before it is done."""

    def wait(self) -> None:
        """Let what the current stream is given from now on wait for what is before it."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to a later one; both are timed and have happened."""


class Device(ABC):
    """Where tensors and kernels are. All launches come from one thread; only events may be waited for by another."""

    where: torch.device
    name: str
    """For people."""
    captures_graphs = True
    """Graphs are recorded, and kernels compiled, so that it is worth doing ahead of need."""

    @abstractmethod
    def pinned(self, num: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that is copied from and to while the host does other things. Zeros, [num]."""

    @abstractmethod
    def send(self, array: "np.ndarray[Any, Any]") -> Tensor:
        """A copy on the device, in new memory, without a wait; there when what is launched next reads it."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy in new memory of the host, good when an event behind this has happened."""

    @abstractmethod
    def event(self, *, timed: bool = False) -> StreamEvent:
        """A new one, before nothing."""

    @abstractmethod
    def graph(self, calls: Calls) -> Calls:
        """Record launches; what is returned makes all of them at once, on the compute stream. They are made once before
        they are recorded, so that nothing is compiled then: what they read has to be harmless."""

    @abstractmethod
    def copying(self) -> Any:
        """A context in which the copy stream is the current one."""

    @abstractmethod
    def lock(self, memory: "np.ndarray[Any, Any]") -> bool:
        """Make memory of the host such as `pinned` is, for as long as the device is open. Returns whether that could be
        done; copies from and to it hold up the host where not."""

    @abstractmethod
    def memory(self, reserved_bytes: int) -> DeviceMemory:
        """What KV blocks have room in, if so much is still to be taken by others of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all is done."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all is done, and let go of what was locked."""


class Gpu(Device):
    """One NVIDIA GPU. The thread that makes it is the one that launches: its current stream is the compute stream from
    then on."""

    def __init__(self) -> None:
        assert not INTERPRETED, "TRITON_INTERPRET is set: kernels would run on the CPU"
        self.where = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.where)
        self._compute = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        self._copy = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._compute)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._locked: list[int] = []

    def pinned(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num, dtype=dtype, pin_memory=True)

    def send(self, array: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.where, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def event(self, *, timed: bool = False) -> StreamEvent:
        # A blocking one sleeps while it is waited for: a spinning thread would hold a core, and the driver's lock.
        event: StreamEvent = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        return event

    def graph(self, calls: Calls) -> Calls:
        calls()
        # torch.cuda.graph() would wait for the whole device and collect garbage, in the middle of serving. Garbage must
        # not be collected meanwhile: a tensor or an event in it would be taken note of in the stream.
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

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._copy):
            yield

    def lock(self, memory: "np.ndarray[Any, Any]") -> bool:
        address = int(memory.ctypes.data)
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cudart.cudaHostRegister(address, memory.nbytes, 0)) != 0:
            # The error stays behind and would be taken for that of the next launch.
            _clear_last_error()
            return False
        self._locked.append(address)
        return True

    def memory(self, reserved_bytes: int) -> DeviceMemory:
        # What loading has left behind, as that of weights which were made smaller here, is nobody's.
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
    """No GPU: kernels run in Triton's interpreter, at once."""

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

    def send(self, array: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(array.copy())

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def event(self, *, timed: bool = False) -> StreamEvent:
        return self._Done()

    def graph(self, calls: Calls) -> Calls:
        return calls

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield

    def lock(self, memory: "np.ndarray[Any, Any]") -> bool:
        return True

    def memory(self, reserved_bytes: int) -> DeviceMemory:
        available = available_bytes()
        return DeviceMemory(available, available, 0, 0)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


def make_device() -> Device:
    """The GPU, or what stands for it in tests."""
    return Interpreted() if INTERPRETED else Gpu()


def _clear_last_error() -> None:
    """What cudaGetLastError does, of the runtime that torch has loaded; torch has no call of its own for it."""
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL).cudaGetLastError()
            return
        except (OSError, AttributeError):
            continue
