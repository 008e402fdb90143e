"""The sampler of sample.h, compiled for one instruction set."""

import ctypes
from collections.abc import Callable

import numpy as np

from tests.kernels.cpu.samplers import CANARY

INF = float("inf")


class Native:
    """One compiled sampler. Memory is garbage before each call, and no call may write outside of its arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.library.scratch_bytes.restype = ctypes.c_size_t
        self.library.floor_row.restype = ctypes.c_float
        self.library.greedy_row.restype = ctypes.c_int32

    def _with_memory(self, vocab_size: int, call: Callable[[ctypes.c_void_p], object]) -> object:
        num_bytes = self.library.scratch_bytes(vocab_size)
        memory = np.full(num_bytes + 64, CANARY, np.uint8)
        result = call(ctypes.c_void_p(memory.ctypes.data))
        assert (memory[num_bytes:] == CANARY).all(), "wrote beyond the scratch memory"
        return result

    def sample(
        self,
        logits: np.ndarray,
        keys: np.ndarray,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> np.ndarray:
        logits = np.ascontiguousarray(logits, np.float32)
        before = logits.copy()
        ids = np.full(len(keys), -1, np.int32)
        keys = np.ascontiguousarray(keys, np.uint64)
        self._with_memory(
            len(logits),
            lambda memory: self.library.sample_many(
                ctypes.c_void_p(logits.ctypes.data),
                len(logits),
                *filter_arguments(temperature, top_k, top_p, min_p),
                ctypes.c_void_p(keys.ctypes.data),
                len(keys),
                ctypes.c_void_p(ids.ctypes.data),
                memory,
            ),
        )
        assert logits.tobytes() == before.tobytes()
        assert ids.min() >= (0 if (logits > -INF).any() else -1) and ids.max() < len(logits)
        return ids

    def kept(self, logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
        logits = np.ascontiguousarray(logits, np.float32)
        floor = self._with_memory(
            len(logits),
            lambda memory: self.library.floor_row(
                ctypes.c_void_p(logits.ctypes.data),
                len(logits),
                *filter_arguments(temperature, top_k, top_p, min_p),
                memory,
            ),
        )
        return logits >= floor

    def penalized(
        self,
        logits: np.ndarray,
        ids: np.ndarray,
        num_prompt: int,
        repetition: float,
        presence: float,
        frequency: float,
    ) -> np.ndarray:
        changed = np.append(logits, np.float32(CANARY)).astype(np.float32)
        ids = np.ascontiguousarray(ids, np.int32)
        self._with_memory(
            len(logits),
            lambda memory: self.library.penalize_row(
                ctypes.c_void_p(changed.ctypes.data),
                len(logits),
                ctypes.c_void_p(ids.ctypes.data),
                num_prompt,
                len(ids),
                *map(ctypes.c_float, (repetition, presence, frequency)),
                memory,
            ),
        )
        assert changed[-1] == CANARY
        return changed[:-1]

    def masked(self, logits: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        changed = np.append(logits, np.float32(CANARY)).astype(np.float32)
        words = np.packbits(allowed, bitorder="little")
        words = np.append(words, np.zeros(-len(words) % 4, np.uint8))
        self.library.mask_row(ctypes.c_void_p(changed.ctypes.data), len(logits), ctypes.c_void_p(words.ctypes.data))
        assert changed[-1] == CANARY
        return changed[:-1]

    def greedy(self, logits: np.ndarray) -> int:
        logits = np.ascontiguousarray(logits, np.float32)
        return self.library.greedy_row(ctypes.c_void_p(logits.ctypes.data), len(logits))


def filter_arguments(temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[object, ...]:
    return ctypes.c_float(temperature), ctypes.c_int(top_k), ctypes.c_float(top_p), ctypes.c_float(min_p)
