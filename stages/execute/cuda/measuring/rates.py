"""Measures a GPU's peak rates: memory bandwidth and matmuls."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from pipeline.cli.profile.results import MachineRates
from pipeline.stages.execute.cuda.device import Device

COPY_BYTES = 256 * 1024**2
"""Size of a copied tensor: several times the caches."""
PRODUCT_SIZE = 8192
"""Rows and columns of a matmul; half as many in float32."""
NUM_TURNS = 20
NUM_WARM = 4

INTERPRETED_BYTES, INTERPRETED_SIZE = 1 << 12, 16
"""Without a GPU, where the rates mean nothing."""


class Probe:
    """Measures rates. Allocates 1.1 GiB when it is created, which must be before the model takes the memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        num_bytes = COPY_BYTES if device.captures_graphs else INTERPRETED_BYTES
        size = PRODUCT_SIZE if device.captures_graphs else INTERPRETED_SIZE
        self._copied = [torch.empty(num_bytes, dtype=torch.uint8, device=device.where).random_() for _ in range(2)]
        self._wide, self._narrow = (
            [torch.randn(num, num, dtype=dtype, device=device.where) for _ in range(3)]
            for num, dtype in ((size // 2, torch.float32), (size, torch.bfloat16))
        )

    def measure(self) -> MachineRates:
        """Time copies beyond the caches' size and large matmuls. Takes about 0.1 s, and waits for the GPU."""
        a, b = self._copied
        copy_s = self._median_s([lambda: a.copy_(b), lambda: b.copy_(a)])
        return MachineRates(2 * a.numel() / copy_s, self._flops(self._wide), self._flops(self._narrow), None)

    def _flops(self, sides: Sequence[Tensor]) -> float:
        """Operations per second of a matmul of square matrices."""
        a, b, out = sides
        seconds = self._median_s([lambda: torch.mm(a, b, out=out), lambda: torch.mm(b, a, out=out)])
        return 2 * len(a) ** 3 / seconds

    def _median_s(self, runs: Sequence[Callable[[], object]]) -> float:
        """Median time of `runs`, called in turn and timed with events. They do the same work on different memory."""
        events = []
        for i in range(NUM_WARM + NUM_TURNS):
            begin, end = self._device.event(timed=True), self._device.event(timed=True)
            begin.record()
            runs[i % len(runs)]()
            end.record()
            events.append((begin, end))
        self._device.synchronize()
        return median(begin.elapsed_time(end) for begin, end in events[NUM_WARM:]) / 1e3
