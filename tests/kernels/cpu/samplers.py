"""sample.h, logits_processors.h and logprobs.h compiled as a separate library, for every instruction set."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.kernels.cpu import build, compiler
from pipeline.kernels.cpu.isa import Isa, available
from pipeline.kernels.cpu.library_file import load as load_library
from pipeline.kernels.sampling.logits_processor_inputs import LOGITS_PROCESSORS, LogitsProcessors
from tests.slices import ALL_CASES

ENTRY = Path(__file__).parent / "sample_entry.cpp"
EMULATED: dict[str, Isa] = {f"emulated_{isa}": isa for isa in compiler.EMULATED if isa not in available()}
"""Instruction sets that this CPU lacks and that can do without their instructions."""
ISAS = [*available(), *EMULATED]
CANARY = 0xA5


def load(isa: Any, root: Path) -> ctypes.CDLL:
    emulate = isa in EMULATED
    quick = not (ALL_CASES or emulate or isa == ISAS[0])  # as compile.py beside this
    library = build.build(EMULATED.get(isa, isa), print, ENTRY, cache_root=root, emulate=emulate, quick=quick)
    assert not library.with_suffix(".log").exists(), library.with_suffix(".log").read_text()
    return load_library(library)


class Rows:
    """Calls for one row. Memory is garbage before each call, and no call may write outside of its arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.scratch_bytes.restype = ctypes.c_size_t

    def processed(self, logits: np.ndarray, logits_processors: LogitsProcessors, num_known: int) -> np.ndarray:
        changed = np.append(logits, np.float32(CANARY)).astype(np.float32)
        described = np.zeros(1, LOGITS_PROCESSORS)
        logits_processors.write(described, 0)
        self._with_memory(
            len(logits),
            lambda memory: self.library.logits_processors_row(
                ctypes.c_void_p(changed.ctypes.data),
                len(logits),
                ctypes.c_void_p(described.ctypes.data),
                num_known,
                memory,
            ),
        )
        assert changed[-1] == CANARY
        return changed[:-1]

    def logprobs(self, logits: np.ndarray, token: int, num_top: int, given: np.ndarray | None = None) -> bytes:
        logits = np.ascontiguousarray(logits, np.float32)
        before, num_bytes = logits.tobytes(), 4 + 8 * num_top
        out = np.full(num_bytes + 64, CANARY, np.uint8)
        self._with_memory(
            len(logits),
            lambda memory: self.library.logprobs_row(
                ctypes.c_void_p(logits.ctypes.data),
                len(logits),
                token,
                num_top,
                ctypes.c_void_p(None if given is None else given.ctypes.data),
                ctypes.c_void_p(out.ctypes.data),
                memory,
            ),
        )
        assert (out[num_bytes:] == CANARY).all() and logits.tobytes() == before
        return out[:num_bytes].tobytes()

    def _with_memory(self, vocab_size: int, call: Callable[[ctypes.c_void_p], object]) -> None:
        num_bytes = self.library.scratch_bytes(vocab_size)
        memory = np.full(num_bytes + 64, CANARY, np.uint8)
        call(ctypes.c_void_p(memory.ctypes.data))
        assert (memory[num_bytes:] == CANARY).all(), "wrote beyond the scratch memory"
