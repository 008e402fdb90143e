"""Touches the pages of the KV memory beside the steps.

    allocated ──first blocks of each layer──► serves ──rest, at the lowest priority──► all touched

To touch 512 MiB takes 0.1 s of CPU time, and up to a second where the system's memory is fragmented or comes from a
host. A start doesn't wait for it, and steps don't either: the scheduler hands out low blocks first.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native

FIRST_BYTES = native.HUGE_PAGE
"""Of each layer: what is touched before the first step."""
CLOSE_S = 60.0


class KVPages:
    """The pages of some layers of `layer_bytes` each, at `addresses`."""

    def __init__(self, library: ctypes.CDLL, addresses: Sequence[int], layer_bytes: int) -> None:
        rest = max(layer_bytes - FIRST_BYTES, 0)
        self._library = library
        self._extents = np.array([(address + FIRST_BYTES, rest) for address in addresses if rest], np.uint64)
        self._stopped = ctypes.c_int(0)
        self._thread: threading.Thread | None = None

    def start(self, memory: Sequence[Any]) -> None:
        """Touch the rest in the background. `memory` keeps it alive meanwhile."""
        if len(self._extents):
            arguments = (list(memory),)
            self._thread = threading.Thread(target=self._touch, args=arguments, name="kv pages", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all pages are touched. Returns False at the timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Stop touching."""
        self._stopped.value = 1
        self.wait(CLOSE_S)

    def _touch(self, memory: list[Any]) -> None:
        """`memory` is only kept alive."""
        extents = self._extents
        arguments = extents.ctypes.data, len(extents), native.HUGE_PAGE, ctypes.byref(self._stopped)
        self._library.touch_later(*arguments)
