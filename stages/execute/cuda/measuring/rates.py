"""What a GPU does at best: copies in its memory, and products."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from pipeline.cli.profile.results import MachineRates
from pipeline.stages.execute.cuda.device import Device

COPY_BYTES = 256 * 1024**2
"""Of a tensor: several times what caches hold."""
PRODUCT_SIZE = 8192
"""Rows and columns; half as many in float32."""
NUM_TURNS = 20
NUM_WARM = 4

INTERPRETED_BYTES, INTERPRETED_SIZE = 1 << 12, 16
"""Where there is no GPU, and rates mean nothing."""


class Probe:
    """Measures rates. Owns the 1.1 GiB that takes, from before a model has the rest."""

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
        """Copies of more than caches hold, and products of the size that libraries are best at. Takes a tenth of a
        second, and waits for it."""
        a, b = self._copied
        copy_s = self._median_s([lambda: a.copy_(b), lambda: b.copy_(a)])
        return MachineRates(2 * a.numel() / copy_s, self._flops(self._wide), self._flops(self._narrow), None)

    def _flops(self, sides: Sequence[Tensor]) -> float:
        """Of products of square matrices."""
        a, b, out = sides
        seconds = self._median_s([lambda: torch.mm(a, b, out=out), lambda: torch.mm(b, a, out=out)])
        return 2 * len(a) ** 3 / seconds

    def _median_s(self, runs: Sequence[Callable[[], object]]) -> float:
        """Of turns that are timed one by one with events; each is the next of `runs`, which do the same with other
        memory."""
        events = []
        for i in range(NUM_WARM + NUM_TURNS):
            begin, end = self._device.event(timed=True), self._device.event(timed=True)
            begin.record()
            runs[i % len(runs)]()
            end.record()
            events.append((begin, end))
        self._device.synchronize()
        return median(begin.elapsed_time(end) for begin, end in events[NUM_WARM:]) / 1e3
